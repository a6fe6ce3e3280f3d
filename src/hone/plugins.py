"""Load users' functions by import path, and bind configured values to their parameters."""

import functools
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError, create_model

from hone.config.base import Config, explain_errors
from hone.config.command_table import import_object
from hone.users_code import CONTAINED, ExitInUserCode


def load_function(path: str, key: str) -> Callable[..., Any]:
    """Return the function at `package.module:function`; modules may be in the working directory.

    Raises ValueError, which names the configuration key `key`, if it cannot be imported.
    """
    if os.getcwd() not in sys.path:  # a console script has its own directory there
        sys.path.append(os.getcwd())
    try:
        with CONTAINED:
            function: Callable[..., Any] = import_object(path)
    except SyntaxError as error:
        raise ValueError(
            f"{key} {path}: {error.filename}, line {error.lineno}: {error.msg}"
        ) from None
    except (ImportError, AttributeError, ValueError, ExitInUserCode) as error:
        raise ValueError(f"{key} {path}: cannot be imported: {error}") from None
    return function


def with_keys(function: Callable[..., Any], given: dict[str, Any], key: str) -> Callable[..., Any]:
    """Bind a function's keyword-only parameters to values, validated by their annotations.

    An exception that the bound function raises becomes a ValueError with the place in the user's
    code.

    Args:
        given: values by parameter name.
        key: configuration key of the values, for messages.

    Raises:
        ValueError: a value is wrong; the message names the key, what was found and what is accepted.
    """
    types = typing.get_type_hints(function)
    fields: dict[str, Any] = {
        name: (types.get(name, Any), ... if one.default is one.empty else one.default)
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    keys = create_model("Keys", __base__=Config, **fields)
    try:
        values = keys.model_validate(given)
    except ValidationError as error:
        raise ValueError(
            "\n".join(f"{key}.{line}" for line in explain_errors(error, keys, {}).splitlines())
        ) from None
    keywords = {name: getattr(values, name) for name in fields}

    @functools.wraps(function)
    def call_with_keys(*args: Any) -> Any:
        try:
            with CONTAINED:
                return function(*args, **keywords)
        except Exception as error:  # users' code may raise anything
            at = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{function.__qualname__} raised {what} ({at.filename}:{at.lineno})"
            ) from error

    return call_with_keys
