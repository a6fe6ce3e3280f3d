"""Names, tags and notes that a person gives to runs; kept beside the runs, in ROOT/.hone/notes.json."""

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hone.dashboard.runs import read_json
from hone.run_directory import rewrite_file

MAX_NAME = 120  # characters
MAX_NOTE = 10_000
MAX_TAGS = 20


@dataclass(frozen=True)
class RunNote:
    """What a person wrote about a run.

    Attributes:
        label: name that is shown in place of the directory, "" for none.
        tags: short words to filter by, such as "baseline".
        note: free text.
        is_archived: the run is hidden in the list unless archived runs are shown.
    """

    label: str = ""
    tags: list[str] = field(default_factory=list)
    note: str = ""
    is_archived: bool = False


class Notes:
    """The notes of all runs below a root, by run id."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / ".hone" / "notes.json"
        self._lock = threading.Lock()

    def read_all(self) -> dict[str, RunNote]:
        found = read_json(self.root, self.file)
        return {run: parse_note(values) for run, values in found.items()}

    def write(self, run: str, values: dict[str, Any]) -> RunNote:
        """Replace the note of a run; an empty note is removed."""
        note = parse_note(values)
        with self._lock:
            found = {name: asdict(one) for name, one in self.read_all().items()}
            found.pop(run, None)
            if note != RunNote():
                found[run] = asdict(note)
            self.file.parent.mkdir(exist_ok=True)
            rewrite_file(self.file, json.dumps(found, indent=2) + "\n")
        return note


def parse_note(values: Any) -> RunNote:
    """Return a note from JSON values; parts that have another form are left out."""
    if not isinstance(values, dict):
        return RunNote()
    tags = values.get("tags")
    words = [" ".join(str(tag).split())[:40] for tag in tags] if isinstance(tags, list) else []
    return RunNote(
        " ".join(str(values.get("label") or "").split())[:MAX_NAME],
        list(dict.fromkeys(word for word in words if word))[:MAX_TAGS],
        str(values.get("note") or "")[:MAX_NOTE],
        bool(values.get("is_archived")),
    )
