"""Judge a model's answers with another model, over any OpenAI-compatible endpoint."""

import asyncio
import os
from typing import Any

from hone.environments.calls import call_function
from hone.environments.parsers import Completion, Parser
from hone.environments.rubric import Rubric
from hone.records import Message

JUDGE_PROMPT = """Decide whether a response gives the right answer to a question.

Question:
{question}

Right answer:
{answer}

Response:
{response}

Say only "yes" if the response gives the right answer, else "no"."""
JUDGE_RETRIES = 3


class JudgeRubric(Rubric):
    """Rubric whose reward functions can call a judge model.

    A reward function with a parameter `judge` calls `await judge(prompt, completion, answer,
    state)`. The judge's answers are cached in the rollout's state, so that several functions share
    one request.

    Args:
        judge_client: an `openai` client; by default requests go to `base_url`, with the key from
            the environment variable `api_key_var`.
        judge_model: name of the judge on its server.
        judge_sampling_args: further fields of the request.
        judge_prompt: prompt template with {question}, {answer} and {response}.
        timeout: seconds per request; not used with `judge_client`.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: dict[str, Any] | None = None,
        judge_prompt: str = JUDGE_PROMPT,
        base_url: str = "https://api.openai.com/v1",
        api_key_var: str = "OPENAI_API_KEY",
        timeout: float = 60.0,
        **others: Any,
    ) -> None:
        super().__init__(parser=parser, **others)
        self.judge_client = judge_client
        self.judge_model = judge_model
        self.judge_prompt = judge_prompt
        self.judge_sampling_args = {
            key: v for key, v in (judge_sampling_args or {}).items() if v is not None
        }
        self.url = f"{base_url.rstrip('/')}/chat/completions"
        self.api_key_var = api_key_var
        self.timeout = timeout
        for name in ("judge_client", "judge_model", "judge_prompt", "judge_sampling_args"):
            self.add_class_object(name, getattr(self, name))
        self.add_class_object("judge", self.judge)

    async def judge(
        self,
        prompt: list[Message] | str,
        completion: Completion,
        answer: str,
        state: dict[str, Any] | None = None,
        **_: Any,
    ) -> str:
        """Return the judge's reply about the answer in `completion`, cached in `state` if given.

        Raises ConnectionError if the judge cannot be reached, RuntimeError if its server answers
        with an error.
        """
        asked = prompt if isinstance(prompt, str) else str(prompt[-1]["content"] if prompt else "")
        response = self.parser.parse_answer(completion)
        text = self.judge_prompt.format(question=asked, answer=answer, response=response or "")
        kept: dict[str, str] = {} if state is None else state.setdefault("judge_response", {})
        if text not in kept:
            kept[text] = await self._ask_judge([{"role": "user", "content": text}])
        return kept[text]

    async def _ask_judge(self, messages: list[Message]) -> str:
        import httpx  # not needed by environments without a judge

        body = {"model": self.judge_model, "messages": messages, **self.judge_sampling_args}
        if self.judge_client is not None:
            answer = await call_function(self.judge_client.chat.completions.create, body)
            return answer.choices[0].message.content or ""
        key = os.environ.get(self.api_key_var, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=self.timeout, headers=headers) as client:
            for attempt in range(JUDGE_RETRIES):
                is_last = attempt == JUDGE_RETRIES - 1
                try:
                    answer = await client.post(self.url, json=body)
                except httpx.HTTPError as error:
                    if is_last:
                        raise ConnectionError(
                            f"the judge at {self.url}: {type(error).__name__}"
                        ) from None
                else:
                    if answer.status_code == 200:
                        return answer.json()["choices"][0]["message"]["content"] or ""
                    if is_last or (answer.status_code < 500 and answer.status_code != 429):
                        raise RuntimeError(
                            f"the judge at {self.url} answered {answer.status_code}: {answer.text[:200]}"
                        )
                await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")
