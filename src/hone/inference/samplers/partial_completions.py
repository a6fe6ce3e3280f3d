"""Stream partial completions: one periodic query of the engine serves all streams.

    Streams.stream_requests ─► generate, under a request name ─► last piece of each request
            ▲
            └── new tokens ◄── look({request name: number of known tokens}), periodically

A query costs the engine as much for a hundred streams as for one, so a stream receives several
tokens at a time. Queries become less frequent when there are more streams or delivering their
tokens takes longer.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hone.records import Completion, GenerateRequest
from hone.text.stop_strings import held_back
from hone.text.tokenizer import Tokenizer

MIN_POLL_SECONDS = 0.01  # between two queries for new tokens
POLL_SECONDS_PER_STREAM = 0.0008
# Pause in multiples of the time that delivering took, which competes with decoding.
PAUSE_PER_DELIVERY = 20
MAX_POLL_SECONDS = 0.5


@dataclass
class _Open:
    """One streamed request: its index in the stream, and the stream's queue of pieces."""

    pieces: asyncio.Queue[tuple[int, Completion | None]]
    index: int
    known: int = 0  # tokens delivered


class Streams:
    """Streaming on top of a sampler's `generate`.

    `look` maps {request name: number of known tokens} to the new tokens of each request.
    """

    def __init__(
        self,
        generate: Callable[[GenerateRequest], Coroutine[Any, Any, Completion]],
        look: Callable[[dict[str, int]], Coroutine[Any, Any, dict[str, Completion]]],
    ) -> None:
        self.generate = generate
        self.look = look
        self.names = itertools.count()
        self.open: dict[str, _Open] = {}
        self._looking: asyncio.Task[None] | None = None

    async def stream_requests(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield (index of the request, new tokens of its completion) as they are generated.

        The last piece of each completion has a finish_reason. Closing the iterator aborts the
        requests. Raises the engine's error if a request is refused.
        """
        pieces: asyncio.Queue[tuple[int, Completion | None]] = asyncio.Queue()
        names = [f"stream {next(self.names)}" for _ in requests]
        told = [0] * len(requests)
        tasks = []
        for i, (name, request) in enumerate(zip(names, requests, strict=True)):
            self.open[name] = _Open(pieces, i)
            task = asyncio.create_task(self.generate(replace(request, name=name)))
            task.add_done_callback(lambda _, i=i: pieces.put_nowait((i, None)))  # type: ignore[misc]
            tasks.append(task)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._collect_pieces())
        try:
            left = len(requests)
            while left:
                i, piece = await pieces.get()
                if piece is None:
                    left -= 1
                    self.open.pop(names[i], None)
                    piece = tasks[i].result().token_range(told[i])
                elif tasks[i].done():
                    continue  # its final piece, with all new tokens, is about to come
                told[i] += len(piece.ids)
                yield i, piece
        finally:
            for name, task in zip(names, tasks, strict=True):
                self.open.pop(name, None)
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _collect_pieces(self) -> None:
        while self.open:
            known = {name: one.known for name, one in self.open.items()}
            found = await self.look(known)
            for name, piece in found.items():
                if piece.ids and name in self.open:
                    one = self.open[name]
                    one.known += len(piece.ids)
                    one.pieces.put_nowait((one.index, piece))
            start = time.perf_counter()
            for _ in range(3):  # lets readers take their pieces, write them, and wait again
                await asyncio.sleep(0)
            pause = max(
                MIN_POLL_SECONDS,
                POLL_SECONDS_PER_STREAM * len(self.open),
                PAUSE_PER_DELIVERY * (time.perf_counter() - start),
            )
            await asyncio.sleep(min(pause, MAX_POLL_SECONDS))


class Spelling:
    """Incremental detokenizer of a completion: returns text that later tokens cannot change.

    Text is held back from the (possible) beginning of a string in `stops` or `hold`.

    Args:
        skip_special: leave out special tokens.
        stops: stop strings.
        hold: further strings to hold back, such as the start of a tool call.
        before: tokens that the completion continues from.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        stops: Sequence[str],
        hold: Sequence[str],
        before: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.skip = skip_special
        self.stops = stops
        self.hold = [*stops, *hold]
        self.ids: list[int] = [*before]
        self.text, self.sent = "", 0  # text so far, and how many of its characters were returned
        # Tokens before `_read` are in the text; decoding begins at `_start`.
        self._start = 0
        self._read = len(before)

    def decode_more(self, ids: list[int]) -> str:
        """Return the text that becomes final with these tokens."""
        self.ids += [token for token in ids if not (self.skip and self.tokenizer.is_dropped(token))]
        if len(self.ids) == self._read:  # no visible text
            return self._release_text(
                self.text, self.sent + held_back(self.text[self.sent :], self.hold)
            )
        before = self._decode_range(self._start, self._read)
        now = self._decode_range(self._start, len(self.ids))
        if not now.endswith("\ufffd"):  # the bytes of an incomplete character
            self.text += now[len(before) :]
            self._start = self._read
            self._read = len(self.ids)
        return self._release_text(
            self.text, self.sent + held_back(self.text[self.sent :], self.hold)
        )

    def finish_text(self, whole: str) -> str:
        """Return the part of the whole text that was not returned yet."""
        return (
            self._release_text(whole, len(whole))
            if whole.startswith(self.text[: self.sent])
            else ""
        )

    def _decode_range(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self.ids[start:end], skip_special_tokens=self.skip)

    def _release_text(self, text: str, end: int) -> str:
        start = self.sent
        self.sent = max(self.sent, end)
        return text[start:end]


def join_pieces(pieces: Sequence[Completion]) -> Completion:
    """Join the pieces of a completion, given in order."""
    end = pieces[-1]
    if len(pieces) == 1:
        return end
    alternatives = (
        None
        if end.alternatives is None
        else [one for piece in pieces for one in piece.alternatives or []]
    )
    mask = None if end.mask is None else [one for piece in pieces for one in piece.mask or []]
    return replace(
        end,
        ids=[i for piece in pieces for i in piece.ids],
        logprobs=[x for piece in pieces for x in piece.logprobs],
        versions=[v for piece in pieces for v in piece.versions],
        alternatives=alternatives,
        mask=mask,
    )
