"""The served model: a sampler, its tokenizer and a name, which change with new weights."""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.config.inference_config import InferenceConfig
from hone.inference.samplers.base import Sampler
from hone.text.tokenizer import Tokenizer
from hone.transport.delivery import TEXT, Message

log = logging.getLogger("hone.inference")


def find_allowed_directories(config: InferenceConfig) -> list[Path]:
    """Return the directories that a server's weights and adapters may be read from.

    By default these are the working directory, $OUTPUT_DIR if it is set, and the parent of the
    model's directory.
    """
    if config.allowed_dirs is not None:
        return config.allowed_dirs
    found = [Path.cwd()]
    model = Path(config.model.name).expanduser()
    if output := os.environ.get("OUTPUT_DIR"):
        found.append(Path(output))
    if model.is_dir():
        found.append(model.resolve().parent)
    return found


class Served:
    """The sampler, tokenizer and name of the served model.

    Weights and adapters are only read from `allowed` directories.
    """

    def __init__(
        self, sampler: Sampler, tokenizer: Tokenizer, name: str, allowed: Sequence[Path]
    ) -> None:
        self.sampler = sampler
        self.name = name
        self.allowed = [directory.resolve() for directory in allowed]
        self._text: tuple[Path, int] | None = None  # source of the tokenizer
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(tokenizer.stop_ids)

    @property
    def model_names(self) -> list[str]:
        """Return the names that requests may use: the model's and its adapters'."""
        return [self.name, *self.sampler.adapters]

    async def update_weights(
        self, delivered: Path, version: int, name: str | None, message: Message
    ) -> dict[str, Any]:
        """Load a version of the weights, and the tokenizer delivered with them if its file is new.

        Args:
            delivered: directory with at least the model's config.json.
            version: number of the version.
            name: new name of the model; None keeps the name.
            message: the sender's message, which says how the weights are sent.

        Returns the new state. Raises ValueError if the weights cannot be loaded.
        """
        self._check_directory(delivered)
        places = [delivered.parent / TEXT, delivered]
        files = [place / "tokenizer.json" for place in places if self._may_read(place)]
        text = next(((file, file.stat().st_mtime_ns) for file in files if file.is_file()), None)
        tokenizer = (
            self.tokenizer.reload_from(text[0].parent) if text and text != self._text else None
        )
        found = await self.sampler.update_weights(delivered, version, message)
        if tokenizer is not None:
            self.set_tokenizer(tokenizer)
            self._text = text
        self.name = name or self.name
        # After the answer, which a run awaits.
        after_the_answer = asyncio.get_running_loop().call_soon
        after_the_answer(log.info, "Took version %d of %s from %s", version, self.name, delivered)
        return found | self._describe_model()

    async def load_adapter(self, name: str, directory: Path) -> dict[str, Any]:
        """Load a LoRA adapter; requests select it with its name as `model`."""
        if name == self.name:
            raise ValueError(f"lora_name: {name!r} is the name of the model itself")
        self.sampler.require_capability("adapters")
        self._check_directory(directory)
        await self.sampler.load_adapter(name, directory)
        log.info("Took adapter %s from %s", name, directory)
        return await self.describe_state()

    def _check_directory(self, directory: Path) -> None:
        """Raise ValueError for a path that is no directory or is not allowed."""
        try:
            is_there = directory.is_dir()
        except OSError:  # a name that no file can have
            is_there = False
        if not is_there:
            raise ValueError(f"{directory} is not a directory here")
        if not self._may_read(directory):
            known = ", ".join(map(str, self.allowed)) or "none"
            raise ValueError(
                f"{directory} is not in a directory that this server may read from (allowed_dirs: {known})"
            )

    def _may_read(self, directory: Path) -> bool:
        return any(directory.resolve().is_relative_to(one) for one in self.allowed)

    async def unload_adapter(self, name: str) -> dict[str, Any]:
        await self.sampler.unload_adapter(name)
        return await self.describe_state()

    async def describe_state(self, each: bool = False) -> dict[str, Any]:
        return await self.sampler.describe_state(each) | self._describe_model()

    def _describe_model(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "is_paused": self.sampler.is_paused,
            "adapters": self.sampler.adapters,
        }
