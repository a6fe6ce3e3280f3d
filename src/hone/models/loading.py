"""Load the configured model: weights, tokenizer and source directory."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.config.lora_config import LoRAConfig
from hone.config.sections import ModelConfig
from hone.kernels import numerics
from hone.kernels.gpu import trains_model
from hone.models.device_memory import apply_limit
from hone.models.eight_bit import quantize_blocks
from hone.models.families import parse_model_config
from hone.models.hf import load_model
from hone.models.language_model import LanguageModel
from hone.models.model_directory import check_links, resolve_model
from hone.models.spec import ModelSpec, read_model_config
from hone.text.tokenizer import Tokenizer

log = logging.getLogger("hone")


@dataclass(frozen=True)
class Loaded:
    model: LanguageModel
    tokenizer: Tokenizer
    directory: Path
    dtype: torch.dtype  # of weights and activations


def load_configured(config: ModelConfig, seed: int = 0, lora: LoRAConfig | None = None) -> Loaded:
    """Load the configured model and tokenizer; select fast or exact numerics for the process.

    Cheap checks come first. If `lora` has base_bits 8, the blocks' weights are stored in 8 bits.
    Raises ValueError if the model cannot be loaded as configured.
    """
    directory = resolve_model(config.name)
    check_links(directory)
    tokenizer = Tokenizer.for_model(directory, config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device: cuda was requested, but torch sees no GPU here")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
        config.dtype, torch.bfloat16 if on_gpu else torch.float32
    )
    device = "cuda" if on_gpu else "cpu"
    apply_limit(torch.device(device))
    has_short_base = lora is not None and lora.base_bits == 8
    place = str(directory / "config.json")
    shape = read_model_config(directory)
    spec = parse_model_config(shape, place, config.implementation)
    log.info("%s", describe_implementation(spec, shape, config))
    model = load_model(
        directory,
        spec=spec,
        random_init=config.random_init,
        seed=seed,
        dtype=dtype,
        device="cpu" if has_short_base else device,
    )
    if has_short_base:
        quantize_blocks(model, device)
        model.to(device)
    tokenizer.fit_vocabulary(model.spec.vocab_size)
    numerics.use(config.numerics)
    if config.numerics == "exact":
        require_order(model)
    return Loaded(model, tokenizer, directory, dtype)


def describe_implementation(spec: ModelSpec, shape: dict[str, Any], config: ModelConfig) -> str:
    """Return a sentence on what computes the model, and why."""
    if spec.implementation == "hone":
        return f"{config.name} is computed by Hone's own implementation"
    reason = "model.implementation says so"
    if config.implementation == "auto":
        try:
            parse_model_config(shape, "config.json", "hone")
        except ValueError as error:
            reason = str(error).removeprefix("config.json: ").split("; ")[0]
    return f"{config.name} is computed by transformers' modules: {reason}"


def require_order(model: LanguageModel) -> None:
    """Raise ValueError if exact numerics do not support this model and its device.

    With exact numerics, sampling and training give the same bits.
    """
    weight = model.embed.weight
    spec = model.spec
    if spec.implementation != "hone":
        raise ValueError(
            "model.numerics exact: it needs Hone's own implementation of the model; take fast"
        )
    if spec.routed_experts:
        raise ValueError(
            "model.numerics exact: mixtures of experts have no exact kernels; take fast"
        )
    if spec.delta_layers:
        raise ValueError(
            "model.numerics exact: sampling computes the gated delta rule token by token, training in chunks, in "
            "another order; take fast"
        )
    if not spec.has_fast_paths:
        raise ValueError(
            "model.numerics exact: this model has windows, factors or norms without exact kernels; take fast"
        )
    if not weight.is_cuda:
        raise ValueError(
            "model.numerics exact is for a GPU; on a CPU, in float32, logprobs of sampler and trainer agree to about "
            "1e-5; take fast"
        )
    if not trains_model(weight, spec.head_dim):
        raise ValueError(
            "model.numerics exact: it needs Triton, model.dtype bfloat16 and heads of 16, 32, 64 or 128; "
            f"this is {str(weight.dtype)[6:]} with heads of {spec.head_dim}; take fast"
        )
