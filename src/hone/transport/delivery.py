"""Deliveries: the trainer's descriptions of published policy versions.

    trainer ── broadcasts/step_N/{config.json, delivery.json, STABLE, and files of the transport} ──►

The directory of a version is published by rename and found by listing. A delivery carries the run's
id, so that files of an earlier run are ignored.
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
    """Description of published weights.

    `checksum` and `fingerprints` cover the whole model, whatever part is sent.

    Attributes:
        run: id of the run.
        version: step that made the weights, 0 for the initial ones.
        checksum: of all weights, hexadecimal (`models/weight_proof.py`).
        dtype: of the weights, such as "bfloat16".
        canary: fixed sequence with its logprobs by the trainer.
        metrics: metrics of the step that made the weights.
        fingerprints: 16 hexadecimal digits per weight, by HF name.
        transport: message to the receiver.
        bytes: size of what was sent.
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
    """Write delivery.json and then STABLE, the last files of a version before it is published."""
    # The message may contain a secret.
    descriptor = os.open(directory / DELIVERY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(asdict(delivery)) + "\n")
    (directory / STABLE).touch()


def read_delivery(directory: Path) -> Delivery | None:
    """Return the delivery in a directory, None if there is none (it may have been removed)."""
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
