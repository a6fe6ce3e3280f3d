"""Shard a model over GPUs with FSDP2.

    fp32 shards ─ all-gather a block, in bf16 ─► forward, backward ─ sum over ranks, in fp32 ─► gradients of the shards

Each rank stores a shard of each weight, and gathers each block's weights when the block runs.
Gathers and sums are collective, so all ranks must make the same number of passes; each rank's
passes are over its own tokens.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.config.lora_config import LoRAConfig
from hone.config.sections import Sharding
from hone.models.expert_parallel import ExpertRanks
from hone.models.hf import find_weight, hf_names, model_class, write_model
from hone.models.language_model import LanguageModel
from hone.models.lora import LoRA, adapter_tensors, lora_modules, write_adapter
from hone.run_directory import appearing_directory
from hone.trainer.ranks import Ranks

log = logging.getLogger("hone")


def shard_model(
    model: LanguageModel, ranks: Ranks, sharding: Sharding, expert_parallel: bool = False
) -> None:
    """Shard the model over the ranks, if there are several and the configuration asks for it.

    "auto" shards on GPUs, and where tokens or experts are divided among ranks. With
    `expert_parallel` each rank keeps its own experts, and the others' are not gathered for a pass.
    Raises ValueError for models and numbers of ranks that do not allow this.
    """
    device = model.embed.weight.device
    if ranks.count > 1 and sharding == "none" and (expert_parallel or ranks.context > 1):
        key = "expert_parallel" if expert_parallel else "context_parallel"
        raise ValueError(f"{key}: sharding none keeps the whole model in each process; take full")
    if expert_parallel:
        _check_experts(model, ranks)
    is_divided = expert_parallel or ranks.context > 1
    is_whole = sharding == "none" or (
        sharding == "auto" and device.type == "cpu" and not is_divided
    )
    if ranks.count == 1 or is_whole:
        return
    if model.spec.implementation != "hone":
        raise ValueError(
            "trainer.sharding: a model on transformers' modules is not sharded; take none, or one trainer process"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = model.embed.weight.dtype
    mesh = init_device_mesh(device.type, (ranks.count,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    own = _divide_experts(model, mesh, ranks) if expert_parallel else set()
    # The last part is what the blocks left: embedding, final norm, head.
    for part in (*model.blocks, model):
        # The optimizer's fp32 masters. Earlier parts are shards already, so that no more than one
        # part is whole in fp32 at a time.
        for parameter in set(part.parameters()) - own:
            if not hasattr(parameter, "to_local"):
                parameter.data = parameter.data.float()
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=own)
        # Losses are shares of the whole batch's, so gradients are summed, not averaged.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # Gloo supports only sums


def _check_experts(model: LanguageModel, ranks: Ranks) -> None:
    """Raise ValueError if the model's experts cannot be divided among the ranks."""
    experts = model.spec.experts  # type: ignore[attr-defined]
    if ranks.count == 1:
        log.warning("expert_parallel has no effect: there is one trainer process")
    if experts % ranks.count:
        raise ValueError(
            f"expert_parallel: the model's {experts} experts cannot be divided evenly among "
            f"{ranks.count} trainer processes"
        )


def _divide_experts(model: LanguageModel, mesh: Any, ranks: Ranks) -> set[nn.Parameter]:
    """Shard the weights and adapters of experts by experts; return these parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor

    found = set()
    for mixture in model.expert_layers:
        mixture.ranks = ExpertRanks(ranks.count)
        for linear in (mixture.gate_up, mixture.down):
            for module in linear.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    # Only what is trained needs fp32; the rest keeps its dtype.
                    whole = parameter.data.float() if parameter.requires_grad else parameter.data
                    part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                    own = nn.Parameter(part, requires_grad=parameter.requires_grad)
                    setattr(module, name, own)
                    found.add(own)
    return found


def is_sharded(model: LanguageModel) -> bool:
    return hasattr(model, "reshard")


def gather_whole(x: Tensor) -> Tensor:
    """Return the whole tensor on every rank. Collective."""
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def as_part_of(part: Tensor, like: Any) -> Tensor:
    """Return the tensor, sharded like `like`, of which `part` is this rank's shard."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def part_of(x: Tensor, like: Any) -> Tensor:
    """Return this rank's shard of `x`, which every rank has whole; `like` determines the sharding."""
    if not hasattr(like, "to_local"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None).to_local()


class Export:
    """The model for servers and files: gathered, adapters merged, in `dtype`.

    A model that is not sharded and has no adapters is returned as is, without a copy.
    """

    def __init__(self, model: LanguageModel, ranks: Ranks, dtype: torch.dtype) -> None:
        self.model = model
        self.ranks = ranks
        self.dtype = dtype
        self.is_plain = not is_sharded(model) and not any(lora_modules(model))
        self._copy: LanguageModel | None = None

    @torch.no_grad()
    def __call__(self, merged: bool = True) -> LanguageModel | None:
        """Return the model on the first rank, None on the others. Collective.

        With `merged=False` adapters are left out.
        """
        if self.is_plain:
            return self.model if self.ranks.is_first else None
        if self._copy is None and self.ranks.is_first:
            self._copy = model_class(self.model.spec)(self.model.spec).to(self.dtype)
        self._reshard_model()
        modules = dict(self.model.named_modules())
        copies = {}
        if self._copy is not None:
            copies = dict(self._copy.named_parameters()) | dict(self._copy.named_buffers())
        for name in hf_names(self.model.spec):
            value = gather_whole(find_weight(self.model, name))
            delta = None
            if name.endswith(".weight"):
                delta = getattr(modules[name.removesuffix(".weight")], "delta", None)
            if isinstance(delta, LoRA) and merged:
                value = delta.add_to(value, self.dtype, gather_whole)
            if name in copies:
                copies[name].copy_(value)
        return self._copy

    def save_model(
        self,
        source: Path,
        where: Callable[[], Path],
        base: str,
        adapter_alone: bool = False,
        write_more: Callable[[Path], None] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Write a model directory, or only the model's adapter. Collective; the first rank writes.

        An adapter is merged into the model and also written to lora_adapters/.

        Args:
            source: directory of the starting model, for configuration and tokenizer.
            where: returns the directory to write; only the first rank calls it.
            base: name of the base model, for the adapter's configuration.
            adapter_alone: write only the adapter, into the directory itself.
            write_more: adds files before the directory appears.
            chat_template: replaces the chat template of `source`.
        """
        model = None if adapter_alone else self()
        adapter = {} if self.lora_config is None else self.adapter_tensors()
        if not self.ranks.is_first:
            return
        with appearing_directory(where()) as partial:
            if model is not None:
                write_model(model, source, partial, chat_template=chat_template)
            if self.lora_config is not None:
                self.write_adapter(
                    base, adapter, partial if adapter_alone else partial / "lora_adapters"
                )
            if write_more is not None:
                write_more(partial)

    @property
    def lora_config(self) -> LoRAConfig | None:
        return next((lora.config for lora in lora_modules(self.model)), None)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the trained adapter tensors by peft's names. Collective."""
        self._reshard_model()
        return adapter_tensors(self.model, gather_whole)

    def write_adapter(self, base: str, tensors: Mapping[str, Tensor], directory: Path) -> None:
        """Write an adapter of the model `base` in peft's format."""
        assert self.lora_config is not None
        write_adapter(tensors, self.lora_config, self.model.spec, base, directory)

    def _reshard_model(self) -> None:
        if is_sharded(self.model):  # a forward pass without gradients leaves the last part gathered
            self.model.reshard()  # type: ignore[operator]
