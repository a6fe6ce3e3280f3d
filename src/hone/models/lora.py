"""LoRA in training (Hu et al. 2021): y = W x + scale * B A x, W frozen, one A and B per HF linear.

    fused weight   q │ k │ v  by rows        A_RI   A of q, k and v stacked
    adapter        B_q A_q │ B_k A_k │ …     B_OR   B of q, k and v on the diagonal, 0 elsewhere

Saved as peft does (adapter_config.json, adapter_model.safetensors), or merged into a plain model.
Adapters that a server loads beside a model are in `adapters.py`.
"""

import copy
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from hone.config.lora_config import LoRAConfig
from hone.kernels import numerics
from hone.kernels.expert_products import multiply_groups
from hone.kernels.row_gather import put_rows
from hone.models.adapters import read_adapter, read_files, scale_of
from hone.models.dithering import dither_, dither_each_
from hone.models.eight_bit import quantize_blocks
from hone.models.expert_parallel import take_local_part
from hone.models.hf import hf_names, split_rows
from hone.models.language_model import LanguageModel
from hone.models.layers import ExpertLinear, Linear
from hone.models.spec import ModelSpec

HEAD = "lm_head"
MERGED_AT_ONCE = 2**26  # numbers, in float32
RANK_MULTIPLE = 8  # rows of grouped products begin at multiples of 16 bytes
Whole = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


