"""Checkpoints: whole or passed over, kept by policy; steps whose gradients cannot be used."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from hone.config.rl_config import TrainerConfig
from hone.config.sections import CkptConfig, OptimConfig
from hone.config.sft_config import DataConfig, SFTConfig
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.orchestrator.run import progress_before
from hone.records import Batch, Sample
from hone.run_directory import RunDirectory
from hone.trainer.checkpoint import (
    Checkpoints,
    _read_metric,
    forget_after,
    refuse_changes,
    restore_checkpoint,
    resume_from,
    to_keep,
)
from hone.trainer.optim import Optimizer
from hone.trainer.ranks import Ranks
from hone.trainer.rl.train import restore_progress
from hone.trainer.rl.trainer import PolicyTrainer

SPEC = ModelSpec(40, 16, 24, 1, 2, 1, 8, 1e-6, make_plain_layers(100.0, 8, 1), True, 64, 0.3, False)


def made(seed=0):
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints of steps 1, 2 and 3, whose weights are all 1, 2 and 3."""
    run = RunDirectory(tmp_path / "run", "sft")
    model = made()
    optimizer = Optimizer(model, OptimConfig())
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        save(run, optimizer, step, CkptConfig(interval=1, keep=3), 1 / step)
    return run


def config_of(seed, **values):
    return SFTConfig(model={"name": "m"}, data=DataConfig(name="d"), seed=seed, **values)


def save(run, optimizer, step, policy, loss):
    Checkpoints(run, optimizer, policy, Ranks()).save_if_due(
        step, True, config_of(0).to_public_dict(), {"val/loss": loss}
    )


def restored(run, resume=True, config=None):
    model = made()
    return restore_checkpoint(
        resume_from(run, resume), Optimizer(model, OptimConfig()), config or config_of(0)
    ), model


