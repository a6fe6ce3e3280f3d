"""One contract for all that samples: Hone's engine, in the server's process and in its own, transformers' generate (of
these tests), a real vLLM.

The last is marked `vllm`: it needs VLLM_PYTHON, the Python of an environment that has it (make test-vllm).
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.config.sections import BACKEND_LOST
from hone.models.hf import load_model
from hone.models.weight_proof import canary_ids, score_sequences
from tests.hangs import HANG_SECONDS

from .conftest import TINY, Server, command, http
from .learning import RECIPE, STEPS, has_learnt, read_rewards

MESSAGES = [
    {
        "role": "system",
        "content": "Reverse the text character-by-character. Put your answer in <reversed_text> tags.",
    },
    {"role": "user", "content": "hello"},
]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": NOTHING}}]
VLLM = ("--backend", "vllm", "--vllm-python", os.environ.get("VLLM_PYTHON", ""), "--enforce-eager")
ENGINE = ("hone", "apart")  # in the server's process, in one of its own
LENGTH = ("--max-model-len", 2048)
KINDS = [
    pytest.param("hone", marks=pytest.mark.main_path),
    "apart",
    "transformers",
    pytest.param("vllm", marks=pytest.mark.vllm),
]


def serve(kind, model, log):
    if kind == "transformers":
        program = (sys.executable, str(Path(__file__).parent / "transformers_sampler.py"))
        return Server("--model.name", model, log=log, program=program)
    if kind == "vllm":  # imports torch twice, and the rest of vLLM
        return Server("--model.name", model, *LENGTH, *VLLM, log=log)
    more = ("--engine-apart", "true") if kind == "apart" else ()
    return Server("--model.name", model, *LENGTH, *more, log=log)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    if request.param == "vllm" and "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON is not set (make test-vllm)")
    return request.param


@pytest.fixture(scope="module")
def sampler(kind, trained, tmp_path_factory):
    server = serve(kind, trained, tmp_path_factory.mktemp(kind) / "log")
    server.root, server.model = server.url.removesuffix("/v1"), str(trained)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def other(trained, tmp_path_factory):
    """Weights that differ in every number: near enough to write, far enough to tell."""
    directory = tmp_path_factory.mktemp("other") / "step_1"
    directory.mkdir()
    for file in trained.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(trained / "model.safetensors")
    save_file(
        {name: one * 1.05 for name, one in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def ask(sampler, **fields):
    body = {
        "model": sampler.model,
        "messages": MESSAGES,
        "max_tokens": 24,
        "return_token_ids": True,
    }
    body |= {"return_token_logprobs": True, **fields}
    return http.post(f"{sampler.url}/chat/completions", json=body)


def control(sampler, route, body=None):
    answer = http.post(f"{sampler.root}/{route}", json=body or {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def take(sampler, directory, version):
    return control(sampler, "update_weights", {"weight_dir": str(directory), "version": version})


def of_model(directory, ids, temperature=1.0):
    return score_sequences(load_model(directory), [ids], temperature)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_logprobs_are_those_of_the_model_at_the_temperature_of_the_draw(
    sampler, trained, temperature
):
    take(sampler, trained, 1)
    answer = ask(sampler, temperature=temperature, n=3, seed=5).json()
    for choice in answer["choices"]:
        ids = answer["prompt_token_ids"] + choice["token_ids"]
        expected = of_model(trained, ids, temperature or 1.0)[len(answer["prompt_token_ids"]) - 1 :]
        assert choice["token_logprobs"] == pytest.approx(expected, abs=2e-3)
        assert choice["policy_versions"] == [1] * len(choice["token_ids"])
        assert choice["finish_reason"] in ("stop", "length")


def test_scores_and_the_likeliest_tokens_are_those_of_the_model(sampler, trained):
    take(sampler, trained, 2)
    ids = [(7 * i) % 250 for i in range(1, 40)]
    assert control(sampler, "score", {"ids": ids})["logprobs"] == pytest.approx(
        of_model(trained, ids), abs=2e-3
    )
    greedy = ask(sampler, temperature=0).json()
    ids = greedy["prompt_token_ids"] + greedy["choices"][0]["token_ids"]
    logits = load_model(trained)
    for i in range(len(greedy["prompt_token_ids"]), len(ids)):
        best = (
            max(
                range(263),
                key=lambda token, i=i: score_sequences(logits, [[*ids[:i], token]], 1.0)[0][-1],
            )
            if i < 14
            else 0
        )
        assert i >= 14 or best == ids[i]
    assert http.post(f"{sampler.root}/score", json={"ids": [1, 10**6]}).status_code == 400


def test_weights_are_taken_and_those_that_cannot_be_change_nothing(
    sampler, trained, other, tmp_path
):
    ids = list(range(1, 34))
    assert take(sampler, trained, 3)["version"] == 3
    before = control(sampler, "score", {"ids": ids})["logprobs"]
    state = take(sampler, other, 4)
    assert state["version"] == 4 and not state["is_paused"]
    after = control(sampler, "score", {"ids": ids})["logprobs"]
    assert after == pytest.approx(of_model(other, ids), abs=2e-3) and after != pytest.approx(
        before, abs=2e-3
    )

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in trained.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_text((trained / "config.json").read_text())
    tensors = load_file(trained / "model.safetensors")
    save_file(dict(list(tensors.items())[1:]), short / "model.safetensors", {"format": "pt"})
    for place in (tmp_path / "nowhere", damaged, short):
        refused = http.post(
            f"{sampler.root}/update_weights",
            json={"weight_dir": str(place), "version": 5},
            timeout=HANG_SECONDS,
        )
        assert refused.status_code == 400 and str(place) in refused.text, refused.text
    assert control(sampler, "score", {"ids": ids})["logprobs"] == after
    assert http.get(f"{sampler.root}/version").json()["version"] == 4
    assert ask(sampler).json()["choices"][0]["policy_versions"][0] == 4


def test_what_runs_goes_on_over_new_weights_and_each_token_is_of_the_version_that_it_says(
    sampler, trained, other
):
    take(sampler, trained, 10)
    answers = []
    asking = [
        threading.Thread(
            target=lambda i=i: answers.append(
                ask(sampler, ignore_eos=True, max_tokens=400, seed=i).json()
            )
        )
        for i in range(4)
    ]
    for one in asking:
        one.start()
    time.sleep(0.4)
    take(sampler, other, 11)
    for one in asking:
        one.join()
    places = {10: trained, 11: other}
    assert len(answers) == 4
    for answer in answers:
        (choice,) = answer["choices"]
        ids, versions = answer["prompt_token_ids"] + choice["token_ids"], choice["policy_versions"]
        assert len(versions) == 400 and versions == sorted(versions) and set(versions) <= {10, 11}
        first = versions.count(10)
        if versions[0] == 10:  # what the older weights wrote, they wrote alone
            expected = of_model(trained, ids)[len(answer["prompt_token_ids"]) - 1 :][:first]
            assert choice["token_logprobs"][:first] == pytest.approx(expected, abs=5e-3)
        assert all(version in places for version in versions)
    assert ask(sampler).json()["choices"][0]["policy_versions"][0] == 11


def test_a_pause_keeps_ends_or_waits_for_what_runs(sampler, trained):
    take(sampler, trained, 20)
    assert control(sampler, "pause?mode=keep")["is_paused"]
    assert http.get(f"{sampler.root}/version").json()["is_paused"]
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(sampler)))
    asking.start()
    asking.join(1.0)
    assert not answers
    take(sampler, trained, 21)
    assert not answers and http.get(f"{sampler.root}/version").json()["is_paused"]
    assert not control(sampler, "resume")["is_paused"]
    asking.join(60)
    assert answers[0].json()["choices"][0]["policy_versions"][0] == 21

    long = threading.Thread(
        target=lambda: answers.append(ask(sampler, ignore_eos=True, max_tokens=450))
    )
    long.start()
    time.sleep(0.3)
    control(sampler, "pause?mode=abort")
    long.join(60)
    (ended,) = answers[1].json()["choices"]
    assert len(ended["token_ids"]) == 450 or ended["finish_reason"] == "abort"
    control(sampler, "resume")
    assert ask(sampler).status_code == 200


def test_a_stream_has_what_the_whole_answer_has(sampler, trained):
    take(sampler, trained, 30)
    whole = ask(sampler, temperature=0, stop=["zzz"]).json()["choices"][0]
    body = {
        "model": sampler.model,
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
    }
    text, ids, reasons = "", [], []
    body |= {"return_token_ids": True, "stop": ["zzz"]}
    with http.stream("POST", f"{sampler.url}/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                ids += choice.get("token_ids") or []
                reasons.append(choice["finish_reason"])
    assert text == whole["message"]["content"] and ids == whole["token_ids"]
    assert reasons[-1] == whole["finish_reason"] and not any(reasons[:-1])


def test_answers_have_the_form_that_is_asked_for_or_it_is_refused(sampler, kind, trained):
    take(sampler, trained, 40)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    }
    found = ask(sampler, **asked, max_tokens=200, seed=3)
    if kind == "transformers" or importlib.util.find_spec("llguidance") is None:
        assert found.status_code == 400 and "answers of a given form" in found.text
        return
    assert json.loads(found.json()["choices"][0]["message"]["content"])["a"] in (1, 2)
    of_regex = ask(sampler, structured_outputs={"regex": "[ab]{4}"}, max_tokens=20).json()[
        "choices"
    ][0]
    assert re.fullmatch("[ab]{4}", of_regex["message"]["content"])
    scored = of_model(
        trained, ask(sampler, max_tokens=1).json()["prompt_token_ids"] + of_regex["token_ids"]
    )
    called = ask(sampler, tools=TOOLS, tool_choice="required", max_tokens=100).json()["choices"][0]
    assert called["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    if kind in ENGINE:  # vLLM's are renormalised over what the form allows
        assert of_regex["token_logprobs"][:4] == pytest.approx(
            scored[-len(of_regex["token_ids"]) :][:4], abs=2e-3
        )


def streamed(sampler, found, **fields):
    body = {
        "model": sampler.model,
        "messages": MESSAGES,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    with http.stream("POST", f"{sampler.url}/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                found["ids"] = found.get("ids", []) + (choice.get("token_ids") or [])
                found["reason"] = choice["finish_reason"]


def test_a_time_limit_and_an_abort_end_what_runs_and_what_waits(sampler, trained, kind):
    if kind == "transformers":
        pytest.skip("it has no time limits, and ends what runs alone")
    take(sampler, trained, 50)
    most = 1900
    long = {"ignore_eos": True, "max_tokens": most, "temperature": 1.0}
    (choice,) = ask(sampler, **long, timeout=0.02).json()["choices"]
    assert len(choice["token_ids"]) < most and choice["finish_reason"] == "timeout", choice[
        "finish_reason"
    ]
    found = {}
    streamed(sampler, found, **long, timeout=0.02)
    assert len(found["ids"]) < most and found["reason"] == "timeout"

    control(sampler, "pause?mode=keep")
    waiting, whole = {}, []
    asking = [
        threading.Thread(target=streamed, args=(sampler, waiting), kwargs=long),
        threading.Thread(target=lambda: whole.append(ask(sampler, **long).json())),
    ]
    for one in asking:
        one.start()
    time.sleep(0.5)
    control(sampler, "pause?mode=abort")
    for one in asking:
        one.join(20)
    control(sampler, "resume")
    assert waiting["reason"] == "abort" and whole[0]["choices"][0]["finish_reason"] == "abort"
    assert ask(sampler).status_code == 200


def test_what_it_cannot_do_is_refused_in_words(sampler, kind):
    full = ask(sampler, max_tokens=10**6)
    assert full.status_code == 400 and full.json()["error"]["code"] == "context_length_exceeded"
    if kind not in ENGINE:
        refused = http.post(
            f"{sampler.root}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"}
        )
        assert refused.status_code == 400 and "LoRA adapters" in refused.text


@pytest.mark.parametrize("killed", ["engine", "server"])
def test_an_engine_in_its_own_process_and_its_server_end_together(trained, tmp_path, killed):
    server = serve("apart", trained, tmp_path / "log")
    pid = int(
        subprocess.run(
            ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True
        ).stdout
    )
    os.kill(pid if killed == "engine" else server.process.pid, signal.SIGKILL)
    code = server.process.wait(HANG_SECONDS)
    assert code == (BACKEND_LOST if killed == "engine" else -signal.SIGKILL)
    deadline = time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    if killed == "engine":
        assert (
            "the engine's process was killed (SIGKILL): this server ends too"
            in (tmp_path / "log").read_text()
        )


def test_what_an_engine_in_its_own_process_cannot_start_for_is_said(tmp_path):
    done = command("inference", "--model.name", tmp_path, "--engine-apart", "true", ok=False)
    assert f"inference: error: {tmp_path}" in done.stderr, done.stderr


def test_the_tiny_recipe_learns_by_it(kind, trained, tmp_path):
    """With a started server of its own (vLLM), or one that is there."""
    options, server = ["--inference.server.port", 0], None
    if kind == "vllm":
        for key, value in (
            ("backend", "vllm"),
            ("vllm-python", os.environ["VLLM_PYTHON"]),
            ("enforce-eager", "true"),
        ):
            options += [f"--inference.{key}", value]
    elif kind == "apart":
        options += ["--inference.engine-apart", "true"]
    elif kind == "transformers":
        server = serve(kind, trained, tmp_path / "log")
        options = ["--orchestrator.client.base-url", server.url]
    try:
        command(
            "rl",
            "@",
            f"{TINY}/rl.toml",
            "--model.name",
            trained,
            "--output-dir",
            tmp_path / "run",
            *RECIPE,
            "--deployment",
            "processes",
            "--max-async-level",
            0,
            "--inference.max-model-len" if kind != "transformers" else "--seq-len",
            64,
            *options,
        )
    finally:
        if server is not None:
            server.stop()
    (before, after), rows = read_rewards(tmp_path / "run")
    assert has_learnt(before, after), (before, after)
    assert (
        len(rows) >= STEPS and max(row.get("weights/canary_difference", 0.0) for row in rows) < 5e-3
    )
    assert max(row.get("mismatch_kl/mean", 0.0) for row in rows) < 1e-3  # on policy


@pytest.mark.vllm
def test_a_vllm_that_is_killed_is_started_again_and_nothing_is_lost():
    """The short form of `make chaos` with vLLM: the server is killed, then the vLLM under it."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON is not set (make test-vllm)")
    words = ("--kills", 2, "--steps", 40, "--vllm", os.environ["VLLM_PYTHON"])
    done = command("python", "-m", "tests.chaos", *words)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 2 and not found["samples_lost"] and not found["samples_doubled"]


