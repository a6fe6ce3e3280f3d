"""Keep secrets out of files and logs: find them by key names and by the form of values.

A process that is started from a written configuration receives its secrets in the environment
variable SECRETS_VARIABLE, which only its user can read.
"""

import json
import os
import re
from typing import Any

SECRETS_VARIABLE = "HONE_SECRETS"
LEFT_OUT = "(left out: it looks like a secret)"
SECRET_KEY = re.compile(
    r"(^|[_.-])(api[_-]?key|apikey|client[_-]?key|secret|password|passwd|passphrase|private[_-]?key|credentials?|authorization|bearer)"
    r"($|[_.-])|^token$|[_-](auth|access|hf|github|wandb|bot|refresh)[_-]?token$|^(auth|access|hf|github|wandb)[_-]?token$",
    re.IGNORECASE,
)
# `api_key_var` names a variable
NAMES_A_SECRET = re.compile(r"(var|variable|file|path|env|name)$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"(^|[^A-Za-z0-9])(sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|Bearer [A-Za-z0-9._~+/-]{12,})"
)
Path = tuple[str | int, ...]


def is_secret(key: Any, value: Any) -> bool:
    """Return True if the name of the key says that it holds a secret, and the value is not empty."""
    name = str(key)
    return bool(value) and bool(SECRET_KEY.search(name)) and not NAMES_A_SECRET.search(name)


def redact_secrets(value: Any) -> Any:
    """Return plain data without secrets: secret keys removed, secret-looking values replaced."""
    if isinstance(value, dict):
        return {
            key: redact_secrets(one)
            for key, one in value.items()
            if key != "api_key" and not is_secret(key, one)
        }
    if isinstance(value, list | tuple):
        return [redact_secrets(one) for one in value]
    return LEFT_OUT if isinstance(value, str) and SECRET_VALUE.search(value) else value


def collect_secrets(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return the secrets that `redact_secrets` removes, with their paths."""
    if isinstance(value, dict):
        found: list[tuple[Path, Any]] = []
        for key, one in value.items():
            if one and (key == "api_key" or is_secret(key, one)):
                found.append(((*path, key), one))
            else:
                found += collect_secrets(one, (*path, key))
        return found
    if isinstance(value, list | tuple):
        return [
            secret for i, one in enumerate(value) for secret in collect_secrets(one, (*path, i))
        ]
    return [(path, value)] if isinstance(value, str) and SECRET_VALUE.search(value) else []


def secrets_variable(value: Any) -> dict[str, str]:
    """Return the environment variables that pass secrets to a process; empty if there are none."""
    found = collect_secrets(value)
    return {SECRETS_VARIABLE: json.dumps(found)} if found else {}


def restore_secrets(values: dict[str, Any]) -> None:
    """Put back into a configuration the secrets that SECRETS_VARIABLE carries, and unset that
    variable.
    """
    for path, secret in json.loads(os.environ.pop(SECRETS_VARIABLE, "[]")):
        place: Any = values
        try:
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = secret
        except (KeyError, IndexError, TypeError):  # belongs to another component
            continue
