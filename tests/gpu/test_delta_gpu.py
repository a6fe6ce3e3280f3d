"""The gated delta rule on a GPU: kernels against plain torch in float32, sampling against training."""

from itertools import chain

import numpy as np
import pytest
import torch

from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.engine.prefill import Shape
from hone.kernels import delta_rule, row_state
from hone.kernels.delta_plan import DeltaHeads, DeltaPlan, DeltaState
from hone.kernels.delta_shape import DeltaShape
from hone.models.attention_layouts import PackedAttention
from hone.models.families import parse_model_config
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.rl.trainer import PolicyTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = [
    DeltaShape(16, 16, 128, 128, 4),
    DeltaShape(4, 8, 128, 128, 4),
]
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
}


def relative_error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def draw_layer(shape, tokens):
    """Return a projection and weights of one layer, in bfloat16."""

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, device="cuda") * scale).bfloat16().requires_grad_()

    decay = torch.empty(shape.value_heads, device="cuda").uniform_(-4, 1.5).bfloat16()
    weights = (
        normal(shape.channels, 1, shape.conv_width, scale=0.5),
        decay.requires_grad_(),
        normal(shape.value_heads),
        normal(shape.value_size),
    )
    return normal(tokens, sum(shape.projection_rows)), weights


def to_wide(tensors):
    return [None if x is None else x.detach().float().requires_grad_() for x in tensors]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_before", [False, True])
@pytest.mark.parametrize("count", [7, 3, 1])  # fewer sequences: fewer columns of a state a program
def test_sequences_with_gradients(shape, has_before, count):
    torch.manual_seed(0)
    lengths = np.array([700, 130, 65, 64, 63, 2, 1])[:count]
    plan = DeltaPlan.for_lengths(lengths, torch.device("cuda"))
    projected, weights = draw_layer(shape, lengths.sum())
    before = [None, None]
    if has_before:
        columns = torch.randn(len(lengths), shape.conv_width - 1, shape.channels, device="cuda")
        matrices = torch.randn(len(lengths), *shape.matrix_sizes, device="cuda")
        before = [columns.bfloat16().requires_grad_(), matrices.requires_grad_()]
    inputs = [projected, *weights, *before]
    wide = to_wide(inputs)
    results = []
    for found, run in ((inputs, delta_rule.run_plan), (wide, delta_rule.run_plan_reference)):
        heads = DeltaHeads(shape, *found[1:5], 1e-6)
        state = None if found[5] is None else DeltaState(*found[5:])
        y, after, _ = run(found[0], heads, plan, state)
        results.append((y, *after.tensors))
    for one, two in zip(*results, strict=True):
        assert relative_error(one, two) < 0.02
    factors = [torch.randn_like(x) for x in results[1]]
    given = [x for x in inputs if x is not None], [x for x in wide if x is not None]
    grads = [
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(result, factors, strict=True)), leaves
        )
        for result, leaves in zip(results, given, strict=True)
    ]
    names = ["projected", "conv", "decay", "bias", "norm", "columns", "matrices"]
    errors = {name: relative_error(one, two) for name, one, two in zip(names, *grads, strict=False)}
    assert max(errors.values()) < 0.03, errors


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_step_skips_done_rows(shape):
    torch.manual_seed(0)
    rows, active = 9, torch.tensor([4, 0, 8, 2, 5], device="cuda")
    projected, weights = draw_layer(shape, len(active))
    state = torch.zeros(rows, row_state.FIELDS, dtype=torch.int64, device="cuda")
    state[8, row_state.DONE] = row_state.STOPPED
    columns = torch.randn(rows, shape.conv_width - 1, shape.channels, device="cuda").bfloat16()
    matrices = torch.randn(rows, *shape.matrix_sizes, device="cuda")
    kept = DeltaState(columns.clone(), matrices.clone())
    wide = DeltaState(columns.float(), matrices.clone())
    with torch.no_grad():
        found = delta_rule.decode_delta(
            projected, DeltaHeads(shape, *weights, 1e-6), kept, active, state
        )
        wanted = delta_rule.decode_delta_reference(
            projected.float(),
            DeltaHeads(shape, *to_wide(weights), 1e-6),
            wide,
            active,
            state,
        )
    assert relative_error(found, wanted) < 0.01
    for one, two in zip(kept.tensors, wide.tensors, strict=True):
        assert relative_error(one, two) < 0.01
    assert torch.equal(kept.matrices_NVEF[8], matrices[8])
    assert torch.equal(kept.columns_NWC[8], columns[8])
    assert torch.equal(kept.matrices_NVEF[1], matrices[1])


@pytest.fixture(scope="module")
def model():
    made = Transformer(parse_model_config(CONFIG))
    made.init_weights(torch.Generator().manual_seed(0))
    return made.to("cuda", torch.bfloat16)


