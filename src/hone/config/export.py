"""Configuration of `hone export`."""

from pathlib import Path
from typing import Literal

from hone.config.base import Config


class ExportConfig(Config):
    checkpoint: Path
    """A checkpoint, checkpoints/step_N of a run."""
    output_dir: Path
    """Where the model goes, in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights; checkpoints have them in fp32."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """How much is logged."""
