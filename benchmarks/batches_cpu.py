"""A batch of rollouts on its way from the orchestrator to the trainer, by size: written, read, packed for the model.

    python benchmarks/batches_cpu.py

Milliseconds, the least of five. What is packed is one micro-batch of all rollouts, groups of 16 with a shared prompt.
"""

import random
import tempfile
import time
from pathlib import Path

import numpy as np
from peer import finish

from hone.records import Batch, Sample
from hone.trainer.packing import pack_shared
from hone.transport.batches import FileBatches

GROUP = 16
SHAPES = ((128, 37, 128), (1024, 224, 511))  # rollouts, tokens of a prompt and of a completion


def least_ms(run) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    draw, figures = random.Random(0), {}
    print("| rollouts | written | read | packed |", "|---" * 4 + "|", sep="\n")
    for rollouts, prompt, completion in SHAPES:
        samples, mask = [], [False] * prompt + [True] * completion
        prompts = [draw.choices(range(150000), k=prompt) for _ in range(rollouts // GROUP)]
        for i in range(rollouts):
            ids = np.array([*prompts[i // GROUP], *draw.choices(range(150000), k=completion)])
            logprobs = np.array([-draw.random() if drawn else 0.0 for drawn in mask])
            samples.append(Sample(ids, np.array(mask), logprobs, 1.0, 1.0, group=i // GROUP, member=i % GROUP))
        with tempfile.TemporaryDirectory() as directory:
            batches, place = FileBatches(Path(directory), "run"), Path(directory) / "step_1"
            place.mkdir()
            written = least_ms(lambda: batches.put(Batch(1, samples), place))  # noqa: B023
            read = least_ms(lambda: batches.take(1))  # noqa: B023
            taken = batches.take(1).samples
        packed = least_ms(lambda: pack_shared([s.ids for s in taken], [s.mask for s in taken]))  # noqa: B023
        name = f"{rollouts} x ({prompt} + {completion})"
        print(f"| {name} | {written:.1f} | {read:.1f} | {packed:.1f} |")
        figures |= {f"{rollouts}_written_ms": written, f"{rollouts}_read_ms": read, f"{rollouts}_packed_ms": packed}
    finish(**figures)


if __name__ == "__main__":
    main()
