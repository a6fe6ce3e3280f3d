"""How much of a device keys and values may take, and how many sequences are then decoded together."""

import logging
from typing import TypedDict

import torch

from hone import machine
from hone.config.sections import EngineConfig
from hone.models.transformer import Transformer

CPU_GIB, CPU_SHARE = (
    8.0,
    4,
)  # on a CPU: at most so many, and at most one part in so many of the machine's memory
FEW, MANY = (
    256,
    1024,
)  # sequences that decode at once by default: FEW on any device, up to MANY if memory allows
log = logging.getLogger("hone")


class Room(TypedDict):
    max_batch_size: int
    kv_cache_gib: float


def plan_cache(
    config: EngineConfig, model: Transformer, length: int | None, reserved: int = 0
) -> Room:
    """As configured, else as the model's device has room for sequences of `length` tokens.

    `length` None: up to the model's own limit, or as long as there is room for. `reserved`: bytes that this process
    will need for other things.
    """
    weight = model.embed.weight
    if not weight.is_cuda:
        batch, gib = config.max_batch_size or FEW, config.kv_cache_gib or cpu_gib()
        tokens = model.spec.max_position_embeddings if length is None else length
        most = min(gib, batch * tokens * model.spec.cache_numbers * weight.dtype.itemsize / 2**30)
        log.info(
            "Up to %d sequences decode at once; their keys and values take up to %.2f GiB of memory, page by page",
            batch,
            most,
        )
        return Room(max_batch_size=batch, kv_cache_gib=gib)
    free, total = torch.cuda.mem_get_info(weight.device)
    free += torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    of_token = model.spec.cache_numbers * weight.dtype.itemsize
    of_sequence = of_token * (length or model.spec.max_position_embeddings)
    return plan_gpu_cache(
        config, of_sequence, free, total, reserved, least=of_sequence if length else of_token
    )


def cpu_gib() -> float:
    """What keys and values may take on a CPU where nothing is configured."""
    return min(CPU_GIB, machine.usable_memory() / CPU_SHARE / 2**30)


def plan_gpu_cache(
    config: EngineConfig, of_sequence: int, free: int, total: int, reserved: int, least: int
) -> Room:
    """`plan_cache` on a GPU. `of_sequence`: bytes of the longest sequence. Raises ValueError if `least` bytes do not fit."""
    gib = config.kv_cache_gib
    if gib is None:
        gib = (free - (1 - config.gpu_memory_utilization) * total - reserved) / 2**30
        if gib * 2**30 < least:
            raise ValueError(
                f"the GPU has {free / 2**30:.1f} GiB free, of which a training step may take {reserved / 2**30:.1f} "
                f"and gpu_memory_utilization leaves {(1 - config.gpu_memory_utilization) * total / 2**30:.1f}; keys "
                f"and values of the longest sequence take {least / 2**30:.2f}. Shorter sequences, fewer "
                "trainer.micro_batch_tokens, trainer.activation_checkpointing or a kv_cache_gib of your own would fit"
            )
    sequences = int(gib * 2**30) // of_sequence
    batch = config.max_batch_size or min(max(FEW, sequences), MANY)
    log.info(
        "Up to %d sequences decode at once; their keys and values take %.1f of the GPU's %.0f GiB",
        batch,
        min(gib, batch * of_sequence / 2**30),
        total / 2**30,
    )
    return Room(max_batch_size=batch, kv_cache_gib=gib)
