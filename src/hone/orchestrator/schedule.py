"""Choose the example of each group. The choice depends only on seed, finished groups and rewards.

    environments, by ratio ─► examples, in a new order every epoch ─► a fraction of easy and hard ones ─► Task

A Task is one group to sample. Tasks are numbered from 0; the number determines the seeds of the
group's rollouts. If a group was started but not trained on, its Task is scheduled again under the
same number.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hone.config.orchestrator_config import BufferConfig

Ratio = list[tuple[int, float]]  # by step


class Task(NamedTuple):
    number: int
    env: str
    example: int  # index in the environment's data


@dataclass
class Stream:
    """Examples that are iterated together: of one environment, or of all if there are no ratios."""

    examples: list[tuple[str, int]]
    ratio: Ratio
    epoch: int = 0
    position: int = 0
    credit: float = 0.0  # groups that it is behind its ratio
    order: list[int] = field(default_factory=list)


class Schedule:
    def __init__(
        self,
        sizes: dict[str, int],
        seed: int,
        groups_in_a_step: int = 1,
        ratios: dict[str, Ratio] | None = None,
        buffer: BufferConfig | None = None,
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Set up a schedule.

        Args:
            sizes: number of examples by environment.
            seed: seed of the order of examples.
            groups_in_a_step: number of groups per step.
            ratios: share of groups by environment, as (step, share) points; None mixes all
                examples.
            buffer: thresholds and fractions of easy and hard examples.
            progress: result of `progress_state`, to resume.
        """
        self.seed = seed
        self.groups_in_a_step = groups_in_a_step
        self.buffer = buffer or BufferConfig()
        of_each = {env: [(env, i) for i in range(size)] for env, size in sizes.items()}
        if ratios:
            self.streams = [Stream(examples, ratios[env]) for env, examples in of_each.items()]
        else:
            self.streams = [
                Stream([x for examples in of_each.values() for x in examples], [(1, 1.0)])
            ]
        self.next = 0
        self.again: list[Task] = []  # a heap
        self.means: dict[str, dict[int, float]] = {env: {} for env in sizes}
        if progress:
            self.next = progress["next"]
            self.again = sorted(Task(*task) for task in progress["untrained"])
            for stream, (epoch, position, credit) in zip(
                self.streams, progress["streams"], strict=True
            ):
                stream.epoch = epoch
                stream.position = position
                stream.credit = credit
            for env, means in progress.get("means", {}).items():
                self.means[env] = {int(example): mean for example, mean in means.items()}

    def next_task(self) -> Task:
        """Return the next group to start."""
        if self.again:
            return heapq.heappop(self.again)
        self.next += 1
        return Task(self.next - 1, *self._choose_example(self._choose_stream()))

    def give_back(self, task: Task) -> None:
        """Put back a group that was not trained on; it is scheduled before new ones."""
        heapq.heappush(self.again, task)

    def record_score(self, task: Task, mean: float) -> None:
        """Record a group's mean reward, which rates the difficulty of its example."""
        if self.buffer.easy_threshold is not None or self.buffer.hard_threshold is not None:
            means = self.means[task.env]
            share = self.buffer.newest_share
            means[task.example] = share * mean + (1 - share) * means.get(task.example, mean)

    def pool_of(self, env: str, example: int) -> str:
        """Return the difficulty of an example: "easy", "normal" or "hard"."""
        mean = self.means[env].get(example)
        buffer = self.buffer
        if mean is None:
            return "normal"
        if buffer.easy_threshold is not None and mean >= buffer.easy_threshold:
            return "easy"
        return (
            "hard"
            if buffer.hard_threshold is not None and mean <= buffer.hard_threshold
            else "normal"
        )

    def pool_shares(self) -> dict[str, float]:
        """Return the shares of easy, normal and hard examples among those with a recorded score.

        Empty if no example has one.
        """
        count = Counter(
            self.pool_of(env, example) for env, means in self.means.items() for example in means
        )
        return (
            {name: count[name] / count.total() for name in ("easy", "normal", "hard")}
            if count
            else {}
        )

    @property
    def epoch(self) -> float:
        """Return the number of passes over the data so far, with fractions."""
        passed = sum(
            stream.epoch * len(stream.examples) + stream.position for stream in self.streams
        )
        return passed / sum(len(stream.examples) for stream in self.streams)

    def progress_state(self, begun: list[Task]) -> dict[str, Any]:
        """Return what a resumed run needs; `begun`: groups in flight or not trained on yet."""
        return {
            "next": self.next,
            "untrained": sorted([*begun, *self.again]),
            "streams": [[stream.epoch, stream.position, stream.credit] for stream in self.streams],
            **({"means": self.means} if any(self.means.values()) else {}),
        }

    def _choose_stream(self) -> Stream:
        """Return the stream that is furthest behind its ratio."""
        step = (self.next - 1) // self.groups_in_a_step + 1
        ratios = [interpolate_at(step, stream.ratio) for stream in self.streams]
        if not any(ratios):
            raise ValueError(f"env.ratio: all are 0 at step {step}")
        for stream, ratio in zip(self.streams, ratios, strict=True):
            stream.credit += ratio / sum(ratios)
        _, _, chosen = max((s.credit, -i, s) for i, s in enumerate(self.streams) if ratios[i])
        chosen.credit -= 1.0
        return chosen

    def _choose_example(self, stream: Stream) -> tuple[str, int]:
        """Return the next example of a stream.

        Easy and hard examples are used with the configured probabilities and otherwise skipped.
        After a whole epoch of skipped examples the next one is used in any case.
        """
        for _ in range(len(stream.examples)):
            found = self._advance_stream(stream)
            pool = self.pool_of(*found)
            if pool == "normal":
                return found
            fraction = self.buffer.easy_fraction if pool == "easy" else self.buffer.hard_fraction
            if (
                random.Random(f"{self.seed} {stream.epoch} {stream.position} {found}").random()
                < fraction
            ):
                return found
        return self._advance_stream(stream)

    def _advance_stream(self, stream: Stream) -> tuple[str, int]:
        if stream.position == len(stream.examples):
            stream.epoch = stream.epoch + 1
            stream.position = 0
            stream.order = []
        if not stream.order:
            label = f" {stream.examples[0][0]}" if stream is not self.streams[0] else ""
            stream.order = list(range(len(stream.examples)))
            random.Random(f"{self.seed} {stream.epoch}{label}").shuffle(stream.order)
        stream.position += 1
        return stream.examples[stream.order[stream.position - 1]]


def interpolate_at(step: int, points: Ratio) -> float:
    """Interpolate linearly between (step, value) `points`, constant before and after them."""
    if step <= points[0][0]:
        return points[0][1]
    for (one, low), (two, high) in itertools.pairwise(points):
        if step <= two:
            return low + (high - low) * (step - one) / (two - one)
    return points[-1][1]
