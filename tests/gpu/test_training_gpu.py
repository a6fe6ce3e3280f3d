"""Kernels with gradients against their plain twins in fp64, on a GPU."""

import copy

import pytest
import torch

from hone.config.rl_config import TrainerConfig
from hone.config.sections import CkptConfig, OptimConfig
from hone.config.sft_config import SFTConfig
from hone.engine.engine import Engine
from hone.kernels.cuda_graphs import Captured
from hone.kernels.gpu_training import (
    heads_attention,
    norm_linear,
    swiglu_linear,
)
from hone.kernels.head import head_logprobs, head_loss
from hone.models.attention_layouts import PackedAttention
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import Checkpoints, restore_checkpoint, resume_from
from hone.trainer.optim import Optimizer
from hone.trainer.packing import pack_sequences, pack_shared
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from tests import twins

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def assert_like_twin(function, twin, tensors, *rest, limit=0.01):
    """Results and all gradients, of bf16 inputs, against the twin's in fp64."""
    half = [None if x is None else x.cuda().bfloat16().requires_grad_() for x in tensors]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in half]
    got, expected = function(*half, *rest), twin(*exact, *rest)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    directions = [torch.randn_like(x) for x in expected]
    for results in (got, expected):
        sum((x.double() * d).sum() for x, d in zip(results, directions, strict=True)).backward()
    pairs = list(zip(got, expected, strict=True))
    pairs += [(x.grad, y.grad) for x, y in zip(half, exact, strict=True) if x is not None]
    for one, other in pairs:
        assert (one.double() - other).norm() / other.norm() < limit


@pytest.mark.parametrize("D", [256, 320])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_linear(D, has_delta, has_bias):
    x, delta = torch.randn(1000, D), torch.randn(1000, D) if has_delta else None
    tensors = [
        x,
        delta,
        torch.rand(D) + 0.5,
        torch.randn(96, D),
        torch.randn(96) if has_bias else None,
    ]
    assert_like_twin(
        lambda x, d, s, w, b: norm_linear(x, d, s, 1e-6, w, b),
        lambda x, d, s, w, b: twins.norm_linear(x, d, s, 1e-6, w, b),
        tensors,
    )


def test_swiglu_linear():
    tensors = [torch.randn(500, 2 * 1100), torch.randn(64, 1100), torch.randn(64)]
    assert_like_twin(swiglu_linear, twins.swiglu_linear, tensors)


def sequences_of(prompts):
    """Alone, or with prompts: groups of a prompt and completions. With their positions and tiles."""
    from hone.kernels.gpu.attention import tiles

    attention = (
        PackedAttention(prompts[0], "cuda", prompts[1])
        if prompts
        else PackedAttention([5, 64, 1, 200, 129], "cuda")
    )
    sequences = attention.sequences
    return (
        sequences,
        attention.token_positions(),
        tiles(sequences.rows, sequences.groups, torch.device("cuda")),
    )


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("H", "K", "E"), [(4, 2, 64), (6, 1, 128)])
@pytest.mark.parametrize("prompts", [None, ([7, 70, 130], [[3, 66], [1, 30, 5], []])])
@pytest.mark.parametrize("least", [512, 64])
def test_heads_attention(monkeypatch, has_norm, H, K, E, prompts, least):
    monkeypatch.setattr("hone.kernels.gpu.attention.LEAST", least)
    sequences, positions, tiles = sequences_of(prompts)
    angles = torch.outer(torch.arange(256.0), 1 / 100 ** (torch.arange(0, E, 2) / E))
    cos, sin = angles.cos(), angles.sin()
    table = [torch.cat(x, -1).cuda().bfloat16() for x in ([cos, cos], [-sin, sin])]
    scales = [torch.rand(E) + 0.5 if has_norm else None for _ in range(2)]
    tensors = [torch.randn(len(positions), H + 2 * K, E), *scales]

    def call(function, dtype):
        turn = tuple(x.to(dtype) for x in table)
        return lambda x, q, k: function(x, q, k, turn, positions, sequences, tiles, 1e-6, H)

    half, exact = call(heads_attention, torch.bfloat16), call(twins.heads_attention, torch.float64)
    assert_like_twin(half, exact, tensors, limit=0.015)


def test_low_rank_parts():
    gate_up, x, scale = torch.randn(300, 2 * 96), torch.randn(300, 128), torch.rand(128) + 0.5
    a, b = torch.randn(16, 96) / 8, torch.randn(64, 16) / 8
    assert_like_twin(swiglu_linear, twins.swiglu_linear, [gate_up, torch.randn(64, 96), None, a, b])
    tensors = [x, scale, torch.randn(64, 128), torch.randn(16, 128) / 8, b]
    assert_like_twin(
        lambda x, s, w, a, b: norm_linear(x, None, s, 1e-6, w, None, a, b),
        lambda x, s, w, a, b: twins.norm_linear(x, None, s, 1e-6, w, None, a, b),
        tensors,
    )


