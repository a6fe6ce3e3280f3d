"""What the trainer says about a version of the weights: published by rename, found by listing.

    trainer ── broadcasts/step_N/{config.json, delivery.json, STABLE, and what the way of the weights puts there} ──►

It carries the run's id, so that what an earlier run left behind is never taken for this one's.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hone.run_directory import steps_in

Message = dict[
    str, str
]  # to a receiver of weights: plain data; `type` says which receiver it is for
DELIVERY, STABLE = "delivery.json", "STABLE"
TEXT = "text"  # tokenizer and template of all versions, beside them


class Superseded(Exception):
    """The trainer has gone on: the version that was asked for is no more."""


@dataclass(frozen=True)
class Canary:
    """A fixed sequence and the logprobs of its tokens after the first: what proves that two models are the same."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Delivery:
    """What the trainer says about published weights. `metrics` are those of the step that made them.

    `checksum` and `fingerprints`, one a weight, are of the whole model, whatever of it travels. `transport` is what a
    receiver has to know.
    """

    run: str
    version: int
    checksum: str
    dtype: str
    canary: Canary
    metrics: dict[str, float]
    fingerprints: dict[str, str] = field(default_factory=dict)
    transport: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0  # that sending took


def write_delivery(delivery: Delivery, directory: Path) -> None:
    """The last files of a version's directory, which is yet to appear."""
    descriptor = os.open(
        directory / DELIVERY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )  # it may have a secret
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(asdict(delivery)) + "\n")
    (directory / STABLE).touch()


def read_delivery(directory: Path) -> Delivery | None:
    """What was delivered there; None where nothing is (it may have been removed by now)."""
    try:
        values = json.loads((directory / DELIVERY).read_text())
    except FileNotFoundError:
        return None
    return Delivery(**{**values, "canary": Canary(**values["canary"])})


def remove_before(parent: Path, step: int) -> None:
    """Removes the published directories of earlier steps."""
    for old, directory in steps_in(parent).items():
        if old < step:
            shutil.rmtree(directory, ignore_errors=True)
