"""Diagnose a run from its files: the findings of `monitors.diagnosis`, with rollouts that show them."""

from dataclasses import replace
from typing import Any

from hone.dashboard.index import Index
from hone.dashboard.tokens import TokenTable
from hone.monitors.diagnosis import METRICS, Diagnosis, Finding, RunFacts, diagnose_run
from hone.run_directory import RunDirectory, shorten_path, steps_in

EXAMPLES = 5  # rollouts that show a finding


def examine_run(index: Index) -> Diagnosis:
    """Return the findings of an SFT or RL run, the worst first, with examples."""
    prompt = find_odd_prompt(index) if index.run.kind == "rl" else ""
    diagnosis = diagnose_run(read_facts(index, prompt))
    findings = [_with_examples(finding, index) for finding in diagnosis.findings]
    return replace(diagnosis, findings=findings)


def read_facts(index: Index, prompt: str = "") -> RunFacts:
    """Return what the rules know from a run's indexed metrics."""
    run = index.run
    kept = index.metric_series(list(METRICS), most=10**9)
    series = {
        name: dict(zip(map(int, steps), values, strict=True))
        for name, (steps, values) in kept.items()
    }
    checkpoints = list(steps_in(RunDirectory(run.path, run.kind).checkpoints))
    return RunFacts(run.kind, series, prompt, checkpoints, shorten_path(run.path))


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


def find_odd_prompt(index: Index) -> str:
    """Return what is unusual about the first prompt's tokens, judged by the run's tokenizer, or ""."""
    rows = index.find_rollouts({}, "step", False, 1, 0)["rows"]
    found = index.read_rollout(rows[0]["id"]) if rows else None
    turns = (found or {}).get("turns") or [{}]
    ids = turns[0].get("prompt_ids")
    if not isinstance(ids, list) or not ids:
        return ""
    return TokenTable.of_run(index.root, index.run).find_oddity(ids)
