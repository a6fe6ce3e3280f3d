"""Write the weights of a step as files, in the layout that the run's configuration selects.

hone     weights/step_N/     the model in HF format, adapters merged; adapters, if any, also in its lora_adapters/
trainer  checkpoint-N/       the adapter alone if one is trained, otherwise the model; trainer_state.json
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from hone.models.loading import Loaded
from hone.monitors.metrics_log import read_rows
from hone.monitors.trainer_lines import trainer_names
from hone.run_directory import RunDirectory
from hone.trainer.sharding import Export


def save_weights(
    export: Export,
    run: RunDirectory,
    step: int,
    max_steps: int,
    loaded: Loaded,
    base: str,
    values: dict[str, float],
) -> None:
    """Write the weights of a step. Collective; the first rank writes.

    `base`: name of the trained model; `values`: metrics of the step.
    """
    where = partial(run.weights_for, step)
    alone = False
    more = None
    if run.layout == "trainer":
        alone = export.lora_config is not None
        more = partial(write_state, run.metrics, step, max_steps, values)
    export.save_model(loaded.directory, where, base, alone, more, loaded.tokenizer.chat_template)


def write_state(
    metrics: Path, step: int, max_steps: int, values: dict[str, float], directory: Path
) -> None:
    """Write trainer_state.json as transformers' TrainerState reads it."""
    rows: dict[int, dict[str, Any]] = {}
    # Evaluations have rows of their own.
    for row in [*read_rows(metrics), {**values, "step": step}]:
        if 0 < row["step"] <= step:
            rows.setdefault(row["step"], {}).update(row)
    history = [trainer_names(rows[number]) | {"step": number} for number in sorted(rows)]
    state = {
        "global_step": step,
        "max_steps": max_steps,
        "epoch": history[-1].get("epoch", 0.0),
        "logging_steps": 1,
        "log_history": history,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
    }
    (directory / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
