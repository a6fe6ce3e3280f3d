"""The engine on a GPU: CUDA graphs and Triton kernels against plain forwards, and its logprobs against transformers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.engine.engine import Engine
from hone.engine.graphs import Key
from hone.engine.prefill import Shape
from hone.engine.warm_up import plan_captures
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import load_model
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import GenerateRequest, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
ROOT = Path(__file__).parents[2]
SPEC = ModelSpec(
    512, 256, 512, 3, 8, 2, 64, 1e-6, make_plain_layers(10000.0, 64, 3), True, 2048, 0.06, False
)


@pytest.fixture(scope="module")
def model():
    made = Transformer(SPEC)
    made.init_weights(torch.Generator().manual_seed(0))
    return made.to("cuda", torch.bfloat16)


def request(prompt, seed=0, max_tokens=40, stop=frozenset(), **sampling):
    return GenerateRequest(
        list(prompt), Sampling(max_tokens=max_tokens, seed=seed, **sampling), stop
    )


@torch.no_grad()
def expected_logprobs(model, prompt, ids, temperature=1.0):
    tokens = torch.tensor([*prompt, *ids[:-1]], device="cuda")
    packed = PackedAttention([len(tokens)], "cuda")
    hidden = model(tokens, packed.token_positions(), packed)[len(prompt) - 1 :]
    logits = torch.mm(hidden, model.embed.weight.t(), out_dtype=torch.float32) / temperature
    return (
        torch.log_softmax(logits, -1)
        .gather(1, torch.tensor(ids, device="cuda")[:, None])
        .squeeze(1)
        .cpu()
    )


def assert_logprobs(model, requests, done, limit=0.03):
    for one, completion in zip(requests, done, strict=True):
        expected = expected_logprobs(
            model, one.prompt_ids, completion.ids, one.sampling.temperature
        )
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < limit


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 512, n).tolist() for n in lengths]


def test_continuous_batching_with_stop_tokens(model):
    requests = [
        request(p, seed=i, max_tokens=5 + i % 60, stop=frozenset({i % 512}), temperature=0.8)
        for i, p in enumerate(prompts([1 + 7 * i % 300 for i in range(150)]))
    ]
    engine = Engine(model, max_batch_size=40, max_model_len=1024, kv_cache_gib=1)
    done = engine.generate(requests)
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert all(
        len(c.ids) == r.sampling.max_tokens
        for c, r in zip(done, requests, strict=True)
        if c.finish_reason == "length"
    )
    assert all(
        c.ids[-1] in r.stop_ids
        for c, r in zip(done, requests, strict=True)
        if c.finish_reason == "stop"
    )
    assert_logprobs(model, requests, done)
    assert engine.pool.available_count == engine.pool.pages - 1


def test_most_tokens_are_read_before_the_last_are_there(model, monkeypatch):
    engine, read = Engine(model, max_batch_size=8, max_model_len=256, kv_cache_gib=1), []
    generated, remember = engine.slots.generated_tokens, engine.pool.remember_pages
    monkeypatch.setattr(
        engine.slots,
        "generated_tokens",
        lambda *asked: read.append(asked[1:3]) or generated(*asked),
    )
    requests = [request(p, seed=i, max_tokens=130) for i, p in enumerate(prompts([62] * 8))]
    monkeypatch.setattr(
        engine.pool,
        "remember_pages",
        lambda ids, *pages: read.append(len(ids)) or remember(ids, *pages),
    )
    done = engine.generate(requests)
    # The last window of steps is a short one. Of the 192 tokens in the end, three pages, the newest has no key.
    assert read == [62] * 8 + [(0, 129)] + [62 + 128] * 8 + [(129, 130)]
    assert_logprobs(model, requests, done)
    whole = [
        [*one.prompt_ids, *completion.ids] for one, completion in zip(requests, done, strict=True)
    ]
    assert [len(engine.pool.match_prefix([*ids, 9])) for ids in whole] == [2] * 8


def test_larger_graphs_stand_in_until_others_would_pay(model):
    engine = Engine(model, max_batch_size=64, max_model_len=512, kv_cache_gib=1, stand_in=True)
    engine.prefill.most_tokens = 1000  # a pass for the few has 352 too many
    many = [request(p, seed=i, max_tokens=21) for i, p in enumerate(prompts([12] * 40))]
    few = [request(p, seed=i, max_tokens=21) for i, p in enumerate(prompts([12] * 12, seed=1))]

    def graphs():
        """Numbers of rows and of prompts that there is a graph for, once these have come."""
        keys = [*engine.captured]
        return {key.rows for key in keys if isinstance(key, Key)}, {
            x.prompts for x in keys if isinstance(x, Shape)
        }

    for requests, rows, passes in ((many, {40}, set()), (many, {40}, {64}), (few, {40}, {64})):
        assert_logprobs(model, requests, engine.generate(requests))
        assert graphs() == (rows, passes)
    for _ in range(3):  # 20 steps each
        assert_logprobs(model, few, engine.generate(few))
    assert graphs() == ({16, 40}, {16, 64})


def test_a_server_has_graphs_before_requests_come(model):
    engine = Engine(model, max_batch_size=100, max_model_len=512, kv_cache_gib=1, stand_in=True)
    for capture in plan_captures(engine):
        capture(engine)
    for count, length in ((1, 20), (12, 12), (20, 12), (80, 12)):  # by graphs for 1, 16, 64 and 100
        requests = [
            request(p, seed=i, max_tokens=21) for i, p in enumerate(prompts([length] * count))
        ]
        assert_logprobs(model, requests, engine.generate(requests))
        assert {key.rows for key in engine.captured if isinstance(key, Key)} == {1, 16, 64, 100}
        assert {key.tokens for key in engine.captured if isinstance(key, Shape)} == {
            256,
            512,
            1024,
            2048,
        }


def test_a_group_reads_its_prompt_once(model):
    shared, alone = prompts([700, 130])
    requests = [request(shared, seed=i) for i in range(40)] + [
        request(alone, seed=i) for i in range(3)
    ]
    engine = Engine(model, max_batch_size=64, max_model_len=1024, kv_cache_gib=1)
    done = engine.generate(requests)
    assert any(isinstance(key, Key) and key.stretches for key in engine.captured.graphs), (
        "the kernel for shared pages did not run"
    )
    assert_logprobs(model, requests, done)


def test_few_long_sequences_are_divided_among_blocks(model):
    requests = [request(p, seed=i, max_tokens=400) for i, p in enumerate(prompts([1500, 70, 3]))]
    engine = Engine(model, max_batch_size=64, max_model_len=2048, kv_cache_gib=1)
    # From their prompts on, or when they have become long
    for some in (requests, requests[1:], requests[2:]):
        engine.captured.clear()
        done = engine.generate(some)
        assert any(isinstance(key, Key) and key.parts for key in engine.captured.graphs), (
            "none was divided"
        )
        assert_logprobs(model, some, done)


def test_many_sequences_over_pages_that_lie_apart():
    made = Transformer(
        ModelSpec(
            512,
            256,
            512,
            2,
            16,
            8,
            64,
            1e-6,
            make_plain_layers(10000.0, 64, 2),
            True,
            2048,
            0.06,
            False,
        )
    )
    made.init_weights(torch.Generator().manual_seed(0))
    made = made.to("cuda", torch.bfloat16)
    engine = Engine(made, max_batch_size=256, max_model_len=512, kv_cache_gib=1)
    # Pages lie apart after the first, in any order
    for seed, count in enumerate((200, 20, 40, 100, 200)):
        lengths = np.random.default_rng(seed).integers(1, 250, count)
        requests = [request(p, seed=i, max_tokens=90) for i, p in enumerate(prompts(lengths, seed))]
        assert_logprobs(made, requests, engine.generate(requests))


def test_a_long_prompt_in_pieces_and_a_prefix_that_is_known(model):
    (long,) = prompts([1500])
    engine = Engine(model, max_batch_size=8, max_model_len=2048, kv_cache_gib=1, prefill_tokens=256)
    requests = [
        request(long),
        request([*long[:1000], 9, 9, 9], seed=1),
        request([*long[:64], 10], seed=2),
    ]
    for one in requests:
        assert_logprobs(model, [one], engine.generate([one]))


def test_filters_and_penalties(model):
    kinds = [
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"presence_penalty": 1000.0},
        {"logit_bias": ((9, 1000.0),)},
    ]
    requests = [request([5, 6, 7], seed=i, **kind) for i, kind in enumerate(kinds)]
    done = Engine(model, max_model_len=512, kv_cache_gib=1).generate(requests)
    assert_logprobs(model, requests, done)  # of the model, whatever was filtered
    assert len(set(done[3].ids)) == 40 and set(done[4].ids) == {9}
    assert done == Engine(model, max_model_len=512, kv_cache_gib=1).generate(requests)


def test_frequencies_of_200000_draws():
    from hone.engine.slots import Slots
    from hone.engine.token_sampler import draw_tokens
    from hone.kernels import row_state as column

    n, logits = 200_000, torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], device="cuda")
    rows = torch.arange(n, device="cuda")
    for T, lowest in ((1.0, None), (0.5, None), (1.0, 0.4)):
        slots = Slots(n, 1, 1, 1, torch.device("cuda"))
        slots.state[:n, column.SEED], slots.state[:n, column.MAX] = rows, 1
        slots.parameters[:, column.TEMPERATURE] = slots.parameters[
            :, column.LOGPROB_TEMPERATURE
        ] = T
        logits_BV = logits.expand(n, -1).contiguous()
        threshold = None if lowest is None else torch.full((n,), lowest, device="cuda")
        draw_tokens(logits_BV, logits_BV, threshold, slots, rows, False)
        tokens = slots.state[:n, column.LAST]
        kept = logits >= (-10 if lowest is None else lowest)
        p = torch.softmax(logits.double() / T, 0) * kept
        p = (p / p.sum())[kept].cpu()
        counts = torch.bincount(tokens, minlength=6).cpu()[kept.cpu()]
        assert counts.sum() == n
        assert float(((counts - n * p) ** 2 / (n * p)).sum()) < 20.5  # chi-squared at p = 0.001
        expected = torch.log_softmax(logits / T, 0)[tokens]
        torch.testing.assert_close(slots.logprobs[:n, 0], expected, rtol=0, atol=1e-5)


def test_updates_in_flight_change_the_very_next_tokens(model):
    made = Transformer(SPEC)
    made.init_weights(torch.Generator().manual_seed(0))
    made = made.to("cuda", torch.bfloat16)
    engine, done = Engine(made, max_model_len=512, kv_cache_gib=1), []
    for seed in range(20):
        engine.add(request([5, 6], seed=seed, max_tokens=200), done.append)
    for version in range(1, 51):
        engine.step()
        with torch.no_grad():
            made.norm.weight.mul_(0.98)  # the same storage: graphs see it
        engine.set_version(version)
    while not engine.is_idle:
        engine.step()
    for completion in done:
        assert (
            completion.versions == sorted(completion.versions) and len(completion.versions) == 200
        )
    first, last = (engine.generate([request([5, 6], seed=1)])[0].logprobs for _ in range(2))
    assert first == last
    # Flatter by the norm that shrank
    assert abs(np.mean(first)) > abs(np.mean(done[1].logprobs[:9]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model after a short SFT on this GPU: 1 to 3 nats a token."""
    out = tmp_path_factory.mktemp("trained")
    data = [
        "-m",
        "reverse_text",
        "--out",
        out / "sft.jsonl",
        "-n",
        400,
        "--min-chars",
        4,
        "--max-chars",
        10,
    ]
    sft = [
        "-m",
        "hone",
        "sft",
        "@",
        "examples/reverse_text_tiny/sft.toml",
        "--data.name",
        out / "sft.jsonl",
    ]
    sft += [
        "--max-steps",
        120,
        "--scheduler.warmup-steps",
        5,
        "--data.batch-size",
        2,
        "--data.seq-len",
        256,
    ]
    sft += ["--optim.type", "adamw"]
    for words in (data, [*sft, "--output-dir", out]):
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT)
    return out / "weights" / "step_120"


