"""Run Hone's engine in its own process, so that HTTP and sampling do not share one GIL.

    server: routes ─► ApartSampler ── frames, over a pair of sockets ──► engine: EmbeddedSampler ─► EngineService
                           ▲                                                │
                           └───── results, by the number of the call ◄──────┘

The sockets have no name, so only these two processes read or write them; values are pickled. The
engine process exits when the server is gone. The server exits when the engine process is gone, and
its launcher restarts it.
"""

import asyncio
import functools
import gc
import io
import itertools
import logging
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hone.child_process import describe_exit, start_process, wait_or_kill
from hone.config.inference_config import InferenceConfig
from hone.config.sections import BACKEND_LOST
from hone.inference.event_loop import run_event_loop as run_loop
from hone.inference.samplers.base import ENGINE_CAN, Alternatives, Pause, Sampler
from hone.inference.samplers.partial_completions import Streams
from hone.inference.served_model import Served, find_allowed_directories
from hone.records import Completion, GenerateRequest
from hone.text.structured_outputs import Following, Form
from hone.text.tokenizer import Tokenizer
from hone.transport.delivery import Message

if TYPE_CHECKING:
    from hone.inference.samplers.embedded import EmbeddedSampler

LENGTH_BYTES = 8  # bytes that tell the length of a frame
# Results handled per turn: requests that end together are answered one after another.
RESULTS_PER_TURN = 2
EXIT_SECONDS = 10.0  # seconds in which the engine's process has to exit
# Seconds that the sampling thread waits at most for the thread that takes calls; default 0.005.
SWITCH_SECONDS = 0.0005

log = logging.getLogger("hone.inference")


class SamplerFacts(NamedTuple):
    """Properties of the engine's sampler, cached in the server.

    The engine process sends new values with the result of every call that may change them.
    """

    context: int
    vocabulary: int
    is_paused: bool
    adapters: list[str]
    routing_shape: tuple[int, int]


class Frames(asyncio.Protocol):
    """Protocol that exchanges pickled values with the other process.

    Values sent in one turn of the event loop are written together.

    Args:
        take: called with each received value.
        gone: called when the other process is gone.
        at_once: values to handle per turn of the event loop; None for all.
    """

    def __init__(
        self, take: Callable[[Any], None], gone: Callable[[], None], at_once: int | None = None
    ) -> None:
        self.take = take
        self.gone = gone
        self.at_once = at_once
        self._read = bytearray()
        self._out = list[bytes]()
        self._arrived = deque[Any]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transport is not a subclass.
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone()

    def data_received(self, data: bytes) -> None:
        self._read += data
        start = 0
        while (end := start + LENGTH_BYTES) <= len(self._read):
            end += int.from_bytes(self._read[start : start + LENGTH_BYTES], "little")
            if end > len(self._read):
                break
            value = pickle.loads(bytes(self._read[start + LENGTH_BYTES : end]))
            start = end
            self._arrived.append(value)
        del self._read[:start]
        self._hand_on()

    def _hand_on(self) -> None:
        for _ in range(min(self.at_once or len(self._arrived), len(self._arrived))):
            self.take(self._arrived.popleft())
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def send(self, value: Any) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(encode_frame(value))

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()


def encode_frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def receive_value(sock: socket.socket) -> Any:
    """Return the next value from a blocking socket. Raises EOFError if the peer is gone."""

    def read_exactly(count: int) -> bytes:
        parts = []
        while count:
            part = sock.recv(min(count, 2**20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return pickle.loads(read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES), "little")))


# ---------------------------------------------------------------------------------------------- requests as bytes
# What a request asks of its tokens (stop strings, a form) has a tokenizer, which travels once.

# By the server's number for them; in the engine's process.
_known: dict[int, Tokenizer] = {}


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number_of: Callable[[Tokenizer], int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.number_of = number_of

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tokenizer):
            return _get_tokenizer, (self.number_of(value),)
        if isinstance(value, Following):  # rebuilt there
            return _rebuild_grammar, (
                value.form,
                value.tokenizer,
                value.vocabulary,
                value.stops,
                value.before,
            )
        return NotImplemented


