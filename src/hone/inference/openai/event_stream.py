"""Stream answers as server-sent events while they are generated.

Sampler.stream ── pieces ──► Spelling: text that is final ──► chunks ──► EventStream
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from hone.inference.connection import DONE, EventStream, Listening
from hone.inference.openai.answers import Answer, error_body
from hone.inference.samplers.base import Sampler
from hone.inference.samplers.partial_completions import join_pieces
from hone.records import Completion, GenerateRequest
from hone.text.structured_outputs import Following


async def stream_answer(
    connection: Request, sampler: Sampler, answer: Answer, requests: Sequence[GenerateRequest]
) -> Response:
    """Start the requests; return a response that streams the answer as server-sent events.

    Raises ValueError for a refused request, and HungUp for a disconnect before the first event.
    """
    events = _iterate_events(sampler, answer, requests)
    listening = Listening(connection).__enter__()
    try:
        head = await anext(events)
    except BaseException as error:
        await events.aclose()
        listening.__exit__(type(error), error, None)
        raise
    return EventStream(head, events, listening)  # which keeps listening


class _EventEncoder:
    """Incremental encoder of an answer's completions as server-sent events."""

    def __init__(self, answer: Answer, requests: Sequence[GenerateRequest]) -> None:
        self.answer = answer
        self.requests = requests
        self.spellings = [answer.start_spelling(i) for i in range(len(requests))]
        self.pieces: list[list[Completion]] = [[] for _ in requests]
        self.written = 0  # completion tokens so far
        self.unfinished = len(requests)
        options = answer.request.stream_options
        self.has_usage = options is not None and bool(options.include_usage)
        self.has_running_usage = options is not None and bool(options.continuous_usage_stats)

    def encode_piece(self, i: int, piece: Completion) -> str:
        """Return the events for the next tokens of completion `i`.

        When the last completion ends, append the usage, if requested, and DONE. Raises ValueError
        if an output format could not be enforced to the end.
        """
        self.pieces[i].append(piece)
        self.written += len(piece.ids)
        spelling = self.spellings[i]
        if not piece.finish_reason:
            delta = self.answer.build_delta(i, spelling.decode_more(piece.ids), piece)
            return self._encode_chunk([delta])
        whole = join_pieces(self.pieces[i])
        events = self._encode_chunk([self.answer.build_last_delta(i, spelling, piece, whole)])
        self.unfinished -= 1
        if not self.unfinished:
            check_forms(self.requests)
            events += self._encode_closing()
        return events

    def encode_opening(self) -> str:
        found = (self.answer.build_first_delta(i) for i in range(len(self.requests)))
        firsts = [choice for choice in found if choice is not None]
        envelope = self.answer.build_envelope()
        return "".join(self._encode_chunk([choice], **envelope) for choice in firsts)

    def encode_failure(self, error: Exception) -> str:
        body = error_body(500, f"{type(error).__name__}: {error}", "server_error")
        return _encode_event(self.answer.encode_json(body)) + DONE

    def _encode_closing(self) -> str:
        usage = self.answer.count_usage(self.written)
        events = _encode_event(self.answer.encode_chunk([], usage=usage)) if self.has_usage else ""
        return events + DONE

    def _encode_chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        usage = self.answer.count_usage(self.written) if self.has_running_usage else None
        more |= {} if usage is None else {"usage": usage}
        return _encode_event(self.answer.encode_chunk(choices, **more))


async def _iterate_events(
    sampler: Sampler, answer: Answer, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[str, None]:
    encoder = _EventEncoder(answer, requests)
    has_begun = False
    try:
        async with aclosing(sampler.stream(requests)) as found:
            async for i, piece in found:
                opening = "" if has_begun else encoder.encode_opening()
                has_begun = True
                yield opening + encoder.encode_piece(i, piece)
    except Exception as error:
        if not has_begun:
            raise
        # The engine failed: the error goes into the stream.
        yield encoder.encode_failure(error)


def check_forms(requests: Sequence[GenerateRequest]) -> None:
    """Raise ValueError if the output format of a request could not be enforced to the end."""
    failures = [
        one.allows.failure
        for one in requests
        if isinstance(one.allows, Following) and one.allows.failure
    ]
    if failures:
        raise ValueError(f"the form of the answer could not be followed to its end: {failures[0]}")


def _encode_event(text: str) -> str:
    return f"data: {text}\n\n"
