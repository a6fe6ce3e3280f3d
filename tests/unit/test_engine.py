"""The engine against plain forwards of the same model."""

import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hone.engine.engine import Engine, _Look
from hone.engine.graphs import PAYS_FOR_GRAPH, DecodeGraphs, Key
from hone.engine.prefill import Prefill, Shape
from hone.engine.slots import Slots
from hone.engine.token_sampler import draw_tokens, filter_thresholds, pick_tokens, uniform_numbers
from hone.engine.warm_up import describe_rehearsal, plan_captures
from hone.kernels import cpu
from hone.kernels import row_state as column
from hone.kernels.cuda_graphs import Captured
from hone.models.attention_layouts import PackedAttention
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.models.weight_proof import score_sequence
from hone.records import GenerateRequest, Sampling

SPEC = ModelSpec(
    50, 32, 64, 2, 4, 2, 8, 1e-6, make_plain_layers(1000.0, 8, 2), True, 96, 0.5, False
)
PACKED = replace(SPEC, num_key_value_heads=1, head_dim=16)  # as many bytes a token
STOP = frozenset({3})
ONE_SEQUENCE = 96 * 256 / 2**30  # GiB for the keys and values of one sequence of full length


@pytest.fixture(scope="module", params=["layer by layer", "packed"])
def model(request):
    """Two sizes of heads: with the second the CPU runs all layers in one compiled call, where it can."""
    model = Transformer(SPEC if request.param == "layer by layer" else PACKED)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.fixture
def one_by_one(monkeypatch):
    """One token of each sequence in a step of the engine."""
    monkeypatch.setattr("hone.engine.decoder.PACKED_STEPS", 1)


def request(prompt, seed=0, temperature=1.0, max_tokens=20, stop=STOP):
    return GenerateRequest(prompt, Sampling(temperature, max_tokens, seed), stop)


