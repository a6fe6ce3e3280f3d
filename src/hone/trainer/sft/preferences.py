"""Convert preference pairs, a chosen and a rejected answer to one prompt, to token ids and loss masks.

Accepted rows, as TRL and the data sets on the hub write them:

    prompt (text or messages), chosen, rejected (text or messages of the answers)
    chosen, rejected (whole conversations, whose first messages are equal)
"""

import json
from typing import Any

from hone.records import Message
from hone.text.messages import MessageError
from hone.trainer.sft.data import Conversation, Renderer
from hone.trainer.sft.data_sources import as_messages, to_tools


class PreferenceRenderer(Renderer):
    """Tokenize a pair of answers: the chosen one, then the rejected one.

    Messages after the shared prompt have a loss. A pair is left out if its two conversations
    together have more than `seq_len` tokens.
    """

    unit_size = 2

    def tokenize_row(self, row: dict[str, Any]) -> list[Conversation]:
        chosen, rejected, shared = to_pair(row)
        pair = []
        for name, messages in (("chosen", chosen), ("rejected", rejected)):
            found = self.tokenizer.conversation_ids(
                messages, self.roles, last_only=True, first_marked=shared, **to_tools(row)
            )
            if not found:
                roles = ", ".join(self.roles)
                raise MessageError(f"{name}: no message of {roles} after the shared prompt")
            pair.append(found[-1])
        if pair[0] == pair[1]:
            raise MessageError("chosen and rejected are equal")
        return pair


def to_pair(row: dict[str, Any]) -> tuple[list[Message], list[Message], int]:
    """Return the chosen and the rejected conversation, and the number of messages of their prompt.

    Raises MessageError if there is no prompt.
    """
    sides = [parse_text(row[name]) for name in ("chosen", "rejected")]
    if row.get("prompt") is None:
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            if isinstance(side, str):
                raise MessageError(
                    f"{name} is text and there is no `prompt`; give messages, or the prompt in a column"
                )
        chosen, rejected = map(list, sides)
        limit = min(len(chosen), len(rejected)) - 1
        shared = 0
        while shared < limit and chosen[shared] == rejected[shared]:
            shared += 1
        return chosen, rejected, shared
    prompt = as_messages(parse_text(row["prompt"]), "user")
    answers = [as_messages(side, "assistant") for side in sides]
    # Some data sets have the prompt in its column and in both conversations.
    chosen, rejected = (
        answer if answer[: len(prompt)] == prompt else prompt + answer for answer in answers
    )
    return chosen, rejected, len(prompt)


def parse_text(value: Any) -> Any:
    """Return the messages that a text holds as JSON, as in CSV files; else the value itself."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_conversation = isinstance(found, list) and all(
        isinstance(message, dict) and "role" in message for message in found
    )
    return found if found and is_conversation else value
