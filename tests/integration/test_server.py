"""The served model as clients see it: OpenAI's Python client, curl, and everything they may get wrong."""

import asyncio
import json
import logging
import math
import subprocess

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.clients import fleet
from hone.clients.http import HttpClient
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import load_model
from hone.records import Prompt, Sampling
from hone.text.tokenizer import Tokenizer
from tests.hangs import HANG_SECONDS

from .conftest import Server, command, generated_tokens, http, until

pytestmark = pytest.mark.main_path

MESSAGES = [
    {
        "role": "system",
        "content": "Reverse the text character-by-character. Put your answer in <reversed_text> tags.",
    },
    {"role": "user", "content": "hello"},
]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0)


def post(server, **body):
    return http.post(f"{server.url}/chat/completions", **body)


def chat(server, trained, **fields):
    body = json.dumps({"model": str(trained), "messages": MESSAGES, "max_tokens": 8, **fields})
    return post(server, content=body, headers={"content-type": "application/json"})


def test_openai_client(client, trained):
    assert [model.id for model in client.models.list()] == [str(trained)]
    answer = client.chat.completions.create(
        model=str(trained),
        messages=MESSAGES,
        max_completion_tokens=8,
        n=2,
        logprobs=True,
        seed=1,
        temperature=1.0,
        extra_body={
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "top_k": -1,
            "min_p": None,
            "odd": 1,
        },
    )
    assert len(answer.choices) == 2 and answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    for choice in answer.choices:
        assert len(choice.token_ids) == len(choice.logprobs.content) <= 8
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs.content[0].token == f"token_id:{choice.token_ids[0]}"