@torch.no_grad()
def plain_logprobs(model, prompt, ids, temperature=1.0):
    tokens = torch.tensor(prompt + ids[:-1])
    packed = PackedAttention([len(tokens)])
    logits = model.compute_logits(model(tokens, packed.token_positions(), packed))[
        len(prompt) - 1 :
    ].float()
    return (
        torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(model, temperature):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 50, n).tolist() for n in (1, 5, 17, 30) for _ in range(5)]
    requests = [request(p, seed=i, temperature=temperature) for i, p in enumerate(prompts)]
    # More requests than rows: rows are reused
    done = Engine(model, max_batch_size=7).generate(requests)
    assert any(c.finish_reason == "stop" for c in done) and any(
        c.finish_reason == "length" for c in done
    )
    for prompt, completion in zip(prompts, done, strict=True):
        expected = plain_logprobs(model, prompt, completion.ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
        assert completion.versions == [0] * len(completion.ids)


def test_progress_is_what_was_written_since(model, one_by_one):
    engine, done = Engine(model), []
    for i in range(3):
        named = replace(
            request([5, 6, 7 + i], seed=i, stop=frozenset()), name=f"run/{i}" if i else ""
        )
        engine.add(named, done.append)
    assert engine.named_progress({"run/1": 0}) == {}
    for _ in range(6):
        engine.step()
    engine.set_version(1)
    for _ in range(4):
        engine.step()
    first = engine.named_progress({"run/1": 0, "run/2": 4, "elsewhere/0": 0})
    engine.step()
    while not engine.is_idle:
        engine.step()
    assert (
        set(first) == {"run/1", "run/2"}
        and len(first["run/1"].ids) == len(first["run/2"].ids) + 4 >= 9
    )
    for name, start in (("run/1", 0), ("run/2", 4)):
        found, whole = first[name], done[int(name[-1])]
        end = start + len(found.ids)
        assert (found.ids, found.logprobs) == (whole.ids[start:end], whole.logprobs[start:end])
        assert found.versions == whole.versions[start:end] and set(found.versions) == {0, 1}


def test_greedy_equals_argmax_of_plain_forwards(model):
    prompt = [7, 8, 9]
    ids = Engine(model).generate([request(prompt, temperature=0.0, max_tokens=12)])[0].ids
    for i, token in enumerate(ids):
        packed = PackedAttention([len(prompt) + i])
        with torch.no_grad():
            logits = model.compute_logits(
                model(torch.tensor(prompt + ids[:i]), packed.token_positions(), packed)
            )[-1]
        assert token == int(logits.argmax())


def test_same_seed_same_tokens_whatever_else_runs(model):
    alone = Engine(model).generate([request([5, 6, 7], seed=42)])[0]
    crowd = [request([5, 6, 7], seed=s, max_tokens=5 + s % 9) for s in range(40)] + [
        request([5, 6, 7], seed=42)
    ]
    assert Engine(model, max_batch_size=8).generate(crowd)[-1].ids == alone.ids


@pytest.mark.skipif(not cpu.IS_AVAILABLE, reason="torch's own products depend on the batch")
def test_logprobs_are_the_same_to_the_bit_whatever_else_runs():
    wide = Transformer(replace(SPEC, hidden_size=64, head_dim=32))
    wide.init_weights(torch.Generator().manual_seed(0))
    rng = np.random.default_rng(1)
    starts = [list(range(4, 40)), []]  # every second prompt starts alike: its pages are shared
    prompts = [starts[i % 2] + rng.integers(4, 50, 1 + i % 30).tolist() for i in range(60)]
    requests = [request(prompt, seed=i, max_tokens=5 + i % 9) for i, prompt in enumerate(prompts)]
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


def test_versions_follow_an_update_in_flight_and_abort_returns_what_there_is(model, one_by_one):
    engine, done = Engine(model), []
    kept = engine.add(request([5], max_tokens=6, stop=frozenset()), done.append)
    dropped = engine.add(request([6], max_tokens=6, stop=frozenset()), done.append)
    engine.step()  # prefill and one decode: two tokens each
    engine.set_version(1)
    engine.abort_request(dropped)
    assert done[0].finish_reason == "abort" and done[0].versions == [0, 0] and len(done[0].ids) == 2
    while not engine.is_idle:
        engine.step()
    assert done[1].versions == [0, 0, 1, 1, 1, 1] and kept not in engine.running_sequences


def test_cache_budget_bounds_what_runs(model):
    engine = Engine(model, kv_cache_gib=ONE_SEQUENCE)
    done = engine.generate([request([5, 6], seed=s, max_tokens=90) for s in range(3)])
    assert engine.pool.pages == 1 + 96 // 16 and len(done) == 3
    assert engine.pool.available_count == 96 // 16 and sorted(engine.slots.free) == list(range(256))


def test_the_cache_keeps_to_what_it_is_allowed(model):
    engine = Engine(model, kv_cache_gib=ONE_SEQUENCE / 2)
    assert engine.max_model_len == 48 and engine.pool.pages == 1 + 48 // 16
    with pytest.raises(ValueError, match="maximum context length is 48 tokens"):
        engine.add(request([1] * 48), print)
    with pytest.raises(ValueError, match=r"holds 48 tokens of this model, max_model_len is 60"):
        Engine(model, max_model_len=60, kv_cache_gib=ONE_SEQUENCE / 2)


def test_uniforms_are_pinned_and_uniform():
    # The published splitmix64 stream from state 0: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4.
    expected = [(0xE220A8397B1DCDAF >> 11) / 2**53, (0x6E789E6AA1B965F4 >> 11) / 2**53]
    assert uniform_numbers(torch.tensor([0]), torch.arange(2)).tolist() == expected
    draws = uniform_numbers(torch.arange(1000)[:, None], torch.arange(100)[None]).ravel().numpy()
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-squared, 49 degrees of freedom


# -------------------------------------------------------------------------------------- pages and scheduling


def drain(engine):
    while not engine.is_idle:
        engine.step()


def assert_all_returned(engine):
    assert engine.pool.available_count == engine.pool.pages - 1 and not any(engine.pool.users)
    assert sorted(engine.slots.free) == list(range(engine.max_batch_size))


@pytest.mark.parametrize("where", ["draw", "pass"])
def test_a_step_that_fails_leaves_nothing_behind(model, monkeypatch, where):
    """Neither slots and pages that nobody has, nor pages that are known and were never computed."""
    prompts = [
        request(list(range(3, 40)), seed=s, temperature=1e-6, max_tokens=4) for s in range(4)
    ]
    expected = Engine(model).generate(prompts)[0].ids
    engine = Engine(model, max_batch_size=4)

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no")

    with monkeypatch.context() as broken:
        if where == "draw":
            broken.setattr(engine.sampler, "sample_tokens", fail)
        elif engine.packed is not None:
            broken.setattr(engine.packed, "prefill_chunks", fail)
        else:
            broken.setattr(engine.prefill, "run_chunks", fail)
        for one in prompts:
            engine.add(one, print)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
        engine.reset()
    assert_all_returned(engine)
    assert [done.ids for done in engine.generate(prompts)] == [expected] * 4


def test_a_group_stores_its_prompt_once(model):
    engine = Engine(model)
    prompt = list(range(4, 44))  # two full pages and half of a third
    for seed in range(8):
        engine.add(request(prompt, seed=seed, max_tokens=30, stop=frozenset()), lambda done: None)
    engine.step()
    pages = [s.pages for s in engine.decoding]
    assert len({tuple(p[:2]) for p in pages}) == 1 and len({p[2] for p in pages}) == 8
    # 70 tokens: five pages, of which two are shared
    assert engine.pool.pages - 1 - engine.pool.available_count == 2 + 8 * 3
    drain(engine)
    assert_all_returned(engine)


def test_a_prompt_that_starts_like_an_earlier_one_is_not_computed_again(model, monkeypatch):
    engine = Engine(model)
    computed = []
    prefill = Engine._run_prefill

    def counting(self, planned):
        computed.append(sum(chunk.end - chunk.start for _, chunk in planned))
        return prefill(self, planned)

    start = list(range(4, 37))  # two pages and a token
    alone = Engine(model).generate([request([*start, 9, 9], seed=5)])[0]
    engine.generate([request([*start, 8], max_tokens=1)])
    monkeypatch.setattr(Engine, "_run_prefill", counting)
    again = engine.generate([request([*start, 9, 9], seed=5)])[0]
    assert computed[0] == 3 and again.ids == alone.ids
    torch.testing.assert_close(
        torch.tensor(again.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
    )
    engine.set_version(1)
    computed.clear()
    engine.generate([request([*start, 9, 9], seed=5)])
    assert computed[0] == 35  # keys of another policy are not used again


def test_prompts_that_start_alike_are_computed_in_one_step(model):
    start = list(range(4, 24))
    prompts = [
        [*start, 9],
        [*start, *range(8, 25), 7],
        start[:18],
        [*start, *range(8, 25), 6],
        [5, 6],
    ]
    requests = [request(p, seed=i) for i, p in enumerate(prompts)]
    engine = Engine(model)
    together = engine.generate(requests)
    for one, completion in zip(requests, together, strict=True):
        alone = Engine(model).generate([one])[0]
        assert alone.ids == completion.ids
        expected = plain_logprobs(model, one.prompt_ids, completion.ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
    assert_all_returned(engine)


@pytest.mark.parametrize(
    "prompt, pages", [([5, 6, 7], 2), (list(range(4, 12)), 2), (list(range(4, 13)), 3)]
)
def test_the_next_turn_of_a_conversation_finds_its_own_tokens(model, prompt, pages):
    """43, 48 and 49 tokens, of which the last has no key; a page has 16."""
    engine = Engine(model)
    first = engine.generate([request(prompt, seed=1, max_tokens=40, stop=frozenset())])[0]
    assert len(engine.pool.match_prefix([*prompt, *first.ids, 8, 9])) == pages


@pytest.mark.parametrize("then", ["go on", "abort", "new weights"])
def test_what_is_read_ahead_is_what_is_handed_over(model, then, one_by_one):
    prompts = [list(range(4, 4 + n)) for n in (3, 20)]
    requests = [request(p, seed=i, max_tokens=40, stop=frozenset()) for i, p in enumerate(prompts)]
    expected, engine, done = Engine(model).generate(requests), Engine(model), {}
    running = [
        engine.add(one, lambda c, i=i: done.__setitem__(i, c)) for i, one in enumerate(requests)
    ]
    for _ in range(30):
        engine.step()
    slots = np.array([s.slot for s in running])
    engine._read_ahead(_Look(running, slots, [], engine.slots.take_snapshot()))
    count = len(running[0].ids)
    assert (
        count >= 30
        and len(engine.pool.match_prefix([*prompts[1], *running[1].ids])) == (20 + count - 1) // 16
    )
    if then == "abort":
        engine.abort_request(running[0])
    elif then == "new weights":
        engine.set_version(1)
    drain(engine)
    for i, whole in enumerate(expected):
        n = count if then == "abort" and i == 0 else 40
        assert done[i].ids == whole.ids[:n]
        torch.testing.assert_close(
            torch.tensor(done[i].logprobs), torch.tensor(whole.logprobs[:n]), rtol=0, atol=1e-4
        )
    assert bool(engine.pool.match_prefix([*prompts[1], 9])) is (then != "new weights")


def test_prompts_longer_than_a_pass_are_computed_in_pieces(model, monkeypatch):
    prompts = [[4 + (7 * i + j) % 40 for j in range(n)] for i, n in enumerate((50, 3, 61, 50))]
    requests = [request(p, seed=i, max_tokens=10) for i, p in enumerate(prompts)] + [
        request(prompts[0], seed=9)
    ]
    whole = Engine(model).generate(requests)
    monkeypatch.setattr("hone.engine.engine.PASS_TOKENS", 16)
    pieces = Engine(model, prefill_tokens=16).generate(requests)
    assert [c.ids for c in whole] == [c.ids for c in pieces]
    for one, two in zip(whole, pieces, strict=True):
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(two.logprobs), rtol=0, atol=1e-5
        )


def test_keys_of_two_policies_are_never_used_again(model, monkeypatch):
    monkeypatch.setattr("hone.engine.engine.PASS_TOKENS", 16)
    engine, prompt = Engine(model, prefill_tokens=16), list(range(4, 44))
    for seed in range(2):
        engine.add(request(prompt, seed=seed, max_tokens=20, stop=frozenset()), lambda done: None)
    engine.step()  # a page of the prompt
    assert engine.admission.prefilling and len(engine.pool.match_prefix(prompt)) == 1
    engine.set_version(1)
    # Joins the two
    engine.add(request(prompt, seed=2, max_tokens=20, stop=frozenset()), lambda done: None)
    drain(engine)
    assert engine.pool.match_prefix([*prompt, 9]) == []
    engine.generate([request(prompt, max_tokens=1)])
    assert len(engine.pool.match_prefix(prompt)) == 2


def test_requests_are_admitted_in_the_order_they_came(model):
    engine, started = Engine(model, max_batch_size=2, kv_cache_gib=ONE_SEQUENCE), []
    # The first fills the cache, the small ones behind it must wait
    for i, n in enumerate((90, 2, 2, 60)):
        engine.add(
            request([5] * n, seed=i, max_tokens=6, stop=frozenset()),
            lambda done, i=i: started.append(i),
        )
    drain(engine)
    assert started == [0, 1, 2, 3]


@pytest.mark.parametrize("lacks", ["slots", "pages", "nothing"])
def test_who_has_just_come_does_not_wait_for_room(model, lacks, one_by_one):
    room = {
        "slots": {"max_batch_size": 2},
        "pages": {"kv_cache_gib": 2 * ONE_SEQUENCE},
        "nothing": {},
    }[lacks]
    engine = Engine(model, **room)
    for i in range(5):
        engine.add(request([5], seed=i, max_tokens=90, stop=frozenset()), lambda done: None)
    assert not engine.running_sequences and engine.admission.without_room == 0
    engine.step()
    left = 0 if lacks == "nothing" else 3
    assert len(engine.running_sequences) == 5 - left and engine.admission.without_room == left
    engine.add(request([6], max_tokens=90), lambda done: None)
    assert engine.admission.without_room == left  # until it has been looked at
    engine.step()
    assert engine.admission.without_room == (left and left + 1)
    engine.step(admit=False)
    assert engine.admission.without_room == (left and left + 1)  # nothing else has been found out
    if lacks == "pages":
        drain(engine)
    else:
        engine.abort_all()
    assert engine.admission.without_room == 0
    assert_all_returned(engine)
    engine.add(request([7], max_tokens=2), lambda done: None)
    assert engine.admission.without_room == 0
    engine.abort_all()


def test_who_waits_for_a_pass_does_not_wait_for_room(model):
    engine = Engine(model, max_batch_size=64, prefill_tokens=8)
    for i in range(50):
        engine.add(request([i % 40 + 1] * (8 + i // 40), seed=i, max_tokens=2), lambda done: None)
    engine.step()
    assert len(engine.admission.waiting) > 40 and engine.admission.without_room == 0
    engine.abort_all()


def test_a_request_ends_at_its_deadline_with_what_it_has(model, one_by_one):
    engine, done = Engine(model), []
    engine.add(replace(request([5], stop=frozenset(), max_tokens=90), timeout=0.02), done.append)
    engine.add(replace(request([6], stop=frozenset()), timeout=0.0), done.append)
    engine.step()
    assert done[0].finish_reason == "timeout" and done[0].ids == []
    time.sleep(0.03)
    engine.step()
    assert done[1].finish_reason == "timeout" and len(done[1].ids) == 2
    assert_all_returned(engine)


def test_ten_thousand_random_requests_with_aborts_return_everything(model):
    rng = np.random.default_rng(0)
    engine, done, alive = (
        Engine(model, max_batch_size=24, kv_cache_gib=3e-4, prefill_tokens=64),
        [],
        [],
    )
    prompts = [rng.integers(4, 50, n).tolist() for n in rng.integers(1, 70, 200)]
    # Layer by layer each takes four times as long
    sent, count = (0, 1_500 if engine.packed is None else 10_000)
    while sent < count or not engine.is_idle:
        for _ in range(min(int(rng.integers(0, 60)), count - sent)):
            prompt = prompts[int(rng.integers(200))]
            timeout = 0.0 if rng.random() < 0.02 else None
            one = replace(
                request(prompt, seed=sent, max_tokens=int(rng.integers(1, 8))), timeout=timeout
            )
            alive.append(engine.add(one, done.append))
            sent += 1
        for _ in range(int(rng.integers(0, 4))):
            if alive:
                # Also such as have ended
                engine.abort_request(alive.pop(int(rng.integers(len(alive)))))
        if rng.random() < 0.02:
            engine.set_version(engine.version + 1)
        engine.step()
    assert len(done) == count
    reasons = {c.finish_reason for c in done}
    assert reasons == {"stop", "length", "abort", "timeout"}
    assert_all_returned(engine)


def test_steps_in_one_call_are_steps_one_by_one(model, monkeypatch):
    """To the bit, whatever ends within a call, and beside a request that is drawn with a filter, step by step."""
    requests = [
        request([5, 6, i % 40 + 4], seed=i, max_tokens=1 + i % 30, stop=STOP) for i in range(70)
    ]
    together = Engine(model).generate(requests)
    assert len({len(c.ids) for c in together}) > 8 and {c.finish_reason for c in together} == {
        "stop",
        "length",
    }
    filtered = replace(
        request([7], stop=frozenset(), max_tokens=40), sampling=Sampling(1.0, 40, 3, top_k=5)
    )
    beside = Engine(model).generate([*requests, filtered])
    monkeypatch.setattr("hone.engine.decoder.PACKED_STEPS", 1)
    assert Engine(model).generate(requests) == together
    assert [c.ids for c in together] == [c.ids for c in beside[:-1]]
    if model.spec.head_dim % 16 == 0:
        assert together == beside[:-1]
    else:  # other heads are torch's, whose last bits may depend on what is in the batch
        for one, other in zip(together, beside, strict=False):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_fifty_updates_under_load_are_seen_in_order(model, one_by_one):
    engine, done = Engine(model, max_batch_size=8), []
    for seed in range(60):
        engine.add(
            request([5, seed % 40 + 4], seed=seed, max_tokens=30, stop=frozenset()), done.append
        )
    for version in range(1, 51):
        for _ in range(1 + version % 5):
            engine.step()
        engine.set_version(version)
    drain(engine)
    seen = set()
    for completion in done:
        assert completion.versions == sorted(completion.versions) and len(completion.versions) == 30
        seen |= set(completion.versions)
    assert seen == set(range(51)), "a version that no token came from"


# -------------------------------------------------------------------------------------------------- sampling


def sampled(model, n=None, **sampling):
    prompt = [5, 6, 7]
    sampling = {"temperature": 1.0, "max_tokens": 20, "seed": 3} | sampling
    return Engine(model).generate([GenerateRequest(prompt, Sampling(**sampling), frozenset())])[0]


def plain_distributions(model, ids, temperature=1.0):
    tokens = torch.tensor([5, 6, 7, *ids[:-1]])
    packed = PackedAttention([len(tokens)])
    with torch.no_grad():
        return (
            model.compute_logits(model(tokens, packed.token_positions(), packed))[2:] / temperature
        )


def test_filters_draw_from_what_they_leave_and_report_the_models_logprob(model):
    for sampling in (
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.7, "temperature": 0.8},
    ):
        done = sampled(model, **sampling)
        logits = plain_distributions(model, done.ids, sampling.get("temperature", 1.0))
        probs = torch.softmax(logits, -1)
        ranks = (probs > probs.gather(1, torch.tensor(done.ids)[:, None])).sum(-1)
        assert ranks.max() < sampling.get("top_k", 50)
        chosen = probs.gather(1, torch.tensor(done.ids)[:, None]).squeeze(1)
        assert (chosen >= sampling.get("min_p", 0.0) * probs.max(-1).values - 1e-6).all()
        expected = (
            torch.log_softmax(logits, -1).gather(1, torch.tensor(done.ids)[:, None]).squeeze(1)
        )
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=1e-4)


def test_masks_are_what_transformers_filters_leave(model):
    """Requests with and without masks run together; a penalty changes what is left."""
    warpers = pytest.importorskip("transformers").generation.logits_process
    samplings = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3, "temperature": 1.3},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.01, "temperature": 0.8},
        {"top_p": 0.6, "presence_penalty": 2.0, "min_tokens": 3},
    ]
    engine = Engine(model, max_batch_size=8, max_model_len=96)
    known = {"max_tokens": 15, "returns_mask": True, "ignore_eos": True}
    requests = [Sampling(**({"seed": i} | known | s)) for i, s in enumerate(samplings)]
    requests += [replace(requests[0], returns_mask=False), Sampling(1.0, 15, returns_mask=True)]
    done = engine.generate([GenerateRequest([5, 6, 7], s, STOP) for s in requests])
    assert [one.mask is not None for one in done] == [True] * len(samplings) + [False] * 2
    assert done[-2].ids == done[0].ids
    for sampling, one in zip(samplings, done, strict=False):
        logits = plain_distributions(model, one.ids)
        if "presence_penalty" in sampling:
            for i in range(1, len(one.ids)):
                logits[i, one.ids[:i]] -= 2.0
            logits[:2, 3] = -1e30
        for row, ids, drawn in zip(logits, one.mask, one.ids, strict=True):
            scores = row[None] / sampling.get("temperature", 1.0)
            for name, kind in (
                ("top_k", warpers.TopKLogitsWarper),
                ("top_p", warpers.TopPLogitsWarper),
            ):
                if name in sampling:
                    scores = kind(sampling[name])(None, scores)
            if "min_p" in sampling:  # of the likeliest, whatever the others leave
                scores = warpers.MinPLogitsWarper(sampling["min_p"])(None, scores)
            assert ids == scores[0].isfinite().nonzero().flatten().tolist()
            assert drawn in ids


