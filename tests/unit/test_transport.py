"""What travels between processes, and the waits for it."""

import asyncio
import gc
import logging
import os
import shutil
import time
import weakref

import numpy as np
import pytest
import torch

from hone import machine
from hone.config.rl_config import OrchestratorRunConfig
from hone.kernels.cuda_graphs import Captured
from hone.models.rope import Rope
from hone.models.spec import LayerAttention, ModelSpec
from hone.models.transformer import Transformer
from hone.models.weight_proof import CanaryScorer, canary_ids, model_checksum, score_sequence
from hone.orchestrator.weight_updates import Weights
from hone.records import Batch, Sample
from hone.run_directory import RunDirectory, Steps, appearing_directory, steps_in
from hone.transport import deadlines
from hone.transport.batches import Batches, FileBatches
from hone.transport.deadlines import Pulse, PulseOf, Wait, Watch, wait_for
from hone.transport.delivery import Canary, Delivery, read_delivery, remove_before, write_delivery

LOG = logging.getLogger("test")
EVAL = {"env": {"id": "x"}, "interval": 3}
SPEC = ModelSpec(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    layers=(LayerAttention(Rope(1e4, 16)),) * 2,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    initializer_range=0.2,
    qkv_bias=False,
)


class Remembered(Batches):
    """A way for batches of one's own."""

    def __init__(self, shelf, run):
        self.shelf, self.run = shelf, run

    def put(self, batch, place):
        self.shelf[self.run, batch.step] = batch

    def take(self, step):
        return self.shelf.get((self.run, step))

    def acknowledge(self, step):
        self.shelf.pop((self.run, step), None)


def told(batch):
    """All that a batch says."""
    return batch.step, [
        {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(sample).items()}
        for sample in batch.samples
    ]


@pytest.mark.parametrize("way", ["files", "remembered"])
def test_a_batch_comes_back_as_it_was_for_its_run_alone(way, tmp_path):
    shelf = {}
    mine, yours = (
        FileBatches(tmp_path, run) if way == "files" else Remembered(shelf, run)
        for run in ("mine", "yours")
    )
    third = 1 / 3  # no rounding on the way
    samples = [
        Sample([1, 2, 3], [False, True, True], [0.0, -third, -2.0], third, 0.7),
        Sample([4, 5], [False, True], [0.0, -1e-9], -third, 1.0, [0.0, -third], "judged"),
        Sample([6], [True], [0.0], 1.0, 1.0, env="other"),
    ]
    assert mine.take(7) is None
    for step, of_step in ((7, samples), (8, [])):
        with appearing_directory(tmp_path / f"step_{step}") as place:
            mine.put(Batch(step, of_step), place)
            assert way != "files" or mine.take(step) is None  # whole or not at all
    assert told(mine.take(7)) == told(mine.take(7)) == told(Batch(7, samples)) and mine.take(
        8
    ) == Batch(8, [])
    assert yours.take(7) is None
    mine.acknowledge(7)
    mine.acknowledge(7)
    assert mine.take(8) == Batch(8, [])
    assert (tmp_path / "step_7").exists()  # what else is there stays


def deliver(parent, run, version, metrics):
    delivery = Delivery(run, version, "sum", "float32", Canary([1, 2], [-0.5]), metrics)
    with appearing_directory(parent / f"step_{version}") as place:
        assert version not in steps_in(parent)
        write_delivery(delivery, place)
    return delivery


def test_deliveries_appear_whole_and_old_ones_go(tmp_path):
    assert steps_in(tmp_path / "nothing") == {}
    for version in (0, 1, 9, 10):
        delivery = deliver(tmp_path, "run", version, {"loss/mean": 0.1})
        directory = tmp_path / f"step_{version}"
        assert (directory / "STABLE").exists() and read_delivery(directory) == delivery
    assert list(steps_in(tmp_path)) == [0, 1, 9, 10]
    remove_before(tmp_path, 9)
    assert list(steps_in(tmp_path)) == [9, 10] and read_delivery(tmp_path / "step_0") is None


