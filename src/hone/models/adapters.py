"""LoRA adapters for sampling (Hu et al. 2021): y = W x + scale * B A x, with an adapter per token.

    peft directory ─ read_adapter ─► Adapter (A and B per HF linear)
                   ─ Adapters.load_adapter ─► one A and one B per fused weight

All loaded adapters are concatenated: compute h = A_all x, set the entries of h to 0 that belong to
adapters other than the token's, then compute B_all h. For a few small adapters this costs two small
matrix multiplications per weight. The computation has no branches, so a CUDA graph can capture it.
Each block of rows of a fused weight (q, k, v; gate, up) has its own A and B; its B is 0 in the rows
of the other blocks.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hone.models.hf import find_weight, hf_names, split_rows
from hone.models.language_model import LanguageModel
from hone.models.layers import ExpertLinear, Linear

# Keys of an adapter_config.json that change what an adapter computes, with the values for plain B A
# x. Other keys may only say how it was trained or where it came from.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    # Others (pissa, olora, corda, loftq, lora_ga, …) change the base weights when peft loads the
    # adapter.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
PEFT_ALPHA = 8  # lora_alpha if a configuration has none
IMMATERIAL = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
    "ensure_weight_tying",
}


@dataclass(frozen=True)
class Adapter:
    """LoRA factors of one adapter.

    Attributes:
        weights: by name of the HF linear layer (without `.weight`): A (rank x inputs) and B
            (outputs x rank, already multiplied by the LoRA scale).
    """

    rank: int
    weights: dict[str, tuple[Tensor, Tensor]]


def takes_adapters(module: object) -> bool:
    """Return True if each token of this layer's input can have an adapter of its own."""
    return isinstance(module, Linear) and not isinstance(module, ExpertLinear)


def read_adapter(directory: Path) -> Adapter:
    """Read a LoRA adapter in peft's format.

    Raises ValueError if files, factors or settings are missing or unsupported.
    """
    config, tensors = read_files(directory)
    path = directory / "adapter_config.json"
    file = directory / "adapter_model.safetensors"
    for key, value in config.items():
        if (
            key not in IMMATERIAL
            and value not in ACCEPTED.get(key, ())
            and value not in (None, False, {}, [])
        ):
            raise ValueError(
                f"{path}: {key} = {value!r} is not supported: it changes what the adapter computes"
            )
    rank = config["r"]
    scale = scale_of(config)
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if match is None:
            raise ValueError(f"{file}: tensor {key} is not of a LoRA layer")
        parts.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in parts.items():
        if set(pair) != {"A", "B"} or len(pair["A"]) != rank or pair["B"].shape[1] != rank:
            raise ValueError(f"{file}: {name} needs lora_A and lora_B of rank {rank}")
    return Adapter(rank, {name: (pair["A"], pair["B"] * scale) for name, pair in parts.items()})


