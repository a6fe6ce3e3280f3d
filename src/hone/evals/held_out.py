"""Evaluation of a model while it is trained, by whoever samples for it. Imports no torch.

held-out examples x rollouts ─► env.rollout(client) ─► eval/ENV/reward, …
"""

import asyncio

import numpy as np

from hone.config.sections import EvalConfig
from hone.environments import Environment
from hone.environments.attempt import attempt
from hone.environments.environment import ModelClient
from hone.records import Rollout, Sampling


async def evaluate(
    config: EvalConfig, environments: dict[str, Environment], client: ModelClient, seed: int
) -> dict[str, float]:
    """Mean reward and metrics of each environment."""
    found: dict[str, float] = {}
    for name, environment in environments.items():
        rollouts = await _rollouts(config, environment, client, seed)
        found |= {f"eval/{name}/{key}": value for key, value in means(rollouts).items()}
        await environment.close()
    return found


async def _rollouts(config: EvalConfig, environment: Environment, client: ModelClient, seed: int) -> list[Rollout]:
    examples, n = environment.get_eval_dataset()[: config.num_examples], config.rollouts_per_example
    seeds = [[(seed << 40) + i * n + k for k in range(n)] for i in range(len(examples))]
    jobs = [
        attempt(environment, client, example, Sampling(config.temperature, config.max_tokens, one), config.timeout)
        for example, of_example in zip(examples, seeds, strict=True)
        for one in of_example
    ]
    return await asyncio.gather(*jobs)


def means(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward and metrics of those that did not fail, and how many did."""
    scored = [r for r in rollouts if not r.error]
    reward = {"reward": float(np.mean([r.reward for r in scored]))} if scored else {}
    return metric_means(scored) | reward | {"failed": len(rollouts) - len(scored)}


def metric_means(scored: list[Rollout]) -> dict[str, float]:
    """Of each metric, over the rollouts that have it."""
    names = sorted({name for r in scored for name in r.metrics})
    return {name: float(np.mean([r.metrics[name] for r in scored if name in r.metrics])) for name in names}
