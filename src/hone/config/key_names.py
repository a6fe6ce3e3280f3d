"""Names of configuration keys and flags in messages, as the running command spells them."""

import contextlib
from collections.abc import Iterator, Mapping

_names: dict[str, str] = {}


def key_name(key: str) -> str:
    """Return the running command's name for a key or flag of `rl`; by default the key itself."""
    return _names.get(key, key)


@contextlib.contextmanager
def use_key_names(names: Mapping[str, str]) -> Iterator[None]:
    """Use `names` for keys and flags in this process's messages until the `with` block ends."""
    before = dict(_names)
    _names.update(names)
    try:
        yield
    finally:
        _names.clear()
        _names.update(before)
