"""A checkpoint as a model directory in Hugging Face format.

checkpoints/step_N: fp32 weights ─ dtype ─► OUTPUT_DIR: model.safetensors, config and tokenizer of the model it began as
"""

import logging

import torch

from hone.config.export import ExportConfig
from hone.models.hf import resolve_model, save_model
from hone.models.spec import parse_model_config, read_model_config
from hone.models.transformer import Transformer
from hone.trainer.checkpoint import HEADER, Damaged, load_tensors, read_header


def main(config: ExportConfig) -> None:
    if not (config.checkpoint / HEADER).is_file():
        raise ValueError(f"--checkpoint {config.checkpoint}: no checkpoint there; it is a checkpoints/step_N of a run")
    if config.output_dir.exists():
        raise ValueError(f"--output-dir {config.output_dir} is there already; give one that is not")
    try:
        header = read_header(config.checkpoint)
    except Damaged as error:
        raise ValueError(f"--checkpoint {config.checkpoint} is damaged: {error}") from None
    directory = resolve_model(header["config"]["model"]["name"])
    model = Transformer(parse_model_config(read_model_config(directory), str(directory / "config.json")))
    load_tensors(config.checkpoint, {f"master.{name}": p.detach() for name, p in model.named_parameters()})
    save_model(model.to(getattr(torch, config.dtype)), directory, config.output_dir)
    logging.getLogger("hone").info("Step %d of %s in %s", header["step"], config.checkpoint, config.output_dir)
