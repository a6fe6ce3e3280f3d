"""Content of the dashboard's pages, made from a run's index and files."""

import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.dashboard.doctor import diagnose_index, examine_run
from hone.dashboard.index import Index
from hone.dashboard.notes import Notes, RunNote
from hone.dashboard.rollout_columns import clean_text
from hone.dashboard.runs import (
    Run,
    component_ages,
    config_of,
    environments_of,
    find_runs,
    is_below,
    read_end,
    read_json,
    read_text,
    run_age,
    run_status,
)
from hone.dashboard.tokens import TokenTable
from hone.monitors.diagnosis import Finding
from hone.run_directory import RunDirectory, checkpoints_in, steps_in
from hone.transport.trained_tokens import read_trained

SPARKLINE_POINTS = 60  # points of the sparkline in the list
INDEX_WAIT_SECONDS = 0.1  # seconds that a reader waits for new data to be indexed
LOG_BYTES = 256 * 1024  # bytes of the end of a log that are shown
HEADLINE = {"rl": "reward/mean", "sft": "loss/mean", "eval": "reward"}

log = logging.getLogger("hone.dashboard")


class Runs:
    """Runs below a root directory, each with an index; a request for a run updates its index."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root = root.resolve()
        self.cache = cache
        self._indexes: dict[str, Index] = {}
        self._findings: dict[str, tuple[str | None, Finding | None]] = {}
        self._lock = threading.Lock()
        self.notes = Notes(self.root)

    def find_runs(self) -> dict[str, Run]:
        return find_runs(self.root)

    def get_run(self, name: str) -> tuple[Run, Index]:
        """Return a run and its index. Raises KeyError if no run below the root has this id."""
        with self._lock:
            index = self._indexes.get(name)
        if index is None or not index.run.manifest_file.is_file():
            run = self.find_runs()[name]
            index = self._index_of(run)
        return index.run, index

    def _index_of(self, run: Run) -> Index:
        with self._lock:
            return self._indexes.setdefault(run.id, Index(self.root, run, self.cache))

    def list_runs(self) -> list[dict[str, Any]]:
        """Return a row per run, newest first; runs whose files cannot be shown are left out."""
        lines = []
        notes = self.notes.read_all()
        for run in self.find_runs().values():
            try:
                line = self.run_line(run) | asdict(notes.get(run.id, RunNote()))
                json.dumps(line, allow_nan=False, ensure_ascii=False).encode()
            except (ValueError, ArithmeticError, RecursionError, TypeError, LookupError) as error:
                log.warning("%r is not listed: %s: %s", run.id, type(error).__name__, error)
                continue
            lines.append(line)
        return sorted(lines, key=lambda line: line["age"])

    def run_line(self, run: Run) -> dict[str, Any]:
        index = self._index_of(run)
        index.update_metrics()
        config = config_of(self.root, run)
        about = read_json(self.root, run.manifest_file)
        metric = HEADLINE[run.kind]
        steps, values = index.metric_series([metric], most=SPARKLINE_POINTS).get(metric, [[], []])
        step = int(steps[-1]) if steps else 0
        most = config.get("max_steps")
        model = config.get("model") if isinstance(config.get("model"), dict) else {}
        finding = self.main_finding(index) if run.kind != "eval" else None
        first, last = index.first_and_last(metric)
        found = {
            "id": run.id,
            "kind": run.kind,
            "name": run.path.name if run.id[0] != "." else self.root.name,
            "place": run.id.rpartition(":")[0],
            "status": run_status(self.root, run, step, most),
            "step": step,
            "max_steps": most,
            "metric": metric,
            "spark": values,
            "first": first,
            "last": last,
            "finding": finding,
            "age": run_age(run),
            "model": clean_text((model or {}).get("name") or about.get("model") or ""),
            "env": ", ".join(_env_names(environments_of(config))),
            "device": clean_text(about.get("device") or ""),
            "fork": self.fork_origin(about.get("fork")),
            "started": about.get("started"),
        }
        if run.kind == "eval":
            reward = about.get("reward")
            found |= {
                "env": clean_text(about.get("env") or ""),
                "last": reward if isinstance(reward, (int, float)) else None,
            }
        return found

    def main_finding(self, index: Index) -> dict[str, Any] | None:
        """Return the worst finding of a run, or None; it is judged again only after new metrics."""
        stamp = index.metrics_stamp
        known = self._findings.get(index.run.id)
        if known is None or known[0] != stamp:
            findings = diagnose_index(index).findings
            known = self._findings[index.run.id] = (stamp, findings[0] if findings else None)
        finding = known[1]
        if finding is None:
            return None
        names = ("kind", "title", "first_step", "is_problem")
        return {name: getattr(finding, name) for name in names}

    def fork_origin(self, fork: Any) -> dict[str, Any] | None:
        """Return run, step and changed keys from the `fork` entry of a run's manifest, or None.

        A run below the root is named by its path relative to the root.
        """
        if not isinstance(fork, dict):
            return None
        place = Path(str(fork.get("run")))
        name = (
            place.relative_to(self.root).as_posix()
            if place.is_relative_to(self.root)
            else str(place)
        )
        return {"run": clean_text(name), "step": fork.get("step"), "changed": fork.get("changed")}

    def run_detail(self, name: str) -> dict[str, Any]:
        run, index = self.get_run(name)
        configs = (
            {
                file.stem: read_text(self.root, file)
                for file in sorted((run.path / "configs").glob("*.toml"))
            }
            if run.kind != "eval"
            else {"metadata": read_text(self.root, run.manifest_file)}
        )
        return {
            **self.run_line(run),
            **asdict(self.notes.read_all().get(run.id, RunNote())),
            "components": component_ages(run),
            "configs": configs,
            "logs": self.log_names(run),
            "checkpoints": self.list_checkpoints(run),
            "names": index.metric_names(),
            "about": read_json(self.root, run.manifest_file),
        }

    def update_run(self, name: str) -> bool:
        """Index a run's new data in a thread; return True if the thread is still running.

        Waits at most INDEX_WAIT_SECONDS for the thread.
        """
        index = self.get_run(name)[1]
        work = threading.Thread(target=index.update_index, args=[True], daemon=True)
        work.start()
        work.join(INDEX_WAIT_SECONDS)
        return work.is_alive()

    def log_names(self, run: Run) -> list[str]:
        """Return the names of the run's logs, such as `orchestrator.log`."""
        places = [run.path / "logs", run.path / "runs"]
        return sorted(
            {
                file.name
                for place in places
                for file in place.glob("*.log")
                if is_below(self.root, file)
            }
        )

    def read_log(self, name: str, log: str) -> dict[str, Any]:
        """Return the end of a log. Raises KeyError for an unknown name."""
        run, _ = self.get_run(name)
        if log not in self.log_names(run):
            raise KeyError(log)
        file = next(
            file
            for file in (run.path / "logs" / log, run.path / "runs" / log)
            if is_below(self.root, file)
        )
        text, start = read_end(self.root, file, LOG_BYTES)
        return {"text": text, "start": start}

    def list_checkpoints(self, run: Run) -> list[dict[str, Any]]:
        """Return the weights and the checkpoints of a run."""
        if run.kind == "eval":
            return []
        directory = RunDirectory(run.path, run.kind)
        places = [
            ("weights", steps_in(directory.weights)),
            ("weights", checkpoints_in(run.path)),
            ("checkpoint", steps_in(directory.checkpoints)),
        ]
        return [
            {
                "kind": kind,
                "step": step,
                "name": path.relative_to(run.path).as_posix(),
                "bytes": _directory_bytes(path),
            }
            for kind, found in places
            for step, path in found.items()
            if not path.is_symlink()
        ]

    def find_checkpoint(self, name: str, place: str) -> Path:
        """Return the directory of a checkpoint. Raises KeyError for an unknown one."""
        run, _ = self.get_run(name)
        for one in self.list_checkpoints(run):
            if one["name"] == place:
                return run.path / place
        raise KeyError(place)

    def read_rollout(self, name: str, number: int) -> dict[str, Any] | None:
        """Return a rollout, plus its tokens with the trainer's logprobs; None if it is missing."""
        run, index = self.get_run(name)
        found = index.read_rollout(number)
        if found is None:
            return None
        at = found["at"]
        tokens = TokenTable.of_run(self.root, run)
        seen = read_trained(index.file_of(at["step"]).parent).get((at["grp"], at["member"]), [])
        return {
            **found,
            "sequences": tokens.trained_sequences(found.get("turns"), seen),
            "decoded": tokens.is_known,
        }

    def examine_run(self, name: str) -> dict[str, Any]:
        index = self.get_run(name)[1]
        index.update_index(waits=True)
        return examine_run(index).as_dict()


def _env_names(envs: list[dict[str, Any]]) -> list[str]:
    named = [(env.get("name"), env.get("id")) for env in envs]
    return [clean_text(name if name not in (None, "None") else id) for name, id in named]


def _directory_bytes(directory: Path) -> int:
    return sum(
        file.stat().st_size
        for file in directory.rglob("*")
        if file.is_file() and not file.is_symlink()
    )
