"""`hone tinker` driven by Tinker's own SDK: results against those of a session in this process."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

import hone
from hone.session.session_data import PER_TARGET
from tests.hangs import HANG_SECONDS
from tests.integration.conftest import BIN, end, start, until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "reverse_text_tiny" / "model"
LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 1.5},
    "dro": {"beta": 0.1},
    "gspo": {},
}
SAMPLING = {"max_batch_size": 8, "max_model_len": 64, "kv_cache_gib": 0.05}


class Server:
    """A `hone tinker` process on a model directory, and clients of it."""

    def __init__(self, directory, *words, port=0):
        self.report = directory / "report.json"
        self.report.unlink(missing_ok=True)
        self.log = (directory / "server.log").open("a")
        words = ["tinker", "--model.name", directory / "model", "--server.port", port, *words]
        self.process = start(
            BIN / "hone",
            *words,
            "--directory",
            directory / "saved",
            log=self.log,
            cwd=directory,
            env={"HONE_REPORT_FILE": str(self.report)},
        )
        until(lambda: self.report.exists() and b"url" in self.report.read_bytes(), self.process)
        self.url = json.loads(self.report.read_bytes())["url"]
        self.base = str(directory / "model")

    def connect(self, key="tml-local"):
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def post(self, path, **body):
        answer = httpx.post(f"{self.url}/api/v1/{path}", json=body, timeout=HANG_SECONDS)
        return answer.status_code, answer.json()

    def close(self):
        end(self.process)
        self.log.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    os.environ["TINKER_TELEMETRY"] = "0"
    found = tmp_path_factory.mktemp("tinker")
    session = hone.TrainingSession(MODEL, random_init=True, device="cpu")
    session.export_weights(found / "model")
    return found


@pytest.fixture(scope="module")
def tinker_server(directory):
    opened = Server(directory)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def client(tinker_server):
    return tinker_server.connect()


def create(client, server, rank=4, seed=0, **keys):
    return client.create_lora_training_client(server.base, rank=rank, seed=seed, **keys).result()


ADAPTER = "adapter_model.safetensors"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]


def make_session(server, rank=4, seed=0, targets=ALL):
    base = hone.FrozenBase(server.base, device="cpu", sampling=SAMPLING)
    lora = {"rank": rank, "alpha": 32, "targets": targets}
    return hone.TrainingSession(base, lora=lora, seed=seed)


def sample_greedy(session, prompt, count):
    """By the trained model itself, without a sampler."""
    ids = list(prompt)
    for _ in range(count):
        several = hone.Datum(ids, [list(range(session.model.spec.vocab_size))] * len(ids))
        ids.append(int(session.forward([several]).logprobs[0][-1].argmax()))
    return ids[len(prompt) :]


def draw_data(draw, count=3, several=False):
    data = []
    for length in draw.integers(2, 9, count):
        shape = (length, 3) if several else (length,)
        data.append(
            hone.Datum(
                draw.integers(3, 60, length),
                draw.integers(3, 60, shape),
                weights=draw.normal(size=shape),
                logprobs=-4 + 0.3 * draw.normal(size=shape),
                advantages=draw.normal(size=shape),
                sequence_ratio_mask=(draw.random(shape) > 0.3).astype(float),
            )
        )
    return data


NEEDED = {
    "cross_entropy": ["weights"],
    "gspo": ["logprobs", "advantages", "sequence_ratio_mask"],
}


def of_sdk(data, loss="cross_entropy"):
    """The data of a session as the SDK takes them."""
    names = NEEDED.get(loss, ["logprobs", "advantages"])
    assert set(names) <= set(PER_TARGET)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(map(int, one.tokens))),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(torch.as_tensor(one.targets)),
                **{
                    name: types.TensorData.from_torch(
                        torch.as_tensor(getattr(one, name), dtype=torch.float32)
                    )
                    for name in names
                },
            },
        )
        for one in data
    ]


def logprobs_of(output):
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def assert_same(found, wanted, atol=1e-5):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=atol)


def adam(lr, clip=0.0):
    return types.AdamParams(learning_rate=lr, grad_clip_norm=clip, eps=1e-8)


def test_a_client_finds_the_model(client, tinker_server):
    rest = tinker.RestClient(base_url=tinker_server.url, api_key="tml-local")
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.model_name == tinker_server.base and model.trainable and model.sampleable
    training = create(client, tinker_server, rank=6)
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 6)
    assert training.get_tokenizer().vocab_size >= 60


@pytest.mark.parametrize("several", [False, True], ids=["N", "N-K"])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_losses_steps_and_samples_are_those_of_a_session(client, tinker_server, loss, several):
    """Two steps, the second clipped; a forward pass between them adds no gradient."""
    draw = np.random.default_rng(len(loss))
    data, settings = draw_data(draw, several=several), LOSSES[loss]
    training, session = create(client, tinker_server), make_session(tinker_server)
    for lr, clip in ((1e-2, 0.0), (3e-3, 0.1)):
        found = training.forward_backward(of_sdk(data, loss), loss, settings).result()
        wanted = session.forward_backward(data, loss, **settings)
        assert_same(logprobs_of(found), wanted.logprobs)
        assert abs(found.metrics["loss:sum"] - wanted.loss) <= 1e-4 * max(1, abs(wanted.loss))
        other = training.forward(of_sdk(data[:1]), "cross_entropy").result()
        assert_same(logprobs_of(other), wanted.logprobs[:1])
        stepped = training.optim_step(adam(lr, clip)).result().metrics
        expected = session.optim_step(hone.AdamParams(lr=lr, max_norm=clip or None))
        assert abs(stepped["optim/grad_norm"] / expected["optim/grad_norm"] - 1) < 1e-4
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    found = sampler.result().sample(prompt, 1, params).result().sequences[0]
    assert found.tokens == sample_greedy(session, [5, 6, 7], 6)
    whole = [5, 6, 7, *found.tokens]
    scores = session.forward([hone.Datum(whole[:-1], whole[1:])]).logprobs[0][2:]
    np.testing.assert_allclose(found.logprobs, scores, atol=1e-4)


def test_a_loss_of_the_client_is_computed_there(client, tinker_server):
    draw = np.random.default_rng(1)
    data = draw_data(draw)
    first, second = (create(client, tinker_server) for _ in range(2))

    def weighted(data, logprobs):
        weights = [torch.as_tensor(one.loss_fn_inputs["weights"].to_numpy()) for one in data]
        total = -sum((w * x).sum() for w, x in zip(weights, logprobs, strict=True))
        return total, {"total": float(total)}

    by_function = first.forward_backward_custom(of_sdk(data), weighted).result()
    by_name = second.forward_backward(of_sdk(data), "cross_entropy").result()
    assert abs(by_function.metrics["total"] - by_name.metrics["loss:sum"]) < 1e-4
    norms = [
        one.optim_step(adam(1e-2)).result().metrics["optim/grad_norm"] for one in (first, second)
    ]
    assert abs(norms[0] / norms[1] - 1) < 1e-5
    outputs = [one.forward(of_sdk(data), "cross_entropy").result() for one in (first, second)]
    assert_same(*map(logprobs_of, outputs))


def test_many_calls_before_a_result_and_calls_in_chunks(client, tinker_server):
    """2,100 data are three chunks, of which the SDK sends the first one last."""
    draw = np.random.default_rng(2)
    data = draw_data(draw, 2100)
    whole, parts, session = (
        create(client, tinker_server),
        create(client, tinker_server),
        make_session(tinker_server),
    )
    found = whole.forward_backward(of_sdk(data), "cross_entropy").result()
    wanted = session.forward_backward(data, "cross_entropy")
    assert_same(logprobs_of(found), wanted.logprobs)
    promised = [
        parts.forward_backward(of_sdk(data[i : i + 105]), "cross_entropy")
        for i in range(0, 2100, 105)
    ]
    steps = [whole.optim_step(adam(1e-3)), parts.optim_step(adam(1e-3))]
    found = [row for one in promised for row in logprobs_of(one.result())]
    assert_same(found, wanted.logprobs)
    norms = [one.result().metrics["optim/grad_norm"] for one in steps]
    assert abs(norms[0] / norms[1] - 1) < 1e-4


def test_a_saved_state_continues_to_the_bit(client, tinker_server):
    draw = np.random.default_rng(3)
    data = of_sdk(draw_data(draw))
    training = create(client, tinker_server)

    def take_steps(one, count):
        for _ in range(count):
            one.forward_backward(data, "cross_entropy")
            one.optim_step(adam(1e-2))
        return logprobs_of(one.forward(data, "cross_entropy").result())

    take_steps(training, 2)
    path = training.save_state("two").result().path
    wanted = take_steps(training, 2)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for one, other in zip(take_steps(resumed, 2), wanted, strict=True):
        assert np.array_equal(one, other)
    anew = client.create_training_client_from_state(path).result()
    assert not np.array_equal(take_steps(anew, 2)[0], wanted[0])
    training.load_state_with_optimizer(path).result()
    for one, other in zip(take_steps(training, 2), wanted, strict=True):
        assert np.array_equal(one, other)
    files = sorted((tinker_server.report.parent / "saved").glob("*/weights/two"))
    tensors = load_file(files[-1] / "adapter_model.safetensors")
    assert any(name.endswith("q_proj.lora_A.weight") for name in tensors)


@pytest.mark.parametrize("merge", [True, False])
def test_snapshots_stay_and_score_as_the_trainer_does(directory, tinker_server, merge):
    """More snapshots than the engine holds at a time sample at once."""
    server = tinker_server if merge else Server(directory, "--no-merge", "--sampling-adapters", 3)
    try:
        check_snapshots(server.connect(), server)
    finally:
        if not merge:
            server.close()


def check_snapshots(client, tinker_server):
    draw = np.random.default_rng(4)
    data = draw_data(draw, 2)
    training = create(client, tinker_server)
    ids = [5, 6, 7, 8, 9]
    samplers, wanted = [], []
    scored = of_sdk([hone.Datum(ids[:-1], ids[1:], weights=[1.0] * 4)])
    for _ in range(6):
        samplers.append(training.save_weights_and_get_sampling_client().result())
        wanted.append(logprobs_of(training.forward(scored, "cross_entropy").result())[0])
        training.forward_backward(of_sdk(data), "cross_entropy")
        training.optim_step(adam(1e-2)).result()
    assert len({tuple(row) for row in np.round(wanted, 4).tolist()}) == 6
    prompt = types.ModelInput.from_ints(ids)
    for _ in range(2):
        promised = [one.compute_logprobs(prompt) for one in samplers]
        for one, row in zip(promised, wanted, strict=True):
            found = one.result()
            assert found[0] is None
            np.testing.assert_allclose(found[1:], row, atol=1e-4)
    promised = [
        one.sample(prompt, 2, types.SamplingParams(max_tokens=4, stop=[])) for one in samplers
    ]
    for one, sampler in zip(promised, samplers, strict=True):
        for sequence in one.result().sequences:
            whole = types.ModelInput.from_ints(ids + sequence.tokens)
            scores = sampler.compute_logprobs(whole).result()[len(ids) :]
            np.testing.assert_allclose(sequence.logprobs, scores, atol=1e-4)


def test_samples_are_as_asked(client, tinker_server):
    sampler = client.create_sampling_client(base_model=tinker_server.base).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])

    def sample(count=1, **keys):
        keys = {"max_tokens": 12, "seed": 3, "stop": []} | keys
        return sampler.sample(prompt, count, types.SamplingParams(**keys)).result().sequences

    several = [one.tokens for one in sample(4)]
    assert len({tuple(one) for one in several}) == 4 and {len(one) for one in several} == {12}
    assert [one.tokens for one in sample(4)] == several
    assert {one.stop_reason for one in sample(4)} == {"length"}
    first = several[0]
    (stopped,) = sample(stop=[first[4]])
    assert stopped.tokens == first[: first.index(first[4]) + 1]
    assert stopped.stop_reason == "stop"
    tokenizer = hone.FrozenBase(tinker_server.base, device="cpu").loaded.tokenizer
    text = tokenizer.decode(first, False)
    piece = text[5:8]
    (ended,) = sample(stop=[piece])
    said = tokenizer.decode(ended.tokens, False)
    assert piece in said and piece not in tokenizer.decode(ended.tokens[:-1], False)
    assert sample(top_k=1)[0].tokens == sample(temperature=0.0)[0].tokens
    found = sampler.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == 3
    rows = found.topk_prompt_logprobs
    assert rows[0] in (None, []) and [len(row) for row in rows[1:]] == [3, 3]


def test_two_models_in_turn_are_each_alone(client, tinker_server):
    draw = np.random.default_rng(5)
    data = [draw_data(draw), draw_data(draw)]
    ranks = (4, 9)
    training = [create(client, tinker_server, rank, seed=i) for i, rank in enumerate(ranks)]
    for _ in range(3):
        promised = [
            one.forward_backward(of_sdk(of), "cross_entropy")
            for one, of in zip(training, data, strict=True)
        ]
        for one in training:
            one.optim_step(adam(1e-2))
    for i, rank in enumerate(ranks):
        session = make_session(tinker_server, rank, seed=i)
        for _ in range(3):
            wanted = session.forward_backward(data[i], "cross_entropy")
            session.optim_step(hone.AdamParams(lr=1e-2))
        assert_same(logprobs_of(promised[i].result()), wanted.logprobs)


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        ({"train_mlp": False, "train_unembed": False}, ATTENTION),
        ({"train_attn": False}, [*ALL[4:]]),
        ({"train_mlp": False}, [*ATTENTION, "lm_head"]),
    ],
)
def test_layers_are_trained_as_asked(client, tinker_server, keys, targets):
    draw = np.random.default_rng(6)
    data = draw_data(draw)
    training = create(client, tinker_server, **keys)
    session = make_session(tinker_server, targets=targets)
    for _ in range(2):
        found = training.forward_backward(of_sdk(data), "cross_entropy").result()
        training.optim_step(adam(1e-2)).result()
        wanted = session.forward_backward(data, "cross_entropy")
        session.optim_step(hone.AdamParams(lr=1e-2))
    assert_same(logprobs_of(found), wanted.logprobs)


def test_mistakes_are_the_user_s_and_the_next_call_works(client, tinker_server):
    draw = np.random.default_rng(7)
    data = of_sdk(draw_data(draw))
    training = create(client, tinker_server)
    outside = types.ModelInput.from_ints([5, 10**6])

    def change(model_input=data[0].model_input, **inputs):
        tensors = {name: types.TensorData.from_torch(x) for name, x in inputs.items()}
        return [types.Datum(model_input=model_input, loss_fn_inputs=tensors)]

    ids = torch.zeros(data[0].model_input.length, dtype=torch.int64)
    wrong = [
        (data, "stable_reinforce", "is not one of"),
        (change(target_tokens=ids, weights=torch.ones(1)), "cross_entropy", "weights has shape"),
        (change(outside, target_tokens=ids[:2]), "cross_entropy", "1000000"),
        (change(), "cross_entropy", "target_tokens"),
        (change(target_tokens=ids, other=torch.ones(1)), "cross_entropy", "has other"),
        (data, "ppo", "needs logprobs"),
    ]
    for given, loss, message in wrong:
        with pytest.raises(tinker.RequestFailedError, match=message):
            training.forward_backward(given, loss).result()
    assert training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    sampler = client.create_sampling_client(base_model=tinker_server.base).result()
    with pytest.raises(tinker.RequestFailedError, match="1000000"):
        sampler.sample(outside, 1, types.SamplingParams(max_tokens=2)).result()
    with pytest.raises(Exception, match="no checkpoint tinker://a/weights/b"):
        client.create_training_client_from_state("tinker://a/weights/b").result()
    with pytest.raises(Exception, match="other/model"):
        client.create_lora_training_client("other/model").result()
    with pytest.raises(tinker.RequestFailedError, match="path: name"):
        training.save_state("../outside").result()
    training.save_state("taken").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_state("taken").result()
    training.save_state("taken", overwrite=True).result()


def test_a_name_is_given_once_and_keeps_its_weights(client, tinker_server):
    data = of_sdk(draw_data(np.random.default_rng(9)))
    training = create(client, tinker_server)
    path = training.save_weights_for_sampler("named").result().path
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])

    def score():
        sampler = client.create_sampling_client(model_path=path).result()
        return sampler.compute_logprobs(prompt).result()[1:]

    before = score()
    training.forward_backward(data, "cross_entropy")
    training.optim_step(adam(1e-1)).result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_weights_for_sampler("named").result()
    with pytest.raises(tinker.RequestFailedError, match="the server's own"):
        training.save_weights_for_sampler("ephemeral-7").result()
    assert score() == before


def test_a_moving_target_follows_each_save(tinker_server):
    """`inflight` saves: samplers of earlier saves see the newest weights."""
    post = tinker_server.post

    def result(answer):
        return post("retrieve_future", request_id=answer[1]["request_id"])[1]

    session_id = post("create_session", tags=[], sdk_version="0.38.0")[1]["session_id"]
    made = {"session_id": session_id, "model_seq_id": 0, "base_model": tinker_server.base}
    model_id = result(post("create_model", **made))["model_id"]
    saved = [
        result(
            post(
                "save_weights_for_sampler",
                model_id=model_id,
                seq_id=i + 1,
                kind="inflight",
                sampling_session_seq_id=i,
            )
        )["sampling_session_id"]
        for i in range(4)
    ]
    found = tinker_server.post("get_info", model_id=model_id)[1]
    assert found["is_lora"] and len(set(saved)) == 4
    paths = {
        httpx.get(f"{tinker_server.url}/api/v1/samplers/{one}").json()["model_path"]
        for one in saved
    }
    assert len(paths) == 1 and paths.pop().endswith("/sampler_weights/ephemeral-inflight")


def test_checkpoints_are_listed_expire_and_are_deleted(client, tinker_server):
    rest = tinker.RestClient(base_url=tinker_server.url, api_key="tml-local")
    training = create(client, tinker_server)
    state = training.save_state("state", ttl_seconds=7200).result().path
    weights = training.save_weights_for_sampler("weights").result().path
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [one.tinker_path for one in listed] == [state, weights]
    assert listed[0].expires_at is not None and listed[1].expires_at is None
    assert all(one.size_bytes > 1000 for one in listed)
    with pytest.raises(Exception, match="ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(weights, 60).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    run = rest.get_training_run(training.model_id).result()
    assert run.last_checkpoint.expires_at is None and run.lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(weights).result()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [one.tinker_path for one in listed] == [state]


def test_a_call_that_comes_twice_counts_once(tinker_server):
    post = tinker_server.post
    session_id = post("create_session", tags=[], sdk_version="0.38.0")[1]["session_id"]
    made = {"session_id": session_id, "model_seq_id": 0, "base_model": tinker_server.base}
    ids = {post("create_model", **made)[1]["request_id"] for _ in range(2)}
    assert len(ids) == 1
    model_id = post("retrieve_future", request_id=ids.pop())[1]["model_id"]
    step = {"model_id": model_id, "adam_params": {"learning_rate": 0.0}}
    second, first, again = (
        post("optim_step", **step, seq_id=i)[1]["request_id"] for i in (2, 1, 1)
    )
    assert first == again != second
    assert all("metrics" in post("retrieve_future", request_id=one)[1] for one in (first, second))
    assert post("retrieve_future", request_id=f"{first[:9]}999999")[0] == 404
    assert post("retrieve_future", request_id="0badf00d-1")[0] == 410
    assert post("optim_step", model_id="nobody", seq_id=1)[0] == 404
    assert post("session_heartbeat", session_id="nobody")[0] == 410
    assert post("session_heartbeat", session_id=session_id)[0] == 200
    httpx.post(f"{tinker_server.url}/api/v1/sessions/{session_id}/finish", json={})
    assert post("optim_step", **step, seq_id=3)[0] == 404


def test_a_key_guards_all_but_health(directory):
    server = Server(directory, "--api-key", "secret")
    try:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.post("create_session")[0] == 401
        with pytest.raises(tinker.AuthenticationError):
            server.connect("tml-wrong").create_sampling_client(base_model=server.base).result()
        training = create(server.connect("tml-secret"), server)
        assert training.get_info().lora_rank == 4
        check_downloads(training, server, directory)
    finally:
        server.close()


def check_downloads(training, server, directory):
    """The SDK's command downloads an exported adapter, and a state, through signed links."""
    training.forward_backward(of_sdk(draw_data(np.random.default_rng(0))), "cross_entropy").result()
    training.optim_step(adam(1e-2)).result()
    state = training.save_state("state").result().path
    exported = training.save_weights_external("exported").result().path
    expected = load_file(directory / "saved" / training.model_id / "weights/state" / ADAPTER)
    env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-secret"}
    for number, path in enumerate((state, exported)):
        output = directory / f"downloaded-{number}"
        words = [BIN / "tinker", "checkpoint", "download", path, "--output", output]
        subprocess.run(words, check=True, env=env, timeout=HANG_SECONDS)
        (found,) = output.rglob(ADAPTER)
        assert json.loads((found.parent / "adapter_config.json").read_text())["r"] == 4
        tensors = load_file(found)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    rest = tinker.RestClient(base_url=server.url, api_key="tml-secret")
    link = rest.get_external_weights_urls(exported).result().urls[ADAPTER]
    assert httpx.get(link).status_code == 200
    for wrong in (link.partition("?")[0], link.replace("=1", "=2"), link.replace(ADAPTER, "x")):
        assert httpx.get(wrong).status_code == 401
    with pytest.raises(ValueError, match="only accepts external weights"):
        rest.get_external_weights_urls(state).result()
    with pytest.raises(tinker.RequestFailedError, match="does not encrypt"):
        training.save_weights_external("secret", age_encryption_recipients=["age1x"]).result()


@pytest.mark.parametrize("kills", [int(os.environ.get("HONE_TINKER_KILLS", "2"))])
def test_what_was_saved_outlives_a_killed_server(tmp_path, directory, kills):
    """Killed in the middle of training: saved states are there, calls of before fail and say why."""
    (tmp_path / "model").symlink_to(directory / "model")
    path, wanted = [], None
    server = Server(tmp_path)
    port = int(server.url.rpartition(":")[2])
    draw = np.random.default_rng(kills)
    for _ in range(kills):
        victim = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.tinker_victim",
                server.url,
                server.base,
                *path,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            found = json.loads(victim.stdout.readline())
            time.sleep(0.1 * draw.random())
            server.process.kill()
            server.process.wait()
            assert wanted is None or found["before"] == wanted
            path, wanted = [found["path"]], found["after"]
            server.close()
            server = Server(tmp_path, port=port)
            error = json.loads(victim.stdout.readline())["error"]
            # Empty if the step was computed and answered before the kill.
            assert re.search("no model|was restarted|Promise expired|^$", error), error
            rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
            listed = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
            assert path[0] in listed
        finally:
            victim.kill()
            victim.wait()
    server.close()
