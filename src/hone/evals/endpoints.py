"""Endpoint registries: names for servers, as Python (`ENDPOINTS = {…}`) or TOML.

An entry has "model" and either "url" and "key" (name of the environment variable with the key) or
"base_url" and "api_key" (the key itself).
"""

import os
import runpy
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hone.config.sections import own_key


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    model: str
    api_key: str | None
    is_default: bool = False  # used because nothing else was named
    is_own: bool = False  # started for this evaluation


def find_endpoint(model: str, base_url: str | None, key_variable: str, registry: str) -> Endpoint:
    """Return the endpoint: `base_url` if given, else the registry's `model` or "default" entry.

    Raises ValueError if there is none.
    """
    if base_url is not None:
        return Endpoint(base_url, model, os.environ.get(key_variable) or own_key(base_url))
    entries = _read_endpoints(Path(registry))
    name = model if model in entries else "default"
    if name not in entries:
        known = (
            f"{registry} has {', '.join(entries)}"
            if entries
            else f"there is no registry {registry}"
        )
        raise ValueError(
            f"no server given: use -b http://HOST:PORT/v1, or name an endpoint with -m ({known})"
        )
    entry = entries[name]
    url = entry.get("url") or entry.get("base_url")
    if not url:
        raise ValueError(f"{registry}: endpoint {name!r} has neither 'url' nor 'base_url'")
    key = entry.get("api_key") or os.environ.get(entry.get("key", key_variable)) or own_key(url)
    return Endpoint(url, entry.get("model", model), key, is_default=name != model)


def is_named(model: str, registry: str) -> bool:
    """Return True if the registry has an entry of that name."""
    return model in _read_endpoints(Path(registry))


def _read_endpoints(path: Path) -> dict[str, dict[str, str]]:
    if not path.is_file():
        return {}
    if path.suffix == ".toml":
        with path.open("rb") as file:
            content = tomllib.load(file)
        entries: dict[str, dict[str, str]] = (
            content.get("ENDPOINTS") or content.get("endpoints") or content
        )
    else:
        entries = runpy.run_path(str(path)).get("ENDPOINTS", {})
    return entries
