"""Hone: post-train language models with reinforcement learning."""

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.config.vf_rl_config import RLTrainerArgs as RLConfig
    from hone.launch.rl_trainer import RLTrainer
    from hone.session.frozen_base import FrozenBase
    from hone.session.session_data import AdamParams, Datum
    from hone.session.training_session import TrainingSession

__version__ = "0.1.0"
__all__ = ["AdamParams", "Datum", "FrozenBase", "RLConfig", "RLTrainer", "TrainingSession"]
STARTED = time.perf_counter()  # start of the process, imports included
_PLACES = {
    "RLConfig": ("hone.config.vf_rl_config", "RLTrainerArgs"),
    "RLTrainer": ("hone.launch.rl_trainer", "RLTrainer"),
    "FrozenBase": ("hone.session.frozen_base", "FrozenBase"),
    "AdamParams": ("hone.session.session_data", "AdamParams"),
    "Datum": ("hone.session.session_data", "Datum"),
    "TrainingSession": ("hone.session.training_session", "TrainingSession"),
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
