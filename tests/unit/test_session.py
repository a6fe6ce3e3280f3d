"""A training session against torch: losses, gradients, optimizer steps, snapshots and state."""

import copy
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import hone
from hone.models.attention_layouts import PackedAttention
from hone.models.lora import lora_modules
from hone.session.session_losses import LOSSES
from hone.session.training_session import TrainingSession

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"
LORA = {"rank": 4, "alpha": 32}
SAMPLING = {"max_batch_size": 8, "max_model_len": 64, "kv_cache_gib": 0.05}


def make_session(lora=None, seed=0, **keys):
    keys = {"random_init": True, "device": "cpu", "sampling": SAMPLING} | keys
    return TrainingSession(MODEL, lora=lora, seed=seed, **keys)


def make_data(draw, count=3, several=False):
    """Data with inputs of all losses; the sampler's logprobs are off the trainer's."""
    data = []
    for length in draw.integers(2, 9, count):
        shape = (length, 3) if several else (length,)
        ids = draw.integers(3, 60, length)
        advantages = draw.normal(size=shape)
        counted = (draw.random(shape) > 0.3).astype(float)
        data.append(
            hone.Datum(
                ids,
                draw.integers(3, 60, shape),
                weights=draw.normal(size=shape),
                logprobs=-4 + 0.3 * draw.normal(size=shape),
                advantages=advantages,
                sequence_ratio_mask=counted,
            )
        )
    return data


def plain_logprobs(model, datum):
    """By one plain forward pass and torch's log_softmax, with gradients."""
    attention = PackedAttention([len(datum.tokens)])
    hidden = model(torch.tensor(datum.tokens), attention.token_positions(), attention)
    rows = torch.log_softmax(model.compute_logits(hidden), -1)
    targets = torch.as_tensor(datum.targets)
    return rows.gather(1, targets.view(len(rows), -1)).view(targets.shape)


def plain_loss(name, x, datum):
    """The formulas of Tinker's documentation, written out."""
    q, a, w, m = (
        torch.as_tensor(np.asarray(v), dtype=torch.float32)
        for v in (datum.logprobs, datum.advantages, datum.weights, datum.sequence_ratio_mask)
    )
    ratio = torch.exp(x - q)
    if name == "cross_entropy":
        return -(w * x).sum()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "cispo":
        return -(ratio.detach().clamp(0.8, 1.2) * a * x).sum()
    if name == "dro":
        return -(x * a - 0.05 / 2 * (x - q) ** 2).sum()
    if name == "gspo":
        mean = ((x - q) * m).sum() / m.sum().clamp(min=1)
        ratio = torch.exp(mean.detach()) * torch.exp(x - x.detach())
    return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).sum()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=[None, LORA], ids=["all weights", "lora"])
def session(request):
    session = make_session(request.param, micro_batch=12)
    for lora in lora_modules(session.model):
        torch.nn.init.normal_(lora.B, std=0.02, generator=torch.Generator().manual_seed(1))
    return session


