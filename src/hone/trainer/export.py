"""Export a checkpoint as a model directory in Hugging Face format.

    checkpoints/step_N: fp32 weights ─ convert to dtype ─► OUTPUT_DIR: model.safetensors

Configuration and tokenizer are those of the model that the run started from.
"""

import logging

import torch

from hone.config.export_config import ExportConfig
from hone.config.lora_config import LoRAConfig
from hone.config.sections import ModelConfig
from hone.models.loading import load_configured
from hone.models.lora import add_lora
from hone.trainer.checkpoint import HEADER, Damaged, load_tensors, read_header
from hone.trainer.ranks import Ranks
from hone.trainer.sharding import Export


def export_model(config: ExportConfig) -> None:
    if not (config.checkpoint / HEADER).is_file():
        raise ValueError(
            f"--checkpoint {config.checkpoint}: no checkpoint there; it is a checkpoints/step_N of a run"
        )
    if config.output_dir.exists():
        raise ValueError(f"--output-dir {config.output_dir} is there already; give one that is not")
    try:
        header = read_header(config.checkpoint)
    except Damaged as error:
        raise ValueError(f"--checkpoint {config.checkpoint} is damaged: {error}") from None
    settings = header["config"]
    loaded = load_configured(
        ModelConfig.model_validate(
            settings["model"] | {"device": "cpu", "dtype": "float32", "numerics": "fast"}
        ),
        settings["seed"],
    )
    lora = settings.get("lora") or (settings.get("trainer") or {}).get("lora")
    if lora:
        add_lora(loaded.model, LoRAConfig.model_validate(lora | {"start_from": None}), 0)
    trained = {
        f"master.{name}": p.detach()
        for name, p in loaded.model.named_parameters()
        if p.requires_grad
    }
    load_tensors(config.checkpoint, trained)
    export = Export(
        loaded.model.to(getattr(torch, config.dtype)), Ranks(), getattr(torch, config.dtype)
    )
    export.save_model(
        loaded.directory,
        lambda: config.output_dir,
        settings["model"]["name"],
        chat_template=loaded.tokenizer.chat_template,
    )
    logging.getLogger("hone").info(
        "Step %d of %s in %s", header["step"], config.checkpoint, config.output_dir
    )
