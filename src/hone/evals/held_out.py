"""Evaluation of a model while it is trained, by whoever samples for it. Imports no torch.

held-out examples x rollouts ─► env.rollout(client) ─► eval/ENV/reward, …
"""

import asyncio
from typing import Any

import numpy as np

from hone.config.sections import EvalConfig
from hone.environments import Environment
from hone.environments.environment import ModelClient
from hone.records import Example, Rollout, Sampling


def is_due(config: EvalConfig | None, step: int, last: int) -> bool:
    """Whether the model is to be evaluated after that step, 0 being before the first."""
    if config is None:
        return False
    return config.at_start if step == 0 else step == last or step % config.interval == 0


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
    async def one(example: Example, seed: int) -> Rollout:
        try:
            return await environment.rollout(client, example, Sampling(config.temperature, config.max_tokens, seed))
        except Exception as error:  # environments are users' code: theirs may raise anything
            return Rollout(example, [], [], error=f"{type(error).__name__}: {error}")

    examples, n = environment.get_eval_dataset()[: config.num_examples], config.rollouts_per_example
    jobs = [one(e, (seed << 40) + i * n + k) for i, e in enumerate(examples) for k in range(n)]
    return await asyncio.gather(*jobs)


def means(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward and metrics of those that did not fail, and how many did."""
    scored = [r for r in rollouts if not r.error]
    columns: dict[str, list[Any]] = {"reward": [r.reward for r in scored]} if scored else {}
    for name in sorted({name for r in scored for name in r.metrics}):
        columns[name] = [r.metrics[name] for r in scored if name in r.metrics]
    return {name: float(np.mean(values)) for name, values in columns.items()} | {"failed": len(rollouts) - len(scored)}
