"""Deliveries: the trainer's description of a policy version, published by rename and found by
listing.

    trainer ── broadcasts/step_N/{config.json, delivery.json, STABLE, and files of the transport} ──►

A delivery carries the run's id, so that files of an earlier run are ignored.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hone.run_directory import steps_in

# Message to a receiver: plain data; `type` selects the receiver.
Message = dict[str, str]
DELIVERY = "delivery.json"
STABLE = "STABLE"
TEXT = "text"  # directory with tokenizer and template of all versions


class Superseded(Exception):
    """The requested version is gone; the trainer has a later one."""


@dataclass(frozen=True)
class Canary:
    """A fixed sequence and the logprobs of its tokens after the first, to compare two models."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Delivery:
    """Description of published weights. `metrics` are those of the step that made them.

    `checksum` and `fingerprints` (one per weight) cover the whole model, whatever part is sent.
    `transport` is the message to the receiver.
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
    seconds: float = 0.0  # duration of sending


def write_delivery(delivery: Delivery, directory: Path) -> None:
    """Write the last files of a version's directory, which is about to appear."""
    # The message may contain a secret.
    descriptor = os.open(directory / DELIVERY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(asdict(delivery)) + "\n")
    (directory / STABLE).touch()


def read_delivery(directory: Path) -> Delivery | None:
    """Read a delivery, None if there is none (it may have been removed)."""
    try:
        values = json.loads((directory / DELIVERY).read_text())
    except FileNotFoundError:
        return None
    return Delivery(**{**values, "canary": Canary(**values["canary"])})


def remove_before(parent: Path, step: int) -> None:
    """Remove the published directories of earlier steps."""
    for old, directory in steps_in(parent).items():
        if old < step:
            shutil.rmtree(directory, ignore_errors=True)