def _get_tokenizer(number: int) -> Tokenizer:
    return _known[number]


def _rebuild_grammar(
    form: Form, tokenizer: Tokenizer, vocabulary: int, stops: list[int], before: list[int]
) -> Following:
    return Following(form, tokenizer, vocabulary, stops).start_another(before)


def _register_tokenizer(number: int, tokenizer: Tokenizer) -> None:
    _known[number] = tokenizer
    for old in sorted(_known)[:-2]:  # the previous one belongs to requests in transit
        del _known[old]


# ---------------------------------------------------------------------------------------------- in the server


class ApartSampler(Sampler):
    """Sampler over a running engine process. Call `open` on the event loop."""

    can = ENGINE_CAN

    def __init__(self, facts: SamplerFacts, lost: Callable[[], None]) -> None:
        self.facts = facts
        self.lost = lost
        self.streams = Streams(
            self.generate, lambda known: self._call_engine("find_partials", known)
        )
        self._numbers = itertools.count()
        self._tokenizers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._sent: tuple[Tokenizer, int] | None = None

    async def open(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        _, self.frames = await loop.create_connection(
            lambda: Frames(self._handle_frame, self.lost, RESULTS_PER_TURN), sock=sock
        )

    def _handle_frame(
        self, frame: tuple[int, Any, BaseException | None, SamplerFacts | None]
    ) -> None:
        number, result, error, facts = frame
        self.facts = facts or self.facts
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    async def _call_engine(self, name: str, *args: Any) -> Any:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.frames.send((number, name, args))
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None:
                self.frames.send((number, "cancel", ()))
            raise

    def _number_of(self, tokenizer: Tokenizer) -> int:
        if self._sent is None or self._sent[0] is not tokenizer:
            self._sent = (tokenizer, next(self._tokenizers))
            self.frames.send((self._sent[1], "tokenizer", (tokenizer,)))
        return self._sent[1]

    @property
    def max_context(self) -> int:
        return self.facts.context

    @property
    def vocab_size(self) -> int:
        return self.facts.vocabulary

    @property
    def routing_shape(self) -> tuple[int, int]:
        return self.facts.routing_shape

    @property
    def is_paused(self) -> bool:
        return self.facts.is_paused

    @property
    def adapters(self) -> list[str]:
        return self.facts.adapters

    async def generate(self, request: GenerateRequest) -> Completion:
        file = io.BytesIO()
        _Pickler(file, self._number_of).dump(request)
        completion, failure = await self._call_engine(
            "generate", file.getvalue(), request.allows is not None
        )
        if isinstance(request.allows, Following):
            request.allows.failure = failure
        return completion

    def stream(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        return self.streams.stream_requests(requests)

    async def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        return await self._call_engine("score", sequences, temperature)

    async def find_likeliest(
        self, ids: list[int], number: int, adapter: str | None = None
    ) -> tuple[list[float], list[Alternatives]]:
        return await self._call_engine("find_likeliest", ids, number, adapter)

    async def update_weights(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        return await self._call_engine("update_weights", place, version, message)

    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        return await self._call_engine("describe_state", each)

    async def pause(self, mode: Pause) -> None:
        await self._call_engine("pause", mode)

    async def resume(self) -> None:
        await self._call_engine("resume")

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._call_engine("load_adapter", name, directory)

    async def unload_adapter(self, name: str) -> None:
        await self._call_engine("unload_adapter", name)

    async def report_progress(self, known: dict[str, int]) -> dict[str, Any]:
        return await self._call_engine("report_progress", known)

    async def read_metrics(self) -> dict[str, float]:
        return await self._call_engine("read_metrics")


class Apart:
    """Backend that starts and ends the engine process."""

    def __init__(self, config: InferenceConfig) -> None:
        self.config = config

    def __enter__(self) -> "Apart":
        # While the model loads.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.sock, theirs = socket.socketpair()
        program = f"from hone.inference.engine_process import main; main({theirs.fileno()})"
        words = [sys.executable, "-c", program]
        self.process = start_process(words, pass_fds=[theirs.fileno()], start_new_session=False)
        theirs.close()
        self.sock.sendall(encode_frame(self.config))
        return self

    def wait(self) -> Served:
        """Wait until the engine is ready; return the served model.

        Raises the error that made the start fail.
        """
        try:
            ready = receive_value(self.sock)
        except (EOFError, OSError):
            raise ValueError(
                f"the engine's process {self._describe_failure()} before it was ready"
            ) from None
        if isinstance(ready, BaseException):
            raise ready
        directory, facts = ready
        self.sampler = ApartSampler(facts, self._handle_engine_loss)
        return Served(
            self.sampler,
            Tokenizer.for_model(directory, self.config.model),
            self.config.model.name,
            find_allowed_directories(self.config),
        )

    def __exit__(self, *_: object) -> None:
        self.sock.close()  # ends the engine process
        wait_or_kill(self.process, EXIT_SECONDS)

    def _describe_failure(self) -> str:
        return describe_exit(wait_or_kill(self.process, EXIT_SECONDS))

    def _handle_engine_loss(self) -> None:
        if not self.is_over:
            log.error("the engine's process %s: this server ends too", self._describe_failure())
            # At once, so that clients see the failure and retry elsewhere.
            os._exit(BACKEND_LOST)

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        """Run `program`, the HTTP server.

        If the engine process ends first, exit with code BACKEND_LOST.
        """

        async def run_both() -> None:
            await self.sampler.open(self.sock)
            await program
            self.is_over = True

        self.is_over = False
        # Excludes loaded modules from collection, which would stop everything for a while.
        gc.freeze()
        run_loop(run_both())


# ---------------------------------------------------------------------------------------------- in the engine's process


def collect_facts(sampler: Sampler) -> SamplerFacts:
    return SamplerFacts(
        sampler.max_context,
        sampler.vocab_size,
        sampler.is_paused,
        sampler.adapters,
        sampler.routing_shape,
    )


async def answer_calls(sock: socket.socket, sampler: "EmbeddedSampler") -> None:
    """Execute the sampler calls that the server process sends; exit when that process is gone."""
    tasks: dict[int, asyncio.Task[None]] = {}

    async def generate_completion(data: bytes, has_form: bool) -> tuple[Completion, str]:
        request = await asyncio.to_thread(pickle.loads, data) if has_form else pickle.loads(data)
        completion = await sampler.generate(request)
        return completion, request.allows.failure if has_form else ""

    async def answer_call(number: int, name: str, args: tuple[Any, ...]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = await (
                generate_completion(*args) if name == "generate" else getattr(sampler, name)(*args)
            )
        except asyncio.CancelledError:
            return
        except Exception as failed:
            error = make_portable(failed)
        finally:
            tasks.pop(number, None)
        frames.send(
            (
                number,
                result,
                error,
                None if name in ("generate", "find_partials") else collect_facts(sampler),
            )
        )

    def handle_frame(frame: tuple[int, str, tuple[Any, ...]]) -> None:
        number, name, args = frame
        if name == "tokenizer":
            _register_tokenizer(number, *args)
        elif name == "cancel":
            if task := tasks.get(number):
                task.cancel()
        else:
            tasks[number] = asyncio.get_running_loop().create_task(answer_call(number, name, args))

    loop = asyncio.get_running_loop()
    _, frames = await loop.create_connection(
        lambda: Frames(handle_frame, functools.partial(os._exit, 0)), sock=sock
    )
    await asyncio.Event().wait()


def make_portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main(number: int) -> None:
    # The server sees the error, ends open requests, and then this process.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    from hone import machine
    from hone.inference.backends import Embedded
    from hone.monitors.logging_setup import start_logging

    sock = socket.socket(fileno=number)
    config = receive_value(sock)
    sys.setswitchinterval(SWITCH_SECONDS)
    machine.prepare_environment()
    start_logging(config.log_level)
    machine.Neighbours.start_watching()
    try:
        opened = Embedded(config)
    except Exception as error:
        sock.sendall(encode_frame(make_portable(error)))
        return
    sock.sendall(encode_frame((opened.served.tokenizer.directory, collect_facts(opened.sampler))))
    opened.run(answer_calls(sock, opened.sampler))
