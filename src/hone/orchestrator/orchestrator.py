"""The orchestrator: prompts out, groups of scored rollouts in, one batch a step.

    schedule ─► groups of rollouts under way ─ env.rollout(client) ─► rewards ─► advantages ─► ready ─► Batch
       ▲                 └ too old: begun again                                       └─► rollouts/step_N/rollouts.jsonl

Groups are under way across steps. One is begun when the step that it will be for, by its place in the line, allows the
version that is served: staleness is bounded before anything is sampled. With max_async_level 0 the groups of a step,
and so its batch, follow from (seed, step) and the weights alone.
"""

import asyncio
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.rl import OrchestratorConfig
from hone.environments import Environment
from hone.environments.environment import ModelClient
from hone.monitors.statistics import summary
from hone.orchestrator.advantage import ADVANTAGES, has_signal, overlong
from hone.orchestrator.schedule import Schedule
from hone.records import Batch, Example, Rollout, Sample, Sampling

REFILLS = 4  # batches of groups without signal that a step replaces, before it goes on with fewer


@dataclass
class Group:
    """The rollouts of one example. `failures`: of attempts at them, by cause."""

    number: int
    env: str
    rollouts: list[Rollout]
    advantages: list[float]
    is_used: bool = True  # False where there is nothing to learn
    failures: Counter[str] = field(default_factory=Counter)
    version: int = 0  # of its oldest token

    @property
    def versions(self) -> list[int]:
        return [v for r in self.rollouts for t in r.turns for v in t.completion.versions]


@dataclass
class Collected:
    """What a step gathered: the batch for the trainer, the groups behind it, the numbers about it, and what a run that
    goes on after it needs to know."""

    batch: Batch
    groups: list[Group]
    metrics: dict[str, float]
    progress: dict[str, Any]


@dataclass(frozen=True)
class _UnderWay:
    task: asyncio.Task[Group]
    version: int  # that was served when it was begun


