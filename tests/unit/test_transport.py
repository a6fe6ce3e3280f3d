"""What travels between processes, and the waits for it."""

import logging
import time

import pytest
import torch

from hone import machine
from hone.config.rl import OrchestratorRunConfig
from hone.models.proof import canary_ids, checksum, score
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.orchestrator.weights import Weights
from hone.records import Batch, Sample
from hone.run_directory import RunDirectory
from hone.transport import waiting
from hone.transport.files import (
    Canary,
    Delivery,
    publish_delivery,
    published,
    read_batch,
    read_delivery,
    remove_before,
    write_batch,
)
from hone.transport.waiting import Pulse, PulseOf, Wait, Watch, wait_for

LOG = logging.getLogger("test")


def test_a_batch_comes_back_as_it_was_for_its_run_alone(tmp_path):
    third = 1 / 3  # no rounding on the way
    samples = [
        Sample([1, 2, 3], [False, True, True], [0.0, -third, -2.0], third, 0.7),
        Sample([4, 5], [False, True], [0.0, -1e-9], -third, 1.0, [0.0, -third], "judged"),
        Sample([6], [True], [0.0], 1.0, 1.0, env="other"),
    ]
    write_batch(Batch(7, samples), "mine", tmp_path)
    assert read_batch(tmp_path, "mine") == Batch(7, samples)
    assert read_batch(tmp_path, "yours") is None
    write_batch(Batch(8, []), "mine", tmp_path)
    assert read_batch(tmp_path, "mine") == Batch(8, [])


def test_deliveries_appear_whole_and_old_ones_go(tmp_path):
    assert published(tmp_path / "nothing") == []
    for version in (0, 1, 9, 10):
        partial = tmp_path / f"step_{version}.partial"
        partial.mkdir()
        assert version not in published(tmp_path)
        delivery = Delivery("run", version, "sum", "float32", Canary([1, 2], [-0.5]), {"loss/mean": 0.1})
        directory = publish_delivery(partial, delivery)
        assert (directory / "STABLE").exists() and read_delivery(directory) == delivery
    assert published(tmp_path) == [0, 1, 9, 10]
    remove_before(tmp_path, 9)
    assert published(tmp_path) == [9, 10] and read_delivery(tmp_path / "step_0") is None


def test_a_pulse_is_believed_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "BEAT", 0.05)
    monkeypatch.setattr(machine, "SILENCE", 0.4)
    (tmp_path / "alive").mkdir()
    (tmp_path / "alive" / "trainer").write_text("3")  # of a run that was killed
    seen = PulseOf(tmp_path / "alive" / "trainer")
    time.sleep(0.2)
    assert not seen.is_beating()
    with Pulse(tmp_path / "alive" / "trainer"):
        wait_for(Wait("a pulse", 5.0, LOG), lambda: seen.is_beating() or None)
        assert not seen.is_silent()
    wait_for(Wait("silence", 5.0, LOG), lambda: seen.is_silent() or None)


def test_a_peer_that_falls_silent_is_named_and_one_that_ends_is_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(waiting, "BEAT", 0.05)
    monkeypatch.setattr(machine, "SILENCE", 1.0)
    monkeypatch.setattr(machine, "_slowness", 1.0)
    well, ill = (Pulse(tmp_path / name) for name in ("well", "ill"))
    peers = {"trainer rank 1": tmp_path / "ill", "orchestrator": tmp_path / "well", "nobody": tmp_path / "no"}
    watch = Watch(peers, LOG)

    def said(count):
        wait_for(Wait("the log", 60.0, LOG), lambda: len(caplog.records) >= count or None)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, logger="test"), watch:
        with well, ill:
            wait_for(
                Wait("pulses", 60.0, LOG), lambda: all(watch.peers[x].is_beating() for x in list(peers)[:2]) or None
            )
            ill._stop.set()  # as one that was stopped
            assert said(1) == ["No sign of life from the trainer rank 1 for 1 s: has it died, or been stopped?"]
            ill._stop.clear()
            with Pulse(tmp_path / "ill"):
                assert said(2)[1] == "The trainer rank 1 is back"
        time.sleep(1.5)  # in which nobody is missed who has ended
    assert len(caplog.records) == 2


def test_a_wait_ends_at_its_deadline_with_its_name():
    with pytest.raises(ConnectionError, match="waited 0 s for the moon; look up"):
        wait_for(Wait("the moon", 0.02, LOG, "look up"), lambda: None)


def test_the_checksum_sees_every_byte():
    spec = ModelSpec(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
        max_position_embeddings=64, initializer_range=0.2, qkv_bias=False,
    )  # fmt: skip
    one, two = Transformer(spec), Transformer(spec)
    for model in (one, two):
        model.init_weights(torch.Generator().manual_seed(0))
    assert checksum(one) == checksum(two) and len(checksum(one)) == 32
    ids = canary_ids(spec.vocab_size)
    assert score(one, ids) == score(two, ids) and len(score(one, ids)) == len(ids) - 1
    with torch.no_grad():
        two.blocks[1].mlp.down.weight[3, 5] *= 1 + 1e-6
    assert checksum(one) != checksum(two)


def test_no_version_that_is_to_be_evaluated_is_passed_over(tmp_path):
    run = RunDirectory(tmp_path, "rl")
    run.id = "a"
    for version in range(1, 6):
        partial = run.broadcasts / f"step_{version}.partial"
        partial.mkdir(parents=True)
        canary = Canary([1, 2], [0.0])
        publish_delivery(partial, Delivery("a", version, "", "float32", canary, {"x": version}, {}, False, "", 0, 0.0))
    config = OrchestratorRunConfig.model_validate({"env": {"id": "x"}, "model": {"name": "m"}})
    weights, trained = Weights(run, config, LOG), []

    class Rows:
        def trained(self, version, values):
            trained.append(version)

    weights.is_evaluated = lambda version: version % 3 == 0
    assert [weights.look(Rows()).version for _ in range(2)] == [3, 5] and weights.look(Rows()) is None
    assert trained == [1, 2, 4]  # whoever looks gives the others their rows
