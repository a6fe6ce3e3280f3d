"""The orchestrator: prompts out, groups of scored rollouts in, one batch a step.

    examples (shuffled by seed) ─► groups of rollouts ─ env.rollout(client) ─► rewards ─► advantages ─► Batch
                                                                     └─► rollouts/step_N/rollouts.jsonl

Which examples a step takes and with which seeds its rollouts draw follows from (seed, step) alone, so a run
is repeatable and a resumed one goes on where it was.
"""

import asyncio
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hone.config.rl import OrchestratorConfig
from hone.environments import Environment
from hone.environments.environment import ModelClient
from hone.monitors.statistics import summary
from hone.orchestrator.advantage import ADVANTAGES, has_signal
from hone.records import Batch, Example, Rollout, Sample, Sampling


@dataclass
class Group:
    """The rollouts of one example."""

    env: str
    rollouts: list[Rollout]
    advantages: list[float]
    is_used: bool = True  # False where there is nothing to learn


@dataclass
class Collected:
    """What a step gathered: the batch for the trainer, the groups behind it, the numbers about it."""

    batch: Batch
    groups: list[Group]
    metrics: dict[str, float]


class Orchestrator:
    def __init__(
        self, config: OrchestratorConfig, environments: dict[str, Environment], client: ModelClient, seed: int
    ) -> None:
        self.config, self.environments, self.client, self.seed = config, environments, client, seed
        self.examples = [(name, example) for name, env in environments.items() for example in env.get_dataset()]
        if len(self.examples) < config.prompts_per_step:
            raise ValueError(
                f"the environments have {len(self.examples)} examples, a step takes {config.prompts_per_step} "
                "(batch_size / rollouts_per_example)"
            )
        self._orders: dict[int, list[int]] = {}

    async def collect(self, step: int, version: int) -> Collected:
        """The rollouts of a step, sampled by policy `version`. Raises ValueError when every one of them failed."""
        start = time.perf_counter()
        groups = await asyncio.gather(
            *(self._group(step, slot, *self._example(step, slot)) for slot in range(self.config.prompts_per_step))
        )
        failed = [r.error for g in groups for r in g.rollouts if r.error]
        if len(failed) == self.config.batch_size:
            raise ValueError(f"step {step}: every rollout failed; the first said: {failed[0]}")
        temperature = self.config.sampling.temperature
        samples = [
            _sample(rollout, advantage, temperature)
            for group in groups
            if group.is_used
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
            if not rollout.error and not (self.config.mask_truncated and rollout.is_truncated)
        ]
        metrics = self._metrics(groups, step, version, time.perf_counter() - start)
        metrics["batch/effective_batch_size"] = len(samples)
        return Collected(Batch(step, samples), list(groups), metrics)

    def _example(self, step: int, slot: int) -> tuple[str, Example]:
        """Example of a step's slot: the data is gone through in a new order every epoch."""
        epoch, position = divmod((step - 1) * self.config.prompts_per_step + slot, len(self.examples))
        if epoch not in self._orders:
            order = list(range(len(self.examples)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1} | {epoch: order}
        return self.examples[self._orders[epoch][position]]

    async def _group(self, step: int, slot: int, env: str, example: Example) -> Group:
        count = self.config.rollouts_per_example
        first = ((step - 1) * self.config.prompts_per_step + slot) * count
        rollouts = await asyncio.gather(
            *(self._rollout(env, example, (self.seed << 40) + first + i) for i in range(count))
        )
        scored = [r for r in rollouts if not r.error]
        if not scored:
            return Group(env, list(rollouts), [0.0] * count, is_used=False)
        rewards = np.array([r.reward for r in scored])
        lengths = np.array([sum(len(t.completion.ids) for t in r.turns) for r in scored], dtype=np.float64)
        of_scored = iter(ADVANTAGES[self.config.advantage](rewards, lengths).tolist())
        advantages = [0.0 if r.error else next(of_scored) for r in rollouts]
        return Group(env, list(rollouts), advantages, has_signal(rewards) or not self.config.drop_zero_signal)

    async def _rollout(self, env: str, example: Example, seed: int) -> Rollout:
        """One rollout; whatever goes wrong with it becomes its `error`, and the step goes on without it."""
        sampling = Sampling(self.config.sampling.temperature, self.config.sampling.max_tokens, seed)
        timeout = self.config.rollout_timeout
        try:
            async with asyncio.timeout(timeout):
                return await self.environments[env].rollout(self.client, example, sampling)
        except TimeoutError:
            return Rollout(example, [], [], error=f"no end within orchestrator.rollout-timeout {timeout} s")
        except Exception as error:  # environments are users' code: theirs may raise anything
            return Rollout(example, [], [], error=f"{type(error).__name__}: {error}")

    def _metrics(self, groups: list[Group], step: int, version: int, seconds: float) -> dict[str, float]:
        rollouts = [r for g in groups for r in g.rollouts if not r.error]
        rewards = np.array([r.reward for r in rollouts])
        best = [[r.reward for r in g.rollouts if not r.error] for g in groups]
        prompt = [sum(len(t.prompt_ids) for t in r.turns[-1:]) for r in rollouts]
        completion = [sum(len(t.completion.ids) for t in r.turns) for r in rollouts]
        lags = [step - 1 - v for r in rollouts for t in r.turns for v in t.completion.versions[:1]]
        values: dict[str, float] = {
            "progress/step": step,
            "progress/samples": len(rollouts),
            "progress/tokens": sum(prompt) + sum(completion),
            "progress/failed": sum(len(g.rollouts) for g in groups) - len(rollouts),
            **summary("reward", rewards),
            "batch/solve_none": float(np.mean([max(b, default=0.0) <= 0.0 for b in best])),
            "batch/solve_all": float(np.mean([min(b, default=0.0) >= 1.0 for b in best])),
            "batch/without_signal": float(np.mean([not g.is_used for g in groups])),
            "batch/async_level": step - 1 - version,
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


def _sample(rollout: Rollout, advantage: float, temperature: float) -> Sample:
    """A single-turn rollout as a training sequence: the ids that were sampled, never tokenised again."""
    (turn,) = rollout.turns
    prompt, completion = turn.prompt_ids, turn.completion
    return Sample(
        ids=prompt + completion.ids,
        mask=[False] * len(prompt) + [True] * len(completion.ids),
        logprobs=[0.0] * len(prompt) + completion.logprobs,
        advantage=advantage,
        temperature=temperature,
    )


def write_rollouts(groups: list[Group], directory: Path, write_more: Callable[[Path], None] | None = None) -> None:
    """One JSON object a rollout: what was asked and written, why it was rewarded, and the tokens behind it.

    The directory appears whole, with what `write_more` puts into it.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "rollouts.jsonl").open("w") as file:
        for number, group in enumerate(groups):
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
                file.write(json.dumps(_row(number, group, rollout, advantage), ensure_ascii=False) + "\n")
    if write_more:
        write_more(partial)
    partial.rename(directory)


def _row(number: int, group: Group, rollout: Rollout, advantage: float) -> dict[str, object]:
    return {
        "env": group.env,
        "example_id": rollout.example.id,
        "group": number,
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
                "finish_reason": turn.completion.finish_reason,
            }
            for turn in rollout.turns
        ],
    }
