"""Stream answers as server-sent events while they are generated.

Sampler.stream ── pieces ──► Spelling: what can be said of them ──► chunks ──► EventStream
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
    """Return a stream of events. Raises ValueError or HungUp before the first event."""
    events = _iterate_events(sampler, answer, requests)
    listening = Listening(connection).__enter__()
    try:
        head = await anext(events)
    except BaseException as error:
        await events.aclose()
        listening.__exit__(type(error), error, None)
        raise
    return EventStream(head, events, listening)  # which keeps listening


async def _iterate_events(
    sampler: Sampler, answer: Answer, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[str, None]:
    options = answer.request.stream_options
    count = len(requests)
    each_usage = options is not None and bool(options.continuous_usage_stats)
    spellings = [answer.start_spelling(i) for i in range(len(requests))]
    pieces: list[list[Completion]] = [[] for _ in requests]
    written = 0
    left = len(requests)

    def encode_chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        usage = {"usage": answer.count_usage(written)} if each_usage else {}
        return _encode_event(answer.encode_chunk(choices, **usage, **more))

    def encode_opening() -> str:
        firsts = [
            choice for i in range(count) if (choice := answer.build_first_delta(i)) is not None
        ]
        return "".join(encode_chunk([choice], **answer.build_envelope()) for choice in firsts)

    def encode_closing() -> str:
        has_usage = options is not None and options.include_usage
        return (
            _encode_event(answer.encode_chunk([], usage=answer.count_usage(written)))
            if has_usage
            else ""
        ) + DONE

    begun = False
    try:
        async with aclosing(sampler.stream(requests)) as found:
            async for i, piece in found:
                said = "" if begun else encode_opening()
                begun = True
                spelling = spellings[i]
                pieces[i].append(piece)
                written += len(piece.ids)
                if piece.finish_reason:
                    whole = join_pieces(pieces[i])
                    said += encode_chunk([answer.build_last_delta(i, spelling, piece, whole)])
                    left -= 1
                else:
                    said += encode_chunk(
                        [answer.build_delta(i, spelling.decode_more(piece.ids), piece)]
                    )
                if not left:
                    check_forms(requests)
                    said += encode_closing()
                yield said
    except Exception as error:
        if not begun:
            raise
        # The engine failed: the error goes into the stream.
        yield (
            _encode_event(
                answer.encode_json(
                    error_body(500, f"{type(error).__name__}: {error}", "server_error")
                )
            )
            + DONE
        )


def check_forms(requests: Sequence[GenerateRequest]) -> None:
    """Raise ValueError if a requested output format cannot be enforced."""
    failures = [
        one.allows.failure
        for one in requests
        if isinstance(one.allows, Following) and one.allows.failure
    ]
    if failures:
        raise ValueError(f"the form of the answer could not be followed to its end: {failures[0]}")


def _encode_event(text: str) -> str:
    return f"data: {text}\n\n"
