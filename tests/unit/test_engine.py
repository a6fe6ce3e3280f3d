"""The engine against plain forwards of the same model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hone.engine.engine import Engine
from hone.engine.sampler import uniforms
from hone.kernels import cpu
from hone.kernels.linear import HAS_AVX512
from hone.models.attention import PackedAttention
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.records import GenerateRequest, Sampling

SPEC = ModelSpec(50, 32, 64, 2, 4, 2, 8, 1e-6, 1000.0, True, 96, 0.5, False)
STOP = frozenset({3})


@pytest.fixture(scope="module")
def model():
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def request(prompt, seed=0, temperature=1.0, max_tokens=20, stop=STOP):
    return GenerateRequest(prompt, Sampling(temperature, max_tokens, seed), stop)


@torch.no_grad()
def plain_logprobs(model, prompt, ids, temperature=1.0):
    tokens = torch.tensor(prompt + ids[:-1])
    packed = PackedAttention([len(tokens)])
    logits = model.logits(model(tokens, packed.positions(), packed))[len(prompt) - 1 :].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(model, temperature):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 50, n).tolist() for n in (1, 5, 17, 30) for _ in range(5)]
    requests = [request(p, seed=i, temperature=temperature) for i, p in enumerate(prompts)]
    done = Engine(model, max_batch_size=7).generate(requests)  # more requests than rows: rows are reused
    assert any(c.finish_reason == "stop" for c in done) and any(c.finish_reason == "length" for c in done)
    for prompt, completion in zip(prompts, done, strict=True):
        expected = plain_logprobs(model, prompt, completion.ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
        assert completion.versions == [0] * len(completion.ids)


def test_greedy_equals_argmax_of_plain_forwards(model):
    prompt = [7, 8, 9]
    ids = Engine(model).generate([request(prompt, temperature=0.0, max_tokens=12)])[0].ids
    for i, token in enumerate(ids):
        packed = PackedAttention([len(prompt) + i])
        with torch.no_grad():
            logits = model.logits(model(torch.tensor(prompt + ids[:i]), packed.positions(), packed))[-1]
        assert token == int(logits.argmax())


def test_same_seed_same_tokens_whatever_else_runs(model):
    alone = Engine(model).generate([request([5, 6, 7], seed=42)])[0]
    crowd = [request([5, 6, 7], seed=s, max_tokens=5 + s % 9) for s in range(40)] + [request([5, 6, 7], seed=42)]
    assert Engine(model, max_batch_size=8).generate(crowd)[-1].ids == alone.ids


@pytest.mark.skipif(not (cpu.IS_AVAILABLE and HAS_AVX512), reason="torch's own products depend on the batch")
def test_logprobs_are_the_same_to_the_bit_whatever_else_runs():
    wide = Transformer(replace(SPEC, hidden_size=64, head_dim=32))
    wide.init_weights(torch.Generator().manual_seed(0))
    rng = np.random.default_rng(1)
    requests = [request(rng.integers(4, 50, 1 + i % 30).tolist(), seed=i, max_tokens=5 + i % 9) for i in range(60)]
    together = Engine(wide).generate(requests)
    by_few = Engine(wide, max_batch_size=7).generate(requests)
    alone = [Engine(wide).generate([one])[0] for one in requests]
    assert together == by_few == alone


def test_stop_token_and_length_end_a_sequence(model):
    first = Engine(model).generate([request([9], seed=1, stop=frozenset())])[0]
    assert len(first.ids) == 20 and first.finish_reason == "length"
    stopping = Engine(model).generate([request([9], seed=1, stop=frozenset({first.ids[4]}))])[0]
    cut = first.ids.index(first.ids[4]) + 1
    assert stopping.ids == first.ids[:cut] and stopping.finish_reason == "stop"


def test_overlong_prompt_is_refused_and_max_tokens_is_cut_to_the_context(model):
    engine = Engine(model)
    with pytest.raises(ValueError, match="maximum context length is 96 tokens"):
        engine.add(request([1] * 96), print)
    with pytest.raises(ValueError, match="empty"):
        engine.add(request([]), print)
    done = engine.generate([request([1] * 90, max_tokens=50, stop=frozenset())])[0]
    assert len(done.ids) == 6 and done.finish_reason == "length"


def test_versions_follow_an_update_in_flight_and_abort_returns_what_there_is(model):
    engine, done = Engine(model), []
    kept = engine.add(request([5], max_tokens=6, stop=frozenset()), done.append)
    dropped = engine.add(request([6], max_tokens=6, stop=frozenset()), done.append)
    engine.step()  # prefill and one decode: two tokens each
    engine.set_version(1)
    engine.abort(dropped)
    assert done[0].finish_reason == "abort" and done[0].versions == [0, 0] and len(done[0].ids) == 2
    while not engine.is_idle:
        engine.step()
    assert done[1].versions == [0, 0, 1, 1, 1, 1] and kept not in engine.running


def test_cache_budget_bounds_what_runs(model):
    engine = Engine(model, kv_cache_gib=1e-9)  # room for one sequence of full length
    done = engine.generate([request([5, 6], seed=s, max_tokens=90) for s in range(3)])
    assert engine.pool.pages == 1 + 96 // 16 and len(done) == 3
    assert engine.pool.available == 96 // 16 and sorted(engine.slots.free) == list(range(256))


def test_uniforms_are_pinned_and_uniform():
    # The published splitmix64 stream from state 0: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4.
    expected = [(0xE220A8397B1DCDAF >> 11) / 2**53, (0x6E789E6AA1B965F4 >> 11) / 2**53]
    assert uniforms(torch.tensor([0]), torch.arange(2)).tolist() == expected
    draws = uniforms(torch.arange(1000)[:, None], torch.arange(100)[None]).ravel().numpy()
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-squared, 49 degrees of freedom