DELTA = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write_model_with_vision(directory, seed, has_vision=True):
    """Write a random model of Qwen3.5's architecture, or its text part alone under the same names."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokens = {name: i for i, name in enumerate(IMAGE_TOKENS)}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=DELTA, vision_config=VISION, tie_word_embeddings=True, **tokens
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3 if "embed" in name else 0.1)
    model.save_pretrained(directory)
    for file in Path(TINY, "model").glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    if not has_vision:
        tensors = load_file(directory / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if "visual" not in name}
        save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.vllm
def test_vllm_takes_weights_of_a_text_part_under_the_names_of_its_files(tmp_path):
    """In a model with vision and the gated delta rule, whose head is tied to the embedding."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON is not set (make test-vllm)")
    first = write_model_with_vision(tmp_path / "first", 0)
    second = write_model_with_vision(tmp_path / "second", 1, has_vision=False)
    # vLLM's kernels for the delta rule on a CPU need bfloat16.
    options = ("--model.dtype", "bfloat16", "--max-model-len", 64)
    server = Server("--model.name", first, *VLLM, *options, log=tmp_path / "log")
    server.root = server.url.removesuffix("/v1")
    try:
        ids = canary_ids(load_model(first).spec)
        found = [control(server, "score", {"ids": ids})["logprobs"]]
        take(server, second, 1)
        found.append(control(server, "score", {"ids": ids})["logprobs"])
    finally:
        server.stop()
    expected = torch.tensor([of_model(directory, ids) for directory in (first, second)])
    assert (torch.tensor(found) - expected).abs().mean(1).max() < 0.2  # by bfloat16
    assert (expected[0] - expected[1]).abs().mean() > 1.0
