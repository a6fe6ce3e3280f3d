"""The routes of the OpenAI protocol as its own client uses them: whole and streamed, chats, texts and token ids."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest

from hone.records import Prompt
from hone.text.tokenizer import Tokenizer
from tests.hangs import HANG_SECONDS

from .conftest import command, generated_tokens, http, until

pytestmark = pytest.mark.main_path

MESSAGES = [
    {
        "role": "system",
        "content": "Reverse the text character-by-character. Put your answer in <reversed_text> tags.",
    },
    {"role": "user", "content": "hello"},
]
DRAWN = {"seed": 11, "temperature": 1.0, "max_tokens": 40}
TOLD = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0)


def control(server, route, **body):
    return http.post(f"{server.url.removesuffix('/v1')}/{route}", json=body)


def test_a_streamed_chat_is_the_whole_one_in_pieces(client, trained):
    ask = {
        "model": str(trained),
        "messages": MESSAGES,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        **DRAWN,
    }
    whole = client.chat.completions.create(**ask, extra_body=TOLD)
    chunks = list(
        client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}, extra_body=TOLD
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert (
        len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    )
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for expected in whole.choices:
        mine = [
            choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index
        ]
        assert "".join(choice.delta.content or "" for choice in mine) == expected.message.content
        assert [
            i for choice in mine for i in getattr(choice, "token_ids", [])
        ] == expected.token_ids
        entries = [entry for choice in mine if choice.logprobs for entry in choice.logprobs.content]
        assert [e.token for e in entries] == [e.token for e in expected.logprobs.content]
        assert [e.logprob for e in entries] == pytest.approx(
            [e.logprob for e in expected.logprobs.content], abs=1e-4
        )
        assert all(len(e.top_logprobs) == 2 for e in entries)
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == expected.finish_reason == "length"
    assert len(chunks) > 6  # while it is written, not at its end


@pytest.mark.parametrize("keep", [False, True])
def test_a_stream_shows_nothing_of_a_stop_string(client, trained, keep):
    ask = {"model": str(trained), "messages": MESSAGES, **DRAWN}
    free = client.chat.completions.create(**ask, extra_body=TOLD).choices[0].message.content
    stop = free[5:8]
    told = TOLD | {"include_stop_str_in_output": keep}
    whole = client.chat.completions.create(
        **ask, stop=[stop, "never there"], extra_body=told
    ).choices[0]
    pieces = list(
        client.chat.completions.create(
            **ask, stop=[stop, "never there"], extra_body=told, stream=True
        )
    )
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert said == whole.message.content == free[: free.find(stop) + (3 if keep else 0)]
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason == "stop"


def test_texts_and_token_ids_are_completed(client, server, trained):
    tokenizer = Tokenizer(trained)
    texts = ["one two", "three"]
    ids = [tokenizer.encode(text) for text in texts]
    ask = {"model": str(trained), "n": 2, "logprobs": 1, "extra_body": TOLD, **DRAWN}
    by_text = client.completions.create(prompt=texts, **ask)
    by_ids = client.completions.create(prompt=ids, **ask)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] and len(
        by_text.choices
    ) == 4
    assert (
        by_text.usage.prompt_tokens == sum(map(len, ids)) and by_text.usage.completion_tokens == 160
    )
    alone = client.completions.create(prompt=texts[1], **ask).choices[0]
    assert alone.text == by_text.choices[2].text and by_text.choices[2].index == 2
    logprobs = alone.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 40
    assert all(
        own in tops and max(tops.values()) >= tops[own]
        for own, tops in zip(logprobs.tokens, logprobs.top_logprobs)
    )
    chunks = list(client.completions.create(prompt=texts, **ask, stream=True))
    for i, expected in enumerate(by_text.choices):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == i]
        assert (
            "".join(choice.text for choice in mine) == expected.text
            and mine[-1].finish_reason == "length"
        )
    assert (
        client.completions.create(
            model=str(trained), prompt="x", extra_body=TOLD
        ).usage.completion_tokens
        == 16
    )


def test_a_prompt_is_echoed_with_its_logprobs(client, server, trained):
    ids = Tokenizer(trained).encode("an echo")
    ask = {"model": str(trained), "prompt": "an echo", "echo": True}
    (choice,) = client.completions.create(**ask, max_tokens=0, logprobs=1).choices
    assert choice.text == "an echo" and choice.finish_reason == "length"
    scored = control(server, "score", ids=ids).json()["logprobs"]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(scored, abs=1e-4)
    assert choice.logprobs.text_offset == list(range(7)) and choice.logprobs.top_logprobs[0] is None
    best = [max(tops.values()) for tops in choice.logprobs.top_logprobs[1:]]
    assert all(
        top >= own - 1e-6 for top, own in zip(best, choice.logprobs.token_logprobs[1:], strict=True)
    )
    (more,) = client.completions.create(**ask, logprobs=0, extra_body=TOLD, **DRAWN).choices
    assert more.text.startswith("an echo") and len(more.logprobs.tokens) == len(ids) + 40
    streamed = list(client.completions.create(**ask, stream=True, extra_body=TOLD, **DRAWN))
    assert "".join(chunk.choices[0].text for chunk in streamed) == more.text


def test_token_ids_in_and_out(client, server, trained):
    tokenizer = Tokenizer(trained)
    found = control(
        server, "tokenize", model=str(trained), messages=MESSAGES, return_token_strs=True
    ).json()
    prompt = tokenizer.prompt_ids(Prompt(MESSAGES))
    assert found["tokens"] == prompt and found["count"] == len(prompt) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    bare = control(server, "tokenize", messages=MESSAGES, add_generation_prompt=False).json()[
        "tokens"
    ]
    assert bare == prompt[: len(bare)] and len(bare) < len(prompt)
    text = "a text: ü 漢"
    tokens = control(server, "tokenize", prompt=text).json()["tokens"]
    assert control(server, "detokenize", tokens=tokens).json() == {"prompt": text}
    body = {"model": str(trained), "messages": MESSAGES, **DRAWN, **TOLD}
    by_messages = http.post(f"{server.url}/chat/completions", json=body).json()
    by_ids = http.post(
        f"{server.url}/chat/completions/tokens", json=body | {"tokens": prompt}
    ).json()
    assert by_ids["choices"] == by_messages["choices"] and by_ids["prompt_token_ids"] == prompt
    assert control(server, "tokenize").status_code == 400
    assert control(server, "detokenize", tokens=[10**6]).status_code == 400
    assert control(server, "tokenize", prompt="x", model="other").status_code == 404


def test_what_prometheus_reads(server, trained):
    def read():
        answer = http.get(f"{server.url.removesuffix('/v1')}/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(
            "text/plain; version=0.0.4"
        )
        assert answer.text.count("# TYPE hone_") == answer.text.count("# HELP hone_") == 7
        lines = [line.split(" ") for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    body = {"model": str(trained), "messages": MESSAGES, "n": 2, **DRAWN, **TOLD}
    used = http.post(f"{server.url}/chat/completions", json=body).json()["usage"]
    after = read()
    grown = {name.removeprefix("hone_"): after[name] - before[name] for name in after}
    assert (
        grown["requests_total"] == 2
        and grown["generated_tokens_total"] == used["completion_tokens"] == 80
    )
    assert grown["prompt_tokens_total"] == 2 * used["prompt_tokens"]
    assert after["hone_requests_running"] == after["hone_requests_waiting"] == 0


def test_models_by_name(client, trained):
    assert client.models.retrieve(str(trained)).id == str(trained)
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_streams_that_are_cut_free_their_places_and_the_rest_complete(server, trained):
    body = {
        "model": str(trained),
        "messages": MESSAGES,
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 150,
    }

    async def one(client, i):
        async with client.stream(
            "POST", f"{server.url}/chat/completions", json=body | {"seed": i}
        ) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if i % 2 and len(lines) > 4:
                    return None
            return lines

    async def all_of_them():
        async with httpx.AsyncClient(
            timeout=HANG_SECONDS, limits=httpx.Limits(max_connections=None)
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(40)))

    ended = asyncio.run(all_of_them())
    for lines in ended[::2]:
        assert lines[-2] == "data: [DONE]"
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: control(server, "progress").json()["running"] == 0)
    assert "Traceback" not in server.log.read_text()


def test_a_long_message_does_not_hold_up_others(server, trained):
    long = {
        "model": str(trained),
        "messages": [{"role": "user", "content": "a few words " * 600_000}],
    }

    async def both():
        async with httpx.AsyncClient(timeout=HANG_SECONDS) as client:
            first = asyncio.create_task(client.post(f"{server.url}/chat/completions", json=long))
            waits = []
            while not first.done():
                begun = time.perf_counter()
                await client.get(f"{server.url.removesuffix('/v1')}/health")
                waits.append(time.perf_counter() - begun)
            return await first, waits

    answer, waits = asyncio.run(both())
    assert answer.status_code == 400 and "maximum context length is 2048" in answer.text
    # Seconds; an event loop that is held answers once, late
    assert max(waits) < max(1.0, sum(waits) / 2)
    over = json.dumps(long | {"messages": [{"role": "user", "content": "x" * 2**24}]})
    sent = {"content-type": "application/json"}
    assert (
        http.post(f"{server.url}/chat/completions", content=over, headers=sent).status_code == 413
    )
    in_parts = http.post(
        f"{server.url}/chat/completions", content=(part.encode() for part in [over]), headers=sent
    )
    assert in_parts.status_code == 413 and "the body is over" in in_parts.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        ("chat/completions", {"presence_penalty": float("nan")}, "presence_penalty"),
        ("chat/completions", {"frequency_penalty": float("inf")}, "frequency_penalty"),
        ("chat/completions", {"logit_bias": {"5": float("nan")}}, "logit_bias"),
        ("chat/completions", {"best_of": 2}, "best_of = 2 is not supported"),
        ("chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        (
            "chat/completions",
            {"stream_options": {"include_usage": True}},
            "stream_options needs stream",
        ),
        ("chat/completions", {"stream": True, "request_name": "x"}, "without stream"),
        ("chat/completions", {"stream": True, "max_tokens": 2048}, "maximum context length"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [10**9]}, "the model has no token"),
        ("completions", {"prompt": [10**9], "stream": True}, "the model has no token"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "needs echo"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("chat/completions/tokens", {"tokens": []}, "tokens"),
    ],
)
def test_what_would_be_ignored_is_refused(server, trained, route, fields, words):
    body = {
        "model": str(trained),
        **({} if route == "completions" else {"messages": MESSAGES}),
        **fields,
    }
    answer = http.post(
        f"{server.url}/{route}",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_what_has_no_part_in_the_answer_is_taken(server, trained):
    harmless = {
        "user": "me",
        "metadata": {},
        "store": False,
        "parallel_tool_calls": True,
        "best_of": 1,
        "suffix": "",
    }
    body = {
        "model": str(trained),
        "messages": MESSAGES,
        "max_tokens": 2,
        "unheard_of": 1,
        **harmless,
    }
    assert http.post(f"{server.url}/chat/completions", json=body).status_code == 200


def test_an_empty_body_is_told_what_it_lacks(server):
    answer = http.post(f"{server.url}/chat/completions", json={})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model, messages: required, and not in the request"


COLOURS = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
}
ADD["parameters"]["additionalProperties"] = False
SUB = {
    "name": "sub",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"description": "", **one}} for one in (ADD, SUB)]


def is_coloured(text):
    found = json.loads(text)
    return (
        set(found) == {"colour", "count"}
        and found["colour"] in ("red", "green")
        and 0 <= found["count"] < 100
    )


MANY = {
    "type": "object",
    "properties": {f"a{i}": {"enum": [1]} for i in range(3000)},
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "maybe \U0001f600"]
FORMS = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "c", "schema": COLOURS},
            }
        },
        is_coloured,
    ),
    ({"structured_outputs": {"json": json.dumps(COLOURS)}}, is_coloured),
    ({"guided_json": COLOURS}, is_coloured),
    (
        {"structured_outputs": {"regex": "[a-c]{3}-[0-9]+x"}},
        lambda text: re.fullmatch("[a-c]{3}-[0-9]+x", text),
    ),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    (
        {"guided_grammar": 'start: "<" /[xy]{2,4}/ ">"'},
        lambda text: re.fullmatch("<[xy]{2,4}>", text),
    ),
]


has_forms = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="no llguidance for this system"
)


@has_forms
@pytest.mark.parametrize(("asked", "fits"), FORMS, ids=[next(iter(asked)) for asked, _ in FORMS])
def test_answers_have_the_form_that_is_asked_for(server, trained, asked, fits):
    body = {
        "model": str(trained),
        "messages": MESSAGES,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": 300,
        "n": 4,
    }
    body |= {"top_k": 1000, **asked}
    for extra in ({}, {"ignore_eos": True}, {"temperature": 0.0}, {"min_tokens": 150}):
        answer = http.post(f"{server.url}/chat/completions", json={**body, **extra})
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "stop" and fits(choice["message"]["content"]), choice
    body |= {"stream": True, "n": 1}
    with http.stream("POST", f"{server.url}/chat/completions", json=body) as stream:
        events = [
            json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")
        ]
    assert fits("".join(event["choices"][0]["delta"].get("content") or "" for event in events))


@has_forms
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_a_call_of_a_tool_can_be_required(client, trained, choice):
    ask = {
        "model": str(trained),
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "n": 4,
        **DRAWN,
    }
    ask["max_tokens"] = 200
    for one in client.chat.completions.create(**ask).choices:
        (call,) = one.message.tool_calls
        assert one.finish_reason == "tool_calls" and not one.message.content
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, set(arguments)) in (
            [("sub", set())] + [("add", {"a"})] * (choice == "required")
        )
    pieces = client.chat.completions.create(**ask | {"n": 1}, stream=True)
    names = [
        call.function.name
        for piece in pieces
        for c in piece.choices
        for call in c.delta.tool_calls or []
    ]
    assert names and set(filter(None, names)) <= {"add", "sub"}


@has_forms
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs it"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "(a"}, "regex"),
        ({"guided_json": {"type": "nope"}}, "Invalid type: nope"),
        ({"guided_json": "{"}, "JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "only one output format"),
        ({"tool_choice": "required"}, "no tools to call"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": TOOLS},
            "not one of the tools",
        ),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "another form"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools: each is"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": "x"}]},
            "tools: each is",
        ),
        ({"guided_json": "[" * 20000}, "not JSON"),
        (
            {"n": 1024, "guided_regex": "a", "max_tokens": 1, "prompt": [[1]] * 1000},
            "1000 prompts x n = 1024",
        ),
        (
            {"guided_json": MANY, "max_tokens": 400, "temperature": 0},
            "could not be followed to its end",
        ),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(server, trained, fields, words):
    route = "completions" if "prompt" in fields else "chat/completions"
    body = {
        "model": str(trained),
        **({} if "prompt" in fields else {"messages": MESSAGES}),
        **fields,
    }
    answer = http.post(f"{server.url}/{route}", json=body)
    assert answer.status_code == 400 and words in answer.text, answer.text


def test_responses_in_their_plain_text_form(client, server, trained):
    said = client.responses.create(
        model=str(trained),
        instructions=MESSAGES[0]["content"],
        input="hello",
        temperature=0.0,
        max_output_tokens=40,
    )
    chat = client.chat.completions.create(
        model=str(trained), messages=MESSAGES, temperature=0.0, max_tokens=40
    )
    assert (
        said.output_text == chat.choices[0].message.content
        and said.usage.input_tokens == chat.usage.prompt_tokens
    )
    assert said.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    items = [
        {"role": "developer", "content": MESSAGES[0]["content"]},
        {"role": "user", "content": parts},
    ]
    again = client.responses.create(
        model=str(trained), input=items, temperature=0.0, max_output_tokens=40
    )
    assert again.output_text == said.output_text
    if importlib.util.find_spec("llguidance") is not None:
        form = {"type": "json_schema", "name": "c", "schema": COLOURS}
        ask = {"model": str(trained), "input": "hello", "max_output_tokens": 300}
        assert is_coloured(client.responses.create(**ask, text={"format": form}).output_text)
    for wrong, words in (
        ({"stream": True}, "stream = True"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "not a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text parts only"),
        ({"model": "other"}, "is not served here"),
    ):
        answer = http.post(
            f"{server.url}/responses", json={"model": str(trained), "input": "a", **wrong}
        )
        assert answer.status_code in (400, 404) and words in answer.text, answer.text


@pytest.mark.node
def test_openai_s_client_for_node(server, trained, tmp_path):
    place = os.environ.get("OPENAI_NODE")
    if place is None:
        pytest.skip("OPENAI_NODE is not set (make test-node)")
    script = Path(__file__).parent / "openai_client.mjs"
    copied = shutil.copy(script, place)  # a module looks for packages from where it lies
    words = ["node", copied, server.url, str(trained)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (
        found["models"] == [str(trained)]
        and found["whole"] == found["streamed"]
        and found["chunks"] >= 3
    )
    assert found["entries"] == found["usage"]["completion_tokens"]
    assert found["call"]["name"] == "add" and json.loads(found["call"]["arguments"])["a"] in (1, 2)
    assert found["streamedCall"] == found["call"] and found["reason"] == "tool_calls"
    assert found["text"] and found["answer"]
    assert found["refusal"] == {"status": 404, "name": "NotFoundError"}


def test_random_requests_and_streams_that_are_cut():
    """The short form of `python -m tests.fuzz`."""
    done = command("python", "-m", "tests.fuzz", "--requests", 600, "--streams", 64, "--seed", 1)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0 and found["statuses"]["200"] > 200 and found["statuses"]["400"] > 100


def test_hostile_clients_cost_a_server_little():
    """The short form of `python -m tests.fuzz --hostile`."""
    done = command(
        "python",
        "-m",
        "tests.fuzz",
        "--hostile",
        "--requests",
        600,
        "--connections",
        300,
        "--seed",
        1,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0 and found["statuses"]["401"] > 100 and found["statuses"]["200"] > 5


def test_where_one_of_several_is_refused_the_others_are_ended(server, trained):
    body = {"model": str(trained), "prompt": ["abc", ""], "max_tokens": 1900, "ignore_eos": True}
    before = generated_tokens(server)
    assert http.post(f"{server.url}/completions", json=body).status_code == 400
    until(lambda: control(server, "progress").json()["running"] == 0)
    assert generated_tokens(server) - before < 1900
