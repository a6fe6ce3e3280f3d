"""Check a run's first prompt: does it have the special tokens of the tokenizer, once each?"""

import json
import re
from pathlib import Path
from typing import Any

from hone.run_directory import RunDirectory, steps_in

MARK = re.compile(r"<\|[a-zA-Z_]{2,24}\|>|\[/?INST\]|<(?:start|end)_of_turn>")
FIRST_LINE_BYTES = 2**22  # of a rollouts file that are read for its first line


def prompt_files(run: RunDirectory) -> tuple[Path, Path]:
    """Return the files of a run that `check_prompt` reads: rollouts of its first step, tokenizer."""
    steps = steps_in(run.rollouts)
    first = steps[min(steps)] if steps else run.rollouts
    return first / "rollouts.jsonl", run.configs / "tokenizer.json"


def check_prompt(rollouts: Path, tokenizer: Path) -> str:
    """Return what is unusual about the tokens of a file's first prompt, or "" if nothing is.

    Args:
        rollouts: a rollouts.jsonl.
        tokenizer: the tokenizer.json that the model was sampled with.
    """
    from tokenizers import Tokenizer

    try:
        with rollouts.open("rb") as file:
            row = json.loads(file.readline(FIRST_LINE_BYTES))
        ids = row["turns"][0]["prompt_ids"]
        return find_prompt_oddity(Tokenizer.from_file(str(tokenizer)), ids)
    except Exception:  # missing, incomplete or foreign files; tokenizers raises Exception itself
        return ""


def find_prompt_oddity(tokenizer: Any, prompt: list[int]) -> str:
    """Return what is unusual about a prompt's tokens, or "" if nothing is.

    It reports chat tokens that are missing or written as ordinary text, and a first token that
    occurs twice in a row. `tokenizer` is a `tokenizers.Tokenizer`.
    """
    known = {i: str(token.content) for i, token in tokenizer.get_added_tokens_decoder().items()}
    added = {i: content for i, content in known.items() if re.fullmatch(r"[<\[]\S+[>\]]", content)}
    used = [token for token in prompt if token in added]
    plain = [token for token in prompt if token not in added]
    marks = sorted({*MARK.findall(str(tokenizer.decode(plain, skip_special_tokens=False)))})
    if marks:
        return f"{', '.join(marks[:3])} is in the prompt as ordinary text: a special token of another tokenizer"
    if len(added) > 2 and not used:
        names = ", ".join(sorted(added.values())[:4])
        return (
            f"The prompt has none of the {len(added)} special tokens of the tokenizer ({names}, …)"
        )
    if len(prompt) > 1 and prompt[0] == prompt[1] and prompt[0] in added:
        return f"The prompt begins with {added[prompt[0]]} twice"
    return ""
