"""Evaluation of a model between the steps of its training: it is sampled where it is, nothing is copied or served.

examples x rollouts ─► env.rollout(LocalClient) ─► engine over the trained weights ─► eval/ENV/reward, …
"""

import asyncio
from typing import Any

import numpy as np

from hone.config.sections import EvalConfig
from hone.engine.engine import Engine
from hone.environments import Environment, load_environments
from hone.inference.service import EngineService, LocalClient
from hone.models.transformer import Transformer
from hone.records import Example, Rollout, Sampling
from hone.text.tokenizer import Tokenizer

CACHE_GIB = 4.0  # of keys and values, beside what training needs


class Evaluation:
    """Keeps its engine for a model that is given again; the weights may have changed meanwhile."""

    def __init__(self, config: EvalConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.environments = load_environments(config.env)
        self._engine: Engine | None = None

    def __call__(self, model: Transformer, tokenizer: Tokenizer, step: int) -> dict[str, float]:
        """Mean reward and metrics of each environment. On the thread that computes."""
        if self._engine is None or self._engine.model is not model:
            self._engine = Engine(model, kv_cache_gib=CACHE_GIB)
        self._engine.set_version(step)
        service = EngineService(self._engine, lockstep=True)
        found: dict[str, float] = {}

        async def program() -> None:
            client = LocalClient(service, tokenizer)
            for name, environment in self.environments.items():
                rollouts = await self._rollouts(environment, client)
                found.update({f"eval/{name}/{key}": value for key, value in means(rollouts).items()})

        service.run_beside(program())
        return found

    async def _rollouts(self, environment: Environment, client: LocalClient) -> list[Rollout]:
        config = self.config

        async def one(example: Example, seed: int) -> Rollout:
            try:
                return await environment.rollout(client, example, Sampling(config.temperature, config.max_tokens, seed))
            except Exception as error:  # environments are users' code: theirs may raise anything
                return Rollout(example, [], [], error=f"{type(error).__name__}: {error}")

        examples = environment.get_eval_dataset()[: config.num_examples]
        n = config.rollouts_per_example
        jobs = [one(e, (self.seed << 40) + i * n + k) for i, e in enumerate(examples) for k in range(n)]
        return await asyncio.gather(*jobs)


def means(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean reward and metrics of those that did not fail, and how many did."""
    scored = [r for r in rollouts if not r.error]
    columns: dict[str, list[Any]] = {"reward": [r.reward for r in scored]} if scored else {}
    for name in sorted({name for r in scored for name in r.metrics}):
        columns[name] = [r.metrics[name] for r in scored if name in r.metrics]
    return {name: float(np.mean(values)) for name, values in columns.items()} | {"failed": len(rollouts) - len(scored)}
