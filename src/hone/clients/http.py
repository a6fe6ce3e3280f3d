"""Client of an OpenAI-compatible server, with the interface that environments use."""

import asyncio
import importlib.util
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json

from hone.config.sections import LOOPBACK, ClientConfig, own_key
from hone.records import Completion, ContextFull, Prompt, Refused, Sampling, Turn
from hone.server_starts import is_starting

# A local server that neither listens nor starts for this long does not exist.
NO_SIGN_SECONDS = 60.0
ANSWER_SECONDS = 10.0  # time for a listening server to answer one poll
# When a wait is announced, and the pause between polls.
NOTICE_SECONDS = 3.0
RETRY_SECONDS = 0.2
FULL = "context_length_exceeded"  # the code of such a refusal, in OpenAI's API
# The message of servers without such a code, among them vLLM.
FULL_IN_WORDS = "maximum context length"


class ServerLost(ConnectionError):
    """The server is gone or did not answer in time."""


class HttpClient:
    """Client of one server. Use as `async with HttpClient(…) as client`.

    Args:
        base_url: URL of the API, ending in /v1.
        model: name of the model in requests.
        api_key: sent as bearer token.
        extra_body: fields that are added to every request.
        timeout: seconds per request.
        retries: further attempts after a lost connection, status 429 or 5xx.
        is_hone: True for a server of Hone: request logprobs as plain numbers, a tenth of the work of OpenAI's format.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        extra_body: dict[str, Any] | None = None,
        timeout: float = 600.0,
        retries: int = 3,
        is_hone: bool = False,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.extra_body = extra_body or {}
        self.timeout = timeout
        self.retries = retries
        self.is_hone = is_hone
        self.prompt_tokens = self.completion_tokens = 0  # over all answers
        self.http = httpx.AsyncClient(
            headers=headers,
            timeout=timeout,
            transport=_choose_transport(self.base_url),
            limits=httpx.Limits(max_connections=None),
            trust_env=httpx.URL(self.base_url).host not in LOOPBACK,
        )

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def check_key(self) -> None:
        """Check the API key against the server.

        Raises ValueError if the server answers 401; the message names the option to set. Raises
        ConnectionError for any other failure.
        """
        try:
            await self.call_control("version")
        except RuntimeError as error:
            if not (isinstance(error, Refused) and error.status == 401):
                raise ConnectionError(str(error)) from None
            raise ValueError(
                f"{self.base_url} refuses the API key (401); name the environment variable that holds it: "
                "--orchestrator.client.api-key-var NAME"
            ) from None

    async def wait_until_serving(self, no_sign_seconds: float = NO_SIGN_SECONDS) -> None:
        """Wait until the server is up, then check that it serves the model.

        A server on this machine is polled until, for `no_sign_seconds`, it shows no sign of
        starting; other servers are polled once. Raises ConnectionError if no server answers,
        ValueError if it refuses the key or does not serve the model.
        """
        answer = await self.wait_until_up(no_sign_seconds)
        if answer.status_code == 401:
            raise ValueError(f"{self.base_url} refuses the API key (401)")
        if answer.status_code == 200:
            served = [card["id"] for card in answer.json()["data"]]
            if self.model not in served:
                raise ValueError(
                    f"{self.base_url} does not serve {self.model!r}; it serves {', '.join(served)}; "
                    f"serve it with: {serve_command(self.model)}"
                )

    async def wait_until_up(self, no_sign_seconds: float = NO_SIGN_SECONDS) -> httpx.Response:
        """Return the server's response to /models; wait for a server on this machine.

        A server on this machine may still be loading its model, or may not listen yet. It is polled
        until, for `no_sign_seconds`, it has neither listened nor announced its start
        (`server_starts.py`). A wait longer than NOTICE_SECONDS is reported on standard error.
        Servers elsewhere are polled once. Raises ConnectionError if there is no response.
        """
        url = httpx.URL(self.base_url)
        is_here = url.host in LOOPBACK
        port = url.port or 80
        start = last_sign = time.monotonic()
        is_announced = False
        while True:
            try:
                return await self.http.get(f"{self.base_url}/models", timeout=ANSWER_SECONDS)
            except httpx.HTTPError as error:
                now = time.monotonic()
                if not isinstance(error, httpx.ConnectError) or is_starting(port):
                    last_sign = now
                if not is_here or now - last_sign >= no_sign_seconds:
                    raise ConnectionError(self._describe_absence(error)) from None
            if not is_announced and now - start >= NOTICE_SECONDS:
                is_announced = True
                limit = f"{no_sign_seconds:.0f} s"
                print(
                    f"waiting for a server at {self.base_url}, up to {limit} without a sign of it",
                    file=sys.stderr,
                )
            await asyncio.sleep(RETRY_SECONDS)

    def _describe_absence(self, error: httpx.HTTPError) -> str:
        kind = type(error).__name__
        command = serve_command(self.model)
        return f"no server answers at {self.base_url} ({kind}); start one with: {command}"

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        """Request one completion.

        Raises ContextFull if the conversation fills the context length, ConnectionError if the
        server is lost, and RuntimeError with the server's message for another error status.
        """
        return (await self.chat_group(prompt, sampling, 1))[0]

    async def chat_group(
        self,
        prompt: Prompt,
        sampling: Sampling,
        count: int,
        name: str = "",
        so_far: list[Completion] | None = None,
    ) -> list[Turn]:
        """Request `count` completions of one prompt, with consecutive seeds from `sampling.seed`.

        Args:
            name: name under which a Hone server reports progress; a named request is not retried.
            so_far: partial completions, one per seed, from which a Hone server continues.
        """
        optional = {
            "tools": prompt.tools,
            "chat_template_kwargs": prompt.template_arguments,
            "n": count if count > 1 else None,
            "request_name": name,
            "so_far": [_encode_partial(one) for one in so_far or []],
        }
        body = {
            "model": self.model,
            "messages": prompt.messages,
            "return_token_ids": True,
            "return_token_logprobs" if self.is_hone else "logprobs": True,
            **{key: value for key, value in optional.items() if value},
            **_encode_sampling(sampling),
            **(_encode_prompt(prompt) if prompt.before and self.is_hone else {}),
            **self.extra_body,
        }
        url = f"{self.base_url}/chat/completions"
        retries = 0 if name else self.retries
        answer = await self._post_json(url, body, retries=retries)
        usage = answer.get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0
        prompt_ids = answer.get("prompt_token_ids") or []
        return [_parse_turn(prompt_ids, choice) for choice in answer["choices"]]

    async def call_control(
        self, route: str, body: dict[str, Any] | None = None, timeout: float = 600.0
    ) -> dict[str, Any]:
        """Call a control route of a Hone server: GET without a body, POST with one."""
        url = f"{self.base_url.removesuffix('/v1')}/{route}"
        if body is not None:
            return await self._post_json(url, body, timeout, self.retries)
        try:
            answer = await self.http.get(url, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerLost(f"{url}: {_describe_error(error)}") from None
        if answer.status_code != 200:
            raise _refusal_error(url, answer)
        return _json_of(answer)

    async def is_up(self, timeout: float = 5.0) -> bool:
        """Return True if the server answers on /health within `timeout` seconds."""
        return not await self.why_down(timeout)

    async def why_down(self, timeout: float) -> str:
        """Return why the server's /health fails (gone or silent), or "" if it answers 200."""
        try:
            answer = await self.http.get(
                f"{self.base_url.removesuffix('/v1')}/health", timeout=timeout
            )
        except httpx.ConnectError:
            return "it is gone: nothing listens there"
        except httpx.TimeoutException:
            return f"/health did not answer within {timeout:.0f} s"
        except httpx.HTTPError as error:
            return f"it is gone: /health: {_describe_error(error)}"
        return "" if answer.status_code == 200 else f"/health answered {answer.status_code}"

    async def _post_json(
        self, url: str, body: dict[str, Any], timeout: float | None = None, retries: int = 0
    ) -> dict[str, Any]:
        timeout = timeout or self.timeout
        for attempt in range(retries + 1):
            try:
                answer = await self.http.post(url, json=body, timeout=timeout)
            except httpx.TimeoutException:
                raise ServerLost(f"{url} did not answer within {timeout} s") from None
            except httpx.HTTPError as error:
                if attempt == retries:
                    raise ServerLost(f"{url}: {_describe_error(error)}") from None
            else:
                if answer.status_code == 200:
                    return _json_of(answer)
                refusal = _refusal_error(url, answer)
                if (
                    not isinstance(refusal, RuntimeError)
                    or isinstance(refusal, Refused)
                    or attempt == retries
                ):
                    raise refusal
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    result: dict[str, Any]
    try:
        # Five times faster than Python's encoder, and accepts less.
        result = from_json(answer.content)
    except ValueError:
        result = answer.json()
    return result


