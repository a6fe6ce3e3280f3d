"""Find stop strings across token borders, as soon as their last character is generated."""

from collections.abc import Callable, Sequence


class StopStrings:
    """Detect stop strings in one sequence.

    Call it with the ids generated so far. It returns how many of them to keep if their text has a
    stop string, else None. `decode_first` replaces `decode` at the beginning of the sequence, where
    the text of ids may depend on the prompt.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        strings: Sequence[str],
        decode_first: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.decode = decode
        self.strings = strings
        self.decode_first = decode_first or decode
        self.checked = 0
        # Each token contributes a character or part of one, so a string begins within this many
        # tokens.
        self.reach = 4 * max(map(len, strings)) + 4

    def __call__(self, ids: list[int]) -> int | None:
        start = max(0, self.checked - self.reach)
        decode = self.decode if start else self.decode_first
        if self._is_in(decode(ids[start:])):
            for count in range(self.checked + 1, len(ids) + 1):
                if self._is_in(decode(ids[start:count])):
                    return count
        self.checked = len(ids)
        return None

    def _is_in(self, text: str) -> bool:
        return any(string in text for string in self.strings)


def cut_at_stop(text: str, strings: Sequence[str], keep: bool = False) -> str:
    """Return the text up to the first of the strings; with `keep`, including it."""
    found = [(at, len(s) if keep else 0) for s in strings if (at := text.find(s)) >= 0]
    at, kept = min(found, default=(len(text), 0))
    return text[: at + kept]


def held_back(text: str, strings: Sequence[str]) -> int:
    """Return how many characters of a streamed text can be sent.

    These are the characters before a stop string, or before an ending of the text that is the
    beginning of a stop string.
    """
    ends = [len(text)]
    for string in strings:
        at = text.find(string)
        if at < 0:
            tails = range(min(len(string) - 1, len(text)), 0, -1)
            at = next((len(text) - n for n in tails if text.endswith(string[:n])), len(text))
        ends.append(at)
    return min(ends)
