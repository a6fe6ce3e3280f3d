"""A batch of rollouts on its way from the orchestrator to the trainer, by size.

    python benchmarks/batches_cpu.py

Milliseconds, the least of five: until rollouts are samples, until those are written, read, and packed for the model.
One micro-batch of all rollouts is packed, groups of 16 with a shared prompt.
"""

import random
import tempfile
import time
from pathlib import Path

from peer import finish

from hone.orchestrator.group import samples_of
from hone.records import Batch, Completion, Example, Rollout, Turn
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
    print("| rollouts | made | written | read | packed |", "|---" * 5 + "|", sep="\n")
    for rollouts, prompt, completion in SHAPES:
        given = []
        for i in range(rollouts):
            shared = (
                draw.choices(range(150000), k=prompt)
                if i % GROUP == 0
                else given[-1].turns[0].prompt_ids
            )
            ids, logprobs = (
                draw.choices(range(150000), k=completion),
                [-draw.random() for _ in range(completion)],
            )
            turn = Turn(shared, Completion(ids, logprobs, [0] * completion, "length"), "")
            given.append(Rollout(Example(0, []), [turn], []))
        made = least_ms(lambda: [samples_of(one, 1.0, 1.0, "") for one in given])  # noqa: B023
        samples = [sample for one in given for sample in samples_of(one, 1.0, 1.0, "")]
        with tempfile.TemporaryDirectory() as directory:
            batches, place = FileBatches(Path(directory), "run"), Path(directory) / "step_1"
            place.mkdir()
            written = least_ms(lambda: batches.put(Batch(1, samples), place))  # noqa: B023
            read = least_ms(lambda: batches.take(1))  # noqa: B023
            taken = batches.take(1).samples
        packed = least_ms(lambda: pack_shared([s.ids for s in taken], [s.mask for s in taken]))  # noqa: B023
        name = f"{rollouts} x ({prompt} + {completion})"
        found = {"made": made, "written": written, "read": read, "packed": packed}
        print(f"| {name} |", *(f"{ms:.1f} |" for ms in found.values()))
        figures |= {f"{rollouts}_{what}_ms": ms for what, ms in found.items()}
    finish(**figures)


if __name__ == "__main__":
    main()
