"""Say on which cards a command fits, and which keys would make it fit a smaller one. Imports no torch.

peak of a training step + the sampler's own weights + cache of one sequence + CUDA   <=   share of the card
gpu_memory_utilization of a card, minus all that                                      =   cache of the others
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from hone.config.base import Config
from hone.config.inference_config import InferenceConfig
from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import RLConfig, TrainerConfig
from hone.config.sections import EngineConfig
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, SFTConfig
from hone.models.spec import ModelSpec
from hone.trainer.memory_estimate import (
    FEW_TOKENS,
    Estimate,
    estimate_rl,
    estimate_step,
    merged_copy_bytes,
)

GIB = 2**30
# What cards of these sizes in GB have, in GiB, as their drivers report it.
CARD_GIB = {16: 15.6, 24: 23.6, 32: 31.3, 48: 47.4, 80: 79.1, 141: 139.8}
# CUDA's context, loaded kernels and buffers of torch's libraries.
CONTEXT_BYTES = int(0.9 * GIB)
FEW_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Need:
    """Bytes of one device that a command needs.

    Attributes:
        training: estimate of a step; None if nothing is trained.
        weights: bytes of weights that are not part of `training`: those that are served, or the
            sampler's merged copy.
        sequence: bytes of keys and values of the longest sequence; 0 if nothing is sampled.
        sequences: sequences that one step or server has at a time at most.
        share: share of the card that may be used.
    """

    training: Estimate | None
    weights: int
    sequence: int
    sequences: int
    share: float

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes without keys and values."""
        trained = 0 if self.training is None else self.training.peak_bytes
        return CONTEXT_BYTES + trained + self.weights

    @property
    def least_bytes(self) -> int:
        """Return the bytes with keys and values of one sequence."""
        return self.fixed_bytes + self.sequence

    def fits(self, card_gib: float) -> bool:
        return self.least_bytes <= self.share * card_gib * GIB

    def sequences_at_once(self, card_gib: float) -> int:
        """Return how many of the longest sequences decode together; 0 if nothing is sampled."""
        if not self.sequence:
            return 0
        free = self.share * card_gib * GIB - self.fixed_bytes
        return min(self.sequences, int(free // self.sequence))


def estimate_need(config: Config, spec: ModelSpec, itemsize: int) -> Need | None:
    """Return what a command needs of one device; None if it needs none.

    Args:
        config: `rl` is taken as one process on one device.
        itemsize: bytes of a weight.
    """
    of_token = spec.cache_numbers * itemsize
    limit = spec.max_position_embeddings
    if isinstance(config, SFTConfig):
        rows = config.data.micro_batch_size or config.data.batch_size
        training = estimate_step(
            spec,
            config.lora,
            config.optim,
            rows * (config.data.seq_len or UNKNOWN_ROW_TOKENS),
            itemsize,
            recomputes=config.activation_checkpointing,
            is_split=rows < config.data.batch_size,
        )
        return Need(training, 0, 0, 0, 1.0)
    if isinstance(config, RLConfig):
        trainer = config.trainer
        step = config.orchestrator.batch_size * config.seq_len
        most = trainer.micro_batch_tokens or FEW_TOKENS
        training = estimate_rl(spec, trainer, step, itemsize, most)
        if config.inference is None:  # sampled elsewhere
            return Need(training, 0, 0, 0, 1.0)
        copy = 0 if trainer.lora is None else merged_copy_bytes(spec, trainer.lora, itemsize)
        of_sequence = of_token * min(limit, config.seq_len)
        most = config.orchestrator.batch_size
        return Need(training, copy, of_sequence, most, _share(config.inference))
    if isinstance(config, InferenceConfig):
        of_sequence = of_token * min(limit, config.max_model_len or limit)
        most = config.max_batch_size or 256
        return Need(None, spec.parameter_count() * itemsize, of_sequence, most, _share(config))
    return None


def _share(config: EngineConfig) -> float:
    return 1.0 if config.kv_cache_gib is not None else config.gpu_memory_utilization


def fit_lines(config: Config, spec: ModelSpec, itemsize: int) -> list[str]:
    """Return a line on the cards that a command fits, and one on how it would fit a smaller card."""
    need = estimate_need(config, spec, itemsize)
    if need is None:
        return []
    fitting = [size for size, gib in CARD_GIB.items() if need.fits(gib)]
    smaller = [size for size in CARD_GIB if size not in fitting]
    lines = [f"needs {need.least_bytes / GIB:.1f} GiB"]
    if fitting:
        lines[0] += f"; fits {', '.join(_describe_card(need, size) for size in fitting)}"
    if smaller:
        lines[0] += f"; does not fit {', '.join(map(str, smaller))} GB"
    cures: dict[str, str] = {}
    for size in reversed(smaller):
        if (found := find_cure(config, spec, itemsize, size)) is not None:
            keys, less = found
            cures[" ".join(keys)] = f"would fit {size} GB ({less.least_bytes / GIB:.1f} GiB) with"
    return lines + [f"{words} {keys}" for keys, words in cures.items()]


def _describe_card(need: Need, size: int) -> str:
    at_once = need.sequences_at_once(CARD_GIB[size])
    return f"{size} GB" + (f" ({at_once} at once)" if at_once else "")


Cure = tuple[str, Callable[[Config], Config]]


def find_cure(
    config: Config, spec: ModelSpec, itemsize: int, size: int
) -> tuple[list[str], Need] | None:
    """Return the fewest further keys, in order of their cost in speed, that make a command fit a card.

    Returns:
        The words of the command line, and what the command then needs; None if they do not suffice.
    """

    def apply(cures: list[Cure]) -> Need | None:
        changed = list(accumulate(cures, lambda before, cure: cure[1](before), initial=config))[-1]
        return estimate_need(changed, spec, itemsize)

    chosen: list[Cure] = []
    for cure in _list_cures(config):
        chosen.append(cure)
        need = apply(chosen)
        if need is not None and need.fits(CARD_GIB[size]):
            for one in chosen[:-1]:  # those that are not needed after all
                rest = [other for other in chosen if other is not one]
                less = apply(rest)
                if less is not None and less.fits(CARD_GIB[size]):
                    chosen, need = rest, less
            return [words for words, _ in chosen], need
    return None


def _list_cures(config: Config) -> Iterator[Cure]:
    """Yield (words of the command line, change), those that cost least first."""
    if isinstance(config, RLConfig):
        prefix = "--trainer."
        section: TrainerConfig | SFTConfig = config.trainer
    elif isinstance(config, SFTConfig):
        prefix, section = "--", config
    else:
        return

    def change(**keys: object) -> Callable[[Config], Config]:
        def apply(before: Config) -> Config:
            if isinstance(before, RLConfig):
                trainer = before.trainer.model_copy(update=keys)
                return before.model_copy(update={"trainer": trainer})
            return before.model_copy(update=keys)

        return apply

    def change_optim(**keys: object) -> Callable[[Config], Config]:
        def apply(before: Config) -> Config:
            own = before.trainer if isinstance(before, RLConfig) else before
            return change(optim=own.optim.model_copy(update=keys))(before)  # type: ignore[attr-defined]

        return apply

    if not section.activation_checkpointing:
        yield f"{prefix}activation-checkpointing", change(activation_checkpointing=True)
    if (
        isinstance(section, TrainerConfig)
        and (section.micro_batch_tokens or FEW_TOKENS) > FEW_MICRO_BATCH_TOKENS
    ):
        words = f"{prefix}micro-batch-tokens {FEW_MICRO_BATCH_TOKENS}"
        yield words, change(micro_batch_tokens=FEW_MICRO_BATCH_TOKENS)
    if isinstance(config, SFTConfig) and config.data.micro_batch_size != 1:
        data = config.data.model_copy(update={"micro_batch_size": 1})
        yield "--data.micro-batch-size 1", change(data=data)
    if section.lora is None:
        if section.optim.type == "adamw" and section.optim.state_dtype != "bfloat16":
            yield f"{prefix}optim.state-dtype bfloat16", change_optim(state_dtype="bfloat16")
        if not section.optim.offload:
            yield f"{prefix}optim.offload", change_optim(offload=True)
        if section.optim.type == "adamw":
            yield f"{prefix}lora.rank 16", change(lora=LoRAConfig(rank=16))
