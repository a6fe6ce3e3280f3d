"""Configuration of `hone export`."""

from pathlib import Path
from typing import Literal

from hone.config.base import Config


class ExportConfig(Config):
    checkpoint: Path
    """Checkpoint to export: checkpoints/step_N of a run."""
    output_dir: Path
    """Directory to write the model to, in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number type of the written weights; checkpoints hold float32."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""
