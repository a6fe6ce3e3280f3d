"""Parse lines of a run's files, which may be incomplete or malformed, into columns of the index."""

import json
import math
from typing import Any

from hone.text.messages import show_message

LISTED_CHARACTERS = 160  # characters of a prompt and a completion in the list
SEARCHED_CHARACTERS = 4000  # characters searched at the beginning and at the end of a rollout


def row_columns(row: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Return a rollout's values of the index columns, and the text that searches cover."""
    turns = [turn for turn in _list_or_empty(row.get("turns")) if isinstance(turn, dict)]
    tokens = sum(
        len(turn["ids"]) if isinstance(turn.get("ids"), list) else _int_or_zero(turn.get("tokens"))
        for turn in turns
    )
    said = "\n".join(_message_text(message) for message in _list_or_empty(row.get("completion")))
    asked = [_message_text(message) for message in _list_or_empty(row.get("prompt"))]
    text = clean_text(f"{asked[-1] if asked else ''}\n{said}\n{row.get('answer') or ''}")
    text = (
        text
        if len(text) <= 2 * SEARCHED_CHARACTERS
        else f"{text[:SEARCHED_CHARACTERS]}\n{text[-SEARCHED_CHARACTERS:]}"
    )
    columns = (
        _int_or_zero(row.get("group", row.get("example_id"))),
        _int_or_zero(row.get("member", row.get("rollout"))),
        clean_text(row.get("env")),
        clean_text(row.get("example_id")),
        _number_or_zero(row.get("reward")),
        _number_or_zero(row.get("advantage")),
        tokens,
        clean_text(row.get("stop") or ""),
        clean_text(row.get("error") or "")[:500],
        clean_text(row.get("unused") or ""),
        int(bool(row.get("is_truncated"))),
        _number_or_zero(row.get("seconds")),
        len(turns),
        _int_or_zero(turns[0].get("version")) if turns else -1,
        _mean_logprob(turns),
        clean_text(asked[-1] if asked else "")[:LISTED_CHARACTERS],
        clean_text(said)[:LISTED_CHARACTERS],
    )
    return columns, text


def _mean_logprob(turns: list[dict[str, Any]]) -> float | None:
    """Return the mean logprob of the generated tokens, or None if unknown."""
    logprobs = [x for turn in turns for x in _list_or_empty(turn.get("logprobs")) if is_finite(x)]
    return sum(logprobs) / len(logprobs) if logprobs else None


def _message_text(message: Any) -> str:
    return show_message(message) if isinstance(message, dict) else ""


def clean_text(value: Any) -> str:
    """Return a value as text that can be encoded as UTF-8: lone surrogates are replaced."""
    return str("" if value is None else value).encode("utf-8", "replace").decode()


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 2**62 else -1


def is_finite(value: Any) -> bool:
    """Return True for a finite number that fits into a float."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _number_or_zero(value: Any) -> float:
    return float(value) if is_finite(value) else 0.0


def row_of(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object; return {} if it is incomplete or no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