class Orchestrator:
    """`adopted` says which version of the weights is served from now on; `collect` gathers one step after the other."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: dict[str, Environment],
        client: ModelClient,
        seed: int,
        max_async_level: int = 0,
    ) -> None:
        self.config, self.environments, self.client, self.seed = config, environments, client, seed
        self.max_async_level = max_async_level
        self.examples = [(name, example) for name, env in environments.items() for example in env.get_dataset()]
        if len(self.examples) < config.prompts_per_step:
            raise ValueError(
                f"the environments have {len(self.examples)} examples, a step takes {config.prompts_per_step} "
                "(batch_size / rollouts_per_example)"
            )
        self.schedule = Schedule(len(self.examples), seed)
        self.step, self.last_step, self.version = 1, math.inf, -1
        self.under_way: dict[int, _UnderWay] = {}
        self.ready: dict[int, Group] = {}
        self.without_signal: list[Group] = []  # that were replaced, since the last step
        self.stale = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def go_on(self, first: int, progress: dict[str, Any] | None) -> None:
        """From step `first` on, after a step that left this behind, or nothing."""
        done = (first - 1) * self.config.prompts_per_step
        progress = progress or {"next": done, "untrained": []}
        self.step, self.schedule = first, Schedule(len(self.examples), self.seed, progress)

    def adopted(self, version: int) -> None:
        self.version = version
        self._begin()

    async def collect(self, step: int, last_step: float = math.inf) -> Collected:
        """The rollouts of a step. Raises ValueError when every one of them failed."""
        start = time.perf_counter()
        self.step, self.last_step = step, last_step
        self._drop_stale()
        self._begin()
        count = self.config.prompts_per_step
        while len(self.ready) < count:
            self._changed.clear()
            await self._changed.wait()
            if self._error is not None:
                raise self._error
        groups = [self.ready.pop(number) for number in sorted(self.ready)[:count]]
        replaced, self.without_signal = self.without_signal, []
        self.step = step + 1
        self._begin()
        failed = [r.error for g in groups for r in g.rollouts if r.error]
        if len(failed) == self.config.batch_size:
            raise ValueError(f"step {step}: every rollout failed; the first said: {failed[0]}")
        temperature = self.config.sampling.temperature
        samples = [
            sample
            for group in groups
            if group.is_used
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
            if not rollout.error and not (self.config.mask_truncated and rollout.is_truncated)
            for sample in samples_of(rollout, advantage, temperature)
        ]
        metrics = self._metrics([*groups, *replaced], step, time.perf_counter() - start)
        metrics |= {
            "batch/effective_batch_size": len(samples),
            "batch/groups_replaced": len(replaced),
            "batch/groups_stale": self.stale,
            "batch/groups_under_way": len(self.under_way),
            "progress/epoch": self.schedule.epoch,
        }
        self.stale = 0
        return Collected(Batch(step, samples), [*groups, *replaced], metrics, self.progress())

    def progress(self) -> dict[str, Any]:
        """What a run that goes on after the step before needs to know."""
        return {"step": self.step - 1, **self.schedule.progress([*self.under_way, *self.ready])}

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = [group.task for group in self.under_way.values()]
        self.under_way = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for environment in self.environments.values():
            await environment.close()

    def _begin(self) -> None:
        """Begins as many groups as the steps take that the served version may be used for, and those that oversampling
        adds: the line is never longer, so what waits in it is never much older."""
        steps = min(self.version + 1 + self.max_async_level, self.last_step) - self.step + 1
        in_a_step = self.config.prompts_per_step
        room = steps * in_a_step + math.ceil((self.config.oversampling_factor - 1) * in_a_step) if steps > 0 else 0
        while len(self.under_way) + len(self.ready) < room:
            number = self.schedule.take()
            task = asyncio.get_running_loop().create_task(
                self._group(number, *self.examples[self.schedule.example(number)])
            )
            self.under_way[number] = _UnderWay(task, self.version)
            task.add_done_callback(lambda task, number=number: self._done(number, task))  # type: ignore[misc]

    def _done(self, number: int, task: asyncio.Task[Group]) -> None:
        begun = self.under_way.get(number)
        if begun is None or begun.task is not task:
            return  # given up
        del self.under_way[number]
        self._changed.set()
        if task.cancelled():  # the program is being ended
            self._error = asyncio.CancelledError()
            return
        self._error = task.exception()
        if self._error is not None:
            return
        group = task.result()
        group.version = min(group.versions, default=begun.version)
        room = REFILLS * self.config.prompts_per_step
        if self.config.refill and not group.is_used and len(self.without_signal) < room:
            self.without_signal.append(group)
        else:
            self.ready[number] = group
        self._begin()

    def _drop_stale(self) -> None:
        """Groups too old for the step, under way or ready, are begun again."""
        oldest = self.step - 1 - self.config.max_off_policy_steps
        old = [number for number, begun in self.under_way.items() if begun.version < oldest]
        for number in old:
            self.under_way.pop(number).task.cancel()
        old += [number for number, group in self.ready.items() if group.version < oldest]
        for number in old:
            self.ready.pop(number, None)
            self.schedule.give_back(number)
        self.stale += len(old)

    async def _group(self, number: int, env: str, example: Example) -> Group:
        count, failures = self.config.rollouts_per_example, Counter[str]()
        seeds = [(self.seed << 40) + number * count + i for i in range(count)]
        rollouts = await asyncio.gather(*(self._rollout(env, example, seed, failures) for seed in seeds))
        scored = [r for r in rollouts if not r.error]
        if not scored:
            return Group(number, env, list(rollouts), [0.0] * count, False, failures)
        rewards = np.array([r.reward for r in scored])
        lengths = np.array([sum(len(t.completion.ids) for t in r.turns) for r in scored], dtype=np.float64)
        rewards = overlong(rewards, lengths, self.config.sampling.max_tokens, self.config.overlong_share)
        of_scored = iter(ADVANTAGES[self.config.advantage](rewards, lengths).tolist())
        advantages = [0.0 if r.error else next(of_scored) for r in rollouts]
        is_used = has_signal(rewards) or not self.config.drop_zero_signal
        return Group(number, env, list(rollouts), advantages, is_used, failures)

    async def _rollout(self, env: str, example: Example, seed: int, failures: Counter[str]) -> Rollout:
        """One rollout. Where it goes wrong it is tried again; then its `error` says how, and the step does without."""
        sampling = Sampling(self.config.sampling.temperature, self.config.sampling.max_tokens, seed)
        timeout, error = self.config.rollout_timeout, ""
        for _ in range(1 + self.config.rollout_retries):
            try:
                async with asyncio.timeout(timeout):
                    rollout = await self.environments[env].rollout(self.client, example, sampling)
            except TimeoutError:
                cause, error = "timeout", f"no end within orchestrator.rollout-timeout {timeout} s"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # given up, or the program is being ended
                cause, error = "raised", "the environment cancelled its own work"
            except Exception as failure:  # environments are users' code: theirs may raise anything
                cause, error = "raised", f"{type(failure).__name__}: {failure}"
            else:
                if not math.isfinite(rollout.reward):
                    cause, error = "not_finite", f"the reward is {rollout.reward}"
                elif not any(turn.completion.ids for turn in rollout.turns):
                    cause, error = "empty", "nothing was sampled"
                else:
                    return rollout
            failures[cause] += 1
        return Rollout(example, [], [], error=error)

    def _metrics(self, groups: list[Group], step: int, seconds: float) -> dict[str, float]:
        rollouts = [r for g in groups for r in g.rollouts if not r.error]
        rewards = np.array([r.reward for r in rollouts])
        best = [[r.reward for r in g.rollouts if not r.error] for g in groups]
        prompt = [sum(len(t.prompt_ids) for t in r.turns[-1:]) for r in rollouts]
        completion = [sum(len(t.completion.ids) for t in r.turns) for r in rollouts]
        lags = [step - 1 - g.version for g in groups]
        failures = sum((g.failures for g in groups), Counter[str]())
        values: dict[str, float] = {
            "progress/step": step,
            "progress/samples": len(rollouts),
            "progress/tokens": sum(prompt) + sum(completion),
            "progress/failed": sum(len(g.rollouts) for g in groups) - len(rollouts),
            **{f"failures/{cause}": failures[cause] for cause in ("raised", "timeout", "not_finite", "empty")},
            **summary("reward", rewards),
            "batch/solve_none": float(np.mean([max(b, default=0.0) <= 0.0 for b in best])),
            "batch/solve_all": float(np.mean([min(b, default=0.0) >= 1.0 for b in best])),
            "batch/without_signal": float(np.mean([not g.is_used for g in groups])),
            "batch/async_level": step - 1 - self.version,
            "batch/off_policy_level/mean": float(np.mean(lags)) if lags else 0.0,
            "batch/off_policy_level/max": max(lags, default=0),
            **summary("prompt_len", prompt),
            **summary("completion_len", completion),
            **summary("seq_len", [a + b for a, b in zip(prompt, completion, strict=True)]),
            "is_truncated/mean": float(np.mean([r.is_truncated for r in rollouts])),
            "time/generate": seconds,
            "perf/generate_throughput": sum(completion) / seconds,
        }
        for env in self.environments:
            of_env = [r for g in groups if g.env == env for r in g.rollouts if not r.error]
            if of_env:
                values[f"reward/{env}"] = float(np.mean([r.reward for r in of_env]))
            for name, count in Counter(name for r in of_env for name in r.metrics).items():
                values[f"metrics/{env}/{name}"] = sum(r.metrics.get(name, 0.0) for r in of_env) / count
        return values


def samples_of(rollout: Rollout, advantage: float, temperature: float) -> list[Sample]:
    """A rollout as training sequences: the ids that were sampled, never tokenised again.

    A turn whose prompt goes on from the tokens so far continues their sequence, what lies between without loss. Where
    it does not (a template that leaves out earlier thinking) the turn begins a sequence of its own.
    """
    samples: list[Sample] = []
    for turn in rollout.turns:
        prompt, completion = turn.prompt_ids, turn.completion
        sample = samples[-1] if samples else None
        if sample is None or prompt[: len(sample.ids)] != sample.ids:
            sample = Sample([], [], [], advantage, temperature)
            samples.append(sample)
        between = prompt[len(sample.ids) :]
        sample.ids = sample.ids + between + completion.ids
        sample.mask = sample.mask + [False] * len(between) + [True] * len(completion.ids)
        sample.logprobs = sample.logprobs + [0.0] * len(between) + completion.logprobs
    return [sample for sample in samples if any(sample.mask)]


def write_rollouts(groups: list[Group], directory: Path, write_more: Callable[[Path], None] | None = None) -> None:
    """One JSON object a rollout: what was asked and written, why it was rewarded, and the tokens behind it.

    The directory appears whole, with what `write_more` puts into it.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "rollouts.jsonl").open("w") as file:
        for group in groups:
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
                file.write(json.dumps(_row(group, rollout, advantage), ensure_ascii=False) + "\n")
    if write_more:
        write_more(partial)
    partial.rename(directory)


def _row(group: Group, rollout: Rollout, advantage: float) -> dict[str, object]:
    return {
        "env": group.env,
        "example_id": rollout.example.id,
        "group": group.number,
        "prompt": rollout.example.prompt,
        "completion": rollout.messages,
        "answer": rollout.example.answer,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "advantage": advantage,
        "is_used": group.is_used and not rollout.error,
        "error": rollout.error,
        "seconds": round(rollout.seconds, 4),
        "turns": [
            {
                "prompt_ids": turn.prompt_ids,
                "ids": turn.completion.ids,
                "logprobs": [round(x, 6) for x in turn.completion.logprobs],
                "version": turn.completion.versions[0] if turn.completion.versions else None,
                "last_version": turn.completion.versions[-1] if turn.completion.versions else None,
                "finish_reason": turn.completion.finish_reason,
            }
            for turn in rollout.turns
        ],
    }
