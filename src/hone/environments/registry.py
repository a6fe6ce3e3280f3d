"""Environments by id: `reverse-text` or `owner/reverse-text` is the installed module `reverse_text`."""

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from typing import Any

from hone.config.sections import EnvConfig
from hone.environments.environment import Environment
from hone.environments.isolated import Isolated
from hone.environments.protocols import native


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """The environment that a package's `load_environment(**env_args)` makes.

    Raises ValueError for an unknown id (with the nearest installed one) or arguments it does not take.
    """
    name = env_id.rpartition("/")[2]
    module_name = name.replace("-", "_")
    if not module_name.isidentifier() or importlib.util.find_spec(module_name) is None:
        installed = installed_environments()
        near = difflib.get_close_matches(name, installed, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"installed: {', '.join(installed) or 'none'}"
        raise ValueError(
            f"environment {env_id!r} is not installed (no module {module_name}); {hint}; one of your own: "
            f"PYTHONPATH=DIRECTORY_OF_{module_name}.py, or install its package"
        )
    return native.load(env_id, module_name, env_args)


def installed_environments() -> list[str]:
    """Names of installed distributions that build on the environment protocol."""
    found = set()
    for distribution in importlib.metadata.distributions():
        needs = {requirement.split(";")[0].split(" ")[0] for requirement in distribution.requires or []}
        if any(need.startswith(("hone-rl", "verifiers")) for need in needs):
            found.add(distribution.metadata["Name"].replace("_", "-"))
    return sorted(found)


def load_environments(wanted: Iterable[EnvConfig]) -> dict[str, Environment]:
    """The environments of a run by the names that they are known by."""
    environments: dict[str, Environment] = {}
    for env in wanted:
        environment = load_environment(env.id, **env.args)
        environment.on_reward_error(env.on_reward_error or "fail")
        environments[env.known_as] = (
            Isolated(environment, env.id, env.args, env.workers, env.on_reward_error) if env.workers else environment
        )
    return environments