# A sequence ratio is of one target for each position.
@pytest.mark.parametrize(
    ("name", "several"),
    [
        (name, several)
        for name in LOSSES
        for several in (False, True)
        if name != "gspo" or not several
    ],
)
def test_losses_and_gradients_are_autograd_s(session, name, several):
    data = make_data(np.random.default_rng(len(name)), several=several)
    plain = copy.deepcopy(session.model)
    expected = [plain_logprobs(plain, one) for one in data]
    total = sum(plain_loss(name, x, one) for x, one in zip(expected, data, strict=True))
    total.backward()
    alone = session.forward(data, name)
    assert not gradients(session.model)  # a forward pass leaves none
    found = session.forward_backward(data, name)
    assert found.loss == pytest.approx(float(total), rel=1e-5)
    assert alone.loss == pytest.approx(found.loss, rel=1e-6)
    assert found.metrics["loss:sum"] == found.loss
    for ours, theirs in zip(found.logprobs, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    wanted = gradients(plain)
    for name, gradient in gradients(session.model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=2e-4, atol=2e-5)
    session.clear_gradients()


def test_many_calls_are_one(session):
    data = make_data(np.random.default_rng(3), count=6)
    session.forward_backward(data, "ppo")
    at_once = gradients(session.model)
    session.clear_gradients()
    for one in data:
        session.forward_backward([one], "ppo")
    for name, gradient in gradients(session.model).items():
        torch.testing.assert_close(gradient, at_once[name], rtol=1e-4, atol=1e-5)
    session.clear_gradients()


def test_a_function_of_logprobs_is_a_loss(session):
    """Cross-entropy, written by a user; and DPO over two pairs."""
    data = make_data(np.random.default_rng(4), count=4)
    session.forward_backward(data)
    wanted = gradients(session.model)
    session.clear_gradients()

    def own(data, logprobs):
        parts = [(torch.tensor(d.weights) * x).sum() for d, x in zip(data, logprobs, strict=True)]
        return -torch.stack(parts).sum(), {"parts": float(len(parts))}

    found = session.forward_backward(data, own)
    assert found.metrics == {"parts": 4.0}
    for name, gradient in gradients(session.model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
    session.clear_gradients()

    def dpo(data, logprobs):
        sums = [x.sum() for x in logprobs]
        margins = torch.stack([sums[0] - sums[1], sums[2] - sums[3]])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean(), {}

    plain = copy.deepcopy(session.model)
    dpo(data, [plain_logprobs(plain, one) for one in data])[0].backward()
    session.forward_backward(data, dpo)
    wanted = gradients(plain)
    for name, gradient in gradients(session.model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)
    session.clear_gradients()


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_steps_are_those_of_torch_s_adamw(max_norm):
    session = make_session()
    plain = copy.deepcopy(session.model)
    draw = np.random.default_rng(5)
    # Norms and biases do not decay.
    decaying = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}])
    for lr, betas, eps, decay in (
        (1e-3, (0.9, 0.95), 1e-8, 0.0),
        (3e-3, (0.9, 0.95), 1e-6, 0.1),
        (1e-3, (0.8, 0.99), 1e-12, 0.05),
    ):
        data = make_data(draw)
        session.forward_backward(data, "importance_sampling")
        metrics = session.optim_step(hone.AdamParams(lr, betas, eps, decay, max_norm))
        for group, own in zip(optimizer.param_groups, (decay, 0.0), strict=True):
            group.update(lr=lr, betas=betas, eps=eps, weight_decay=own)
        optimizer.zero_grad()
        sum(plain_loss("importance_sampling", plain_logprobs(plain, d), d) for d in data).backward()
        limit = float("inf") if max_norm is None else max_norm
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        optimizer.step()
        assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for ours, theirs in zip(session.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)
    assert session.steps == 3


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_saved_state_continues_to_the_bit(lora, tmp_path):
    draw = np.random.default_rng(6)
    batches = [make_data(draw) for _ in range(4)]

    def train(session, batches):
        for data in batches:
            session.forward_backward(data)
            session.optim_step(hone.AdamParams(1e-2))
        return [p.detach().clone() for p in session.model.parameters()]

    session = make_session(lora)
    train(session, batches[:2])
    session.save_state(tmp_path / "state")
    expected = train(session, batches[2:])
    other = make_session(lora, seed=0)
    other.forward_backward(batches[0])  # gradients that loading discards
    other.load_state(tmp_path / "state")
    assert other.steps == 2
    assert all(map(torch.equal, train(other, batches[2:]), expected))
    # Without the optimizer's state the same weights take other steps.
    fresh = make_session(lora)
    fresh.load_state(tmp_path / "state", optimizer=False)
    assert not all(map(torch.equal, train(fresh, batches[2:]), expected))
    with pytest.raises(ValueError, match="lora = "):
        make_session(None if lora else LORA).load_state(tmp_path / "state")
    with pytest.raises(ValueError, match="holds no state"):
        session.load_state(tmp_path / "none")
    damaged = tmp_path / "state" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match="not readable"):
        session.load_state(tmp_path / "state")


