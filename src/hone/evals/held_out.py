"""Evaluate a model during training, with any client that samples from it. Imports no torch.

held-out examples x rollouts ─► env.rollout(client) ─► eval/ENV/reward, …
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hone.config.sections import EvalConfig
from hone.environments import Environment
from hone.environments.attempt import attempt, score_group_or_fail
from hone.environments.conversation import TokenClient
from hone.records import Example, Rollout, Sampling


async def evaluate_environments(
    config: EvalConfig, environments: dict[str, Environment], client: TokenClient, seed: int
) -> dict[str, float]:
    """Return the mean reward and metrics of each environment, as eval/ENV/NAME."""
    found: dict[str, float] = {}
    for name, environment in environments.items():
        examples = environment.get_eval_dataset()[: config.num_examples]
        sampling = Sampling(config.temperature, config.max_tokens, seed)
        rollouts = await attempt_rollouts(
            environment, client, examples, config.rollouts_per_example, sampling, config.timeout
        )
        found |= {f"eval/{name}/{key}": value for key, value in mean_scores(rollouts).items()}
    return found


async def attempt_rollouts(
    environment: Environment,
    client: TokenClient,
    examples: list[Example],
    n: int,
    sampling: Sampling,
    timeout: float | None = None,
    at_once: int | None = None,
    retries: int = 0,
    known: dict[int, Rollout] | None = None,
    done: Callable[[int, Rollout], None] | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> list[Rollout]:
    """Run n rollouts per example, grouped by example, each with its own seed after `sampling.seed`.

    Args:
        timeout: seconds per rollout.
        at_once: most rollouts in flight.
        known: finished rollouts by number, which are not run again.
        done: called with each finished rollout.
        give_up: checked before each rollout; True skips it.

    A rollout that fails carries its error.
    """
    count = len(examples) * n
    slots = asyncio.Semaphore(at_once or max(1, count))

    async def attempt_one(i: int) -> Rollout:
        async with slots:
            if give_up():
                return Rollout(
                    examples[i // n], [], [], error="not tried, since all before it failed"
                )
            own = replace(sampling, seed=(sampling.seed << 40) + i)
            return await attempt(environment, client, examples[i // n], own, timeout, retries)

    async def attempt_group(start: int) -> list[Rollout]:
        numbers = range(start, start + n)
        if known and all(i in known for i in numbers):
            return [known[i] for i in numbers]
        rollouts = await asyncio.gather(*map(attempt_one, numbers))
        await score_group_or_fail(environment, rollouts, timeout)
        for i, rollout in zip(numbers, rollouts, strict=True):
            if done is not None:
                done(i, rollout)
        return rollouts

    return [
        rollout
        for of_one in await asyncio.gather(*map(attempt_group, range(0, count, n)))
        for rollout in of_one
    ]


def mean_scores(rollouts: list[Rollout]) -> dict[str, float]:
    """Return mean reward and metrics of rollouts that did not fail, and the number that did."""
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