def test_a_completion_goes_on_from_what_was_written_elsewhere(server, trained):
    fields = {
        "return_token_ids": True,
        "return_token_logprobs": True,
        "seed": 3,
        "ignore_eos": True,
    }
    whole = chat(server, trained, **fields).json()
    (choice,) = whole["choices"]
    keys = {"ids": "token_ids", "logprobs": "token_logprobs", "versions": "policy_versions"}
    before = {name: choice[key][:5] for name, key in keys.items()}
    answer = chat(server, trained, **fields, so_far=[before], request_name="some").json()
    (joined,) = answer["choices"]
    assert (
        len(joined["token_ids"])
        == len(joined["token_logprobs"])
        == len(joined["policy_versions"])
        == 8
    )
    assert {name: joined[key][:5] for name, key in keys.items()} == before
    assert answer["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = answer["prompt_token_ids"] + joined["token_ids"]
    scored = http.post(server.url.removesuffix("/v1") + "/score", json={"ids": ids}).json()[
        "logprobs"
    ]
    assert joined["token_logprobs"] == pytest.approx(scored[-8:], abs=1e-4)
    refused = chat(server, trained, so_far=[before, before])
    assert refused.status_code == 400 and "so_far is for each of n" in refused.text
    refused = chat(server, trained, so_far=[before | {"ids": [10**12] * 5}])
    assert refused.status_code == 400 and "the model has no token 1000000000000" in refused.text
    refused = chat(server, trained, so_far=[before | {"ids": [1]}])
    assert refused.status_code == 400 and "of different lengths" in refused.text
    state = http.post(server.url.removesuffix("/v1") + "/progress", json={}).json()
    assert state == {"running": 0, "waiting": 0, "without_room": 0, "partials": {}}


def test_a_server_that_reads_many_requests_is_not_taken_for_a_full_one(
    server, trained, monkeypatch
):
    monkeypatch.setattr(
        fleet, "POLL_SECONDS", 0.001
    )  # so that it is looked at while it has only begun
    learn, found = fleet.Server.update_progress, []

    def learns(self, state):
        found.append(self.busy)
        learn(self, state)

    monkeypatch.setattr(fleet.Server, "update_progress", learns)

    async def program():
        async with HttpClient(server.url, str(trained)) as client:
            made = fleet.Fleet([client], None, 10.0, logging.getLogger("hone"))
            watching, least = asyncio.ensure_future(made.watch_servers()), []
            for _ in range(5):
                asked = [
                    made.chat(
                        Prompt([{"role": "user", "content": f"text {i // 8}"}]),
                        Sampling(1.0, 16, seed=i),
                    )
                    for i in range(128)
                ]
                await asyncio.gather(*asked)
                least.append(made.servers[0].limit)
            assert made.servers[0].is_up and not watching.done()
            watching.cancel()
            await made.close()
        return least

    assert asyncio.run(program()) == [math.inf] * 5
    assert any(found)


def test_logprobs_are_those_of_the_model(server, trained):
    answer = chat(
        server, trained, logprobs=True, return_token_ids=True, temperature=0.8, seed=3
    ).json()
    ids = answer["choices"][0]["token_ids"]
    prompt = answer["prompt_token_ids"]
    assert prompt == Tokenizer(trained).prompt_ids(Prompt(MESSAGES))
    model = load_model(trained)
    packed = PackedAttention([len(prompt) + len(ids)])
    with torch.no_grad():
        logits = model.compute_logits(
            model(torch.tensor(prompt + ids), packed.token_positions(), packed)
        )[len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    got = torch.tensor([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_seed_gives_the_same_answer_among_many(server, trained):
    async def ask(seeds):
        async with httpx.AsyncClient(timeout=HANG_SECONDS) as http:
            body = {
                "model": str(trained),
                "messages": MESSAGES,
                "max_tokens": 12,
                "return_token_ids": True,
            }
            posts = [
                http.post(f"{server.url}/chat/completions", json=body | {"seed": s}) for s in seeds
            ]
            return [r.json()["choices"][0]["token_ids"] for r in await asyncio.gather(*posts)]

    alone = asyncio.run(ask([7]))[0]
    many = asyncio.run(ask(range(40)))
    assert many[7] == alone and len({tuple(ids) for ids in many}) > 5


def ask(server, trained, **fields):
    answer = chat(server, trained, max_tokens=24, seed=5, return_token_ids=True, **fields).json()
    return answer["choices"][0]


def test_token_ids_go_in_and_come_out(server):
    """As the train client of verifiers 0.4 asks: one call per turn, the same tokens as elsewhere."""
    root = server.url.removesuffix("/v1")
    model = http.get(f"{server.url}/models").json()["data"][0]
    prompt = [5, 6, 7, 8]
    params = {"temperature": 0.7, "max_tokens": 12, "seed": 3, "top_k": 20}
    asked = {
        "model": model["id"],
        "token_ids": prompt,
        "sampling_params": params
        | {"logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [9], "min_p": 0.0}
        | {"return_token_ids": True, "routed_experts_prompt_start": 3},
        "cache_salt": "7",
    }
    answer = http.post(f"{root}/inference/v1/generate", json=asked).json()
    (choice,) = answer["choices"]
    body = {"model": model["id"], "prompt": prompt, "stop_token_ids": [9], "logprobs": 1}
    body |= params | {"return_token_ids": True, "return_token_logprobs": True}
    expected = http.post(f"{server.url}/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == expected["finish_reason"]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [one["logprob"] for one in content] == expected["logprobs"]["token_logprobs"]
    # without max_tokens, up to the end of the context
    free = {"token_ids": prompt, "sampling_params": {"ignore_eos": True}}
    found = http.post(f"{root}/inference/v1/generate", json=free).json()
    assert found["usage"]["total_tokens"] == model["max_model_len"]
    assert found["choices"][0]["logprobs"] is None


def test_the_ids_that_could_be_drawn_are_returned(server):
    root = server.url.removesuffix("/v1")
    params = {"seed": 3, "top_k": 5, "max_tokens": 9, "return_sampling_mask": True}
    asked = {"token_ids": [5, 6, 7], "sampling_params": params}
    choice = http.post(f"{root}/inference/v1/generate", json=asked).json()["choices"][0]
    masks = choice["sampling_mask"]
    assert len(masks) == len(choice["token_ids"]) and {len(ids) for ids in masks} == {5}
    assert all(drawn in ids for drawn, ids in zip(choice["token_ids"], masks, strict=True))
    params["top_k"] = 0
    choice = http.post(f"{root}/inference/v1/generate", json=asked).json()["choices"][0]
    assert "sampling_mask" not in choice


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"return_routed_experts": True}}, "not a mixture of experts"),
        ({"sampling_params": {"routed_experts_prompt_start": -1}}, "routed_experts_prompt_start"),
        ({"token_ids": [10**9]}, "the model has no token 1000000000"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs is not supported"),
        ({"content_parts": [{"type": "image"}]}, "content_parts: this route takes token ids"),
        ({"model": "other"}, "model 'other' is not served here"),
        ({"sampling_params": {"max_tokens": 10**6}}, "maximum context length"),
    ],
)
def test_bad_requests_for_token_ids_are_refused(server, change, words):
    root = server.url.removesuffix("/v1")
    answer = http.post(f"{root}/inference/v1/generate", json={"token_ids": [1, 2]} | change)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_stop_strings_end_the_text_across_tokens(server, trained):
    free = ask(server, trained, ignore_eos=True)
    text = free["message"]["content"]
    stop = text[3:6]  # three characters, each a token of its own
    cut = ask(server, trained, ignore_eos=True, stop=["never there", stop])
    assert cut["message"]["content"] == text[: text.find(stop)] and cut["finish_reason"] == "stop"
    assert (
        cut["token_ids"] == free["token_ids"][: len(cut["token_ids"])]
        and len(cut["token_ids"]) < 24
    )
    kept = ask(server, trained, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept["message"]["content"] == text[: text.find(stop) + 3]


def test_the_ways_of_drawing_reach_the_engine(server, trained):
    banned = ask(server, trained)["token_ids"][0]
    assert ask(server, trained, logit_bias={str(banned): -1000})["token_ids"][0] != banned
    assert (
        ask(server, trained, top_k=1)["token_ids"]
        == ask(server, trained, temperature=0)["token_ids"]
    )
    assert (
        ask(server, trained, top_p=1e-9)["token_ids"]
        == ask(server, trained, min_p=1.0)["token_ids"]
    )
    assert len(ask(server, trained, min_tokens=20)["token_ids"]) >= 20
    assert (
        len(
            ask(server, trained, stop_token_ids=list(range(Tokenizer(trained).vocab_size)))[
                "token_ids"
            ]
        )
        == 1
    )
    assert len(set(ask(server, trained, presence_penalty=1e4, ignore_eos=True)["token_ids"])) == 24
    entries = ask(server, trained, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert all(
        len(e["top_logprobs"]) == 2 and e["top_logprobs"][0]["logprob"] >= e["logprob"] - 1e-6
        for e in entries
    )
    cold, raw = (
        ask(server, trained, logprobs=True, temperature=0.5, raw_logprobs=r) for r in (False, True)
    )
    assert cold["token_ids"] == raw["token_ids"] and cold["logprobs"] != raw["logprobs"]


def write_adapter(directory, model_dir, rank=2):
    """A LoRA adapter of every query projection, in peft's format."""
    directory.mkdir()
    tensors = {}
    for file in model_dir.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            if "q_proj" in key:
                name = f"base_model.model.{key.removesuffix('.weight')}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, tensor.shape[1])
                tensors[f"{name}.lora_B.weight"] = torch.randn(tensor.shape[0], rank)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )
    return str(directory)


def test_adapters_are_models_by_name(server, client, trained, tmp_path):
    control = server.url.removesuffix("/v1") + "/v1/load_lora_adapter"
    path = write_adapter(tmp_path / "a", trained)
    assert http.post(control, json={"lora_name": "a", "lora_path": path}).json()["adapters"] == [
        "a"
    ]
    try:
        assert [model.id for model in client.models.list()] == [str(trained), "a"]
        plain, other = (
            ask(server, model, ignore_eos=True)["token_ids"] for model in (trained, "a")
        )
        assert plain != other
        for body, words in (
            ({"lora_name": "b", "lora_path": str(trained)}, "is not an adapter"),
            ({"lora_name": str(trained), "lora_path": path}, "is the name of the model itself"),
        ):
            answer = http.post(control, json=body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    finally:
        http.post(control.replace("/load", "/unload"), json={"lora_name": "a"})
    refused = chat(server, "a")
    assert (
        refused.status_code == 404
        and "'a' is not served here" in refused.json()["error"]["message"]
    )


def test_a_client_that_hangs_up_frees_its_place(server, trained):
    before = generated_tokens(server)
    with pytest.raises(httpx.ReadTimeout):
        body = {
            "model": str(trained),
            "messages": MESSAGES,
            "max_tokens": 1900,
            "n": 200,
            "ignore_eos": True,
        }
        http.post(f"{server.url}/chat/completions", json=body, timeout=0.3)
    assert chat(server, trained).status_code == 200
    progress = server.url.removesuffix("/v1") + "/progress"
    until(lambda: http.post(progress, json={"known": {}}).json()["running"] == 0)
    assert generated_tokens(server) - before < 200 * 1900
    assert "Traceback" not in server.log.read_text()


def test_curl(server, trained):
    body = json.dumps({"model": str(trained), "messages": MESSAGES, "max_tokens": 4})
    words = [
        "curl",
        "-s",
        f"{server.url}/chat/completions",
        "-H",
        "content-type: application/json",
        "-d",
        body,
    ]
    answer = json.loads(
        subprocess.run(words, capture_output=True, timeout=HANG_SECONDS, check=True).stdout
    )
    assert (
        answer["object"] == "chat.completion"
        and answer["choices"][0]["message"]["role"] == "assistant"
    )


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "other"}, 404, "'other' is not served here"),
        (
            {"messages": [{"role": "user", "content": "x" * 2100}]},
            400,
            "maximum context length is 2048",
        ),
        ({"max_tokens": 2046}, 400, "maximum context length is 2048"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"content": "no role"}]}, 400, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "text parts only",
        ),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0.0}, 400, "top_p"),
        ({"top_k": -2}, 400, "top_k"),
        ({"min_p": 2}, 400, "min_p"),
        ({"logit_bias": {"5000": 1}}, 400, "token id 5000 is not one of the model's"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"stop": [1]}, 400, "stop"),
        ({"stop": "", "top_k": -1, "top_p": 1, "logit_bias": {}, "timeout": 60.0}, 200, ""),
        ({"n": 0}, 400, "n:"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "message 0 (user) has no content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, ""),
        ({"chat_template_kwargs": {"messages": []}}, 400, "messages cannot be set here"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "tools": [{"type": "function"}]},
            200,
            "",
        ),
        ({"temperature": 1e-30}, 200, ""),
        ({"seed": 2**70}, 200, ""),
        ({"seed": -1, "temperature": None, "max_tokens": None}, 200, ""),
    ],
)
def test_bad_requests_are_refused_with_words_never_with_500(server, trained, fields, status, words):
    answer = chat(server, trained, **fields)
    assert answer.status_code == status, answer.text
    if words:
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000])
def test_malformed_json_is_a_4xx(server, content):
    answer = post(server, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]