@pytest.mark.parametrize("prompts", [None, ([70], [[3, 66]]), ([70], [[300, 700]])])
def test_a_step_gives_the_same_bits_twice(prompts):
    sequences, positions, tiles = sequences_of(prompts)
    qkv = torch.randn(len(positions), 8, 64, device="cuda", dtype=torch.bfloat16)
    table = tuple(torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = []
    for _ in range(2):
        x = qkv.clone().requires_grad_()
        out = heads_attention(x, None, None, table, positions, sequences, tiles, 1e-6, 4)
        (out * out).sum().backward()
        found.append((out, x.grad))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_groups_share_their_prompts_with_the_gradients_of_whole_sequences():
    """Of the exact ones as far away as theirs, the same bits each time, and as a reference without gradients too."""
    spec = ModelSpec(
        512, 256, 512, 2, 8, 2, 64, 1e-6, make_plain_layers(10000.0, 64, 2), True, 512, 0.06, False
    )
    draw = torch.Generator().manual_seed(0)
    exact = Transformer(spec)
    exact.init_weights(draw)
    exact = exact.bfloat16().double()
    ids, masks = [], []
    for prompt, completions in ((130, [40, 1, 90]), (70, [64, 129])):
        shared = torch.randint(0, 512, (prompt,), generator=draw).tolist()
        for n in completions:
            ids.append(shared + torch.randint(0, 512, (n,), generator=draw).tolist())
            masks.append([False] * prompt + [True] * n)

    def gradients(model, pack_samples):
        device = model.embed.weight.device
        packed = pack_samples(ids, masks, device)
        temperature = torch.ones(len(packed.targets_N), device=device)
        model.zero_grad()
        logprobs, _ = packed.target_logprobs(model, temperature)
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=device)).sum().backward()
        with torch.no_grad():
            again, _ = packed.target_logprobs(model, temperature)
        return again, [p.grad.clone() for p in model.parameters()]

    model = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    expected, exact_gradients = gradients(exact, pack_sequences)

    def distances(pack_samples):
        logprobs, found = gradients(model, pack_samples)
        assert (logprobs.cpu() - expected).abs().max() < 0.1
        pairs = zip(found, exact_gradients, strict=True)
        return found, [
            float((one.cpu().double() - other).norm() / other.norm()) for one, other in pairs
        ]

    found, shared = distances(pack_shared)
    assert all(
        torch.equal(one, two) for one, two in zip(found, distances(pack_shared)[0], strict=True)
    )
    _, whole = distances(pack_sequences)
    assert max(shared) < 1.5 * max(whole) < 0.1
    assert PolicyTrainer(model, TrainerConfig(), 1).shares_prompts


def test_the_engine_reads_the_adapter_that_is_trained():
    """In graphs that were captured before the step too."""
    spec = ModelSpec(
        512, 256, 512, 3, 8, 2, 64, 1e-6, make_plain_layers(10000.0, 64, 3), True, 512, 0.06, False
    )
    model = Transformer(spec)
    model.init_weights(torch.Generator().manual_seed(0))
    model = model.to("cuda", torch.bfloat16)
    trainer = PolicyTrainer(
        model, TrainerConfig.model_validate({"lora": {"rank": 8}, "optim": {"lr": 1e-2}}), 10
    )
    engine = Engine(model)
    request = GenerateRequest([1, 2, 3], Sampling(1.0, 24, seed=1), frozenset())
    for step in range(1, 6):
        completion = engine.generate([request])[0]
        mask = [False] * 3 + [True] * 24
        sample = Sample([1, 2, 3, *completion.ids], mask, [0.0] * 3 + completion.logprobs, 1.0, 1.0)
        values = trainer.step(Batch(step, [sample]))
        engine.set_version(step)
        assert abs(values["importance_ratio/mean"] - 1) < 0.1 and values["mismatch_kl/mean"] < 0.01


