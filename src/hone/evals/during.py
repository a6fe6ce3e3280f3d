"""Evaluation of a model while it is trained: its environments' held-out examples, by whoever samples for it.

    examples x rollouts ─► env.rollout(client) ─► eval/ENV/reward, …

SFT has no sampler: `Evaluation` is one over the trained weights themselves, between two steps.
"""

import asyncio
from typing import Any

import numpy as np

from hone.config.sections import EvalConfig
from hone.engine.engine import Engine
from hone.environments import Environment, load_environments
from hone.environments.environment import ModelClient
from hone.inference.service import EngineService, LocalClient
from hone.models.transformer import Transformer
from hone.records import Example, Rollout, Sampling
from hone.text.tokenizer import Tokenizer

CACHE_GIB = 4.0  # of keys and values, beside what training needs


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


class Evaluation:
    """Keeps its engine for a model that is given again; the weights may have changed meanwhile."""

    def __init__(self, config: EvalConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.environments = load_environments(config.env)
        self._engine: Engine | None = None

    def __call__(self, model: Transformer, tokenizer: Tokenizer, step: int) -> dict[str, float]:
        """On the thread that computes."""
        if self._engine is None or self._engine.model is not model:
            self._engine = Engine(model, kv_cache_gib=CACHE_GIB)
        self._engine.set_version(step)
        service = EngineService(self._engine, lockstep=True)
        found: dict[str, float] = {}

        async def program() -> None:
            client = LocalClient(service, tokenizer)
            found.update(await evaluate(self.config, self.environments, client, self.seed))

        service.run_beside(program())
        return found
