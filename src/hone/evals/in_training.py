"""Evaluate between training steps without a server, sampling from the model being trained."""

from hone.config.sections import EvalConfig
from hone.engine.engine import Engine
from hone.environments import load_environments
from hone.evals.held_out import evaluate_environments
from hone.inference.engine_service import EngineService, LocalClient
from hone.models.language_model import LanguageModel
from hone.models.lora import Merged
from hone.text.tokenizer import Tokenizer

CACHE_GIB = 4.0  # of keys and values, beside what training uses


class Evaluation:
    """Evaluate a model with an engine that is reused while the model is the same object."""

    def __init__(self, config: EvalConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.environments = load_environments(config.env)
        self._sampled: Merged | None = None
        self._engine: Engine

    def __call__(self, model: LanguageModel, tokenizer: Tokenizer, step: int) -> dict[str, float]:
        """Return mean rewards and metrics, as eval/ENV/NAME. Call it on the compute thread."""
        if self._sampled is None or self._sampled.trained is not model:
            self._sampled = Merged(model)
            self._engine = Engine(self._sampled.model, kv_cache_gib=CACHE_GIB)
        self._sampled.follow_step()
        self._engine.set_version(step)
        service = EngineService(self._engine, lockstep=True)
        found: dict[str, float] = {}

        async def run_evaluation() -> None:
            client = LocalClient(service, tokenizer)
            try:
                found.update(
                    await evaluate_environments(self.config, self.environments, client, self.seed)
                )
            finally:  # the next evaluation has another event loop
                for environment in self.environments.values():
                    await environment.close()

        service.run_beside(run_evaluation())
        return found
