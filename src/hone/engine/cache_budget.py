"""Choose the size of the KV cache and the number of sequences that decode together."""

import logging
from typing import TypedDict

import torch

from hone import machine
from hone.config.key_names import key_name
from hone.config.sections import EngineConfig
from hone.engine.mixer_states import kept_states
from hone.engine.state_rows import count_sequences, count_state_rows
from hone.models.device_memory import free_and_total_bytes
from hone.models.language_model import LanguageModel

# On a CPU: the most GiB, and the share of the machine's memory.
CPU_GIB = 8.0
CPU_SHARE = 4
# Default for sequences that decode at once, on any device; and the largest, if memory allows.
DEFAULT_BATCH_SIZE = 256
MAX_DEFAULT_BATCH_SIZE = 1024
STATE_SHARE = 0.5  # of what is left for the cache that states of sequences may take by default
log = logging.getLogger("hone")


class Room(TypedDict):
    max_batch_size: int
    kv_cache_gib: float


def plan_cache(
    config: EngineConfig, model: LanguageModel, length: int | None, reserved: int = 0
) -> Room:
    """Return max_batch_size and kv_cache_gib: as configured, else by the free memory of the device.

    Args:
        length: tokens of the longest sequence; None: the model's limit, or as much as fits.
        reserved: bytes of device memory that this process needs for other purposes than the cache.
    """
    weight = model.embed.weight
    if not weight.is_cuda:
        batch = config.max_batch_size or DEFAULT_BATCH_SIZE
        gib = config.kv_cache_gib or cpu_gib()
        tokens = model.spec.max_position_embeddings if length is None else length
        most = min(gib, batch * tokens * model.spec.cache_numbers * weight.dtype.itemsize / 2**30)
        log.info(
            "Up to %d sequences decode at once; their keys and values take up to %.2f GiB of memory, page by page",
            batch,
            most,
        )
        return Room(max_batch_size=batch, kv_cache_gib=gib)
    if model.spec.mixer_layers:
        batch = config.max_batch_size or DEFAULT_BATCH_SIZE
        config = config.model_copy(update={"max_batch_size": batch})
        reserved += model.state_bytes * kept_states(batch)
    torch.cuda.empty_cache()  # the cache is one allocation, which fits none of the freed blocks
    free, total = free_and_total_bytes(weight.device)
    of_token = model.spec.cache_numbers * weight.dtype.itemsize
    of_sequence = of_token * (length or model.spec.max_position_embeddings)
    least = of_sequence if length else of_token
    of_state = model.spec.state_bytes(weight.dtype.itemsize)
    return plan_gpu_cache(config, of_sequence, free, total, reserved, least, of_state)


def cpu_gib() -> float:
    """Return the default cache size on a CPU in GiB."""
    return min(CPU_GIB, machine.usable_memory() / CPU_SHARE / 2**30)


def plan_gpu_cache(
    config: EngineConfig,
    of_sequence: int,
    free: int,
    total: int,
    reserved: int,
    least: int,
    of_state: int = 0,
) -> Room:
    """Return max_batch_size and kv_cache_gib for a GPU (see `plan_cache`).

    Args:
        config: settings of the engine.
        of_sequence: cache size of the longest sequence in bytes.
        free: bytes of GPU memory that are free.
        total: bytes of GPU memory.
        reserved: bytes that this process needs for other purposes than the cache.
        least: smallest cache size to accept, in bytes.
        of_state: bytes of a sequence's state, in models with the gated delta rule.

    Raises:
        ValueError: no cache size is configured, and less than `least` bytes are left.
    """
    gib = config.kv_cache_gib
    room = free - (1 - config.gpu_memory_utilization) * total - reserved
    if of_state:
        most = count_sequences(int(STATE_SHARE * room / of_state))
        batch = config.max_batch_size or max(1, min(DEFAULT_BATCH_SIZE, most))
        config = config.model_copy(update={"max_batch_size": batch})
        room -= of_state * count_state_rows(batch)
    if gib is None:
        gib = room / 2**30
        if gib * 2**30 < least:
            raise ValueError(
                f"the GPU has {free / 2**30:.1f} GiB free, of which a training step may take {reserved / 2**30:.1f} "
                f"and gpu_memory_utilization leaves {(1 - config.gpu_memory_utilization) * total / 2**30:.1f}; keys "
                f"and values of the longest sequence take {least / 2**30:.2f}. Shorter sequences, fewer "
                f"{key_name('trainer.micro_batch_tokens')}, {key_name('trainer.activation_checkpointing')}"
                " or a smaller kv_cache_gib may fit"
            )
    sequences = int(gib * 2**30) // of_sequence
    batch = config.max_batch_size or min(max(DEFAULT_BATCH_SIZE, sequences), MAX_DEFAULT_BATCH_SIZE)
    log.info(
        "Up to %d sequences decode at once; their keys and values take %.1f of the GPU's %.0f GiB",
        batch,
        min(gib, batch * of_sequence / 2**30),
        total / 2**30,
    )
    return Room(max_batch_size=batch, kv_cache_gib=gib)