def test_steps_are_seen_at_once_and_a_directory_is_read_when_it_has_changed(tmp_path, monkeypatch):
    steps, reads = Steps(tmp_path / "out"), []
    monkeypatch.setattr(
        os, "listdir", lambda path, real=os.listdir: reads.append(path) or real(path)
    )
    assert steps.list_numbers() == []
    for number in range(50):
        with appearing_directory(steps.path_of(number)):
            assert number not in steps.list_numbers()
        assert steps.list_numbers() == list(range(number + 1))
    time.sleep(Steps.SETTLED * 1.1)
    steps.list_numbers()
    reads.clear()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        steps.list_numbers()
    assert not reads
    shutil.rmtree(steps.path_of(0))
    assert steps.list_numbers() == list(range(1, 50))
    shutil.rmtree(steps.parent)
    assert steps.list_numbers() == []


def test_steps_are_seen_on_a_file_system_that_notes_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr(Steps, "_time_of_change", lambda self: 0)
    monkeypatch.setattr(Steps, "AGAIN", 0.1)
    steps = Steps(tmp_path)
    steps.list_numbers()
    time.sleep(Steps.SETTLED * 1.1)
    assert steps.list_numbers() == []
    with appearing_directory(steps.path_of(7)):
        pass
    assert steps.list_numbers() == []
    time.sleep(0.11)
    assert steps.list_numbers() == [7]


