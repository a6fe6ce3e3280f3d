"""Load the configured model: weights, tokenizer and source directory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from hone.config.lora_config import LoRAConfig
from hone.config.sections import ModelConfig
from hone.kernels import numerics
from hone.kernels.gpu import trains_model
from hone.models.device_memory import apply_limit
from hone.models.eight_bit import quantize_blocks
from hone.models.hf import check_links, load_model, resolve_model
from hone.models.transformer import Transformer
from hone.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Loaded:
    model: Transformer
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
    model = load_model(
        directory,
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


def require_order(model: Transformer) -> None:
    """Raise ValueError if exact numerics do not support this model and its device.

    With exact numerics, sampling and training give the same bits.
    """
    weight = model.embed.weight
    spec = model.spec
    if spec.routed_experts:
        raise ValueError(
            "model.numerics exact: mixtures of experts have no exact kernels; take fast"
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