def test_logprobs_against_transformers(trained):
    transformers = pytest.importorskip("transformers")
    made = load_model(trained, dtype=torch.bfloat16, device="cuda")
    requests = [request(p, seed=i, max_tokens=64) for i, p in enumerate(prompts([30] * 64))]
    requests = [
        request([t % 85 + 5 for t in r.prompt_ids], seed=i, max_tokens=64)
        for i, r in enumerate(requests)
    ]
    done = Engine(made, max_model_len=512, kv_cache_gib=1).generate(requests)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).cuda()
    differences, entropies = [], []
    for one, completion in zip(requests, done, strict=True):
        ids = torch.tensor([[*one.prompt_ids, *completion.ids]], device="cuda")
        with torch.no_grad():
            logprobs = torch.log_softmax(
                theirs(ids[:, :-1]).logits[0, len(one.prompt_ids) - 1 :], -1
            )
        chosen = (
            logprobs.gather(1, torch.tensor(completion.ids, device="cuda")[:, None])
            .squeeze(1)
            .cpu()
        )
        differences.append(chosen - torch.tensor(completion.logprobs))
        entropies.append(-(logprobs.exp() * logprobs).sum(-1).cpu())
    log_ratio = torch.cat(differences)
    figures = {
        "mean_absolute": float(log_ratio.abs().mean()),
        "mismatch_kl": float((log_ratio.exp() - log_ratio - 1).mean()),
        "entropy": float(torch.cat(entropies).mean()),
    }
    print(json.dumps(figures))
    assert (
        figures["mean_absolute"] <= 0.01
        and figures["mismatch_kl"] <= 1e-4
        and 1 <= figures["entropy"] <= 3
    )
