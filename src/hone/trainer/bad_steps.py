"""Handle gradients that are not finite or too large.

The sequences with the worst gradients are saved; the step is skipped, or the run ends.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hone.models.expert_parallel import take_local_part
from hone.trainer.optim import Optimizer
from hone.trainer.ranks import Ranks

SHOWN_SEQUENCES = 8  # sequences that are written


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step, to be processed one by one.

    Attributes:
        count: number of sequences.
        backward: runs the backward pass of sequence i alone, which adds to the parameters' gradients.
        describe: returns the JSON object that is written for sequence i.
    """

    count: int
    backward: Callable[[int], object]
    describe: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class BadStepPolicy:
    """What to do about a step whose gradient norm is not finite or too large.

    Attributes:
        directory: where sequences of the step are written.
        on_bad_step: "stop" or "skip".
    """

    directory: Path
    on_bad_step: str


def handle_bad_step(
    step: int,
    norm: float,
    sequences: Sequences,
    optimizer: Optimizer,
    policy: BadStepPolicy,
    ranks: Ranks,
) -> None:
    """Save the sequences with the largest gradients of a step, then warn or raise. Collective.

    Called if `norm`, the gradient norm of the whole step, is not finite or exceeds
    `optim.skip_norm`. Raises ValueError if `policy.on_bad_step` is "stop".
    """
    count = sequences.count
    on_bad_step = policy.on_bad_step
    directory = policy.directory
    norms = []
    # Every rank has the whole batch; ranks that share a model process all of it.
    for i in range(count):
        optimizer.clear_gradients()
        if ranks.is_first or optimizer.is_sharded:
            sequences.backward(i)
            norms.append(
                optimizer.gradient_norm(optimizer.local_gradients())
                / (ranks.shares if optimizer.is_sharded else 1)
            )
    optimizer.clear_gradients()
    if not ranks.is_first:
        ranks.barrier()  # until the first has written: an exiting process takes the others with it
        if on_bad_step == "stop":
            raise ValueError(f"step {step}: the gradients' norm is {norm:.4g}")
        return
    worst = sorted(range(count), key=lambda i: -norms[i] if math.isfinite(norms[i]) else -math.inf)[
        :SHOWN_SEQUENCES
    ]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"step_{step}.jsonl"
    lines = [
        json.dumps({"index": i, "grad_norm": str(norms[i]), **sequences.describe(i)}) for i in worst
    ]
    file.write_text("\n".join(lines) + "\n")
    ranks.barrier()
    what = f"step {step}: the gradients' norm is {norm:.4g}; the sequences with the worst are in {file}"
    if on_bad_step == "stop":
        broken = sum(not torch.isfinite(take_local_part(p)).all() for p in optimizer.parameters)
        cause = (
            f"{broken} weights are not finite themselves"
            if broken
            else "a lower optim.lr? --on-bad-step skip continues"
        )
        raise ValueError(f"{what} ({cause})")
    logging.getLogger("hone").warning("%s; the step is skipped", what)
