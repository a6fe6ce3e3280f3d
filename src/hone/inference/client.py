"""The client of an OpenAI-compatible server: the model as environments see it, over HTTP."""

import asyncio
import itertools
from typing import Any

import httpx

from hone.records import Completion, Message, Sampling, Turn


class HttpClient:
    """Use as `async with HttpClient(…) as client`. `extra_body` goes into every request as it is."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        extra_body: dict[str, Any] | None = None,
        timeout: float = 600.0,
        max_concurrent: int = 32,
        retries: int = 3,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url, self.model, self.extra_body = base_url.rstrip("/"), model, extra_body or {}
        self.timeout, self.retries = timeout, retries
        limits = httpx.Limits(max_connections=None)
        # Several small pools: the cost of a request in httpx grows with the connections of its pool.
        pools = -(-max_concurrent // 32)
        self.pools = [httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits) for _ in range(pools)]
        self.turn = itertools.cycle(self.pools)

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self.pools:
            await pool.aclose()

    async def check(self) -> None:
        """Raises ConnectionError or ValueError, in words, unless the server answers and has the model."""
        url = f"{self.base_url}/models"
        try:
            answer = await self.pools[0].get(url, timeout=10.0)
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"no server answers at {self.base_url} ({type(error).__name__}); "
                f"start one with: inference --model.name {self.model}"
            ) from None
        if answer.status_code == 401:
            raise ValueError(f"{self.base_url} refuses the API key (401)")
        if answer.status_code == 200:
            served = [card["id"] for card in answer.json()["data"]]
            if self.model not in served:
                raise ValueError(f"{self.base_url} does not serve {self.model!r}; it serves {', '.join(served)}")

    async def chat(self, messages: list[Message], sampling: Sampling) -> Turn:
        """One completion. Raises RuntimeError with the words of a refusal, ConnectionError when the server is gone."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "logprobs": True,
            "return_token_ids": True,
            **self.extra_body,
        }
        answer = await self._post(body)
        choice = answer["choices"][0]
        ids = choice.get("token_ids") or []
        entries = (choice.get("logprobs") or {}).get("content") or []
        versions = choice.get("policy_versions") or [0] * len(ids)
        reason = choice.get("finish_reason") or "stop"
        completion = Completion(ids, [entry["logprob"] for entry in entries], versions, reason)
        return Turn(answer.get("prompt_token_ids") or [], completion, choice["message"]["content"] or "")

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.base_url}/chat/completions"
        for attempt in range(self.retries + 1):
            try:
                answer = await next(self.turn).post(url, json=body)
            except httpx.TimeoutException:
                raise ConnectionError(f"{url} did not answer within {self.timeout} s") from None
            except httpx.HTTPError as error:
                if attempt == self.retries:
                    raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from None
            else:
                if answer.status_code == 200:
                    result: dict[str, Any] = answer.json()
                    return result
                is_final = answer.status_code < 500 and answer.status_code != 429
                if is_final or attempt == self.retries:
                    raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:500]}")
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")