def test_unknown_routes_and_methods(server):
    assert http.get(f"{server.url}/nothing").status_code == 404
    assert http.get(f"{server.url}/chat/completions").status_code == 405


def test_the_key_guards_every_route_but_health(trained, tmp_path):
    server = Server(
        "--model.name",
        trained,
        "--api-key",
        "secret",
        "--server.host",
        "127.0.0.1",
        log=tmp_path / "log",
    )
    try:
        url = server.url.removesuffix("/v1")
        assert http.get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/v1/chat/completions", "/nothing", "/docs", "/openapi.json"):
            assert http.get(url + path).status_code == 401, path
            assert (
                http.get(url + path, headers={"authorization": "Bearer wrong"}).status_code == 401
            ), path
        assert (
            http.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).status_code
            == 200
        )
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url, api_key="wrong").models.list()
        assert "secret" not in server.log.read_text()
    finally:
        server.stop()


def test_a_port_in_use_is_named(server, trained):
    port = server.url.split(":")[2].split("/")[0]
    done = command("inference", "--model.name", trained, "--server.port", port, ok=False)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr


def test_vf_eval_against_the_server(server, trained, tmp_path):
    options = [
        "-m",
        trained,
        "-b",
        server.url,
        "-n",
        6,
        "-r",
        2,
        "-t",
        16,
        "-a",
        '{"texts": "generated", "max_chars": 6, "min_chars": 3}',
    ]
    done = command("vf-eval", "reverse-text", *options, "-s", cwd=tmp_path)
    assert "reward: avg - " in done.stdout and "exact_match: avg - " in done.stdout
    (saved,) = (tmp_path / "outputs" / "evals").glob("reverse-text--*/*")
    metadata = json.loads((saved / "metadata.json").read_text())
    results = [json.loads(line) for line in (saved / "results.jsonl").open()]
    assert len(results) == 12 and metadata["failed"] == 0
    assert metadata["reward"] == pytest.approx(sum(r["reward"] for r in results) / 12)