def test_a_mask_of_too_many_ids_is_dropped(model, monkeypatch):
    monkeypatch.setattr("hone.engine.sequence.MAX_MASK_IDS", 40)
    assert len(sampled(model, top_k=2, returns_mask=True).mask) == 20
    assert sampled(model, top_k=3, returns_mask=True).mask is None


def test_raw_logprobs_are_those_at_temperature_one(model):
    done = sampled(model, temperature=0.5, raw_logprobs=True)
    assert done.ids == sampled(model, temperature=0.5).ids
    logits = plain_distributions(model, done.ids)
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=0, atol=1e-4)


def test_likeliest_tokens_on_request(model):
    done = sampled(model, top_logprobs=3)
    assert done.ids == sampled(model).ids and len(done.alternatives) == 20
    expected = torch.log_softmax(plain_distributions(model, done.ids), -1).topk(3)
    for row, ids, values in zip(
        done.alternatives, expected.indices.tolist(), expected.values.tolist(), strict=True
    ):
        assert [i for i, _ in row] == ids and [v for _, v in row] == pytest.approx(values, abs=1e-4)


def test_bias_and_penalties_change_the_draw(model):
    assert set(sampled(model, logit_bias=((9, 100.0),)).ids) == {9}
    assert len(set(sampled(model, presence_penalty=1000.0).ids)) == 20  # no token twice
    assert len(set(sampled(model, frequency_penalty=1000.0).ids)) == 20
    unlike = sampled(model, repetition_penalty=1e6, temperature=0.0).ids
    first = plain_distributions(model, [4])[0]
    weaker = torch.where(first > 0, first / 1e6, first * 1e6)
    first = torch.where(torch.isin(torch.arange(50), torch.tensor([5, 6, 7])), weaker, first)
    assert unlike[0] == int(first.argmax())