def request(ids, seed, tokens):
    return GenerateRequest(list(ids), Sampling(1.0, tokens, seed, ignore_eos=True), frozenset())


@torch.no_grad()
def score(model, prompt, ids):
    """Return the logprobs of a completion, computed as training does."""
    tokens = torch.tensor([*prompt, *ids], device="cuda")
    packed = PackedAttention([len(tokens)], "cuda")
    hidden = model(
        tokens[:-1], packed.token_positions()[:-1], PackedAttention([len(tokens) - 1], "cuda")
    )
    logits = model.compute_logits(hidden[len(prompt) - 1 :]).float()
    wanted = torch.tensor(ids, device="cuda")[:, None]
    return logits.log_softmax(-1).gather(1, wanted).squeeze(1).cpu()


def test_sampler_scores_as_training(model):
    """Groups, prefix hits, rows that are done while others run, and slots that are used again."""
    engine = Engine(model, max_batch_size=8, max_model_len=600, kv_cache_gib=1)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 512, n).tolist() for n in (1, 37, 64, 65, 130, 300)]
    requests = [
        request(ids, 10 * i + j, 5 + 40 * j) for i, ids in enumerate(prompts) for j in range(3)
    ]
    starts = []
    run = engine.prefill.run_chunks

    def record(chunks, kept):
        starts.extend(chunk.start for chunk in chunks)
        return run(chunks, kept)

    engine.prefill.run_chunks = record
    done = engine.generate(requests)
    longer = [request([*ids, *range(20)], 99, 20) for ids in prompts]
    starts.clear()
    done += engine.generate(longer)
    assert sorted(starts)[-2:] == [128, 256]  # the states after whole pages of the prompts
    asked = [*requests, *longer]
    for version in (1, 2):  # the shapes of passes recur: they are CUDA graphs
        engine.set_version(version)
        for more in (requests, longer):
            asked += more
            done += engine.generate(more)
    assert any(isinstance(key, Shape) for key in engine.captured)
    differences = []
    for one, completion in zip(asked, done, strict=True):
        found = torch.tensor(completion.logprobs)
        differences.append((found - score(model, one.prompt_ids, completion.ids)).abs())
    assert torch.cat(differences).mean() < 0.02
    assert torch.cat(differences).max() < 0.3


def test_training_on_shared_prompts(model):
    """Gradients of prompts that completions share equal those of each sequence by itself."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 512, n).tolist() for n in (37, 130)]
    completions = [[draw.integers(0, 512, n).tolist() for n in (20, 70, 64)] for _ in prompts]
    flat = [ids for prompt, own in zip(prompts, completions, strict=True) for ids in (prompt, *own)]
    sizes = [len(prompt) for prompt in prompts], [[len(x) for x in own] for own in completions]
    shared = PackedAttention(sizes[0], "cuda", sizes[1])
    tokens = torch.tensor([*chain.from_iterable(flat)], device="cuda")
    parts = model(tokens, shared.token_positions(), shared).split([len(x) for x in flat])
    of_completions = [x for i, x in enumerate(parts) if i % 4]
    whole = [[*p, *c] for p, own in zip(prompts, completions, strict=True) for c in own]
    apart = PackedAttention([len(x) for x in whole], "cuda")
    tokens = torch.tensor([*chain.from_iterable(whole)], device="cuda")
    found = model(tokens, apart.token_positions(), apart).split([len(x) for x in whole])
    alone = [x[-len(y) :] for x, y in zip(found, of_completions, strict=True)]
    grads = []
    factors = torch.randn_like(torch.cat(alone))
    for hidden in (of_completions, alone):
        loss = (torch.cat(hidden).float() * factors.float()).sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert relative_error(torch.cat(of_completions), torch.cat(alone)) < 0.02
    for (name, _), one, two in zip(model.named_parameters(), *grads, strict=True):
        assert relative_error(one, two) < 0.05, name


def test_a_step_is_trained(model):
    trainer = PolicyTrainer(model, TrainerConfig(optim=OptimConfig(lr=1e-4)), max_steps=4)
    draw = np.random.default_rng(0)
    samples = []
    for group in range(4):
        prompt = draw.integers(0, 512, 37).tolist()
        for _ in range(8):
            ids = prompt + draw.integers(0, 512, 50).tolist()
            mask = [False] * 37 + [True] * 50
            samples.append(Sample(ids, mask, [-6.2] * len(ids), float(group % 2) - 0.5, 1.0))
    rows = [trainer.step(Batch(step, samples)) for step in range(1, 4)]
    assert all(np.isfinite(list(row.values())).all() for row in rows)