def _refusal_error(url: str, answer: httpx.Response) -> Exception:
    """Return the exception for a status other than 200.

    It is ContextFull if the prompt fills the context length, Refused for another 4xx except 429,
    and otherwise a RuntimeError, after which the request is retried.
    """
    said = answer.text[:500]
    status = answer.status_code
    if status == 400 and (_error_code(answer) == FULL or FULL_IN_WORDS in said):
        return ContextFull(said)
    message = f"{url} answered {status}: {said}"
    return (
        Refused(message, status) if 400 <= status < 500 and status != 429 else RuntimeError(message)
    )


def _error_code(answer: httpx.Response) -> Any:
    """Return the code of an error in OpenAI's format."""
    try:
        error = answer.json().get("error")
    except (ValueError, AttributeError):
        return None
    return error.get("code") if isinstance(error, dict) else None


def _encode_partial(one: Completion) -> dict[str, Any]:
    """Return the JSON of a partial completion that a server continues from."""
    return {"ids": one.ids, "logprobs": one.logprobs, "versions": one.versions}


def _encode_prompt(prompt: Prompt) -> dict[str, Any]:
    return {"conversation_ids": prompt.before, "conversation_messages": prompt.covered}


def _encode_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling fields of a request; most are left out if they have their default."""
    given = asdict(sampling)
    always = ("max_tokens", "temperature", "seed")
    default = asdict(Sampling())
    given["logit_bias"], default["logit_bias"] = dict(sampling.logit_bias), {}
    return {key: value for key, value in given.items() if key in always or value != default[key]}


def serve_command(model: str) -> str:
    """Return the shell command that serves a model.

    `model` is a directory, a hub id, an adapter's directory or an adapter's name.
    """
    path = Path(model).expanduser()
    if (path / "adapter_config.json").is_file() and not (path / "config.json").exists():
        try:
            base = json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = None
        base, name, directory = map(shlex.quote, (base or "BASE", path.name, model))
        return f"inference --model.name {base} --adapters.{name} {directory}"
    if not path.exists() and "/" not in model:
        return f"inference --model.name MODEL, or with an adapter of that name --adapters.{model} DIRECTORY"
    return f"inference --model.name {shlex.quote(model)}"


def connect_clients(config: ClientConfig, model: str, **options: Any) -> list[HttpClient]:
    """Return a client for each configured server.

    Raises ValueError if the environment variable `config.api_key_var` is not set.
    """
    key = None
    if config.api_key_var:
        key = os.environ.get(config.api_key_var, "").strip()
        if not key:
            raise ValueError(
                f"client.api-key-var: the environment variable {config.api_key_var} is not set"
            )
    urls = [
        url if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
        for url in config.base_url
    ]
    return [HttpClient(url, model, key or own_key(url), is_hone=True, **options) for url in urls]


def _choose_transport(url: str) -> httpx.AsyncBaseTransport | None:
    """Return `http_connection.Wire`, faster than httpx's own transport, if it can serve this URL.

    Otherwise return None, for httpx's own.
    """
    if importlib.util.find_spec("httptools") is None:
        return None
    from hone.clients.http_connection import Wire, is_direct

    return Wire() if is_direct(url) else None


def _describe_error(error: httpx.HTTPError) -> str:
    """Return an error's type and text, without the text of a LocalProtocolError.

    That text may hold the API key.
    """
    name = type(error).__name__
    return name if isinstance(error, httpx.LocalProtocolError) else f"{name}: {error}"


def _parse_turn(prompt_ids: list[int], choice: dict[str, Any]) -> Turn:
    ids = choice.get("token_ids") or []
    logprobs = choice.get("token_logprobs")
    if logprobs is None:
        logprobs = [
            entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []
        ]
    versions = choice.get("policy_versions") or [0] * len(ids)
    reason = choice.get("finish_reason") or "stop"
    reason = "stop" if reason == "tool_calls" else reason
    completion = Completion(ids, logprobs, versions, reason, routing=choice.get("routing") or "")
    message = choice["message"]
    return Turn(
        prompt_ids, completion, message.get("content") or "", message.get("tool_calls") or []
    )
