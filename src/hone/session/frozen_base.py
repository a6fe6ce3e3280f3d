"""A frozen model on which several sessions train adapters of their own.

frozen base ─┬─ session 1: adapter, gradients, optimizer ─┐
             ├─ session 2: adapter, gradients, optimizer ─┼─► adapters of one engine
             └─ one engine that samples ◄─────────────────┘
"""

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.config.sections import ModelConfig
from hone.engine.engine import Engine
from hone.models.loading import load_configured
from hone.models.lora import share_base


class FrozenBase:
    """Weights that are loaded once, for the sessions that train adapters on them.

        base = hone.FrozenBase("Qwen/Qwen3-0.6B")
        first = hone.TrainingSession(base, lora={"rank": 32})
        second = hone.TrainingSession(base, lora={"rank": 8})

    Not thread-safe: one thread owns it and its sessions.

    Attributes:
        name: the model's directory or hub id.
        loaded: model, tokenizer and directory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int = 0,
        sampling: Mapping[str, Any] | None = None,
        **model_keys: Any,
    ) -> None:
        """Load a model.

        Args:
            model: a directory in Hugging Face format, or a hub id.
            seed: seed of random weights.
            sampling: arguments of the sampling engine, such as `max_batch_size` and `kv_cache_gib`.
            model_keys: further keys of section `model`, such as `dtype` and `device`.

        Raises ValueError if the model cannot be loaded as configured.
        """
        config = ModelConfig(name=str(model), **model_keys)
        self.name = config.name
        self.loaded = load_configured(config, seed)
        self.loaded.model.requires_grad_(False)
        self._sampling = dict(sampling or {})
        self._sessions = itertools.count(1)

    def count_session(self) -> int:
        """Return the number of a new session."""
        return next(self._sessions)

    @functools.cached_property
    def engine(self) -> Engine:
        """The engine that samples for all sessions, started when first used."""
        return Engine(share_base(self.loaded.model), **self._sampling)
