"""`rl --fork RUN@N`: start a new run from step N of another run, with any configuration.

    RUN/checkpoints/step_N ─► DIR/checkpoints/step_N ─► DIR resumes from there
    RUN/metrics.jsonl, rows to N ─► DIR/metrics.jsonl    run_rl.json: {"fork": {"run", "step", "changed"}}

Weights, optimizer and data position are taken from RUN, which is not changed. The data position
restarts if the seed, the number of prompts or the environments differ.
"""

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from hone.config.base import find_differences
from hone.config.rl_config import RLConfig
from hone.models.model_directory import resolve_model
from hone.monitors.metrics_log import read_rows
from hone.run_directory import RunDirectory, appearing_directory, steps_in
from hone.trainer.checkpoint import HEADER, Damaged, read_header
from hone.transport.batches import read_progress, write_progress

log = logging.getLogger("hone.rl")
COUNTED = (
    "seed",
    "orchestrator.batch_size",
    "orchestrator.rollouts_per_example",
    "orchestrator.env",
)


def fork_run(config: RLConfig) -> RLConfig:
    """Create the fork's directory; return the configuration that resumes in it.

    A configuration without `fork` is returned unchanged. Raises ValueError.
    """
    if config.fork is None:
        return config
    source, step = parse_fork(config.fork)
    run = RunDirectory(config.output_dir, "rl", config.layout)
    goes_on = config.model_copy(update={"fork": None, "clean": False, "resume": True})
    if run.manifest.exists() and config.resume in (True, "auto"):
        begun = json.loads(run.manifest.read_text()).get("fork")
        if begun is None or (begun["run"], begun["step"]) != (str(source), step):
            raise ValueError(
                f"--fork {config.fork}: {run.path} holds a run that did not begin there"
            )
        return goes_on  # resumed
    if source == run.path.resolve():
        raise ValueError(
            f"--fork {config.fork}: a fork has a directory of its own; give another --output-dir"
        )
    _copy_run(config, run, source, step)
    return goes_on


def _copy_run(config: RLConfig, run: RunDirectory, source: Path, step: int) -> None:
    """Copy the checkpoint and metrics of a run up to a step into a new run's directory."""
    checkpoint = find_checkpoint(source, step)
    try:
        header = read_header(checkpoint)
    except Damaged as error:
        raise ValueError(f"--fork {config.fork}: {checkpoint} is damaged: {error}") from None
    if step >= config.max_steps:
        raise ValueError(
            f"--fork {config.fork}: max-steps is {config.max_steps}, nothing is left to do after step {step}"
        )
    resolve_model(config.model.name)  # mistakes are reported before anything is written
    run.claim_run(clean=config.clean, weight_steps=config.weights.list_steps(config.max_steps))
    changed = {key: [was, now] for key, was, now in find_differences(header["config"], config)}
    if (before := header["config"].get("max_steps")) not in (None, config.max_steps):
        changed["max_steps"] = [before, config.max_steps]
    counts_anew = any(key.startswith(COUNTED) for key in changed)
    with appearing_directory(run.checkpoints / f"step_{step}") as place:
        _copy_checkpoint(checkpoint, place, header, step, counts_anew)
    earlier = [row for row in read_rows(source / "metrics.jsonl") if row["step"] <= step]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    run.write_facts(
        fork={"run": str(source), "step": step, "changed": changed},
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    words = (
        ", ".join(f"{key} {was} -> {now}" for key, (was, now) in changed.items())
        or "no key that changes what is learnt"
    )
    log.info("Forked from step %d of %s; changed: %s", step, source, words)


def _copy_checkpoint(
    checkpoint: Path, place: Path, header: dict[str, Any], step: int, counts_anew: bool
) -> None:
    """Link a checkpoint's files into `place`.

    If `counts_anew`, the orchestrator starts at the beginning of the data.
    """
    shutil.copytree(checkpoint, place, copy_function=_link_file, dirs_exist_ok=True)
    if counts_anew or read_progress(checkpoint / "orchestrator") is None:
        (place / "orchestrator" / "progress.json").unlink(missing_ok=True)
        (place / "orchestrator").mkdir(exist_ok=True)
        write_progress({"step": step}, place / "orchestrator")
        header["files"].pop("orchestrator/progress.json", None)
    (place / HEADER).unlink()  # a link: the other run's file is not changed
    (place / HEADER).write_text(json.dumps(header | {"config": {}}, indent=2) + "\n")


def parse_fork(fork: str) -> tuple[Path, int]:
    """Return the run's directory and the step of RUN@N. Raises ValueError."""
    match = re.fullmatch(r"(.+)@(\d+)", fork)
    if match is None:
        raise ValueError(
            f"--fork {fork!r}: it is RUN@N, the directory of a run and a step of which it has a checkpoint"
        )
    return Path(match[1]).resolve(), int(match[2])


def find_checkpoint(source: Path, step: int) -> Path:
    """Return the checkpoint of a step. Raises ValueError that lists the available steps."""
    there = steps_in(source / "checkpoints")
    if step in there:
        return there[step]
    if not (source / "run_rl.json").exists():
        raise ValueError(f"--fork {source}@{step}: {source} holds no rl run")
    steps = f"those of steps {', '.join(map(str, there))}" if there else "none"
    raise ValueError(
        f"--fork {source}@{step}: no checkpoint of step {step} there, but {steps} (--ckpt.interval N writes them, "
        "--ckpt.keep M says how many of the last stay)"
    )


def _link_file(source: str, target: str) -> None:
    """Hard-link a file if the file system can, else copy it; checkpoints are never modified."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
