"""Load environments by id: `reverse-text` or `owner/reverse-text` is the module `reverse_text`."""

import difflib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hone.config.sections import EnvConfig
from hone.environments.environment import Environment
from hone.environments.protocols import native, verifiers_v0
from hone.environments.protocols.isolated import Isolated
from hone.environments.protocols.verifiers_v0 import isolated_place
from hone.environments.protocols.worker_process import WorkerEnvironment


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """Load an environment by calling its package's `load_environment(**env_args)`.

    Environments of the verifiers library run in a process of their own. Raises ValueError for an
    unknown id (and suggests the closest installed one), or for arguments that the environment does
    not accept.
    """
    return _load_configured(EnvConfig(id=env_id, args=env_args))


def _load_configured(env: EnvConfig) -> Environment:
    env_id = env.id
    name = env_id.rpartition("/")[2]
    module_name = native.module_of(env_id)
    python = (
        verifiers_v0.python_of(name, module_name, env.venv) if module_name.isidentifier() else None
    )
    if python is not None:
        return verifiers_v0.VerifiersEnv(env_id, env.args, python, env.workers)
    if not module_name.isidentifier() or importlib.util.find_spec(module_name) is None:
        installed = installed_environments()
        near = difflib.get_close_matches(name, installed, n=1, cutoff=0.5)
        hint = (
            f"did you mean {near[0]}?" if near else f"installed: {', '.join(installed) or 'none'}"
        )
        raise ValueError(
            f"environment {env_id!r} is not installed (no module {module_name}); {hint}; one of your own: "
            f"PYTHONPATH=DIRECTORY_OF_{module_name}.py, or install its package"
        )
    return native.load_native(env_id, module_name, env.args)


def add_folder(place: str, env_id: str) -> None:
    """Add an environment's folder to the import path, here and for its workers.

    The folder is `place`/my_env for the module my_env; it holds my_env.py or a package my_env. A
    folder that does not exist is ignored.
    """
    folder = Path(place) / native.module_of(env_id)
    if folder.is_dir():
        sys.path.insert(0, str(folder))
        paths = os.environ.get("PYTHONPATH", "")
        # For its workers.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder.resolve()), paths]))


def described_environments() -> list[tuple[str, str, str, str]]:
    """Return name, version, protocol and summary of each installed environment."""
    rows = []
    for distribution in importlib.metadata.distributions():
        protocol = _find_protocol(distribution)
        if protocol:
            about = distribution.metadata
            rows.append(
                (
                    about["Name"].replace("_", "-"),
                    about["Version"],
                    protocol,
                    about["Summary"] or "",
                )
            )
    own = isolated_place("").glob("*/bin/python")
    rows += [
        (path.parent.parent.name, "", "verifiers", "in a virtual environment of its own")
        for path in own
    ]
    return sorted(set(rows))


def installed_environments() -> list[str]:
    """Return the names of the installed environments, sorted."""
    return sorted({name for name, *_ in described_environments()})


def _find_protocol(distribution: importlib.metadata.Distribution) -> str:
    needs = [
        requirement for requirement in distribution.requires or [] if "extra ==" not in requirement
    ]
    found = {
        name for need in needs for name in ("hone-rl", "verifiers") if re.match(rf"{name}\b", need)
    }
    return "hone" if "hone-rl" in found else "verifiers" if found else ""


def load_environments(
    wanted: Iterable[EnvConfig], template_arguments: dict[str, Any] | None = None
) -> dict[str, Environment]:
    """Load the environments of a run; return them by their configured names.

    `template_arguments` are the chat template arguments configured for the model; those configured
    for an environment override them.
    """
    environments: dict[str, Environment] = {}
    for env in wanted:
        environment = _load_configured(env)
        if env.on_reward_error is not None:
            environment.on_reward_error(env.on_reward_error)
        if env.workers and not isinstance(environment, WorkerEnvironment):
            environment = Isolated(environment, env.id, env.args, env.workers, env.on_reward_error)
        environment.template_arguments = {**(template_arguments or {}), **env.template_arguments}
        environments[env.known_as] = environment
    return environments
