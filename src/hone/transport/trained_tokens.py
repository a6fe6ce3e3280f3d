"""Store the logprobs and loss masks that a trainer rank computed, in files for inspection.

rollouts/step_N/trainer.RANK.safetensors has flat arrays over the target tokens of the rank's
samples, in order. A sample is identified by its group and member.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hone.records import Sample


@dataclass(frozen=True)
class Trained:
    """Values of a step's targets, concatenated over `samples`.

    Attributes:
        logprobs: by the trainer, before the step.
        is_masked: True for tokens that the loss dropped or clipped.
    """

    samples: list[Sample]
    logprobs: NDArray[np.float32]
    is_masked: NDArray[np.bool_]

    def write_files(self, directory: Path, rank: int = 0) -> None:
        file = directory / f"trainer.{rank}.safetensors"
        partial = file.with_suffix(".partial")
        counts = [sample.target_count for sample in self.samples]
        of_each = np.array(
            [(s.group, s.member, n) for s, n in zip(self.samples, counts, strict=True)],
            dtype=np.int64,
        )
        arrays: dict[str, NDArray[Any]] = {
            "samples": of_each.reshape(-1, 3),
            "logprobs": self.logprobs,
            "is_masked": self.is_masked,
        }
        save_file(arrays, partial)
        # safetensors writes files that only their owner can read.
        partial.chmod(directory.stat().st_mode & 0o666)
        partial.replace(file)


# The samples of a rollout, in order.
Seen = list[tuple[NDArray[np.float32], NDArray[np.bool_]]]


def read_trained(directory: Path) -> dict[tuple[int, int], Seen]:
    """Return logprobs and masks by group and member.

    The result is empty if the step was not trained on; unreadable files are skipped.
    """
    found: dict[tuple[int, int], Seen] = defaultdict(list)
    for file in sorted(directory.glob("trainer.*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as reader:
                samples, logprobs, is_masked = (
                    reader.get_tensor(name) for name in ("samples", "logprobs", "is_masked")
                )
        except (OSError, SafetensorError):
            continue
        ends = np.cumsum(samples[:, 2])
        for (group, member, count), end in zip(samples.tolist(), ends.tolist(), strict=True):
            found[group, member].append((logprobs[end - count : end], is_masked[end - count : end]))
    return found
