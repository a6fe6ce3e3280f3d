"""The orchestrator: prompts out, groups of scored rollouts in, one batch per step.

    schedule ─► groups in flight ─ env.rollout(client) ─► rewards ─► advantages ─► samples ─► ready ─► Batch
       ▲                 └ too old: restarted               └ a teacher's logprobs ─┘  └─► rollouts/step_N/

Groups are in flight across steps. A group starts once the served version is recent enough for the
step that will train on it, so staleness is bounded before anything is sampled. With max_async_level
0, seed, step and weights alone determine the groups of a step and so its batch.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.key_names import key_name
from hone.config.orchestrator_config import OrchestratorConfig
from hone.environments import Environment
from hone.environments.attempt import attempt, score_group_or_fail
from hone.environments.conversation import TokenClient
from hone.orchestrator.advantage import make_advantage
from hone.orchestrator.group import Group, judge_group
from hone.orchestrator.replay import Replay
from hone.orchestrator.rollouts_file import read_group
from hone.orchestrator.schedule import Schedule, Task
from hone.orchestrator.step_metrics import StepGroups, metrics_of
from hone.orchestrator.teacher import Teacher
from hone.records import Batch, Example, Prompt, Rollout

log = logging.getLogger("hone.orchestrator")
# Batches of groups without signal that a step replaces before it continues with fewer.
MAX_REFILLS = 4


@dataclass
class Collected:
    """A step's batch, its groups, and the progress that a resumed run needs.

    `measure` computes the metrics, which can wait until the trainer has the batch.
    """

    batch: Batch
    groups: list[Group]
    measure: Callable[[], dict[str, float]]
    progress: dict[str, Any]


@dataclass(frozen=True)
class _UnderWay:
    task: Task
    work: asyncio.Task[Group]
    version: int  # served version when it started


class Orchestrator:
    """Sample groups and collect one batch per step; `on_adopted` sets the served policy version."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: dict[str, Environment],
        client: TokenClient,
        seed: int,
        max_async_level: int = 0,
        teacher: Teacher | None = None,
        count_tokens: Callable[[Prompt], int] | None = None,
    ) -> None:
        """Set up without starting anything.

        `count_tokens` returns the number of tokens of a prompt; max_prompt_tokens has no effect
        without it.
        """
        self.config = config
        self.environments = environments
        self.client = client
        self.seed = seed
        self.max_async_level = max_async_level
        self.teacher = teacher
        self.examples = self._select_examples(count_tokens)
        self.count = sum(map(len, self.examples.values()))
        self.settings = {env.known_as: config.group_config_of(env.known_as) for env in config.env}
        self._check_settings()
        self.advantages = {
            name: make_advantage(settings) for name, settings in self.settings.items()
        }
        self.largest = max(settings.rollouts_per_example for settings in self.settings.values())
        # Group numbers and rollout seeds have the same meaning in a resumed run only if these values are equal.
        self._kind = {
            "seed": seed,
            "batch_size / rollouts_per_example": config.prompts_per_step,
            "rollouts_per_example of environments": {
                k: one.rollouts_per_example for k, one in self.settings.items()
            },
            "examples of environments": {
                name: len(examples) for name, examples in self.examples.items()
            },
        }
        self.replay = Replay(config.buffer.replay)
        self.schedule = self._build_schedule(None)
        self.step = 1
        self.last_step = math.inf
        self.version = -1
        self.first_version = -1  # the first served version
        self.under_way: dict[int, _UnderWay] = {}
        self.ready: dict[int, Group] = {}
        self.without_signal: list[Group] = []  # replaced since the last step
        self.stale = 0
        # Receives the number of groups that are ready for a step, and needed.
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def _select_examples(
        self, count_tokens: Callable[[Prompt], int] | None
    ) -> dict[str, list[Example]]:
        """Return each environment's training examples within max_prompt_tokens."""
        most = self.config.max_prompt_tokens
        found = dict[str, list[Example]]()
        for name, environment in self.environments.items():
            found[name] = environment.get_dataset()
            if most is not None and count_tokens is not None:
                found[name] = short_enough(name, environment, found[name], most, count_tokens)
        return found

    def _check_settings(self) -> None:
        """Raise ValueError for too few examples; warn if sampling biases the importance ratio."""
        in_a_step = self.config.prompts_per_step
        if self.count < in_a_step:
            raise ValueError(
                f"the environments have {self.count} examples, a step takes {in_a_step} "
                "(batch_size / rollouts_per_example)"
            )
        for name, one in self.settings.items():
            if one.sampling.to_sampling(0).is_filtered:
                log.warning(
                    "%s: the sampling keys beside temperature and max_tokens change what is drawn, not the logprobs "
                    "that are trained on; the importance ratio leaves that out",
                    name,
                )

    def go_on(
        self, first: int, progress: dict[str, Any] | None, rollouts: Path | None = None
    ) -> None:
        """Continue a run at step `first`.

        Args:
            progress: `progress_state` after the previous step; None: the examples of earlier steps are skipped.
            rollouts: directory with the rollouts of earlier steps, from which groups for replay are read.

        Raises ValueError if `progress` is of a run with another seed, batch size, group size or
        number of examples.
        """
        before = (progress or {}).get("of", self._kind)
        for key, now in self._kind.items():
            if before.get(key) != now:
                raise ValueError(
                    f"--resume: {key} differs from the run's: it had {before.get(key)}, found {now}"
                )
        self.step, self.schedule = first, self._build_schedule(progress)
        if progress is None:
            for _ in range((first - 1) * self.config.prompts_per_step):
                self.schedule.next_task()
        temperatures = {name: one.sampling.temperature for name, one in self.settings.items()}
        for step, number, uses in (progress or {}).get("replay", []):
            group = (
                read_group(rollouts / f"step_{step}", number, temperatures) if rollouts else None
            )
            if group is not None:
                self.replay.put_back(step, group, uses)

    def _build_schedule(self, progress: dict[str, Any] | None) -> Schedule:
        config = self.config
        sizes = {name: len(examples) for name, examples in self.examples.items()}
        return Schedule(
            sizes, self.seed, config.prompts_per_step, config.mixing_ratios, config.buffer, progress
        )

    def on_adopted(self, version: int) -> None:
        if self.version < 0:
            self.first_version = version
        self.version = version
        self._start_groups()

    async def collect_step(
        self, step: int, last_step: float = math.inf, since: float | None = None
    ) -> Collected:
        """Return the batch of a step, once its groups are ready.

        Args:
            step: the step that trains on the batch.
            last_step: no groups are started for steps after this one.
            since: `time.perf_counter` value from which time/generate counts; now by default.

        Raises ValueError if every rollout failed.
        """
        start = time.perf_counter() if since is None else since
        self.step = step
        self.last_step = last_step
        self._drop_stale()
        self._start_groups()
        taken = await self._take_ready(step)
        replaced = self.without_signal
        self.without_signal = []
        for group in [*taken, *replaced]:
            if group.reward_list:
                self.schedule.record_score(group.task, float(np.mean(group.reward_list)))
        used = [group for group in taken if not group.unused]
        oldest = step - 1 - self.config.max_off_policy_steps
        again = self.replay.take_groups(len(taken) - len(used), oldest)
        self.replay.add_groups(step, used)
        groups = StepGroups(step, taken, replaced, again)
        self.step = step + 1
        self._start_groups()
        samples = [sample for group in [*used, *again] for sample in group.samples]
        now = {
            "batch/groups_stale": self.stale,
            "batch/groups_under_way": len(self.under_way),
            "batch/async_level": step - 1 - self.version,
            "progress/epoch": self.schedule.epoch,
            "time/generate": time.perf_counter() - start,
        } | {f"pool/{name}": share for name, share in self.schedule.pool_shares().items()}
        self.stale = 0

        def measure_step() -> dict[str, float]:
            found = metrics_of(groups, list(self.environments)) | now
            found["perf/generate_throughput"] = (
                found["completion_len/total"] / found["time/generate"]
            )
            return found

        return Collected(Batch(step, samples), groups.sampled, measure_step, self.progress_state())

    async def _take_ready(self, step: int) -> list[Group]:
        """Wait for the groups of a step. Raises ValueError if every rollout failed."""
        count = self.config.prompts_per_step
        while len(self.ready) < count or self._error is not None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        groups = [self.ready.pop(number) for number in sorted(self.ready)[:count]]
        failed = [r.error for g in groups for r in g.rollouts if r.error]
        if failed and len(failed) == sum(len(g.rollouts) for g in groups):
            raise ValueError(f"step {step}: every rollout failed; the first said: {failed[0]}")
        return groups

    def progress_state(self) -> dict[str, Any]:
        """Return the state that a run needs to resume after the last collected step."""
        begun = [
            *(group.task for group in self.ready.values()),
            *(one.task for one in self.under_way.values()),
        ]
        return {
            "step": self.step - 1,
            "of": self._kind,
            **self.schedule.progress_state(begun),
            **self.replay.progress_state(),
        }

    async def give_up(self) -> None:
        """Cancel the groups in flight."""
        works = [group.work for group in self.under_way.values()]
        self.under_way = {}
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    async def close(self) -> None:
        """Cancel the groups in flight; close environments and the teacher."""
        await self.give_up()
        for environment in self.environments.values():
            await environment.close()
        if self.teacher is not None:
            await self.teacher.close()

    def _start_groups(self) -> None:
        """Start groups for all steps that may train on samples of the served version.

        Groups of later steps are not started, since they would be too old when their step begins.
        The groups in flight are at most those of one step at first, and of one more step after each
        new version: if the groups of several steps started together, they would also end together,
        later than those of a single step, and training would wait for them. The additional groups
        of `oversampling_factor` are on top of both limits.
        """
        steps = min(self.version + 1 + self.max_async_level, self.last_step) - self.step + 1
        in_a_step = self.config.prompts_per_step
        spare = math.ceil((self.config.oversampling_factor - 1) * in_a_step)
        room = steps * in_a_step + spare if steps > 0 else 0
        at_once = (self.version - self.first_version + 1) * in_a_step + spare
        while len(self.under_way) < at_once and len(self.under_way) + len(self.ready) < room:
            task = self.schedule.next_task()
            work = asyncio.get_running_loop().create_task(self._run_group(task))
            self.under_way[task.number] = _UnderWay(task, work, self.version)
            work.add_done_callback(partial(self._on_group_done, task.number))

    def _on_group_done(self, number: int, work: asyncio.Task[Group]) -> None:
        begun = self.under_way.get(number)
        if begun is None or begun.work is not work:
            return  # abandoned
        del self.under_way[number]
        self._changed.set()
        if work.cancelled():  # the program ends
            self._error = asyncio.CancelledError()
            return
        error = work.exception()
        if error is not None:
            self._error = self._error or error
            return
        group = work.result()
        group.version = group.oldest_version(begun.version)
        room = MAX_REFILLS * self.config.prompts_per_step
        if (
            self.settings[group.task.env].refill
            and group.unused
            and len(self.without_signal) < room
        ):
            self.without_signal.append(group)
        else:
            self.ready[number] = group
            self.on_progress(len(self.ready), self.config.prompts_per_step)
        self._start_groups()

    def _drop_stale(self) -> None:
        """Cancel groups whose policy version is too old for the step, and schedule them again."""
        oldest = self.step - 1 - self.config.max_off_policy_steps
        old = [begun.task for begun in self.under_way.values() if begun.version < oldest]
        for task in old:
            self.under_way.pop(task.number).work.cancel()
        old += [group.task for group in self.ready.values() if group.version < oldest]
        for task in old:
            self.ready.pop(task.number, None)
            self.schedule.give_back(task)
        self.stale += len(old)

    async def _run_group(self, task: Task) -> Group:
        settings = self.settings[task.env]
        failures = Counter[str]()
        first = (self.seed << 40) + task.number * self.largest
        seeds = range(first, first + settings.rollouts_per_example)
        rollouts = await asyncio.gather(
            *(self._run_rollout(task, seed, failures) for seed in seeds)
        )
        await score_group_or_fail(
            self.environments[task.env], rollouts, self.config.rollout_timeout
        )
        rollouts = [own for rollout in rollouts for own in rollout.split_agents()]
        group = Group(task, rollouts, failures)
        judge_group(group, self.advantages[task.env], settings, self.config.buffer)
        if self.teacher is not None and settings.teacher_logprobs and group.samples:
            await self.teacher.score_samples(group.samples)
        return group

    async def _run_rollout(self, task: Task, seed: int, failures: Counter[str]) -> Rollout:
        """Run one rollout with retries; if all attempts fail, it has an `error` and is not trained
        on.
        """
        settings = self.settings[task.env]
        example = self.examples[task.env][task.example]
        sampling = settings.sampling.to_sampling(seed)
        client: TokenClient = self.client
        if settings.sampler == "teacher" and self.teacher is not None:
            client = self.teacher.writer_of_version(self.version)
        limits = (self.config.rollout_timeout, self.config.rollout_retries)
        return await attempt(
            self.environments[task.env],
            client,
            example,
            sampling,
            *limits,
            failures,
            needs_tokens=True,
        )


def first_prompt(environment: Environment, example: Example) -> Prompt:
    """Return the first prompt of a rollout, as far as it is known beforehand."""
    tools = environment.first_tools(example)
    arguments = dict(environment.template_arguments)
    return Prompt(example.prompt, tools, template_arguments=arguments)


def short_enough(
    name: str,
    environment: Environment,
    examples: list[Example],
    most: int,
    count_tokens: Callable[[Prompt], int],
) -> list[Example]:
    """Return the examples whose first prompt has at most `most` tokens.

    Raises ValueError if none has.
    """
    kept = [
        example for example in examples if count_tokens(first_prompt(environment, example)) <= most
    ]
    if examples and not kept:
        raise ValueError(
            f"{name}: every prompt has more than "
            f"{key_name('orchestrator.max_prompt_tokens')} {most} tokens"
        )
    if len(kept) < len(examples):
        left = len(examples) - len(kept)
        log.info(
            "%s: %d of %d examples have prompts of over %d tokens: left out",
            name,
            left,
            len(examples),
            most,
        )
    return kept
