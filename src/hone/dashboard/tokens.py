"""Tokens of a rollout for display: text, sampler and trainer logprobs, loss mask, version."""

import functools
from pathlib import Path
from typing import Any

from hone.dashboard.runs import Run, is_below
from hone.run_directory import checkpoints_in, steps_in
from hone.text.detokenizer import TokenTexts, name_of
from hone.transport.trained_tokens import Seen

MAX_TOKENS = 16384  # tokens of a rollout that are shown
MAX_TOKEN_CHARACTERS = 200  # characters of a token that are shown


class TokenTable:
    """Decode token ids with the tokenizer.json that the run wrote, if it is readable."""

    def __init__(self, file: Path | None) -> None:
        self._tokenizer: Any = None
        self._texts: TokenTexts | None = None
        if file is not None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(file))
                self._texts = TokenTexts(self._tokenizer)
            except Exception:  # tokenizers raises Exception itself
                self._tokenizer = None

    @staticmethod
    def of_run(root: Path, run: Run) -> "TokenTable":
        return _load_tokens(*_find_tokenizer(root, run))

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def token_text(self, token: int) -> str:
        if self._texts is None or self._tokenizer.id_to_token(token) is None:
            return f"{token}"
        return name_of(self._texts.bytes_of(token))[:MAX_TOKEN_CHARACTERS]

    def trained_sequences(self, turns: Any, seen: Seen) -> list[dict[str, Any]]:
        """Return the token sequences of a rollout that were trained on, for display.

        A turn whose prompt begins with the sequence so far extends it; another turn begins a new
        sequence. A sequence is a dict with one value per token in each of the lists `ids`, `text`,
        `sampled` (the sampler's logprobs), `version`, `trained` (the trainer's logprobs) and
        `masked`; a missing value is None. `cut` is the number of tokens that are not shown.

        Args:
            turns: turns of the rollout, as in its file.
            seen: for each sequence, the trainer's logprobs and loss mask (`read_trained`).
        """
        sequences = _join_turns(turns if isinstance(turns, list) else [])
        for i, one in enumerate(sequences):
            own = [j for j, logprob in enumerate(one["sampled"]) if logprob is not None and j > 0]
            one["trained"], one["masked"] = [None] * len(one["ids"]), [None] * len(one["ids"])
            if i < len(seen) and len(seen[i][0]) == len(own):
                for j, logprob, is_masked in zip(own, *(x.tolist() for x in seen[i]), strict=True):
                    one["trained"][j], one["masked"][j] = logprob, is_masked
            one["cut"] = max(0, len(one["ids"]) - MAX_TOKENS)
            for key in ("ids", "sampled", "version", "trained", "masked"):
                one[key] = one[key][:MAX_TOKENS]
            texts: dict[int, str] = {
                token: self.token_text(token) for token in {*one["ids"]} if isinstance(token, int)
            }
            one["text"] = [texts.get(token, "?") for token in one["ids"]]
        return sequences


@functools.lru_cache(maxsize=4)
def _load_tokens(file: Path | None, _stamp: int) -> TokenTable:
    return TokenTable(file)


def _join_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sequences of token ids, sampler logprobs and policy versions.

    If a turn's prompt begins with the whole previous sequence, the turn extends that sequence;
    otherwise it starts a new one.
    """
    sequences: list[dict[str, Any]] = []
    for turn in turns:
        prompt = turn.get("prompt_ids")
        ids = turn.get("ids")
        if not isinstance(prompt, list) or not isinstance(ids, list):
            continue
        last = sequences[-1] if sequences else None
        if last is None or prompt[: len(last["ids"])] != last["ids"]:
            last = {"ids": [], "sampled": [], "version": []}
            sequences.append(last)
        between = prompt[len(last["ids"]) :]
        nothing = [None] * len(between)
        last["sampled"] += nothing + list(turn.get("logprobs") or [None] * len(ids))
        last["version"] += nothing + [turn.get("version")] * len(ids)
        last["ids"] += between + ids
    return sequences


def _find_tokenizer(root: Path, run: Run) -> tuple[Path | None, int]:
    """Return the path of the run's tokenizer.json and its modification time."""
    places = [
        run.path / "configs",
        *steps_in(run.path / "weights").values(),
        *checkpoints_in(run.path).values(),
        run.path / "broadcasts" / "text",
    ]
    for place in places:
        file = place / "tokenizer.json"
        if is_below(root, file):
            return file, file.stat().st_mtime_ns
    return None, 0