class LoRA(nn.Module):
    """LoRA adapters of one fused weight, one for each targeted HF linear in it.

    `names`: the HF linears that the weight stacks by rows; `heights`: the number of rows of each.
    """

    def __init__(
        self, weight: Tensor, names: list[str], heights: list[int], config: LoRAConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.heights = dict(zip(names, heights, strict=True))
        self.targets = [name for name in names if name.rsplit(".", 1)[-1] in (config.targets or ())]
        r = config.rank
        n = len(self.targets)
        owner_O = torch.repeat_interleave(
            torch.tensor([_index_of(x, self.targets) for x in names]), torch.tensor(heights)
        )
        rows = (owner_O >= 0).nonzero().squeeze(1).to(weight.device)
        diagonal = (owner_O[:, None] == torch.arange(n)).to(weight) * config.scale
        self.A = nn.Parameter(weight.new_empty(r * n, weight.shape[1]))
        self.B = nn.Parameter(weight.new_zeros(len(rows), r))
        self.register_buffer("rows", rows, persistent=False)  # of the weight, that have an adapter
        # Which adapter a column belongs to, times scale.
        self.register_buffer("diagonal", diagonal[rows.to(diagonal.device)], persistent=False)
        self.outputs = len(weight)

    @torch.no_grad()
    def draw_values(self, generator: torch.Generator) -> None:
        """Draw A as nn.Linear does, and peft: uniform up to 1 / sqrt(inputs)."""
        bound = 1 / math.sqrt(self.A.shape[1])
        self.A.copy_(torch.empty(self.A.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x_TI: Tensor) -> Tensor:
        if not self.is_plain and torch.is_grad_enabled():
            x_TI = F.dropout(x_TI, self.config.dropout)
        a_RI, b_OR = self.scaled_factors()
        return F.linear(F.linear(x_TI, a_RI), b_OR)

    @property
    def is_plain(self) -> bool:
        return not (self.training and self.config.dropout)

    def scaled_factors(self) -> tuple[Tensor, Tensor]:
        """Return A_RI and the block-diagonal B_OR of the fused weight; B includes the scale."""
        b_OR = (self.B[:, None, :] * self.diagonal[:, :, None]).flatten(1)  # type: ignore[index]
        if len(b_OR) != self.outputs:
            b_OR = put_rows(b_OR, self.rows, self.outputs)  # type: ignore[arg-type]
        return self.A, b_OR

    @torch.no_grad()
    def merge_into(self, weight_OI: Tensor) -> Tensor:
        """Return a fused weight with the adapter merged, as samplers use it."""
        return self.add_to(weight_OI, weight_OI.dtype)

    def named_pairs(self, whole: Whole = _as_it_is) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each HF linear with its A and B, unscaled and detached.

        `whole` gathers sharded tensors.
        """
        of_a = whole(self.A.detach()).split(self.config.rank)
        of_b = whole(self.B.detach()).split([self.heights[name] for name in self.targets])
        yield from zip(self.targets, of_a, of_b, strict=True)

    def add_to(self, weight_OI: Tensor, dtype: torch.dtype, whole: Whole = _as_it_is) -> Tensor:
        """Return a fused weight with the adapter merged, in `dtype`."""
        merged = weight_OI.to(torch.float32, copy=True)
        rows = dict(zip(self.heights, merged.split(list(self.heights.values())), strict=True))
        for name, a, b in self.named_pairs(whole):
            add_product(rows[name], a, b, self.config.scale, dtype)
        return merged.to(dtype)


class ExpertLoRA(LoRA):
    """LoRA adapters of one linear of all experts: each expert has an A and a B of its own.

    A holds the A of all experts, of gate and up in turn, stacked by rows; so does B.
    """

    def __init__(
        self, weight: Tensor, names: list[str], heights: list[int], config: LoRAConfig, experts: int
    ) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.experts = experts
        self.heights = dict(zip(names, heights, strict=True))
        targets = config.targets or ()
        self.targets = [name for name in names if name.rsplit(".", 1)[-1] in targets]
        # Of the linears that an expert's weight stacks, those with an adapter
        self.adapted = [name in self.targets for name in names[: len(names) // experts]]
        rows = sum(self.heights[name] for name in self.targets)
        self.A = nn.Parameter(weight.new_empty(config.rank * len(self.targets), weight.shape[1]))
        self.B = nn.Parameter(weight.new_zeros(rows, config.rank))

    def forward(self, x_MI: Tensor, counts_E: Tensor) -> Tensor:  # type: ignore[override]
        """Return the adapters' part of the product, M x outputs.

        Args:
            x_MI: rows ordered by expert.
            counts_E: number of rows of each expert.
        """
        if not self.is_plain and torch.is_grad_enabled():
            x_MI = F.dropout(x_MI, self.config.dropout)
        a_ERI, b_EOR = self._stacked_factors(x_MI.dtype)
        return multiply_groups(multiply_groups(x_MI, a_ERI, counts_E), b_EOR, counts_E)

    def _stacked_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A (E x R x I) and the block-diagonal B (E x O x R, with the scale) of the experts.

        They are those of this rank's experts. R is rounded up, as torch's grouped product needs it.
        """
        rank = self.config.rank
        width = -(-rank * sum(self.adapted) // RANK_MULTIPLE) * RANK_MULTIPLE
        A, B = (take_local_part(x).to(dtype) for x in (self.A, self.B))
        a_ERI = A.view(-1, rank * sum(self.adapted), A.shape[1])
        E = len(a_ERI)
        a_ERI = F.pad(a_ERI, (0, 0, 0, width - a_ERI.shape[1]))
        height = next(iter(self.heights.values()))
        blocks = (B * self.config.scale).view(E, -1, height, rank).unbind(1)
        wide = [B.new_zeros(E, height, width)] * len(self.adapted)
        places = [i for i, is_adapted in enumerate(self.adapted) if is_adapted]
        for i, (place, block) in enumerate(zip(places, blocks, strict=True)):
            wide[place] = F.pad(block, (i * rank, width - (i + 1) * rank))
        return a_ERI, torch.cat(wide, 1)

    def add_to(self, weight_OI: Tensor, dtype: torch.dtype, whole: Whole = _as_it_is) -> Tensor:
        if weight_OI.is_cuda:  # where thousands of linears one by one would take long
            return self.add_at_once(weight_OI, dtype, whole)
        return super().add_to(weight_OI, dtype, whole)

    def add_at_once(self, weight_OI: Tensor, dtype: torch.dtype, whole: Whole) -> Tensor:
        """Return what `add_to` does, but for rounding, by products of many experts at once."""
        E = self.experts
        count = sum(self.adapted)
        factors = [whole(x.detach()).to(weight_OI.device, torch.float32) for x in (self.A, self.B)]
        a, b = (x.view(E, count, -1, x.shape[1]) for x in factors)
        places = [i for i, is_adapted in enumerate(self.adapted) if is_adapted]
        merged = weight_OI.to(dtype, copy=True)
        parts = merged.view(E, len(self.adapted), -1, weight_OI.shape[1])
        base = weight_OI.view_as(parts)
        at_once = max(1, MERGED_AT_ONCE // base[0, 0].numel())
        for first in range(0, E, at_once):
            some = slice(first, first + at_once)
            for i, place in enumerate(places):
                changed = base[some, place].to(torch.float32, copy=True)
                changed.baddbmm_(b[some, i], a[some, i], alpha=self.config.scale)
                dither_each_(changed, dtype)
                parts[some, place] = changed.to(dtype)
        return merged


def add_product(
    weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, dtype: torch.dtype
) -> None:
    """Add scale * B A to an fp32 weight of one HF linear in place, rounded to numbers of `dtype`."""
    a, b = (x.to(weight_OI.device, torch.float32) for x in (a_RI, b_OR))
    weight_OI.addmm_(b, a, alpha=scale)
    dither_(weight_OI, dtype)


@torch.no_grad()
def merge_adapter(into: Mapping[str, Tensor], directory: Path) -> None:
    """Merge a saved adapter into base weights, with the same bits as in the trainer's export.

    `into` has the base weights by HF name. Raises ValueError for an adapter of another model.
    """
    config, tensors = read_files(directory)
    scale, used = scale_of(config), {"lm_head.weight"}  # a tied head appears once more

    def take_tensor(name: str) -> Tensor | None:
        used.add(name)
        return tensors.get(f"base_model.model.{name}")

    for name, weight in into.items():
        module = name.removesuffix(".weight")
        saved = take_tensor(name)
        a = take_tensor(f"{module}.lora_A.weight")
        b = take_tensor(f"{module}.lora_B.weight")
        if saved is not None:
            weight.copy_(saved)
        if a is not None and b is not None:
            merged = weight.to(torch.float32, copy=True)
            add_product(merged, a, b, scale, weight.dtype)
            weight.copy_(merged)
    surplus = sorted({name.removeprefix("base_model.model.") for name in tensors} - used)
    if surplus:
        raise ValueError(
            f"{directory}: tensors that the model does not have: {', '.join(surplus[:5])}"
        )


def add_lora(
    model: LanguageModel, config: LoRAConfig, seed: int, allows_head: bool = False
) -> None:
    """Freeze the model except `modules_to_save`, and add adapters.

    Adapters start with random A and B = 0, or with the weights in `start_from`. With `allows_head`,
    `lm_head` may be a target too; samplers have to merge it (`MergedWeights`). Raises ValueError if
    the configured layers or the weights in `start_from` do not fit the model.
    """
    table = hf_names(model.spec)
    kinds = [theirs.rsplit(".", 2)[-2] for _, name in list_linears(model) for theirs in table[name]]
    possible = list(dict.fromkeys(kinds))
    head = {HEAD} if allows_head else set()
    impossible = sorted(set(config.targets or []) - set(possible) - head)
    if impossible:
        raise ValueError(
            f"lora.targets: {impossible[0]} has no adapter in this model; {', '.join(possible)} have"
        )
    config = config.model_copy(update={"targets": config.targets or possible})
    if config.base_bits == 8:
        if numerics.is_exact():
            raise ValueError("lora.base_bits 8: model.numerics exact merges the adapter; take 16")
        quantize_blocks(model)
    if model.head is None and "lm_head" in config.modules_to_save:
        raise ValueError("lora.modules_to_save: lm_head is embed_tokens in this model; name that")
    for name, parameter in model.named_parameters():
        modules = {theirs.rsplit(".", 2)[-2] for theirs in table[name]}
        parameter.requires_grad_(bool(modules & set(config.modules_to_save)))
    generator = torch.Generator().manual_seed(seed)
    has_head = HEAD in config.targets  # type: ignore[operator]
    for linear, name in list_linears(model):
        heights = [len(part) for part in split_rows(model.spec, name, linear.weight)]
        theirs = [hf.removesuffix(".weight") for hf in table[name]]
        lora = (
            ExpertLoRA(linear.weight, theirs, heights, config, linear.experts)
            if isinstance(linear, ExpertLinear)
            else LoRA(linear.weight, theirs, heights, config)
        )
        if lora.targets:
            lora.draw_values(generator)
            linear.delta = lora
    if has_head:
        weight_VD = model.head_weight_VD
        model.head_delta = LoRA(weight_VD, [HEAD], [len(weight_VD)], config)
        model.head_delta.draw_values(generator)
    if config.start_from is not None:
        _load_adapter(model, config, config.start_from)


def _load_adapter(model: LanguageModel, config: LoRAConfig, directory: Path) -> None:
    adapter = read_adapter(directory)
    wanted = {name for lora in lora_modules(model) for name in lora.targets}
    if adapter.rank != config.rank or set(adapter.weights) != wanted:
        targets = sorted({name.rsplit(".", 1)[-1] for name in adapter.weights})
        raise ValueError(
            f"lora.start_from {directory}: rank {adapter.rank} on {', '.join(targets)}; "
            f"lora.rank is {config.rank}, lora.targets are {', '.join(config.targets or ())}"
        )
    with torch.no_grad():
        for lora in lora_modules(model):
            for name, a, b in lora.named_pairs():
                theirs_a, theirs_b = adapter.weights[name]
                a.copy_(theirs_a)
                b.copy_(theirs_b / config.scale)  # they are scaled


def lora_modules(model: LanguageModel) -> Iterator[LoRA]:
    return (module for module in model.modules() if isinstance(module, LoRA))


def seed_dropout(model: LanguageModel, *numbers: int) -> None:
    """Seed the adapters' dropout with `numbers`, so that a repeated step drops the same inputs."""
    if any(not lora.is_plain for lora in lora_modules(model)):
        torch.manual_seed(zlib.crc32(repr(numbers).encode()))


class Merged:
    """The weights of a model in training as the sampler uses them: with LoRA adapters merged.

    Without adapters, or with `lora.merge` False, `model` is the trained model itself. Else `model`
    is a LanguageModel without adapters: weights that have an adapter in the trained model are merged copies, updated
    by `follow_step`; all other weights are shared with the trained model.
    """

    def __init__(self, trained: LanguageModel) -> None:
        self.trained = trained
        self.model = trained
        self._sums: list[tuple[nn.Parameter, nn.Parameter, LoRA]] = []
        if not any(lora.config.keeps_copy for lora in lora_modules(trained)):
            return
        self.model = share_base(trained)
        for name, linear in trained.named_modules():
            if isinstance(linear, Linear) and isinstance(linear.delta, LoRA):
                own = nn.Parameter(torch.empty_like(linear.weight), requires_grad=False)
                self.model.get_submodule(name).weight = own
                self._sums.append((own, linear.weight, linear.delta))
        self.follow_step()

    @torch.no_grad()
    def follow_step(self) -> None:
        """Update the merged weights after a training step."""
        for own, weight, lora in self._sums:
            own.copy_(lora.merge_into(weight))


def share_base(model: LanguageModel) -> LanguageModel:
    """Return a model without adapters that shares all other tensors with `model`."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    shared = copy.deepcopy(model, {id(x): x for x in tensors})
    del shared.head_delta
    shared.head_delta = None
    for module in shared.modules():
        if isinstance(module, Linear) and module.delta is not None:
            del module.delta  # a child module, in whose place an engine puts something else
            module.delta = None
    return shared


@contextmanager
def without_lora(model: LanguageModel) -> Iterator[None]:
    """Context manager that disables the adapters."""
    kept = [(linear, linear.delta) for linear, _ in _block_linears(model)]
    for linear, _ in kept:
        linear.delta = None
    try:
        yield
    finally:
        for linear, delta in kept:
            linear.delta = delta


def adapter_tensors(model: LanguageModel, whole: Whole = _as_it_is) -> dict[str, Tensor]:
    """Return the model's LoRA and `modules_to_save` tensors by peft's names."""
    tensors: dict[str, Tensor] = {}
    saved = set[str]()
    for lora in lora_modules(model):
        saved = set(lora.config.modules_to_save)
        for name, a, b in lora.named_pairs(whole):
            tensors |= {
                f"base_model.model.{name}.lora_{kind}.weight": x for kind, x in (("A", a), ("B", b))
            }
    parameters = dict(model.named_parameters())
    for ours, theirs in hf_names(model.spec).items():
        if saved & {name.rsplit(".", 2)[-2] for name in theirs}:
            tensors[f"base_model.model.{theirs[0]}"] = whole(parameters[ours].detach())
    if "embed_tokens" in saved and model.head is None:  # peft uses a tied head's own name
        tensors["base_model.model.lm_head.weight"] = tensors[
            "base_model.model.model.embed_tokens.weight"
        ].clone()
    return tensors


def write_adapter(
    tensors: Mapping[str, Tensor], config: LoRAConfig, spec: ModelSpec, base: str, directory: Path
) -> None:
    """Write an adapter in peft's format, for peft, vLLM, and `load_lora_adapter` of Hone's server."""
    # peft matches the ends of names: norm alone would match all norms.
    saved = ["model.norm" if name == "norm" else name for name in config.modules_to_save]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": config.dropout,
        "bias": "none",
        "target_modules": sorted(config.targets or spec.linear_shapes),
        "modules_to_save": saved or None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    if "embed_tokens" in config.modules_to_save and spec.tie_word_embeddings:
        settings["ensure_weight_tying"] = True
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(
        {name: x.contiguous().cpu() for name, x in tensors.items()},
        directory / "adapter_model.safetensors",
    )


def _index_of(name: str, names: list[str]) -> int:
    return names.index(name) if name in names else -1


def list_linears(model: LanguageModel) -> list[tuple[Linear, str]]:
    """Return the linears that may have an adapter, with the names of their weights."""
    table = hf_names(model.spec)
    return [
        (linear, names[0])
        for linear, names in _block_linears(model)
        if model.spec.can_adapt(table[names[0]][0])
    ]


def _block_linears(model: LanguageModel) -> Iterator[tuple[Linear, list[str]]]:
    """Yield the blocks' linears with the names of their weights."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("blocks."):
            yield module, [f"{name}.weight"]