@pytest.mark.parametrize("chunk", [2**30, 4 * 5003 * 64])
def test_head(monkeypatch, chunk):
    monkeypatch.setattr("hone.kernels.head.CHUNK_BYTES", chunk)
    targets, temperature = (
        torch.randint(0, 5003, (300,), device="cuda"),
        (torch.rand(300) + 0.5).cuda(),
    )
    tensors = [torch.randn(300, 128), torch.randn(5003, 128) / 4]

    def half(x, w):
        return head_logprobs(x, w, targets, temperature, entropy_gradient=True)

    def exact(x, w):
        return twins.head_logprobs(x, w, targets, temperature.double())

    assert_like_twin(half, exact, tensors)
    a, b, seen = torch.randn(300).cuda(), torch.randn(300).cuda(), []

    def loss_of(part, logprobs, entropy):
        seen.append(part)
        return (logprobs.exp() * a[part] + entropy * b[part]).sum()

    def loss(x, w):
        return head_loss(x, w, targets, temperature, loss_of, entropy_gradient=True)

    def exact_loss(x, w):
        logprobs, entropy = exact(x, w)
        return (logprobs.exp() * a + entropy * b).sum()

    assert_like_twin(loss, exact_loss, tensors)
    assert len(seen) == -(-300 // max(chunk // (4 * 5003), 64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_in_one_pass_moves_weights_as_torchs_does(dtype):
    """Gradients in bfloat16; against torch's on a CPU in fp32. Twice the same bits."""
    exact, results = (
        Transformer(
            ModelSpec(
                300, 64, 96, 2, 4, 2, 16, 1e-6, make_plain_layers(1e4, 16, 2), True, 64, 0.1, False
            )
        ),
        [],
    )
    exact.init_weights(torch.Generator().manual_seed(0))
    start, config = copy.deepcopy(exact).cuda().bfloat16(), OptimConfig(lr=1e-2, state_dtype=dtype)
    before, expected = (
        [p.detach().clone() for p in exact.parameters()],
        Optimizer(exact, OptimConfig(lr=1e-2)),
    )
    for turn in range(2):
        model = copy.deepcopy(start)
        optimizer = Optimizer(model, config)
        assert optimizer.is_own
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for one, two in zip(model.parameters(), exact.parameters(), strict=True):
                one.grad = torch.randn(one.shape, generator=generator).cuda().bfloat16()
                two.grad = one.grad.float().cpu()
            norm = optimizer.step(1e-2)
            assert turn or expected.step(1e-2) == pytest.approx(norm, rel=1e-5)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    for ours, first, last in zip(optimizer.masters, before, exact.parameters(), strict=True):
        moved, wanted = ours.cpu() - first.bfloat16().float(), last.detach() - first
        assert (moved - wanted).norm() < (1e-3 if dtype == "float32" else 0.02) * wanted.norm()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_in_the_machines_memory_moves_weights_as_one_on_the_device(
    kind, dtype, tmp_path
):
    """To the bit; the device holds nothing of its state, and a checkpoint gives it back."""
    spec, results, taken = (
        ModelSpec(
            4096,
            1024,
            2048,
            2,
            8,
            4,
            128,
            1e-6,
            make_plain_layers(1e4, 128, 2),
            True,
            64,
            0.1,
            False,
        ),
        [],
        [],
    )

    def started(offload):
        model = Transformer(spec).cuda().bfloat16()
        model.init_weights(torch.Generator("cuda").manual_seed(0))
        before = torch.cuda.memory_allocated()
        optimizer = Optimizer(
            model, OptimConfig(type=kind, lr=1e-2, state_dtype=dtype, offload=offload)
        )
        taken.append(torch.cuda.memory_allocated() - before)
        assert optimizer.own.table is not None  # the kernel's
        return model, optimizer

    def step(model, optimizer, number):
        for i, p in enumerate(model.parameters()):
            p.grad = (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
                .cuda()
                .bfloat16()
            )
        optimizer.step(1e-2)

    run = RunDirectory(tmp_path / "run", "sft")
    run.claim_run(clean=False)
    for offload in (False, True):
        model, optimizer = started(offload)
        optimizer.own.rehearse()
        for number in range(3):
            step(model, optimizer, number)
        if offload:
            checkpoints = Checkpoints(run, optimizer, CkptConfig(interval=1), Ranks())
            checkpoints.save_if_due(
                3, True, SFTConfig(model={"name": "m"}, data={"name": "d"}).to_public_dict(), {}
            )
        step(model, optimizer, 3)
        results.append(
            [
                t.detach().cpu().clone()
                for t in (*model.parameters(), *optimizer.state_tensors().values())
            ]
        )
        del model, optimizer
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert taken[0] > 6 * spec.parameter_count() > 2**20 > taken[1] >= 0
    model, optimizer = started(True)
    assert (
        restore_checkpoint(
            resume_from(run, True), optimizer, SFTConfig(model={"name": "m"}, data={"name": "d"})
        )
        == 3
    )
    step(model, optimizer, 3)
    after = [t.detach().cpu() for t in (*model.parameters(), *optimizer.state_tensors().values())]
    assert all(torch.equal(one, two) for one, two in zip(results[1], after, strict=True))


def test_a_checkpoint_is_written_while_graphs_are_captured(tmp_path):
    model = Transformer(
        ModelSpec(
            50_000,
            256,
            512,
            3,
            8,
            2,
            64,
            1e-6,
            make_plain_layers(10000.0, 64, 3),
            True,
            512,
            0.06,
            False,
        )
    ).cuda()
    model.init_weights(torch.Generator("cuda").manual_seed(0))
    optimizer, run = Optimizer(model, OptimConfig()), RunDirectory(tmp_path / "run", "sft")
    run.claim_run(clean=False)
    checkpoints, captured, x = (
        Checkpoints(run, optimizer, CkptConfig(interval=1), Ranks()),
        Captured(),
        torch.ones(1000).cuda(),
    )
    for step in range(1, 4):
        checkpoints.save_if_due(step, False, {}, {})
        for number in range(100):
            captured.capture((step, number), lambda: x * 2)
    checkpoints.wait_until_written()
    assert (run.checkpoints / "step_3" / "checkpoint.json").exists()
