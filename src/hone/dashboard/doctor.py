"""Diagnose a run from its files: the findings of `monitors.diagnosis`, with rollouts that show them."""

from dataclasses import replace
from typing import Any

from hone.dashboard.index import Index
from hone.dashboard.runs import is_below
from hone.monitors.diagnosis import METRICS, Diagnosis, Finding, RunFacts, diagnose_run
from hone.monitors.prompt_check import check_prompt, prompt_files
from hone.run_directory import RunDirectory, shorten_path, steps_in

EXAMPLES = 5  # rollouts that show a finding


def examine_run(index: Index) -> Diagnosis:
    """Return the findings of an SFT or RL run, the worst first, with examples."""
    diagnosis = diagnose_index(index)
    findings = [_with_examples(finding, index) for finding in diagnosis.findings]
    return replace(diagnosis, findings=findings)


def diagnose_index(index: Index) -> Diagnosis:
    """Return the findings of a run from its indexed metrics, which is fast."""
    run = index.run
    place = RunDirectory(run.path, run.kind)
    kept = index.metric_series(list(METRICS), most=10**9)
    series = {
        name: dict(zip(map(int, steps), values, strict=True))
        for name, (steps, values) in kept.items()
    }

    def read_prompt() -> str:
        files = prompt_files(place)
        is_safe = all(is_below(index.root, file) for file in files)
        return check_prompt(*files) if is_safe else ""

    facts = RunFacts(
        run.kind,
        series,
        read_prompt,
        lambda: steps_in(place.checkpoints),
        shorten_path(run.path),
    )
    return diagnose_run(facts)


def _with_examples(finding: Finding, index: Index) -> Finding:
    """Return the finding with rollouts of its first step as examples."""
    if index.run.kind != "rl" or not finding.is_problem:
        return finding
    sort, is_descending = ("tokens", True) if finding.kind == "length" else ("reward", False)
    wanted: dict[str, Any] = {"step_from": finding.first_step, "step_to": finding.first_step}
    if finding.kind == "truncated":
        wanted["truncated"] = 1
    rows = index.find_rollouts(wanted, sort, is_descending, EXAMPLES, 0)["rows"]
    return replace(finding, rollouts=[row["id"] for row in rows])
