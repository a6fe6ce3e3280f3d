"""Sampler over vLLM: completions by its `/v1/completions`, new weights by its control routes.

    generate ── POST /v1/completions, token ids in and out ──────────────► vLLM (vllm_process.py)
    update   ── pause (running requests end early), reload, resume ──────►
                 └─ a request that ended early is sent again: prompt plus its tokens so far, with the new weights

So every token has one version, and logprobs after an update are those of the new weights over the
whole prefix. vLLM has no checksum: the logprobs of the canary, a fixed text, show whether new
weights arrived.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from hone.inference.samplers.base import Alternatives, Pause, Sampler
from hone.inference.samplers.partial_completions import join_pieces
from hone.inference.samplers.vllm_process import NAME, VllmProcess
from hone.records import Completion, ContextFull, GenerateRequest, other_seed
from hone.text.stop_strings import StopStrings
from hone.text.structured_outputs import Following, FormEnds
from hone.transport.delivery import Message

CONNECTIONS_PER_CLIENT = 64  # connections per client: httpx's cost per request grows with the pool
EXIT_SECONDS = 5.0  # seconds that a failing vLLM may take to exit
TOKEN = "token_id:"


class VllmSampler(Sampler):
    """Sampler over a running vLLM. Call `open` on the event loop."""

    can = frozenset(("forms",))

    def __init__(self, process: VllmProcess, max_batch_size: int | None) -> None:
        self.process = process
        text = process.files.config.get("text_config") or process.files.config
        self._vocabulary = int(text["vocab_size"])
        self._positions = int(text.get("max_position_embeddings") or 0)
        # Longest request, and longest text to score: the canary may be longer.
        self._context = self._scored_context = self._positions
        pools = max(1, -(-(max_batch_size or 256) // CONNECTIONS_PER_CLIENT))
        transports = [
            httpx.AsyncHTTPTransport(uds=str(process.socket), limits=_LIMITS) for _ in range(pools)
        ]
        self._pools = [
            httpx.AsyncClient(transport=one, base_url="http://vllm", timeout=None)
            for one in transports
        ]
        self._turn = itertools.cycle(self._pools)
        # Set while requests may be sent; cleared during weight updates.
        self._open = asyncio.Event()
        self._open.set()
        self._updates = self.completions = self.tokens_read = self.tokens_written = self.running = 0
        self._aborts = 0  # pauses that aborted all waiting requests
        self.version = 0
        self._paused = False
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        """Read the maximum context length that vLLM chose."""
        card = (await self._call_json("GET", "/v1/models"))["data"][0]
        self._scored_context = int(card["max_model_len"])
        self._context = min(self._scored_context, self.process.max_model_len or sys.maxsize)

    async def close(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    @property
    def max_context(self) -> int:
        return self._context

    @property
    def vocab_size(self) -> int:
        return self._vocabulary

    @property
    def is_paused(self) -> bool:
        return self._paused

    # ------------------------------------------------------------------------------------------ tokens

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of a request.

        A request with a timeout is streamed from vLLM, so that the tokens so far are known at the
        timeout.
        """
        pieces: list[Completion] = []
        try:
            async with asyncio.timeout(request.timeout):
                async with aclosing(
                    self._iterate_pieces(request, streamed=request.timeout is not None)
                ) as found:
                    async for piece in found:
                        pieces.append(piece)
        except TimeoutError:
            pieces.append(_build_end(request, "timeout"))
        return _join_pieces(request, pieces)

    async def stream(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        queue: asyncio.Queue[tuple[int, Completion | BaseException]] = asyncio.Queue()

        async def stream_one(i: int, request: GenerateRequest) -> None:
            try:
                async with asyncio.timeout(request.timeout):
                    async with aclosing(self._iterate_pieces(request, streamed=True)) as found:
                        async for piece in found:
                            queue.put_nowait((i, piece))
            except TimeoutError:
                queue.put_nowait((i, _build_end(request, "timeout")))
            except Exception as error:
                queue.put_nowait((i, error))

        tasks = [asyncio.create_task(stream_one(i, request)) for i, request in enumerate(requests)]
        pieces: list[list[Completion]] = [[] for _ in requests]
        try:
            left = len(requests)
            while left:
                i, piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                told = sum(len(before.ids) for before in pieces[i])
                pieces[i].append(piece)
                if piece.finish_reason:
                    left -= 1
                    whole = _join_pieces(requests[i], pieces[i])
                    piece = whole.token_range(told)
                yield i, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _iterate_pieces(
        self, request: GenerateRequest, streamed: bool
    ) -> AsyncGenerator[Completion, None]:
        """Yield the pieces of a completion, which continues after weight updates.

        The last piece has a finish_reason.
        """
        self._check_request(request)
        written: list[int] = []
        self.running += 1
        # vLLM applies a structured output from its beginning only: an interrupted answer is
        # generated again.
        is_anew = request.allows is not None
        try:
            while True:
                if not await self._is_open():
                    yield _build_end(request, "abort")
                    break
                updates = self._updates
                reason = ""
                async with aclosing(self._request_completion(request, written, streamed)) as asked:
                    async for piece in asked:
                        reason = piece.finish_reason
                        # A whole answer that was requested before an update and survived it may be
                        # of either version.
                        if (
                            updates != self._updates
                            and not streamed
                            and (reason != "abort" or is_anew)
                        ):
                            reason = "abort"
                            written = []
                            break
                        written = written + piece.ids
                        if reason == "abort" and updates != self._updates and not is_anew:
                            piece.finish_reason = ""
                        yield piece
                # A stream reports nothing of an answer that ends before its first token.
                if reason not in ("", "abort"):
                    break
                if updates == self._updates or (is_anew and streamed):
                    if not reason:
                        yield _build_end(request, "abort")
                    break
            self.completions += 1
            self.tokens_read += len(request.prompt_ids)
            self.tokens_written += len(written)
        finally:
            self.running -= 1

    async def _is_open(self) -> bool:
        """Wait until requests may be sent; return False if a pause aborts the waiting requests."""
        aborts = self._aborts
        while not self._open.is_set():
            if aborts != self._aborts:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _request_completion(
        self, request: GenerateRequest, written: list[int], streamed: bool
    ) -> AsyncGenerator[Completion, None]:
        """Send one request to vLLM; yield the pieces of the completion.

        `written` holds the tokens generated so far, which are appended to the prompt. Unless
        `streamed`, the completion is one piece. Raises RuntimeError if vLLM fails.
        """
        body = self._build_body(request, written) | {"stream": streamed}
        version = self.version
        if not streamed:
            choice = (await self._call_json("POST", "/v1/completions", body))["choices"][0]
            yield _parse_choice(choice, version, request.sampling.top_logprobs)
            return
        async with self._send_request("POST", "/v1/completions", body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"vLLM failed: {event['error'].get('message')}")
                for choice in event["choices"]:
                    yield _parse_choice(choice, version, request.sampling.top_logprobs)

    def _check_request(self, request: GenerateRequest) -> None:
        length = len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        if length >= self._context:
            raise ContextFull(
                f"This model's maximum context length is {self._context} tokens, the prompt alone has {length}"
            )
        if max(request.prompt_ids) >= self._vocabulary:
            raise ValueError(
                f"token id {max(request.prompt_ids)} is not one of the model's: it has {self._vocabulary}"
            )
        if request.adapter is not None:
            self.require_capability("adapters")
        if request.sampling.raw_logprobs and request.sampling.temperature not in (0.0, 1.0):
            self.require_capability("raw_logprobs")

    def _build_body(self, request: GenerateRequest, written: list[int]) -> dict[str, Any]:
        how = request.sampling
        form = request.allows
        room = self._context - len(request.prompt_ids)
        strings = request.ends.strings if isinstance(request.ends, (StopStrings, FormEnds)) else []
        return {
            "model": NAME,
            "prompt": request.prompt_ids + written,
            "max_tokens": max(1, min(how.max_tokens, room) - len(written)),
            "temperature": how.temperature,
            "seed": (other_seed(how.seed, len(written)) if written else how.seed) % 2**63,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "min_p": how.min_p,
            "repetition_penalty": how.repetition_penalty,
            "presence_penalty": how.presence_penalty,
            "frequency_penalty": how.frequency_penalty,
            "logit_bias": {str(token): bias for token, bias in how.logit_bias} or None,
            "min_tokens": max(0, how.min_tokens - len(written)),
            "ignore_eos": True,  # we name the stop tokens
            "stop_token_ids": [] if how.ignore_eos else sorted(request.stop_ids),
            "stop": list(strings) or None,
            "include_stop_str_in_output": True,
            "structured_outputs": {form.form.kind: form.form.value}
            if isinstance(form, Following)
            else None,
            "logprobs": how.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }

    async def score(self, sequences: list[list[int]], temperature: float) -> list[list[float]]:
        if temperature != 1.0:
            raise ValueError("temperature: vLLM scores given tokens at temperature 1 alone")
        found = await asyncio.gather(*(self.find_likeliest(ids, 0) for ids in sequences))
        return [logprobs for logprobs, _ in found]

    async def find_likeliest(
        self, ids: list[int], number: int, adapter: str | None = None
    ) -> tuple[list[float], list[Alternatives]]:
        if adapter is not None:
            self.require_capability("adapters")
        if len(ids) > self._positions or max(ids) >= self._vocabulary:
            raise ValueError(f"ids: at most {self._positions}, each below {self._vocabulary}")
        limit = self._scored_context
        if len(ids) >= limit:  # vLLM refuses prompts that leave no room for a token
            raise ContextFull(
                f"This model's maximum context length is {limit} tokens, there are {len(ids)}"
            )
        body = {
            "model": NAME,
            "prompt": ids,
            "max_tokens": 1,
            "prompt_logprobs": number,
            "add_special_tokens": False,
        }
        read = None
        while read is None:  # interrupted by new weights
            await self._open.wait()
            read = (await self._call_json("POST", "/v1/completions", body))["choices"][0][
                "prompt_logprobs"
            ]
        read = read[1:]
        own = [place[str(token)]["logprob"] for place, token in zip(read, ids[1:], strict=True)]
        every = [[(int(token), one["logprob"]) for token, one in place.items()] for place in read]
        return own, [_parse_top_logprobs(place, number) for place in every]

    # ------------------------------------------------------------------------------------------ weights

    async def update_weights(self, place: Path, version: int, message: Message) -> dict[str, Any]:
        async with self._changing:
            taken = await asyncio.to_thread(
                self.process.files.take_version, place, version, message
            )
            load: dict[str, Any] = {"method": "hone_take_weights", "kwargs": {"words": taken}}
            if isinstance(taken, Path):
                load = {
                    "method": "reload_weights",
                    "kwargs": {"weights_path": str(taken.resolve())},
                }
            self._open.clear()
            self._updates += 1
            try:
                await self._call_json("POST", "/pause?mode=abort")
                await self._call_json("POST", "/collective_rpc", load)
                await self._call_json("POST", "/reset_prefix_cache")
                self.version = version
                if not self._paused:
                    await self._call_json("POST", "/resume")
            except BaseException:
                # Its weights are neither the old version nor the new one: it exits and is
                # restarted.
                self.process.process.terminate()
                raise
            if not self._paused:
                self._open.set()
        return await self.describe_state()

    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        return {
            "version": self.version,
            "checksum": None,
            "device": f"vLLM {self.process.version} on {'CPU' if self.process.is_on_cpu else 'GPU'}",
            "dtype": self.process.dtype,
            "completions": self.completions,
        }

    async def pause(self, mode: Pause) -> None:
        async with self._changing:
            self._paused = True
            self._open.clear()
            self._aborts += mode == "abort"
            await self._call_json("POST", f"/pause?mode={mode}")

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._call_json("POST", "/resume")
            self._open.set()

    async def report_progress(self, known: dict[str, int]) -> dict[str, Any]:
        return {"running": self.running, "waiting": 0, "without_room": 0, "partials": {}}

    async def read_metrics(self) -> dict[str, float]:
        return {
            "requests_running": self.running,
            "requests_total": self.completions,
            "prompt_tokens_total": self.tokens_read,
            "generated_tokens_total": self.tokens_written,
            "policy_version": self.version,
        }

    # ------------------------------------------------------------------------------------------ HTTP

    async def _call_json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._send_request(method, path, body) as answer:
            text = await answer.aread()
        return json.loads(text) if text else None

    def _send_request(self, method: str, path: str, body: dict[str, Any] | None) -> "_Sent":
        return _Sent(self, next(self._turn).stream(method, path, json=body))


_LIMITS = httpx.Limits(max_connections=None)


class _Sent:
    """Context manager that sends a request to vLLM and returns the successful response.

    Raises ContextFull or ValueError if vLLM refuses the request, RuntimeError if vLLM fails. If
    vLLM has exited, the call waits forever: the server is about to exit too, and clients retry
    elsewhere.
    """

    def __init__(self, sampler: VllmSampler, answering: Any) -> None:
        self.sampler = sampler
        self.answering = answering

    async def __aenter__(self) -> httpx.Response:
        try:
            answer: httpx.Response = await self.answering.__aenter__()
        except httpx.TransportError as error:
            await self._handle_disconnect()
            raise RuntimeError(f"vLLM does not answer: {type(error).__name__}: {error}") from None
        if answer.status_code == 200:
            return answer
        said = (await answer.aread()).decode(errors="replace")[:500]
        await self.answering.__aexit__(None, None, None)
        if answer.status_code >= 500:
            await self._handle_disconnect()
            raise RuntimeError(f"vLLM answered {answer.status_code}: {said}")
        raise ContextFull(said) if "maximum context length" in said else ValueError(said)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self.answering.__aexit__(kind, error, trace)
        if isinstance(error, httpx.TransportError):
            await self._handle_disconnect()

    async def _handle_disconnect(self) -> None:
        for _ in range(int(EXIT_SECONDS / 0.1)):
            if self.sampler.process.process.poll() is not None:
                await asyncio.Event().wait()  # wait for the end that the server's watchdog brings
            await asyncio.sleep(0.1)


def _parse_choice(choice: dict[str, Any], version: int, number: int) -> Completion:
    ids = choice.get("token_ids") or []
    found = choice.get("logprobs") or {}
    logprobs = list(found.get("token_logprobs") or [])
    alternatives = None
    if number:
        places = ((place or {}).items() for place in found.get("top_logprobs") or [])
        alternatives = [
            _parse_top_logprobs([(int(name.removeprefix(TOKEN)), x) for name, x in one], number)
            for one in places
        ]
    return Completion(
        ids, logprobs, [version] * len(ids), choice.get("finish_reason") or "", alternatives
    )


def _build_end(request: GenerateRequest, reason: str) -> Completion:
    """Return a last piece without tokens, with `reason` as its finish_reason."""
    return Completion([], [], [], reason, [] if request.sampling.top_logprobs else None)


def _parse_top_logprobs(place: Alternatives, number: int) -> Alternatives:
    """Return the `number` likeliest tokens of `place`, to which vLLM adds the sampled token."""
    return sorted(place, key=lambda one: -one[1])[:number]


def _join_pieces(request: GenerateRequest, pieces: list[Completion]) -> Completion:
    """Join all pieces, and keep only the tokens that the stop condition `request.ends` keeps."""
    whole = join_pieces(pieces)
    keep = request.ends(whole.ids) if request.ends is not None else None
    if keep is not None:
        whole = whole.token_range(0, keep)
        whole.finish_reason = "stop"
    return whole
