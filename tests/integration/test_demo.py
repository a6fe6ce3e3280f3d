"""`make demo` at reduced length: every stage runs by its command, the report and the picture are there."""

import json

import pytest

from .conftest import ROOT, command


@pytest.mark.main_path
def test_demo(tmp_path, monkeypatch):
    # As users run it: threads wait by what else is running
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    done = command(
        "python",
        ROOT / "examples/reverse_text_tiny/demo.py",
        "--out",
        tmp_path,
        "--sft-steps",
        30,
        "--rl-steps",
        3,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    for stage in ("base", "sft", "rl"):
        for figure in ("reward", "exact", "greedy_exact"):
            assert 0 <= report[f"{stage}_{figure}"] <= 1
    assert report["seed"] == 0 and report["seconds"] >= sum(report["stage_seconds"].values()) * 0.9
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for command_shown in (
        "$ uv run sft @",
        "$ uv run rl @",
        "$ uv run vf-eval reverse-text",
        "$ uv run inference --model.name",
    ):
        assert command_shown in done.stdout
    assert "after RL" in done.stdout and "reversed (greedy)" in done.stdout
