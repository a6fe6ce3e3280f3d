"""What Weights & Biases and TensorBoard are given, read back from what their own libraries wrote and read."""

import json
import time
from pathlib import Path

import pytest

from hone.config.rl_config import RLConfig
from hone.config.sections import TensorBoardConfig
from hone.monitors import trackers
from hone.monitors.logging_setup import start_logging
from hone.monitors.metrics_log import Metrics, read_rows
from hone.monitors.step_lines import RolloutLines
from hone.monitors.trackers import COLUMNS, TensorBoard, Tracker, Trackers, spread_by_reward
from tests.hangs import HANG_SECONDS


def config(**keys):
    return RLConfig(model={"name": "m"}, orchestrator={"env": {"id": "x"}}, max_steps=12, **keys)


def rows(step, count=20):
    made = {
        "env": "x",
        "prompt": "<b>ask</b>",
        "completion": "``` said",
        "answer": "a",
        "stop": "length",
        "error": "",
    }
    return [
        {"step": step, **made, "reward": i / count, "advantage": i - 10.0, "tokens": i}
        for i in range(count)
    ]


def run(path, asked, steps=range(1, 13)):
    with Metrics(path, asked) as metrics:
        for step in steps:
            metrics.on_rollouts(step, {}, lambda step=step: rows(step))
            metrics.on_step(step, {"reward/mean": step / 10})


def test_samples_go_from_the_lowest_reward_to_the_highest():
    assert [row["reward"] for row in spread_by_reward(rows(1), 3)] == [0.0, 0.5, 0.95]
    assert len(spread_by_reward(rows(1, 2), 8)) == 2 and spread_by_reward([], 8) == []


def test_tensorboard_reads_numbers_histograms_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "metrics.jsonl", config(tensorboard={"samples": 3, "interval": 5}))
    everything = {"tensors": 0, "histograms": 0, "scalars": 0}
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance=everything).Reload()
    assert [(event.step, round(event.value, 3)) for event in found.Scalars("reward/mean")][-1] == (
        12,
        1.2,
    )
    histograms = found.Histograms("distribution/reward")
    # Every fifth, the first and the last
    assert [event.step for event in histograms] == [1, 5, 10, 12]
    assert histograms[0].histogram_value.num == 20
    texts = found.Tensors("samples")
    said = texts[0].tensor_proto.string_val[0].decode()
    assert said.count("said") == 3 and "<b>ask</b>" in said and "**reward 0.95**" in said
    assert "made_by" in found.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 12


def test_wandbs_files_are_in_the_run_where_its_service_runs_in_another_directory(
    tmp_path, monkeypatch
):
    """As below a notebook that has used W&B: what it starts finds that service, which has its own place."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    asked = config(wandb={"project": "p", "offline": True})
    for place in ("first", "second"):
        (tmp_path / place / "run").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        run(Path("run/metrics.jsonl"), asked, range(1, 3))
        assert list((tmp_path / place / "run/wandb").glob("offline-run-*/*.wandb"))


def test_wandb_has_rows_tables_and_histograms_and_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    asked = config(
        wandb={"project": "p", "group": "g", "offline": True, "samples": 3, "interval": 5}
    )
    run(tmp_path / "metrics.jsonl", asked, range(1, 7))
    run(tmp_path / "metrics.jsonl", asked, range(7, 13))
    deadline = time.monotonic() + HANG_SECONDS
    # W&B's service is a process of its own, which may write when the run has ended here
    while True:
        files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
        records = [record for file in files for record in records_of(file)]
        if sum(record.HasField("exit") for record in records) == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    runs = [record.run for record in records if record.HasField("run")]
    assert len({one.run_id for one in runs}) == 1 and {one.run_group for one in runs} == {"g"}
    logged = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    means = {
        json.loads(one["step"]): json.loads(one["reward/mean"])
        for one in logged
        if "reward/mean" in one
    }
    assert means == pytest.approx({step: step / 10 for step in range(1, 13)})
    assert [json.loads(one["samples/nrows"]) for one in logged if "samples/nrows" in one] == [3] * 4
    histograms = [
        json.loads(one["distribution/reward/values"])
        for one in logged
        if "distribution/reward/values" in one
    ]
    assert [sum(values) for values in histograms] == [20] * 4
    table = json.loads(
        next((tmp_path / "wandb").glob("offline-run-*/files/media/table/*.json")).read_text()
    )
    assert table["columns"] == list(COLUMNS) and len(table["data"]) == 3


def records_of(file):
    """The records of an offline run: LevelDB's log format (blocks of 32 KiB, records in parts) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # what is left of a block has no room for a header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def test_a_tracker_that_fails_is_left_out_and_said_once(caplog):
    class Bad(Tracker):
        asked = 0

        def log_row(self, step, values):
            Bad.asked += 1
            raise OSError("no disk")

        def log_rollouts(self, step, rows, sample): ...

        def close(self, well):
            raise AssertionError

    def missing():
        raise RuntimeError("no network")

    with caplog.at_level("WARNING", "hone"):
        start_logging().propagate = True
        both = Trackers([("bad", Bad), ("worse", missing)])
        both.log_row(1, {})
        both.log_row(2, {})
        both.close(True)
    assert Bad.asked == 1
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "worse failed",
        "bad failed",
    ]
    assert "no network): the run continues without it" in caplog.records[0].message


def test_what_is_not_installed_is_named_before_work_starts(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"hone-rl\[tensorboard\]"):
        trackers.check_trackers(None, TensorBoardConfig())


def test_nothing_a_model_wrote_ends_the_code_it_is_shown_as(tmp_path):
    assert trackers._fence_text("a ```` b").startswith("`````\n")
    TensorBoard(tmp_path, TensorBoardConfig(), config()).log_rollouts(1, rows(1), rows(1))


def test_a_rollout_is_logged_every_so_many_steps(caplog):
    values = {"batch/effective_batch_size": 1.0, "time/step": 1.0, "reward/mean": 0.5}
    values |= dict.fromkeys(("perf/throughput", "seq_len/mean", "batch/async_level"), 1.0)
    values["batch/off_policy_level/max"] = 0.0
    every_third, never = RolloutLines(config(), 3), RolloutLines(config())
    with caplog.at_level("INFO", "hone.orchestrator"):
        for step in range(1, 7):
            every_third.on_rollouts(
                step,
                values,
                lambda step=step: [row | {"completion": "\x1b[2Jx"} for row in rows(step)],
            )
            never.on_rollouts(step, values, lambda: 1 / 0)
    samples = [record for record in caplog.records if "Sample ===" in record.message]
    assert [record.message.splitlines()[0] for record in samples] == [
        "=== Step 3 Sample ===",
        "=== Step 6 Sample ===",
    ]
    assert samples[0].message.endswith(
        "Completion: \\x1b[2Jx\nReward: 0.5, advantage 0, 10 tokens (length)"
    )


def test_lines_as_json_are_an_object_each(capsys):
    start_logging(form="json").info('said "%s"', "x\ny")
    line = json.loads(capsys.readouterr().out)
    assert (
        line["message"] == 'said "x\ny"' and line["level"] == "info" and line["component"] == "hone"
    )
    start_logging()
