"""Plan the memory of a command on one card: what it needs, and a step that fits. Imports no torch.

peak of a training step + the sampler's own weights + cache of one sequence + CUDA   <=   share of the card
gpu_memory_utilization of a card, minus all that                                      =   cache of the others
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from hone.config.base import Config
from hone.config.inference_config import InferenceConfig
from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import RLConfig, TrainerConfig, TrainerRunConfig
from hone.config.sections import EngineConfig
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, SFTConfig
from hone.engine.state_rows import count_state_rows
from hone.models.spec import ModelSpec
from hone.trainer.memory_estimate import (
    FEW_TOKENS,
    MANY_TOKENS,
    Estimate,
    estimate_rl,
    estimate_step,
    merged_copy_bytes,
    micro_batch_tokens,
)

GIB = 2**30
# CUDA's context, loaded kernels and buffers of torch's libraries.
CONTEXT_BYTES = int(0.9 * GIB)
# Sequences that a sampler should decode at once: fewer leave a GPU idle, the more so the fewer.
WANTED_SEQUENCES = (32, 16, 8, 4, 2, 1)
# Of a CPU's memory: there a step takes about twice the estimate, which is that of a GPU's kernels.
CPU_SHARE = 0.45
TRAINING_SHARE = 0.95  # of a card, for commands that only train
# Micro-batches that "auto" tries, after the default: with all activations, and with recomputed ones.
SMALLER_TOKENS = (8192, 4096)
LEAST_TOKENS = 2048
MAX_SFT_TOKENS = 2 * MANY_TOKENS  # per micro-batch of `sft`; more are not faster
AnyConfig = TypeVar("AnyConfig", bound=Config)


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
        state: bytes of a sequence's state, in models with the gated delta rule.
    """

    training: Estimate | None
    weights: int
    sequence: int
    sequences: int
    share: float
    state: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes without keys and values."""
        trained = 0 if self.training is None else self.training.peak_bytes
        return CONTEXT_BYTES + trained + self.weights

    @property
    def least_bytes(self) -> int:
        """Return the bytes with keys and values of one sequence."""
        return self.fixed_bytes + self._held_bytes(1)

    def _held_bytes(self, sequences: int) -> int:
        """Return the bytes of keys, values and states of a number of decoding sequences."""
        states = self.state * count_state_rows(sequences) if self.state else 0
        return self.sequence * sequences + states

    def fits(self, card_gib: float, sequences: int = 1) -> bool:
        """Return True if a card has room for this, with keys and values of that many sequences."""
        held = self._held_bytes(min(sequences, self.sequences))
        return self.fixed_bytes + held <= self.share * card_gib * GIB

    def sequences_at_once(self, card_gib: float) -> int:
        """Return how many of the longest sequences decode together; 0 if nothing is sampled."""
        if not self.sequence:
            return 0
        free = self.share * card_gib * GIB - self.fixed_bytes
        return bisect_right(range(1, self.sequences + 1), free, key=self._held_bytes)


def estimate_training(
    config: Config, spec: ModelSpec, itemsize: int
) -> tuple[int, Estimate] | None:
    """Return a device's tokens of a micro-batch, and memory of a step; None if nothing is trained."""
    if isinstance(config, SFTConfig):
        rows = config.data.micro_batch_size or config.data.batch_size
        of_rows = rows * (config.data.seq_len or UNKNOWN_ROW_TOKENS)
        tokens = -(-of_rows // config.context_parallel)
        return tokens, estimate_step(
            spec,
            config.lora,
            config.optim,
            tokens,
            itemsize,
            recomputes=config.activation_checkpointing is True,
            has_reference=config.keeps_reference_copy,
            is_split=rows < config.data.batch_size,
        )
    if isinstance(config, RLConfig):
        trainer: TrainerConfig = config.trainer
        longest = -(-config.seq_len // trainer.context_parallel)
        step = config.orchestrator.batch_size * longest
    elif isinstance(config, TrainerRunConfig):
        trainer = config
        longest = 0
        step = config.micro_batch_tokens or FEW_TOKENS
    else:
        return None
    # A sequence that is longer than a micro-batch is one of its own.
    most = max(trainer.micro_batch_tokens or FEW_TOKENS, longest)
    return min(step, most), estimate_rl(spec, trainer, step, itemsize, most)


def estimate_need(config: Config, spec: ModelSpec, itemsize: int) -> Need | None:
    """Return what a command needs of one device; None if it needs none.

    Args:
        config: `rl` is taken as one process on one device; "auto" counts as False.
        itemsize: bytes of a weight.
    """
    of_token = spec.cache_numbers * itemsize
    limit = spec.max_position_embeddings
    if isinstance(config, TrainerRunConfig):  # a step may have several micro-batches
        most = config.micro_batch_tokens or FEW_TOKENS
        training = estimate_rl(spec, config, 2 * most, itemsize, most)
        return Need(training, 0, 0, 0, TRAINING_SHARE)
    if (found := estimate_training(config, spec, itemsize)) is not None:
        _, training = found
        if not isinstance(config, RLConfig) or config.inference is None:  # sampled elsewhere
            return Need(training, 0, 0, 0, TRAINING_SHARE)
        lora = config.trainer.lora
        copy = merged_copy_bytes(spec, lora, itemsize) if lora and lora.keeps_copy else 0
        of_sequence = of_token * min(limit, config.seq_len)
        most = config.orchestrator.batch_size
        share = _usable_share(config.inference)
        return Need(training, copy, of_sequence, most, share, spec.state_bytes(itemsize))
    if isinstance(config, InferenceConfig):
        of_sequence = of_token * min(limit, config.max_model_len or limit)
        most = config.max_batch_size or 256
        weights = spec.parameter_count() * itemsize
        share = _usable_share(config)
        return Need(None, weights, of_sequence, most, share, spec.state_bytes(itemsize))
    return None


def _usable_share(config: EngineConfig) -> float:
    return 1.0 if config.kv_cache_gib is not None else config.gpu_memory_utilization


def choose_memory(
    config: AnyConfig,
    spec: ModelSpec,
    itemsize: int,
    device_bytes: int | None,
    is_gpu: bool = True,
) -> AnyConfig:
    """Return a configuration whose "auto" memory keys have values with which it fits a device.

    The first of these that fits is chosen: smaller micro-batches with all activations, then
    recomputed activations; the first of WANTED_SEQUENCES with which any fits should decode at
    once. If nothing fits, the last one is returned. Keys that are set stay. A CPU's defaults are
    kept where they fit, since its results depend on them to the bit.

    Args:
        device_bytes: memory of the device; None: keep activations, in micro-batches of default size.
    """
    choices = list(_list_choices(config, spec, itemsize, device_bytes if is_gpu else None))
    if device_bytes is None:
        return choices[0]
    usable_gib = device_bytes * (1.0 if is_gpu else CPU_SHARE) / GIB
    for least in WANTED_SEQUENCES if is_gpu else (1,):
        for chosen in choices:
            need = estimate_need(chosen, spec, itemsize)
            if need is None or need.fits(usable_gib, least):
                return chosen
    return choices[-1]


def describe_choice(config: Config, spec: ModelSpec, itemsize: int, device_bytes: int) -> str:
    """Return a sentence on the micro-batches that `choose_memory` chose, and what a step needs."""
    need = estimate_need(config, spec, itemsize)
    assert need is not None
    section = config.trainer if isinstance(config, RLConfig) else config
    if isinstance(config, SFTConfig):
        size = f"{config.data.micro_batch_size or config.data.batch_size} rows"
    else:
        size = f"up to {section.micro_batch_tokens:,} tokens"  # type: ignore[attr-defined]
    kept = "recomputed" if section.activation_checkpointing else "kept"  # type: ignore[attr-defined]
    return (
        f"Micro-batches of {size}, activations {kept}: about {need.least_bytes / GIB:.1f} of the device's "
        f"{device_bytes / GIB:.1f} GiB are needed at least"
    )


def _list_choices(
    config: AnyConfig, spec: ModelSpec, itemsize: int, card_bytes: int | None
) -> Iterator[AnyConfig]:
    """Yield the configuration with values in place of "auto", the fastest first.

    `card_bytes` is None if the device is no GPU.
    """
    if isinstance(config, SFTConfig):
        for recomputes in _list_recomputing(config.activation_checkpointing, config.lora):
            for rows in _list_rows(config, recomputes, card_bytes):
                data = config.data.model_copy(update={"micro_batch_size": rows})
                yield config.model_copy(
                    update={"data": data, "activation_checkpointing": recomputes}
                )
        return
    trainer = config.trainer if isinstance(config, RLConfig) else config
    if not isinstance(trainer, TrainerConfig):
        yield config
        return
    for recomputes in _list_recomputing(trainer.activation_checkpointing, trainer.lora):
        default = micro_batch_tokens(spec, itemsize, recomputes, card_bytes)
        less = (*SMALLER_TOKENS, LEAST_TOKENS) if recomputes else SMALLER_TOKENS
        for tokens in (
            [trainer.micro_batch_tokens] if trainer.micro_batch_tokens else [default, *less]
        ):
            keys = {"micro_batch_tokens": tokens, "activation_checkpointing": recomputes}
            if isinstance(config, RLConfig):
                yield config.model_copy(update={"trainer": trainer.model_copy(update=keys)})
            else:
                yield config.model_copy(update=keys)


def _list_recomputing(configured: bool | str, lora: LoRAConfig | None) -> list[bool]:
    if lora is not None and lora.base_bits == 8:
        return [True]
    return [False, True] if configured == "auto" else [bool(configured)]


def _list_rows(config: SFTConfig, recomputes: bool, card_bytes: int | None) -> list[int | None]:
    """Return numbers of rows of a micro-batch, the largest first. All activations need enough of them."""
    if config.data.micro_batch_size:
        return [config.data.micro_batch_size]
    row = config.data.seq_len or UNKNOWN_ROW_TOKENS
    batch = config.data.batch_size
    sizes = [rows for rows in range(batch, 0, -1) if batch % rows == 0]
    if card_bytes is not None:
        sizes = [rows for rows in sizes if rows * row <= MAX_SFT_TOKENS] or sizes[-1:]
    enough = [rows for rows in sizes if rows * row >= SMALLER_TOKENS[-1]] or sizes[:1]
    return list(sizes if recomputes else enough)