@pytest.mark.parametrize("lora", [None, LORA])
def test_snapshots_keep_their_weights_and_sample_what_is_trained(lora):
    session = make_session(lora)
    prompts = [[5, 6, 7], [9, 8, 7, 6]]

    def logprobs_of(prompt, completion):
        datum = hone.Datum.from_completion(prompt, completion.ids)
        return session.forward([datum]).logprobs[0][len(prompt) - 1 :]

    before = session.save_for_sampling()
    assert session.save_for_sampling() is before
    known = before.sample(prompts, 2, max_tokens=8, seed=1)
    for step in range(2):
        for prompt, completions in zip(
            prompts, session.sample(prompts, 2, max_tokens=8, seed=1), strict=True
        ):
            assert completions[0].ids != completions[1].ids
            for one in completions:
                np.testing.assert_allclose(one.logprobs, logprobs_of(prompt, one), atol=1e-4)
        data = [hone.Datum.from_completion(p, [11, 12, 13, 14]) for p in prompts]
        session.forward_backward(data)
        session.optim_step(hone.AdamParams(3e-2))
        after = session.save_for_sampling()
        assert after.version == step + 1 and before.version == 0
        again = before.sample(prompts, 2, max_tokens=8, seed=1)
        for ours, theirs in zip(chain(*again), chain(*known), strict=True):
            assert ours.ids == theirs.ids and set(ours.versions) == {0}
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    ids = [*prompts[0], 11, 12, 13, 14]
    found = after.compute_logprobs(ids)
    assert found == pytest.approx(session.compute_logprobs(ids), abs=1e-5)
    expected = session.forward([hone.Datum(ids[:-1], ids[1:])]).logprobs[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert before.compute_logprobs(ids) != pytest.approx(found, abs=1e-2)


def test_an_adapter_is_written_as_peft_reads_it_and_weights_as_transformers_does(tmp_path):
    draw = np.random.default_rng(7)
    for name, lora in (("adapter", LORA), ("weights", None)):
        session = make_session(lora)
        session.forward_backward(make_data(draw))
        session.optim_step(hone.AdamParams(1e-2))
        place = session.export_weights(tmp_path / name)
        if lora is None:
            again = TrainingSession(place, device="cpu")
            assert all(map(torch.equal, again.model.parameters(), session.model.parameters()))
        else:
            again = make_session(LORA | {"start_from": place})
            for ours, theirs in zip(
                lora_modules(again.model), lora_modules(session.model), strict=True
            ):
                torch.testing.assert_close(ours.B, theirs.B)


def test_mistakes_are_named_and_add_nothing(session):
    good = hone.Datum([5, 6], [6, 7])
    for data, loss, settings, words in (
        ([], "cross_entropy", {}, "there is no datum"),
        ([good], "nothing", {}, "'nothing' is not one of cross_entropy"),
        ([good], "ppo", {}, r"data\[0\]: loss ppo needs logprobs"),
        ([good], "cross_entropy", {"beta": 1.0}, "has no setting 'beta'"),
        (
            [good, hone.Datum([5, 10**6], [1, 2])],
            "cross_entropy",
            {},
            r"data\[1\]: tokens has 1000000",
        ),
        ([hone.Datum([5, 6], [-1, 2])], "cross_entropy", {}, "targets has -1"),
        ([hone.Datum([5, 6], [1])], "cross_entropy", {}, r"targets has shape \[1\]"),
        ([hone.Datum([], [])], "cross_entropy", {}, "at least one id"),
        ([hone.Datum([5], [6], weights=[1.0, 2.0])], "cross_entropy", {}, "weights has shape"),
        ([hone.Datum([5], [6], weights=[float("nan")])], "cross_entropy", {}, "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            session.forward_backward(data, loss, **settings)
        assert not gradients(session.model)
    session.forward_backward([good])  # the next call works
    session.clear_gradients()
    with pytest.raises(ValueError, match="modules_to_save"):
        make_session(LORA | {"modules_to_save": ["norm"]})


def test_a_gradient_that_is_not_finite_changes_nothing():
    session = make_session()
    before = [p.detach().clone() for p in session.model.parameters()]
    session.forward_backward([hone.Datum([5, 6], [6, 7], weights=[3e38, 3e38])])
    assert session.optim_step(hone.AdamParams(1e-2))["optim/skipped"] == 1.0
    assert session.steps == 0 and all(map(torch.equal, session.model.parameters(), before))
    session.forward_backward([hone.Datum([5, 6], [6, 7])])
    assert session.optim_step(hone.AdamParams(1e-2))["optim/skipped"] == 0.0


def test_a_loop_of_one_s_own_learns():
    """Policy gradient on a reward of the sampled ids: how often a token is even."""
    session = make_session(LORA)
    prompts = [[5, 6, 7], [9, 8, 7]]
    rewards = []
    for step in range(25):
        groups = session.sample(prompts, 8, max_tokens=6, seed=1000 * step, stop_ids=[])
        data = []
        for prompt, group in zip(prompts, groups, strict=True):
            own = [np.mean([i % 2 == 0 for i in one.ids]) for one in group]
            rewards.append(np.mean(own))
            data += [
                hone.Datum.from_completion(prompt, one.ids, one.logprobs, reward - np.mean(own))
                for one, reward in zip(group, own, strict=True)
            ]
        session.forward_backward(data, "importance_sampling")
        session.optim_step(hone.AdamParams(2e-2))
    assert np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.2


def test_sessions_on_one_base_learn_what_each_learns_alone():
    """Two adapters of other ranks in turn; samples of both come from one engine."""
    draw = np.random.default_rng(3)
    data = [make_data(draw), make_data(draw)]
    loras = [LORA, {"rank": 2, "alpha": 32, "targets": ["q_proj", "down_proj"]}]

    def take_step(session, which):
        found = session.forward_backward(data[which], "cross_entropy")
        session.optim_step(hone.AdamParams(lr=1e-2, max_norm=0.5))
        return found.loss, session.sample([[5, 6, 7]], max_tokens=6)[0][0]

    keys = {"random_init": True, "device": "cpu"}
    base = hone.FrozenBase(MODEL, sampling=SAMPLING, **keys)
    before = {name: x.clone() for name, x in base.loaded.model.named_parameters()}
    together = [hone.TrainingSession(base, lora=lora, seed=i) for i, lora in enumerate(loras)]
    found = [[take_step(session, i) for i, session in enumerate(together)] for _ in range(3)]
    for i, lora in enumerate(loras):
        alone = make_session(lora, seed=i, **keys)
        alone.model.load_state_dict(base.loaded.model.state_dict(), strict=False)
        for row in found:
            loss, completion = take_step(alone, i)
            assert abs(row[i][0] - loss) <= 1e-5 * abs(loss)
            assert row[i][1].ids == completion.ids
            np.testing.assert_allclose(row[i][1].logprobs, completion.logprobs, atol=1e-5)
    after = dict(base.loaded.model.named_parameters())
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_a_base_refuses_what_it_has_decided():
    base = hone.FrozenBase(MODEL, random_init=True, device="cpu")
    for keys in ({}, {"lora": LORA, "dtype": "bfloat16"}, {"lora": LORA, "sampling": SAMPLING}):
        with pytest.raises(ValueError, match="FrozenBase"):
            hone.TrainingSession(base, **keys)
    with pytest.raises(ValueError, match="base_bits"):
        hone.TrainingSession(base, lora=LORA | {"base_bits": 8})


def test_an_adapter_of_the_head_is_trained_as_autograd_does():
    """Of a tied head, whose embedding stays; logits by the formula with A and B written out."""
    base = hone.FrozenBase(MODEL, random_init=True, device="cpu")
    lora = {"rank": 3, "alpha": 6, "targets": ["q_proj", "lm_head"]}
    session = hone.TrainingSession(base, lora=lora)
    delta = session.model.head_delta
    with torch.no_grad():
        delta.B.normal_(generator=torch.Generator().manual_seed(0))
    data = make_data(np.random.default_rng(5))
    found = session.forward_backward(data)
    gradients = [delta.A.grad.clone(), delta.B.grad.clone()]
    session.clear_gradients()
    total = torch.zeros(())
    for datum, logprobs in zip(data, found.logprobs, strict=True):
        attention = PackedAttention([len(datum.tokens)])
        hidden = session.model(torch.tensor(datum.tokens), attention.token_positions(), attention)
        weight = session.model.embed.weight + 2.0 * delta.B @ delta.A
        rows = torch.log_softmax(hidden @ weight.T, -1)
        wanted = rows.gather(1, torch.as_tensor(datum.targets)[:, None]).squeeze(1)
        np.testing.assert_allclose(logprobs, wanted.detach().numpy(), atol=1e-5)
        total = total - (torch.tensor(datum.weights, dtype=torch.float32) * wanted).sum()
    total.backward()
    for mine, theirs in zip(gradients, (delta.A.grad, delta.B.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="lm_head has no adapter"):
        make_session(lora)
