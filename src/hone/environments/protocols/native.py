"""Load environments written for Hone: `load_environment` returns a `hone.environments.Environment`."""

import importlib
import inspect
import traceback
from typing import Any

from hone.environments.environment import Environment
from hone.users_code import CONTAINED


def module_of(env_id: str) -> str:
    """Return the name of an environment's module: reverse_text for owner/reverse-text."""
    return env_id.rpartition("/")[2].replace("-", "_")


def load_native(env_id: str, module_name: str, arguments: dict[str, Any]) -> Environment:
    """Import an environment's module and call its `load_environment`.

    Raises ValueError if the module cannot be imported or has no `load_environment`, if that
    function does not accept `arguments` or returns no environment, or if a reward function requires
    an argument that is not available.
    """
    try:
        with CONTAINED:
            module = importlib.import_module(module_name)
    except SyntaxError as error:
        raise ValueError(
            f"environment {env_id!r}: {error.filename}, line {error.lineno}: {error.msg}"
        ) from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"environment {env_id!r} needs the module {error.name}, which is not installed"
        ) from None
    except Exception as error:
        where = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        raise ValueError(
            f"environment {env_id!r}: importing it raised {type(error).__name__}: {error} ({where.filename}, line "
            f"{where.lineno})"
        ) from None
    loader = getattr(module, "load_environment", None)
    if loader is None:
        raise ValueError(
            f"module {module_name} is not an environment: it has no load_environment()"
        )
    try:
        inspect.signature(loader).bind(**arguments)
    except TypeError as error:
        accepted = ", ".join(inspect.signature(loader).parameters)
        raise ValueError(
            f"environment {env_id!r}: {error}; its arguments are: {accepted}"
        ) from None
    try:
        with CONTAINED:
            made = loader(**arguments)
    except ValueError:
        raise  # its own message
    except Exception as error:
        where = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        raise ValueError(
            f"environment {env_id!r}: load_environment() raised {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno}); its arguments were {arguments}"
        ) from None
    if not isinstance(made, Environment):
        kind = type(made)
        raise ValueError(
            f"environment {env_id!r}: load_environment() returned {kind.__module__}.{kind.__qualname__}; accepted is "
            "an environment of hone.environments (SingleTurnEnv, MultiTurnEnv, ToolEnv, EnvGroup, your own subclass of "
            "Environment)"
        )
    try:
        made.check()
    except ValueError as error:
        raise ValueError(f"environment {env_id!r}: {error}") from None
    made.name = made.name or env_id
    return made