def test_a_state_in_the_machines_memory_is_written_before_training_goes_on(tmp_path, monkeypatch):
    """As that of optim.offload, here on a CPU: without a copy, so what moves after `save` is not in the checkpoint."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    run, model = RunDirectory(tmp_path, "sft"), made()
    run.claim_run(clean=False)
    optimizer = Optimizer(model, OptimConfig())
    optimizer.is_away = True
    checkpoints = Checkpoints(run, optimizer, CkptConfig(interval=1), Ranks())
    with torch.no_grad():
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.fill_(step)
            checkpoints.save_if_due(step, False, config_of(0).to_public_dict(), {})
            for parameter in model.parameters():
                parameter.zero_()
    checkpoints.wait_until_written()
    step, model = restored(run)
    assert step == 2 and all((p == 2).all() for p in model.parameters())


def test_the_last_whole_one_is_gone_on_from(run, caplog):
    step, model = restored(run)
    assert step == 3 and all((p == 3).all() for p in model.parameters())
    tensors = run.checkpoints / "step_3" / "trainer" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1  # one bit
    tensors.write_bytes(content)
    (run.checkpoints / "step_2" / "checkpoint.json").write_text('{"step": 2, "con')  # half written
    (run.checkpoints / "step_9.partial").mkdir()
    with caplog.at_level(logging.WARNING, logger="hone"):
        step, model = restored(run)
    assert step == 1 and all((p == 1).all() for p in model.parameters())
    assert "step_3 is damaged" in caplog.text and "step_2 is damaged" in caplog.text
    (run.checkpoints / "step_1" / "trainer" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="none of .*step_3.* is whole"):
        restored(run)


def test_what_resume_may_be(run, tmp_path):
    assert restored(run, "auto")[0] == 3 and restored(run, "never")[0] == 0
    assert restored(run, str(run.checkpoints / "step_2"))[0] == 2
    empty = RunDirectory(tmp_path / "empty", "sft")
    assert restored(empty, "auto")[0] == 0
    with pytest.raises(ValueError, match=r"has no checkpoint \(--ckpt.interval N writes them\)"):
        restored(empty)
    empty.path.mkdir()
    empty.weights_for(4).mkdir(parents=True)
    with pytest.raises(
        ValueError, match="--resume auto: .* has weights of a run, and no checkpoint to resume from"
    ):
        restored(empty, "auto")
    with pytest.raises(
        ValueError, match="--resume atuo: no checkpoint there; it is auto, never, or"
    ):
        restored(run, "atuo")
    with pytest.raises(ValueError, match="seed differs from the run .*: it had 0, found 1"):
        restored(run, True, config_of(1, output_dir="elsewhere"))
    with pytest.raises(ValidationError, match="exclude each other"):
        SFTConfig(model={"name": "m"}, data=DataConfig(name="d"), clean=True, resume="auto")


def test_what_an_orchestrator_left_goes_along_to_another_directory(tmp_path):
    run = RunDirectory(tmp_path, "rl")
    restore_progress({"step": 3, "next": 40}, run.rollouts / "step_3")
    restore_progress(
        {"step": 3, "next": 50}, run.rollouts / "step_3"
    )  # what is there already stays
    assert progress_before(run, 4) == {"step": 3, "next": 40}


def test_going_back_forgets_what_came_after(run):
    run.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    forget_after(2, run)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_1", "step_2"]
    assert len(run.metrics.read_text().splitlines()) == 2


def test_which_are_kept(run):
    values = {10: 0.5, 20: 0.1, 30: 0.3, 40: None, 50: 0.4}
    assert to_keep(values, CkptConfig(interval=1, keep=2)) == {40, 50}
    assert to_keep(values, CkptConfig(interval=1, keep=1, keep_every=20)) == {20, 40, 50}
    assert to_keep(values, CkptConfig(interval=1, keep=1, keep_best="val/loss")) == {20, 50}
    assert to_keep(values, CkptConfig(interval=1, keep=1, keep_best="reward/mean")) == {10, 50}
    later = {10: 0.2, 20: 0.1, 30: None, 40: None, 50: None, 60: None}  # evaluated beside training
    assert to_keep(later, CkptConfig(interval=1, keep=1, keep_best="eval/x/reward")) == {
        10,
        40,
        50,
        60,
    }
    model = made()
    policy = CkptConfig(interval=1, keep=1, keep_best="val/loss")
    save(run, Optimizer(model, OptimConfig()), 4, policy, 0.9)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_3", "step_4"]


def samples(bad=None):
    found = []
    for i in range(6):
        logprobs = [0.0, 0.0, -3.0 - 0.1 * i, -2.0]
        found.append(
            Sample(
                [1, 2, 3 + i, 4],
                [False, False, True, True],
                logprobs,
                math.nan if i == bad else 1.0,
                1.0,
            )
        )
    return found


@pytest.mark.parametrize("bad", ["a number", "a norm"])
def test_a_bad_step_is_skipped_or_ends_the_run_and_names_its_samples(bad, tmp_path):
    skip_norm = 1e-6 if bad == "a norm" else None
    config = TrainerConfig(optim=OptimConfig(lr=1e-2, skip_norm=skip_norm), on_bad_step="skip")
    trainer = PolicyTrainer(made(), config, 10, tmp_path)
    before = [p.clone() for p in trainer.model.parameters()]
    values = trainer.step(Batch(7, samples(bad=4 if bad == "a number" else None)))
    assert values["optim/skipped"] == 1.0
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
    worst = json.loads((tmp_path / "step_7.jsonl").read_text().splitlines()[0])
    if bad == "a number":
        assert worst["index"] == 4 and worst["grad_norm"] == "nan" and worst["ids"] == [1, 2, 7, 4]
        assert worst["mask"] == [False, False, True, True] and worst["logprobs"] == [
            0.0,
            0.0,
            -3.4,
            -2.0,
        ]
    config.optim.skip_norm = None
    assert trainer.step(Batch(8, samples()))["optim/skipped"] == 0.0  # and it goes on
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    config.on_bad_step = "stop"
    with pytest.raises(ValueError, match=r"step 9: the gradients' norm is nan; .*step_9.jsonl"):
        trainer.step(Batch(9, samples(bad=0)))


def test_the_value_of_a_checkpoint_may_stand_in_the_rows_of_the_run(tmp_path):
    found = {step: tmp_path / f"step_{step}" for step in (1, 2, 3)}
    for step, directory in found.items():
        directory.mkdir()
        (directory / "checkpoint.json").write_text(
            json.dumps({"metrics": {"loss/mean": step / 10}})
        )
    rows = tmp_path / "metrics.jsonl"
    rows.write_text(
        '{"step": 1, "reward": 5}\n{"step": 1, "eval/x": 0.5}\n{"step": 2, "eval/x": 0.75}\n{"step": 3, "ev'
    )
    assert _read_metric(found, "eval/x", rows) == {1: 0.5, 2: 0.75, 3: None}
    assert _read_metric(found, "loss/mean", rows) == {1: 0.1, 2: 0.2, 3: 0.3}
    assert _read_metric(found, None, rows) == {1: None, 2: None, 3: None}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (SFTConfig, "--model.name runs/a/weights/step_3 in another --output-dir"),
        (TrainerConfig, "--fork runs/a@3"),
    ],
)
def test_a_changed_key_is_refused_with_the_way_to_a_new_run(kind, way):
    rest = {"data": {"name": "rows.jsonl"}, "model": {"name": "m"}} if kind is SFTConfig else {}
    before, now = (kind.model_validate(rest | {"optim": {"lr": lr}}) for lr in (1e-4, 1e-3))
    source = Path("runs/a/checkpoints/step_3")
    with pytest.raises(ValueError, match="optim.lr differs") as refused:
        refuse_changes(before.model_dump(mode="json"), now, source)
    assert str(refused.value).endswith(f"it is a new run: {way}")