def test_a_pulse_is_believed_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlines, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(machine, "SILENCE_SECONDS", 0.4)
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
    monkeypatch.setattr(deadlines, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(machine, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(machine, "_slowness", 1.0)
    well, ill = (Pulse(tmp_path / name) for name in ("well", "ill"))
    peers = {
        "trainer rank 1": tmp_path / "ill",
        "orchestrator": tmp_path / "well",
        "nobody": tmp_path / "no",
    }
    watch = Watch(peers, LOG)

    def said(count):
        wait_for(Wait("the log", 60.0, LOG), lambda: len(caplog.records) >= count or None)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, logger="test"), watch:
        with well, ill:
            wait_for(
                Wait("pulses", 60.0, LOG),
                lambda: all(watch.peers[x].is_beating() for x in list(peers)[:2]) or None,
            )
            ill._stop.set()  # as one that was stopped
            assert said(1) == [
                "No heartbeat from the trainer rank 1 for 1 s: has it died, or been stopped?"
            ]
            ill._stop.clear()
            with Pulse(tmp_path / "ill"):
                assert said(2)[1] == "The trainer rank 1 is back"
        time.sleep(1.5)  # in which nobody is missed who has ended
    assert len(caplog.records) == 2


def test_a_wait_ends_at_its_deadline_with_its_name():
    with pytest.raises(ConnectionError, match="waited 0 s for the moon; look up"):
        wait_for(Wait("the moon", 0.02, LOG, "look up"), lambda: None)


def test_the_checksum_sees_every_byte():
    one, two = Transformer(SPEC), Transformer(SPEC)
    for model in (one, two):
        model.init_weights(torch.Generator().manual_seed(0))
    assert model_checksum(one) == model_checksum(two) and len(model_checksum(one)) == 32
    ids = canary_ids(SPEC)
    assert (
        score_sequence(one, ids) == score_sequence(two, ids)
        and len(score_sequence(one, ids)) == len(ids) - 1
    )
    with torch.no_grad():
        two.blocks[1].mlp.down.weight[3, 5] *= 1 + 1e-6
    assert model_checksum(one) != model_checksum(two)


def test_a_canary_that_was_captured_goes_with_its_model(monkeypatch):
    """Without the collector, which would come long after the memory is needed."""
    monkeypatch.setattr(
        Captured, "capture", lambda self, key, forward: self.graphs.update({key: forward})
    )
    model = Transformer(SPEC)
    scorer, is_there = CanaryScorer(model), weakref.ref(model)
    scorer._capture_graph()
    gc.disable()
    try:
        del scorer, model
        assert is_there() is None
    finally:
        gc.enable()


def test_no_version_that_is_to_be_evaluated_is_passed_over(tmp_path):
    run = RunDirectory(tmp_path, "rl")
    run.id = "a"
    for version in range(1, 6):
        deliver(run.broadcasts, "a", version, {"x": version})
    config = OrchestratorRunConfig.model_validate(
        {"env": {"id": "x"}, "model": {"name": "m"}, "eval": EVAL}
    )
    trained = []

    class Rows:
        def write_trained(self, version, values):
            trained.append(version)

    async def looks():
        weights = Weights(run, config, [], LOG)
        return [weights.find_delivery(Rows()) for _ in range(3)]

    *found, nothing = asyncio.run(looks())
    assert [delivery.version for delivery in found] == [3, 5] and nothing is None
    assert trained == [1, 2, 4]  # whoever looks gives the others their rows


def test_a_server_without_a_checksum_proves_that_its_weights_moved(tmp_path):
    """vLLM on a GPU rounds its logits: the canary alone may differ by as much as a step moves it."""

    class Client:
        base_url, answer = "there", [-1.0, -2.0]

        async def call_control(self, route, body=None):
            state = {"is_paused": False, "checksum": None, "dtype": "bfloat16", "version": 4}
            return {"logprobs": self.answer} if route == "score" else state

    async def program():
        config = OrchestratorRunConfig.model_validate({"env": {"id": "x"}, "model": {"name": "m"}})
        weights, client = Weights(RunDirectory(tmp_path, "rl"), config, [], LOG), Client()

        async def take(version, *canary):
            delivery = Delivery(
                "run", version, "sum", "bfloat16", Canary([1, 2, 3], list(canary)), {}
            )
            return (await weights._update_server(client, delivery)).difference

        # More than Hone's own engine may differ
        assert await take(1, -1.1, -2.3) == pytest.approx(0.3)
        # A small step may leave rounded logits as they were
        assert await take(2, -1.1, -2.31) == pytest.approx(0.31)
        with pytest.raises(ConnectionError, match="keeps the old weights"):
            await take(3, -1.1, -2.4)
        client.answer = [-1.0, -2.5]
        assert await take(3, -1.1, -2.4) == pytest.approx(0.1)
        client.answer = [-1.0, -2.6]
        with pytest.raises(ConnectionError, match="disagree on the canary"):
            await take(4, -1.1, -1.9)

    asyncio.run(program())


def test_weights_that_are_the_same_to_the_bit_are_served_before_the_canary_is_known(tmp_path):
    class Client:
        base_url, checksum, asked = "there", "sum", []

        async def call_control(self, route, body=None):
            self.asked.append(route)
            state = {
                "is_paused": False,
                "checksum": self.checksum,
                "dtype": "float32",
                "version": 1,
                "fingerprints": {},
            }
            return {"logprobs": [-1.0, -2.0]} if route == "score" else state

    async def program(canary, checksum="sum"):
        config = OrchestratorRunConfig.model_validate({"env": {"id": "x"}, "model": {"name": "m"}})
        client = Client()
        client.asked, client.checksum = [], checksum
        weights = Weights(RunDirectory(tmp_path, "rl"), config, [client], LOG)
        delivery = Delivery(
            "run",
            1,
            "sum",
            "float32",
            Canary([1, 2, 3], canary),
            {},
            transport={"type": "filesystem"},
        )
        await weights._adopt_delivery(delivery)
        assert (weights.version, client.asked, weights.proven.is_set()) == (
            1,
            ["update_weights"],
            False,
        )
        found = await weights._prove_delivery(delivery)
        assert client.asked == ["update_weights", "score"] and weights.proven.is_set()
        return found

    assert asyncio.run(program([-1.0, -2.0])) == {"weights/canary_difference": 0.0}
    with pytest.raises(ConnectionError, match="disagree on the canary of version 1"):
        asyncio.run(program([-1.0, -3.0]))
    with pytest.raises(ConnectionError, match="serves other weights than version 1"):
        asyncio.run(program([-1.0, -2.0], checksum="other"))


def test_a_run_of_another_layout_is_removed_where_it_wrote(tmp_path):
    run = RunDirectory(tmp_path, "rl", "trainer")
    run.claim_run(clean=False)
    (run.weights_for(2) / "x").mkdir(parents=True)
    (run.logs / "trainer.log").write_text("")
    assert (tmp_path / "checkpoint-2").exists() and (tmp_path / "runs" / "trainer.log").exists()
    again = RunDirectory(tmp_path, "rl")
    again.claim_run(clean=True)
    assert (
        not (tmp_path / "checkpoint-2").exists()
        and not (tmp_path / "runs" / "trainer.log").exists()
    )
    assert again.weights_of(2) == tmp_path / "weights" / "step_2"


def test_a_configuration_that_is_written_again_stays_whole_for_who_reads_it(tmp_path):
    run = RunDirectory(tmp_path, "rl")
    with run.write_config("first = 1\n", "trainer").open() as reading:
        assert run.write_config("second = 2\n", "trainer").read_text() == "second = 2\n"
        assert reading.read() == "first = 1\n"
    assert [path.name for path in (tmp_path / "configs").iterdir()] == ["trainer.toml"]
