"""Environments (tasks with rewards), with the class and function names of verifiers' v0 API.

    import hone.environments as vf

    env = vf.SingleTurnEnv(
        dataset=…,
        system_prompt=…,
        parser=vf.XMLParser(["answer"]),
        rubric=vf.Rubric(funcs=[…]),
    )

The v0 methods that run an environment (`rollout`, `generate`, `evaluate`) are replaced by the
interface in `environment.py`.
"""

import importlib
from typing import Any

from hone.environments.command_env import CommandEnv
from hone.environments.env_group import EnvGroup
from hone.environments.environment import Environment, ModelClient, State
from hone.environments.example_data import load_example_dataset
from hone.environments.judge import JudgeRubric
from hone.environments.math_rubric import MathRubric
from hone.environments.parsers import (
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
)
from hone.environments.registry import load_environment, load_environments
from hone.environments.rubric import RewardError, Rubric, RubricGroup
from hone.environments.tools import StatefulToolEnv, ToolEnv, ToolRubric
from hone.environments.turns import MultiTurnEnv, SingleTurnEnv, cleanup, stop, teardown
from hone.records import Example, Message


def __getattr__(name: str) -> Any:
    """Return RLTrainer or RLConfig of `hone`: verifiers exports both names from its package."""
    if name in ("RLTrainer", "RLConfig"):
        return getattr(importlib.import_module("hone"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Messages = list[Message]
Info = dict[str, Any]

__all__ = [
    "CommandEnv",
    "EnvGroup",
    "Environment",
    "Example",
    "Info",
    "JudgeRubric",
    "MathRubric",
    "MaybeThinkParser",
    "Message",
    "Messages",
    "ModelClient",
    "MultiTurnEnv",
    "Parser",
    "RewardError",
    "Rubric",
    "RubricGroup",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "ThinkParser",
    "ToolEnv",
    "ToolRubric",
    "XMLParser",
    "cleanup",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_environment",
    "load_environments",
    "load_example_dataset",
    "stop",
    "teardown",
]
