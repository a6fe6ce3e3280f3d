"""Result folders of evaluations, which are also read to resume or compare.

outputs/evals/ENV--MODEL/ID/{results.jsonl, metadata.json}
"""

import json
import uuid
from pathlib import Path
from typing import Any

from hone.environments.rollout_rows import rollout_of, row_of
from hone.records import Rollout

FILE = "results.jsonl"
ABOUT = "metadata.json"
SAME = (
    "env",
    "env_args",
    "model",
    "num_examples",
    "rollouts_per_example",
    "temperature",
    "max_tokens",
    "sampling_args",
    "seed",
)


class Folder:
    """A result folder, written as rollouts finish, so that an interrupted evaluation can resume."""

    def __init__(self, path: Path, settings: dict[str, Any], token_ids: bool = False) -> None:
        self.path = path
        self.settings = settings
        self.token_ids = token_ids

    @classmethod
    def create(
        cls, settings: dict[str, Any], token_ids: bool, path: Path | None = None
    ) -> "Folder":
        """Make a folder: `path`, or a new one under outputs/evals.

        Raises ValueError if `path` holds results.
        """
        name = f"{settings['env']}--{settings['model']}".replace("/", "--")
        new = Path("outputs") / "evals" / name / uuid.uuid4().hex[:8]
        folder = cls(path or new, settings, token_ids)
        if (folder.path / ABOUT).exists():
            raise ValueError(
                f"--output-dir: {path} holds results; continue them (--resume {path}), or choose another folder"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_about(settings)
        return folder

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Open a folder. Raises ValueError if it has no results."""
        if not (path / ABOUT).is_file():
            raise ValueError(
                f"{path} has no {ABOUT}: it is no folder of results (outputs/evals/ENV--MODEL/ID)"
            )
        return cls(path, json.loads((path / ABOUT).read_text()))

    def write_about(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        (self.path / ABOUT).write_text(json.dumps(settings, indent=2) + "\n")

    def append_rollout(self, number: int, rollout: Rollout) -> None:
        with (self.path / FILE).open("a") as file:
            file.write(self._format_line(number, rollout))

    def end_line(self) -> None:
        """End a truncated last line, so that new rows start on their own line."""
        file = self.path / FILE
        if file.is_file() and not file.read_text().endswith("\n"):
            with file.open("a") as out:
                out.write("\n")

    def _format_line(self, number: int, rollout: Rollout) -> str:
        if "saved row" in rollout.state:
            return json.dumps(rollout.state["saved row"], ensure_ascii=False) + "\n"
        row = (
            rollout.metrics
            | row_of(rollout, self.settings["env"], self.token_ids)
            | {"rollout": number}
        )
        return json.dumps(row, ensure_ascii=False, default=str) + "\n"

    def rewrite_rollouts(self, rollouts: list[Rollout]) -> None:
        """Replace the results by these rollouts, which are numbered in order."""
        whole = "".join(
            self._format_line(number, rollout) for number, rollout in enumerate(rollouts)
        )
        partial = self.path / f"{FILE}.partial"
        partial.write_text(whole)
        partial.rename(self.path / FILE)

    def read_rows(self) -> list[dict[str, Any]]:
        file = self.path / FILE
        found = []
        for line in file.read_text().split("\n") if file.is_file() else []:
            try:
                found.extend([json.loads(line)] if line else [])
            except ValueError:  # a truncated last line
                continue
        return found

    def read_known(self, settings: dict[str, Any]) -> dict[int, Rollout]:
        """Return the successful rollouts of the folder, by number.

        Raises ValueError if `settings` differ from those of the folder.
        """
        for key in SAME:
            if self.settings.get(key) != settings[key]:
                raise ValueError(
                    f"--resume: {key} is {settings[key]!r}, the results have {self.settings.get(key)!r}"
                )
        known = {}
        for row in self.read_rows():
            if not row["error"]:
                known[row["rollout"]] = rollout_of(row)
                known[row["rollout"]].state["saved row"] = row
        return known


def find_unfinished(settings: dict[str, Any]) -> Folder | None:
    """Return the newest unfinished folder with these settings, or None."""
    name = f"{settings['env']}--{settings['model']}".replace("/", "--")
    paths = sorted(
        (Path("outputs") / "evals" / name).glob(f"*/{ABOUT}"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(paths):
        folder = Folder.open(path.parent)
        if "seconds" not in folder.settings and all(
            folder.settings.get(key) == settings[key] for key in SAME
        ):
            return folder
    return None
