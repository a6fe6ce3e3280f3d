"""Find the runs and evaluations below a directory, with their state and progress.

Nothing outside the root is read. Runs are found by walking it, and links are not followed.
"""

import json
import os
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone import machine
from hone.run_directory import RunDirectory

MAX_DEPTH = 6  # levels of directories searched below the root
KINDS = ("rl", "sft")
PASSED_OVER = {
    "rollouts",
    "weights",
    "checkpoints",
    "checkpoints_sft",
    "broadcasts",
    "logs",
    "alive",
    "wandb",
    "src",
    "node_modules",
    "bad_steps",
    "tensorboard",
    "configs",
    "models",
    "tests",
    "docs",
}
GONE_SECONDS = 60.0  # seconds of silence after which a process counts as dead
FRESH_SECONDS = 20.0  # seconds since its last line during which an evaluation counts as running


@dataclass(frozen=True)
class Run:
    """A run or an evaluation. `id` is its path below the root and its kind: `outputs/demo:rl`."""

    id: str
    kind: str  # rl, sft, eval
    path: Path

    @property
    def metrics_file(self) -> Path:
        return RunDirectory(self.path, self.kind).metrics

    @property
    def manifest_file(self) -> Path:
        return self.path / ("metadata.json" if self.kind == "eval" else f"run_{self.kind}.json")


def find_runs(root: Path) -> dict[str, Run]:
    """Return the runs by id. Unreadable directories are skipped."""
    found = {}
    for directory, names in _walk_directories(root, MAX_DEPTH):
        place = directory.relative_to(root).as_posix()
        kinds = [kind for kind in KINDS if f"run_{kind}.json" in names]
        kinds += ["eval"] if {"metadata.json", "results.jsonl"} <= names else []
        for kind in kinds:
            found[f"{place}:{kind}"] = Run(f"{place}:{kind}", kind, directory)
    return found


def _walk_directories(top: Path, depth: int) -> Iterator[tuple[Path, set[str]]]:
    """Yield `top` and the directories below it, with the names of their plain files.

    It goes `depth` levels down, and skips hidden directories and those in PASSED_OVER.
    """
    try:
        entries = list(os.scandir(top))
    except OSError:
        return
    yield top, {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    for entry in entries if depth else []:
        is_looked_through = not entry.name.startswith(".") and entry.name not in PASSED_OVER
        if is_looked_through and entry.is_dir(follow_symlinks=False):
            yield from _walk_directories(Path(entry.path), depth - 1)


def read_text(root: Path, file: Path, most: int = 2**20) -> str:
    """Return the last `most` bytes of a file below the root as text.

    Returns "" if the file is missing, or if a link leads out of the root.
    """
    data, _ = read_end(root, file, most)
    return data


def read_end(root: Path, file: Path, most: int) -> tuple[str, int]:
    """Return the last `most` bytes of a file as text, and the offset at which they begin."""
    try:
        if not is_below(root, file):
            return "", 0
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, os.SEEK_END) - most)
            opened.seek(start)
            return opened.read(most).decode(errors="replace"), start
    except OSError:
        return "", 0


def is_below(root: Path, file: Path) -> bool:
    """Return True for a plain file whose real path is below the root."""
    return file.is_file() and file.resolve().is_relative_to(root.resolve())


def read_json(root: Path, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(root, file))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def config_of(root: Path, run: Run) -> dict[str, Any]:
    """Return a run's resolved configuration, merged from the files of its processes.

    Files that cannot be read or parsed are skipped.
    """
    names = {"rl": ("orchestrator", "trainer", "rl"), "sft": ("sft",), "eval": ()}[run.kind]
    found: dict[str, Any] = {}
    for name in names:
        try:
            found |= tomllib.loads(read_text(root, run.path / "configs" / f"{name}.toml"))
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
    return found


def orchestrator_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the orchestrator's configuration: its section in `config`, or else all of `config`."""
    section = config.get("orchestrator")
    return section if isinstance(section, dict) else config


def environments_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    envs = orchestrator_keys(config).get("env")
    return [env for env in (envs if isinstance(envs, list) else [envs]) if isinstance(env, dict)]


def component_ages(run: Run) -> dict[str, float]:
    """Return the seconds since the last heartbeat of each process."""
    names = [file for file in _list_directory(run.path / "alive") if not file.is_symlink()]
    if run.kind == "sft":
        names = [file for file in names if file.name.startswith("sft")]
    elif run.kind == "rl":
        names = [file for file in names if not file.name.startswith("sft")]
    ages = {}
    for file in names:
        try:
            ages[file.name.replace("_", " ")] = max(0.0, _file_clock() - file.stat().st_mtime)
        except OSError:
            continue
    return ages


def _list_directory(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _file_clock() -> float:
    """Return the current time of the clock that file modification times use."""
    return time.time()  # noqa: TID251


def run_status(root: Path, run: Run, step: int, max_steps: int | None) -> str:
    """Return running, silent (a process hangs or was just killed), done or stopped."""
    if run.kind == "eval":
        about = read_json(root, run.manifest_file)
        if "seconds" in about:
            return "done"
        age = _file_age(run.path / "results.jsonl")
        return "running" if age is not None and age < FRESH_SECONDS else "stopped"
    youngest = min(component_ages(run).values(), default=GONE_SECONDS)
    if youngest < GONE_SECONDS:
        return "running" if youngest < max(machine.silence_seconds(), 5.0) else "silent"
    over = read_json(root, run.manifest_file).get("over")
    return "done" if over or (max_steps and step >= max_steps) else "stopped"


def _file_age(file: Path) -> float | None:
    try:
        return max(0.0, _file_clock() - file.stat().st_mtime)
    except OSError:
        return None


def run_age(run: Run) -> float:
    """Return the seconds since the run wrote its last row, or since it began."""
    ages = [
        _file_age(file)
        for file in (run.metrics_file, run.manifest_file, run.path / "results.jsonl")
    ]
    return min((one for one in ages if one is not None), default=0.0)
