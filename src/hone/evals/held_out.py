"""Evaluate a model during training, with any client that samples from it. Imports no torch.

held-out examples x rollouts ─► env.rollout(client) ─► eval/ENV/reward, …
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hone.config.sections import EvalConfig
from hone.environments import Environment
from hone.environments.attempt import attempt, score_group_or_fail
from hone.environments.conversation import TokenClient
from hone.records import Example, Rollout, Sampling


@dataclass(frozen=True)
class RolloutPlan:
    """How to run the rollouts of an evaluation.

    Rollout k of example i has the number i * per_example + k.

    Attributes:
        per_example: number of rollouts of each example.
        sampling: sampling parameters; the seed of each rollout is derived from `sampling.seed`.
        timeout: seconds per rollout.
        retries: further attempts at a rollout that failed.
        max_in_flight: maximum number of concurrent rollouts; None for no limit.
        finished: finished rollouts by number; an example is skipped if all its rollouts are finished.
        on_rollout: called with number and rollout, once all rollouts of the example are scored.
        gives_up: called before each rollout; if it returns True, the rollout is not run.
    """

    per_example: int
    sampling: Sampling
    timeout: float | None = None
    retries: int = 0
    max_in_flight: int | None = None
    finished: Mapping[int, Rollout] = field(default_factory=dict)
    on_rollout: Callable[[int, Rollout], None] = lambda number, rollout: None
    gives_up: Callable[[], bool] = lambda: False


async def evaluate_environments(
    config: EvalConfig, environments: dict[str, Environment], client: TokenClient, seed: int
) -> dict[str, float]:
    """Return the mean reward and metrics of each environment, as eval/ENV/NAME."""
    found: dict[str, float] = {}
    for name, environment in environments.items():
        examples = environment.get_eval_dataset()[: config.num_examples]
        sampling = Sampling(config.temperature, config.max_tokens, seed)
        plan = RolloutPlan(config.rollouts_per_example, sampling, config.timeout)
        rollouts = await attempt_rollouts(environment, client, examples, plan)
        found |= {f"eval/{name}/{key}": value for key, value in mean_scores(rollouts).items()}
    return found


async def attempt_rollouts(
    environment: Environment,
    client: TokenClient,
    examples: list[Example],
    plan: RolloutPlan,
) -> list[Rollout]:
    """Run the plan's rollouts of each example; return them grouped by example.

    A rollout that fails carries its error.
    """
    n = plan.per_example
    count = len(examples) * n
    slots = asyncio.Semaphore(plan.max_in_flight or max(1, count))

    async def attempt_one(i: int) -> Rollout:
        async with slots:
            example = examples[i // n]
            if plan.gives_up():
                return Rollout(example, [], [], error="not tried, since all before it failed")
            own = replace(plan.sampling, seed=(plan.sampling.seed << 40) + i)
            return await attempt(environment, client, example, own, plan.timeout, plan.retries)

    async def attempt_group(start: int) -> list[Rollout]:
        numbers = range(start, start + n)
        if all(i in plan.finished for i in numbers):
            return [plan.finished[i] for i in numbers]
        rollouts = await asyncio.gather(*map(attempt_one, numbers))
        await score_group_or_fail(environment, rollouts, plan.timeout)
        for i, rollout in zip(numbers, rollouts, strict=True):
            plan.on_rollout(i, rollout)
        return rollouts

    return [
        rollout
        for of_one in await asyncio.gather(*map(attempt_group, range(0, count, n)))
        for rollout in of_one
    ]


def mean_scores(rollouts: list[Rollout]) -> dict[str, float]:
    """Return mean reward and metrics of the successful rollouts, and the number of failed ones."""
    scored = [r for r in rollouts if not r.error]
    reward = {"reward": float(np.mean([r.reward for r in scored]))} if scored else {}
    return metric_means(scored) | reward | {"failed": len(rollouts) - len(scored)}


def metric_means(scored: list[Rollout]) -> dict[str, float]:
    """Return the mean of each metric over the rollouts that have it."""
    names = sorted({name for r in scored for name in r.metrics})
    return {
        name: float(np.mean([r.metrics[name] for r in scored if name in r.metrics]))
        for name in names
    }
