"""Metrics of a run: one JSON object a step in a file, and Weights & Biases where it is asked for."""

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from hone.config.base import Config
from hone.config.sections import WandbConfig


def check_wandb(config: WandbConfig | None) -> None:
    """Raises ValueError, naming the extra, when wandb is asked for and not installed. Call before work starts."""
    if config is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb is asked for but not installed; install the extra: pip install 'hone-rl[wandb]'")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl or rollouts.jsonl; what a run that was killed, or a full disk, left of its last line
    is no row."""
    rows = []
    for line in path.read_text().split("\n") if path.exists() else []:  # not splitlines: text may hold U+2028
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Metrics:
    """Use as a context manager; `log(step, values)` appends a line."""

    def __init__(self, path: Path, wandb: WandbConfig | None, run_config: Config) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")
        self.run = None
        if wandb is not None:
            import wandb as library

            mode: Any = "offline" if wandb.offline else None  # None: what WANDB_MODE says, or online
            try:
                self.run = library.init(
                    project=wandb.project, name=wandb.name, config=run_config.public(), dir=str(path.parent), mode=mode
                )
            except library.errors.UsageError as error:  # no API key, for one
                raise ValueError(f"wandb: {error}; or write to disk only: --wandb.offline") from None

    def log(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        if self.run is not None:
            self.run.log(values, step=step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.file.close()
        if self.run is not None:
            self.run.finish(exit_code=0 if kind is None else 1)