def scale_of(config: dict[str, Any]) -> float:
    """Return the factor that multiplies B A, from the content of an adapter_config.json."""
    rank: int = config["r"]
    alpha: float = config.get("lora_alpha", PEFT_ALPHA)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read an adapter's configuration and tensors.

    Raises ValueError if files are missing or unreadable.
    """
    path = directory / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not an adapter: it has no adapter_config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type {config.get('peft_type')!r} is not supported; supported: 'LORA'"
        )
    if not isinstance(config.get("lora_alpha", PEFT_ALPHA), int | float):
        raise ValueError(f"{path}: lora_alpha = {config['lora_alpha']!r} is not a number")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{path}: r = {rank!r} is not a rank")
    file = directory / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"{directory} has no adapter_model.safetensors")
    try:
        return config, load_file(file)
    except Exception as error:  # safetensors raises its own class for a damaged file
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None


class Delta:
    """Contribution of all loaded adapters to the output of one fused linear layer."""

    def __init__(self, a_RI: Tensor, b_OR: Tensor, owner_R: Tensor, adapters: "Adapters") -> None:
        self.a_RI = a_RI
        self.b_OR = b_OR
        self.owner_R = owner_R
        self.adapters = adapters

    def __call__(self, x_TI: Tensor) -> Tensor | None:
        if not self.adapters.which:
            return None
        h_TR = F.linear(x_TI, self.a_RI)
        others = self.adapters.which[len(x_TI)][:, None] != self.owner_R
        return F.linear(h_TR.masked_fill(others, 0.0), self.b_OR)


class Adapters:
    """The loaded adapters of a model, by name.

    `which` has the adapter numbers of the current forward pass, 0 for none, as a dict from number
    of rows to a tensor with a number per row: one entry for all tokens, and one for the tokens that
    the last block keeps. It is empty if the pass uses no adapter.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.loaded: dict[str, tuple[int, Adapter]] = {}
        self.which: dict[int, Tensor] = {}
        self._next = 0

    def number_of(self, name: str | None) -> int:
        """Return the number of the adapter with this name, 0 if `name` is None.

        Raises ValueError if the adapter is not loaded.
        """
        if name is None:
            return 0
        if name not in self.loaded:
            raise ValueError(
                f"no adapter {name!r} is loaded; loaded: {', '.join(self.loaded) or 'none'}"
            )
        return self.loaded[name][0]

    def load_adapter(self, name: str, adapter: Adapter) -> bool:
        """Load or replace an adapter; return True if tensors that CUDA graphs read were replaced.

        One of the same rank and layers is replaced in place. Raises ValueError if the adapter does
        not fit the model.
        """
        sources = self._linear_shapes()
        for target, (a, b) in adapter.weights.items():
            if target not in sources and ".experts." in target:
                raise ValueError(
                    f"adapter {name}: {target} is an expert's; an adapter of experts cannot be "
                    "chosen by request: serve the run's weights, in which it is merged"
                )
            if target not in sources:
                raise ValueError(f"adapter {name}: the model has no linear {target}")
            outputs, inputs = sources[target]
            if (b.shape[0], a.shape[1]) != (outputs, inputs):
                found = f"{b.shape[0]} x {a.shape[1]}"
                raise ValueError(
                    f"adapter {name}: {target} is for {found} weights, the model's are {outputs} x {inputs}"
                )
        if name not in self.loaded:
            self._next += 1
        number = self.loaded[name][0] if name in self.loaded else self._next
        self.loaded[name] = (number, adapter)
        return self._place_factors()

    def unload_adapter(self, name: str) -> None:
        self.number_of(name)
        del self.loaded[name]
        self._place_factors()

    @contextmanager
    def used_by(self, which_T: Tensor | None, keep_N: Tensor | None = None) -> Iterator[None]:
        """Apply each token's own adapter in the forward passes inside this context manager.

        Args:
            which_T: adapter number per token, 0 for none; None: no adapters.
            keep_N: indices of the tokens that the last block keeps; None: all tokens.
        """
        before = self.which
        if which_T is not None:
            kept = {} if keep_N is None else {len(keep_N): which_T[keep_N]}
            self.which = {len(which_T): which_T, **kept}
        try:
            yield
        finally:
            self.which = before

    def used_by_all(self, name: str | None, count: int) -> AbstractContextManager[None]:
        """Apply an adapter to forward passes of `count` tokens inside this context manager.

        `name` None: no adapter. Raises ValueError if the adapter is not loaded.
        """
        number = self.number_of(name)
        device = self.model.embed.weight.device
        return self.used_by(torch.full((count,), number, device=device) if number else None)

    def _linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each linear that can have an adapter, by HF name."""
        sizes = {}
        modules = dict(self.model.named_modules())
        for ours, theirs in hf_names(self.model.spec).items():
            module = modules.get(ours.removesuffix(".weight"))
            if not ours.startswith("blocks.") or not takes_adapters(module):
                continue
            parts = split_rows(self.model.spec, ours, find_weight(self.model, ours))
            for name, part in zip(theirs, parts, strict=True):
                if part.dim() == 2:
                    sizes[name.removesuffix(".weight")] = (part.shape[0], part.shape[1])
        return sizes

    @torch.no_grad()
    def _place_factors(self) -> bool:
        """Write the factors of all adapters; return True if tensors of the model were replaced."""
        has_replaced = False
        modules = dict(self.model.named_modules())
        for ours, theirs in hf_names(self.model.spec).items():
            module = modules.get(ours.removesuffix(".weight"))
            if not takes_adapters(module) or not ours.endswith(".weight"):
                continue
            assert isinstance(module, Linear)
            rows_A = []
            columns_B = []
            owners = []
            blocks = split_rows(self.model.spec, ours, module.weight)
            starts = [0]
            for block in blocks:
                starts.append(starts[-1] + len(block))
            for number, adapter in self.loaded.values():
                for i, hf in enumerate(theirs):
                    pair = adapter.weights.get(hf.removesuffix(".weight"))
                    if pair is None:
                        continue
                    a, b = (x.to(module.weight.device, module.weight.dtype) for x in pair)
                    column = a.new_zeros(len(module.weight), adapter.rank)
                    column[starts[i] : starts[i + 1]] = b
                    rows_A.append(a)
                    columns_B.append(column)
                    owners += [number] * adapter.rank
            before = module.delta
            if not owners:
                has_replaced |= before is not None
                module.delta = None
                continue
            owner_R = torch.tensor(owners, device=module.weight.device)
            delta = Delta(torch.cat(rows_A), torch.cat(columns_B, dim=1), owner_R, self)
            if (
                isinstance(before, Delta)
                and before.adapters is self
                and torch.equal(before.owner_R, owner_R)
            ):
                before.a_RI.copy_(delta.a_RI)
                before.b_OR.copy_(delta.b_OR)
                continue
            module.delta = delta
            has_replaced = True
        return has_replaced
