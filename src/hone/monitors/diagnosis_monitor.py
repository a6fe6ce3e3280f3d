"""Listener that reports findings while a run is running, and stops the run on chosen ones."""

import functools
import logging
from collections.abc import Sequence

from hone.monitors.diagnosis import Finding, RunFacts, RunningDiagnosis
from hone.monitors.events import Events
from hone.monitors.metrics_log import read_rows
from hone.monitors.prompt_check import check_prompt, prompt_files
from hone.run_directory import RunDirectory, shorten_path, steps_in


class DiagnosisMonitor(Events):
    """Diagnose an RL run as its steps complete.

    Attributes:
        log: receives new findings and the reason of a stop.
        done: steps that were taken before a resume; their metrics are read from the run.
        stop_when: kinds of findings that stop the run.
        logs_findings: False if another process logs the findings.
    """

    def __init__(
        self,
        run: RunDirectory,
        log: logging.Logger,
        done: int = 0,
        stop_when: Sequence[str] = (),
        logs_findings: bool = True,
    ) -> None:
        self.log = log
        self.stop_when = stop_when
        self.logs_findings = logs_findings
        facts = RunFacts(
            "rl",
            # A prompt that is odd stays so: one look at it is enough.
            read_prompt=functools.cache(lambda: check_prompt(*prompt_files(run))),
            list_checkpoints=lambda: steps_in(run.checkpoints),
            place=shorten_path(run.path),
        )
        earlier = [row for row in read_rows(run.metrics) if row["step"] <= done]
        self.diagnosis = RunningDiagnosis(facts, earlier)

    @property
    def main_finding(self) -> Finding | None:
        return self.diagnosis.findings[0] if self.diagnosis.findings else None

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        for finding in self.diagnosis.add_step(step, values):
            if self.logs_findings:
                level = logging.WARNING if finding.is_problem else logging.INFO
                self.log.log(level, "%s", format_finding(finding, step))
        for finding in self.diagnosis.findings:
            if finding.kind in self.stop_when:
                self.log.warning(
                    "Stopping after step %d, as orchestrator.stop_when asks for: %s",
                    step,
                    finding.title,
                )
                return False
        return True


def format_finding(finding: Finding, step: int) -> str:
    """Format a finding as a log line, with the advice that usually helps most."""
    return (
        f"Diagnosis at step {step} | {finding.title} (since step {finding.first_step}) | "
        f"{finding.evidence} | Try: {finding.helps[0]}"
    )