def test_min_tokens_and_ignore_eos(model):
    free = sampled(model)
    stop = frozenset({free.ids[2]})
    prompt = [5, 6, 7]
    cut = Engine(model).generate([GenerateRequest(prompt, Sampling(max_tokens=20, seed=3), stop)])[
        0
    ]
    assert cut.ids == free.ids[: free.ids.index(free.ids[2]) + 1]
    held = Engine(model).generate(
        [GenerateRequest(prompt, Sampling(max_tokens=20, seed=3, min_tokens=8), stop)]
    )[0]
    assert not stop & set(held.ids[:7]) and len(held.ids) >= 8
    ignoring = Sampling(max_tokens=20, seed=3, ignore_eos=True)
    assert Engine(model).generate([GenerateRequest(prompt, ignoring, stop)])[0].ids == free.ids


def test_a_condition_of_the_caller_ends_a_sequence(model):
    free = sampled(model)
    one = GenerateRequest(
        [5, 6, 7],
        Sampling(max_tokens=20, seed=3),
        frozenset(),
        lambda ids: 4 if len(ids) > 5 else None,
    )
    done = Engine(model).generate([one])[0]
    assert done.ids == free.ids[:4] and done.finish_reason == "stop" and len(done.versions) == 4


def test_tokens_that_are_not_allowed_are_not_drawn_and_logprobs_are_the_model_s(model):
    """Each token is to be one more than the one before, from 3 on, beside a request that is free."""

    def one_more(ids):
        may = np.zeros(model.spec.vocab_size, dtype=bool)
        may[ids[-1] + 1 if ids else 3] = True
        return may

    prompt, free = [5, 6, 7], sampled(model)
    told = GenerateRequest(prompt, Sampling(1.0, 6, seed=3), frozenset({7}), allows=one_more)
    beside = GenerateRequest(prompt, Sampling(max_tokens=20, seed=3), frozenset())
    done, other = Engine(model).generate([told, beside])
    assert done.ids == [3, 4, 5, 6, 7] and done.finish_reason == "stop" and other.ids == free.ids
    assert done.logprobs == pytest.approx(score_sequence(model, prompt + done.ids)[-5:], abs=1e-4)


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]
FILTERS = {
    "plain": ({}, [0, 1, 2, 3, 4, 5]),
    "temperature": ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
    "top_p": ({"top_p": 0.8}, [0, 1, 2]),
    "top_k": ({"top_k": 4}, [0, 1, 2, 3]),
    "min_p": ({"min_p": 0.1}, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("is_one_seed", [True, False])
def test_frequencies_of_200000_draws(name, is_one_seed):
    """Chi-squared at p = 0.001, for one seed's stream and for the first draws of many seeds."""
    sampling, kept = FILTERS[name]
    n, logits = 200_000, torch.tensor(LOGITS)
    slots = Slots(n, 1, 1, 1, torch.device("cpu"))
    rows = torch.arange(n)
    slots.state[:n, column.SEED] = 7 if is_one_seed else rows
    slots.state[:n, column.MAX] = n + 1
    T = sampling.get("temperature", 1.0)
    slots.parameters[:, column.TEMPERATURE] = slots.parameters[:, column.LOGPROB_TEMPERATURE] = T
    slots.parameters[:, column.TOP_P] = sampling.get("top_p", 1.0)
    slots.parameters[:, column.TOP_K] = sampling.get("top_k", 0)
    slots.parameters[:, column.MIN_P] = sampling.get("min_p", 0.0)
    logits_BV = logits.expand(n, -1).contiguous()
    if is_one_seed:  # draw i of the stream, one after the other: the counter moves, the logits stay
        tokens = pick_tokens(
            logits_BV, torch.full((n,), T), uniform_numbers(torch.tensor([7]), rows)
        )
        if name not in ("plain", "temperature"):
            keep = logits_BV >= filter_thresholds(logits_BV[:1], slots.parameters[:1])[:, None]
            masked = logits_BV.masked_fill(~keep, -1e30)
            tokens = pick_tokens(
                masked, torch.full((n,), T), uniform_numbers(torch.tensor([7]), rows)
            )
    else:
        is_filtered = name not in ("plain", "temperature")
        draw_tokens(
            logits_BV,
            logits_BV,
            filter_thresholds(logits_BV, slots.parameters[:n]) if is_filtered else None,
            slots,
            rows,
            False,
        )
        tokens = slots.state[:n, column.LAST]
        expected = torch.log_softmax(logits / T, 0)[tokens]
        torch.testing.assert_close(slots.logprobs[:n, 0], expected, rtol=0, atol=1e-5)
    p = torch.softmax(logits[kept].double() / T, 0)
    counts = torch.bincount(tokens, minlength=6)
    assert counts[kept].sum() == n
    chi = float(((counts[kept] - n * p) ** 2 / (n * p)).sum())
    assert chi < {2: 13.8, 3: 16.3, 5: 20.5}[len(kept) - 1]


class Named(Captured):
    """Graphs by their names alone, for those who choose among them."""

    def has(self, *keys):
        self.graphs |= dict.fromkeys(keys)
        return self


@pytest.mark.parametrize("stand_in", [True, False])
def test_a_graph_of_more_rows_stands_in_until_its_spare_rows_have_paid(stand_in, monkeypatch):
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    many, few = Key(128, 0, False, 0, 0, False), Key(64, 0, False, 0, 0, False)
    unlike = [
        few._replace(rows=96, **one) for one in ({"kind": 1}, {"parts": 2}, {"is_long": True})
    ]
    graphs.captured = Named(stand_in).has(
        many, few._replace(rows=256), few._replace(rows=32), *unlike
    )
    monkeypatch.setattr(graphs, "capture_graph", lambda key: graphs.captured.has(key))
    steps = PAYS_FOR_GRAPH // 2  # of which each has half of its rows for nobody
    chosen = [graphs._choose_graph(few, steps) for _ in range(5)]
    assert chosen == ([many] * 3 + [few] * 2 if stand_in else [few] * 5)
    graphs.captured.clear()
    graphs.captured.has(many)
    assert graphs._choose_graph(few, steps) == (many if stand_in else few)  # begins anew
    shared = few._replace(stretches=8, parts=1)
    graphs.captured.has(shared._replace(rows=128))
    assert graphs._choose_graph(shared, 1) == shared


@pytest.mark.parametrize(
    ("sequences", "length", "most_tokens", "found"),
    [
        (100, 512, 1e6, [(256, 16, 256), (512, 32, 512), (1024, 64, 512), (2048, 128, 512)]),
        (
            256,
            165,
            1400,
            [(256, 16, 256), (512, 32, 256), (1024, 64, 256)],
        ),  # a longer pass hides its launches
        (1, 165, 1e6, [(256, 16, 256)]),  # no longer pass can come
        (8, 4096, 1e6, [(256, 16, 256), (512, 32, 512), (1024, 64, 1024), (2048, 128, 2048)]),
    ],
)
@pytest.mark.parametrize("has_states", [False, True])
def test_graphs_for_prompts_are_of_the_sizes_that_may_come(
    sequences, length, most_tokens, found, has_states
):
    prefill, captured = Prefill.__new__(Prefill), []
    prefill.captured, prefill.most_tokens = Captured(True), most_tokens
    prefill.capture_graph = captured.append
    engine = SimpleNamespace(
        graphs=None,
        prefill=prefill,
        max_batch_size=sequences,
        max_model_len=length,
        cache=SimpleNamespace(deltas=object() if has_states else None),
    )
    for capture in plan_captures(engine):
        capture(engine)
    fewer = 4 if has_states else 1  # room for states takes memory
    assert captured == [Shape(n, prompts // fewer, m, has_states) for n, prompts, m in found]
    prefill.captured = None
    assert not plan_captures(engine)


# The states of 12 prompts more cost as much as 192 tokens.
@pytest.mark.parametrize(("stand_in", "deltas", "times"), [(1, None, 2), (1, (), 1), (0, None, 0)])
def test_a_larger_pass_stands_in_as_long_as_its_padding_hides_launches(
    stand_in, deltas, times, monkeypatch
):
    prefill = Prefill.__new__(Prefill)
    prefill.seen, prefill.most_tokens = set(), 1000
    prefill.cache = SimpleNamespace(deltas=deltas)
    few_prompts, decoding = Shape(192, 2, 64), Key(128, 0, False, 0, 0, False)
    captured = Named(bool(stand_in)).has(
        Shape(512, 16, 64), Shape(768, 16, 64), few_prompts, decoding
    )
    monkeypatch.setattr(prefill, "capture_graph", lambda shape: captured.has(shape))
    small, longer = Shape(128, 4, 32), Shape(128, 4, 128)
    chosen = [prefill._choose_graph(captured, small) for _ in range(4)]
    first = [Shape(512, 16, 64)] * times if stand_in else [None]
    assert chosen == [*first, *[small] * (4 - len(first))]
    # Nothing has room for it
    assert [prefill._choose_graph(captured, longer) for _ in range(3)] == [None, longer, longer]
    captured.clear()
    captured.has(Shape(512, 16, 64))
    assert prefill._choose_graph(captured, small) == (Shape(512, 16, 64) if stand_in else small)


def test_a_start_notes_which_kernels_are_kept(tmp_path, monkeypatch):
    """Another shape, or an empty cache, is rehearsed again."""
    from hone.kernels.gpu.compiling import KeptKernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    first, other = (
        KeptKernels(describe_rehearsal(Engine(model, max_batch_size=size)))
        for size in (4, 8)
        for model in [Transformer(SPEC)]
    )
    assert not first.are_there()
    first.note()
    assert first.are_there() and not other.are_there()
    shutil.rmtree(tmp_path / "kernels")
    assert not first.are_there()
