"""The list of suites, and that CI's jobs are those."""

from pathlib import Path

import pytest
import yaml

from tests import suites
from tests.hangs import find_descendants

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_every_suite():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    jobs = workflow["jobs"]["suite"]["strategy"]["matrix"]["suite"]
    assert ["lint", "core", *jobs] == list(suites.SUITE_BY_NAME)


def add_suite(monkeypatch, name, run, obstacle=""):
    suite = suites.Suite(name, "", run, lambda: obstacle)
    monkeypatch.setitem(suites.SUITE_BY_NAME, name, suite)


def test_a_suite_that_fails_or_cannot_run_is_listed_with_the_reason(monkeypatch, capfd):
    add_suite(monkeypatch, "good", lambda runner: runner.run("true"))
    add_suite(monkeypatch, "bad", lambda runner: runner.run("false"))
    add_suite(monkeypatch, "absent", lambda runner: runner.run("true"), "no such machine")
    monkeypatch.setattr("sys.argv", ["suites", "bad", "good", "absent"])
    assert suites.main() == 1
    rows = [line.split()[:2] for line in capfd.readouterr().out.split("Suites:\n")[1].splitlines()]
    assert rows == [["bad", "failed"], ["good", "ran"], ["absent", "not"]]
    monkeypatch.setattr("sys.argv", ["suites", "good", "absent"])
    assert suites.main() == 0
    assert "not run: no such machine" in capfd.readouterr().out


def test_an_unknown_suite_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["suites", "hlem"])
    with pytest.raises(SystemExit) as ended:
        suites.main()
    assert ended.value.code == 2


def test_descendants_are_found_through_generations():
    processes = {2: (1, []), 3: (2, []), 4: (3, []), 5: (9, []), 6: (2, [])}
    assert sorted(find_descendants(2, processes)) == [3, 4, 6]
