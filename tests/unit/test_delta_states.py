"""Snapshots of states at the ends of prefixes: which requests start from one, and with which logprobs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hone.engine import state_rows
from hone.engine.engine import Engine
from hone.engine.warm_up import rehearse_snapshots
from hone.kernels.cuda_graphs import Captured
from hone.models.families import parse_model_config
from hone.models.transformer import Transformer
from hone.models.weight_proof import score_sequence
from hone.records import GenerateRequest, Sampling

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
PAGE = 16


@pytest.fixture(scope="module")
def model():
    made = Transformer(parse_model_config(CONFIG))
    made.init_weights(torch.Generator().manual_seed(0))
    return made


@pytest.fixture
def prompt():
    return torch.randint(0, 64, (100,), generator=torch.Generator().manual_seed(1)).tolist()


def make_engine(model, **more):
    sizes = {"max_batch_size": 4, "max_model_len": 200, "kv_cache_gib": 0.05}
    return Engine(model, **sizes | more)


def first_tokens(engine, ids):
    """Generate from a prompt; return the first token of each of its passes, after a check of its logprobs."""
    starts = []
    run = engine.prefill.run_chunks
    engine.prefill.run_chunks = lambda chunks, kept: (
        starts.extend(chunk.start for chunk in chunks) or run(chunks, kept)
    )
    (done,) = engine.generate([GenerateRequest(ids, Sampling(1.0, 4, seed=1), frozenset())])
    engine.prefill.run_chunks = run
    expected = torch.tensor(score_sequence(engine.model, ids + done.ids)[len(ids) - 1 :])
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=1e-4, atol=1e-4)
    return starts


def test_a_request_starts_at_the_last_page_of_a_prompt_that_it_begins_with(model, prompt):
    engine = make_engine(model)
    assert first_tokens(engine, prompt) == [0]
    assert first_tokens(engine, prompt) == [96]
    assert first_tokens(engine, prompt + [5] * 20) == [96]
    assert first_tokens(engine, prompt + [5] * 30) == [112]


class Uncaptured(Captured):
    """Runs the functions that a GPU would capture."""

    def capture(self, key, forward):
        self.graphs[key] = forward

    def replay(self, key, times=1):
        return self.graphs[key]()


def attend_each(q, k, v, ends, *_):
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(ends.tolist()):
        parts = (x[start:end].transpose(0, 1) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        out[start:end] = mixed.transpose(0, 1)
    return out


def test_captured_passes_keep_the_states_of_prompts_and_of_their_pages(model, prompt, monkeypatch):
    """By the kernels in Triton's interpreter, as CUDA graphs would run them."""
    pytest.importorskip("triton")
    monkeypatch.setattr("hone.engine.prefill.flash_varlen", attend_each)
    engine = make_engine(model)
    engine.prefill.captured = Uncaptured()
    others = [prompt[n:] + prompt[:n] for n in (10, 20, 30)]
    for ids in (prompt, *others):  # from the second on they have a graph
        assert first_tokens(engine, ids) == [0]
    (shape,) = engine.prefill.captured
    assert (shape.prompts, shape.has_snapshots) == (1, True) and shape.tokens > len(prompt)
    for ids in others:  # after the snapshots that the graph wrote
        assert first_tokens(engine, [*ids, 5, 6]) == [96]
    for ids in ([1, 2, 3], [4, 5, 6]):  # without snapshots, in a graph of its own
        assert first_tokens(engine, ids) == [0]
    assert len(engine.prefill.captured.graphs) == 2


@torch.no_grad()
def test_rehearsals_write_to_the_spare_row_alone(model):
    engine = make_engine(model)
    rehearse_snapshots(engine)
    written = engine.cache.deltas.matrices.abs().flatten(2).sum((0, 2)).nonzero().flatten()
    assert written.tolist() == [engine.prefill.spare_row]


def test_a_shorter_prompt_gets_a_snapshot_of_its_own(model, prompt):
    """Its pages are those of the longer prompt, which has no state at their end."""
    engine = make_engine(model)
    first_tokens(engine, prompt)
    assert first_tokens(engine, prompt[:50]) == [0]
    assert first_tokens(engine, prompt[:50] + [5] * 9) == [48]


def test_an_evicted_snapshot_is_taken_again(model, prompt, monkeypatch):
    monkeypatch.setattr(state_rows, "MOST_SNAPSHOTS", 1)
    engine = make_engine(model)
    other = prompt[::-1]
    assert [first_tokens(engine, ids) for ids in (prompt, other, prompt, prompt)] == [
        [0],
        [0],
        [0],
        [96],
    ]


@pytest.mark.parametrize(("cut", "starts"), [(96, [0, 96]), (40, [0, 40, 80]), (48, [0, 48, 96])])
def test_passes_may_end_before_or_at_the_snapshot(model, prompt, cut, starts):
    engine = make_engine(model, prefill_tokens=cut)
    assert first_tokens(engine, prompt) == starts
    assert first_tokens(engine, prompt) == [96]


def test_new_weights_drop_snapshots(model, prompt):
    engine = make_engine(model)
    first_tokens(engine, prompt)
    engine.set_version(1)
    assert first_tokens(engine, prompt) == [0]
    engine.reset()
    assert first_tokens(engine, prompt) == [0]
