"""Checkpoints of a Tinker server, by `tinker://RUN/KIND/NAME`.

DIRECTORY/RUN/KIND/NAME/      KIND: weights (with the optimizer's state), sampler_weights or external_weights
    checkpoint.json           Checkpoint
    adapter_*                 the adapter in peft's format
    state.safetensors         what a session continues from (weights only)
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.run_directory import appearing_directory

SCHEME = "tinker://"
# KIND: the SDK's checkpoint_type
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
DESCRIPTION_FILE = "checkpoint.json"
# One part of a path: no separator, not hidden, no parent.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+=-]{0,199}")
LEAST_TTL_SECONDS, MOST_TTL_SECONDS = 3600, 10 * 365 * 86400


@dataclass(frozen=True)
class Checkpoint:
    """Description of a checkpoint.

    Attributes:
        run: id of the training run, for example "a1b2:train:0".
        kind: "weights", "sampler_weights" or "external_weights".
        name: for example "step-20".
        base_model: name of the frozen model.
        lora: rank and targets of the adapter.
        created: seconds since 1970.
        expires: likewise; None: never.
        user_metadata: the client's own description.
    """

    run: str
    kind: str
    name: str
    base_model: str
    lora: dict[str, Any]
    created: float
    expires: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= wall_clock()


class CheckpointStore:
    """Checkpoints in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)

    def write_checkpoint(
        self, checkpoint: Checkpoint, write: Callable[[Path], object], overwrite: bool = False
    ) -> None:
        """Write a checkpoint: `write` gets an empty directory, which appears when it is whole.

        Raises ValueError if the name is not valid, or taken.
        """
        for part, value in (("training run", checkpoint.run), ("name", checkpoint.name)):
            if not NAME.fullmatch(value):
                raise ValueError(
                    f"path: {part} {value!r} is not one of letters, digits and _ . : + = -"
                )
        place = self._place(checkpoint.run, checkpoint.kind, checkpoint.name)
        if not overwrite and self.find_in(place) is not None:
            raise ValueError(f"path: {checkpoint.path} exists; save with overwrite to replace it")
        with appearing_directory(place) as partial:
            write(partial)
            (partial / DESCRIPTION_FILE).write_text(json.dumps(asdict(checkpoint), indent=2) + "\n")

    def find(self, path: str) -> tuple[Checkpoint, Path]:
        """Return a checkpoint and its directory. Raises KeyError if there is none of this path."""
        parts = path.removeprefix(SCHEME).split("/")
        is_valid = path.startswith(SCHEME) and len(parts) == 3 and parts[1] in KINDS
        if not is_valid or not all(NAME.fullmatch(part) for part in parts):
            raise KeyError(f"{path} is no path like {SCHEME}RUN/weights/NAME")
        place = self._place(*parts)
        if (found := self.find_in(place)) is None:
            raise KeyError(f"there is no checkpoint {path}")
        return found, place

    def locate(self, checkpoint: Checkpoint) -> Path:
        """Return the directory of a checkpoint, which may not be written yet."""
        return self._place(checkpoint.run, checkpoint.kind, checkpoint.name)

    def find_in(self, place: Path) -> Checkpoint | None:
        """Return the checkpoint of a directory; None if there is none, or if it has expired."""
        try:
            found = Checkpoint(**json.loads((place / DESCRIPTION_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return None if found.is_expired or found.name != place.name else found

    def list_checkpoints(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all, the oldest first."""
        if run is not None and not NAME.fullmatch(run):
            return []
        places = self.directory.glob(f"{run or '*'}/*/*/{DESCRIPTION_FILE}")
        found = (self.find_in(place.parent) for place in places)
        return sorted((one for one in found if one is not None), key=lambda one: one.created)

    def delete(self, path: str) -> None:
        """Delete a checkpoint. Raises KeyError if there is none."""
        shutil.rmtree(self.find(path)[1])

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Let a checkpoint expire after some seconds from now; None: never.

        Raises KeyError if there is none, ValueError for a time that is too short or too long.
        """
        found, place = self.find(path)
        changed = asdict(found) | {"expires": expiry(seconds)}
        temporary = place / f"{DESCRIPTION_FILE}.new"
        temporary.write_text(json.dumps(changed, indent=2) + "\n")
        temporary.replace(place / DESCRIPTION_FILE)

    def delete_expired(self) -> None:
        """Delete the checkpoints that have expired, and what an interrupted write left."""
        for place in self.directory.glob("*/*/*"):
            if place.is_dir() and self.find_in(place) is None:
                shutil.rmtree(place, ignore_errors=True)

    def _place(self, run: str, kind: str, name: str) -> Path:
        return self.directory / run / kind / name


def expiry(seconds: int | None) -> float | None:
    """Return the time of expiry. Raises ValueError for a time that is too short or too long."""
    if seconds is None:
        return None
    if not LEAST_TTL_SECONDS <= seconds <= MOST_TTL_SECONDS:
        raise ValueError(
            f"ttl_seconds: {seconds} is not from {LEAST_TTL_SECONDS} (an hour) to {MOST_TTL_SECONDS} (ten years)"
        )
    return wall_clock() + seconds


def describe_checkpoint(checkpoint: Checkpoint, place: Path) -> dict[str, Any]:
    """Return a checkpoint as the SDK reads it."""
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": as_iso(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": count_bytes(place),
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else as_iso(checkpoint.expires),
    }


def list_files(place: Path) -> list[str]:
    """Return the names of a checkpoint's own files, without its description."""
    return sorted(
        file.name for file in place.glob("*") if file.is_file() and file.name != DESCRIPTION_FILE
    )


def count_bytes(place: Path) -> int:
    """Return the size of a checkpoint's own files."""
    return sum((place / name).stat().st_size for name in list_files(place))


def wall_clock() -> float:
    """Return the seconds since 1970."""
    return datetime.now(UTC).timestamp()


def as_iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