def test_vf_eval_fails_when_every_rollout_did(server, trained, tmp_path):
    options = ["-b", server.url, "-n", 2, "-r", 1, "-a", '{"texts": "generated"}']
    done = command(
        "vf-eval",
        "reverse-text",
        "-m",
        trained,
        *options,
        "-S",
        '{"best_of": 2}',
        ok=False,
        cwd=tmp_path,
    )
    assert "every rollout failed" in done.stderr and "best_of = 2 is not supported" in done.stderr
    done = command("vf-eval", "reverse-text", "-m", "other", *options, ok=False, cwd=tmp_path)
    assert "does not serve 'other'" in done.stderr


def test_endpoint_registry(server, trained, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "endpoints.py").write_text(
        f"ENDPOINTS = {{'tiny': {{'model': {str(trained)!r}, 'url': {server.url!r}, 'key': 'SOME_KEY'}}, "
        f"'default': {{'base_url': {server.url!r}, 'api_key': None}}}}"
    )
    for model in ("tiny", trained):
        command(
            "vf-eval",
            "reverse-text",
            "-m",
            model,
            "-n",
            1,
            "-r",
            1,
            "-t",
            4,
            "-a",
            '{"texts": "generated"}',
            cwd=tmp_path,
        )


def test_control_routes(server, trained):
    root, chat = server.url.removesuffix("/v1"), f"{server.url}/chat/completions"
    assert http.post(f"{root}/pause?mode=never").status_code == 400
    assert http.post(f"{root}/pause?mode=wait").json() == {"is_paused": True}
    body = {
        "model": str(trained),
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 3,
    }
    with pytest.raises(httpx.ReadTimeout):
        http.post(chat, json=body, timeout=0.5)
    assert http.get(f"{root}/version").json()["is_paused"]
    assert http.post(f"{root}/resume").json() == {"is_paused": False}
    assert http.post(chat, json=body).status_code == 200
    answer = http.post(f"{root}/update_weights", json={"weight_dir": "/nowhere", "version": 1})
    assert answer.status_code == 400 and "/nowhere is not a directory" in answer.text
    assert http.post(f"{root}/score", json={"ids": [1, 10**6]}).status_code == 400
    one, two = (
        http.post(f"{root}/score", json={"ids": ids}).json()["logprobs"]
        for ids in ([1, 2, 3], [4, 5])
    )
    assert len(one) == 2
    both = http.post(f"{root}/score", json={"ids": [[1, 2, 3], [4, 5]]}).json()["logprobs"]
    assert both == [pytest.approx(one, abs=1e-5), pytest.approx(two, abs=1e-5)]
    cold = http.post(f"{root}/score", json={"ids": [4, 5], "temperature": 0.5}).json()["logprobs"]
    assert cold != pytest.approx(two, abs=1e-3)
    assert http.post(f"{root}/score", json={"ids": []}).status_code == 400
