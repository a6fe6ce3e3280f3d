"""Directories that vLLM loads weights from, validated first because vLLM exits if a load fails.

    files ─ directory validated ─────────────────────────────────────────────► vLLM
    adapter, or NCCL ─ received in this process's memory, written as files ──►
    NCCL, on a GPU ─ received in GPU memory, which vLLM reads ───────────────►   (vllm_worker.py)

vLLM's CPU build keeps a packed copy of the LM head. If the head is tied to the embedding, new
weights do not reach that copy (seen in vLLM 0.32: the logprobs of a fixed text differ). So on a CPU
such a model is served with an untied head.
"""

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hone.engine.cache_budget import DEFAULT_BATCH_SIZE, cpu_gib
from hone.models.families import is_known, parse_model_config
from hone.models.hf import empty_model, find_weights, hf_tensors, stored_names, write_weights
from hone.models.language_model import LanguageModel
from hone.models.spec import read_model_config
from hone.models.weight_proof import canary_length
from hone.transport.delivery import Message
from hone.transport.gpu_memory import Owned
from hone.transport.transports import Receivers
from hone.transport.weight_transport import Tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
# Keys of a config.json.
NO_SHAPE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


class VllmFiles:
    """Prepare the directories from which one vLLM server loads weights.

    Args:
        model: directory of the model served at first.
        home: directory, private to this user, for the files that are written here.
        dtype: name of the weights' torch dtype.
        is_on_cpu: vLLM runs on a CPU.
        shares: vLLM's workers can read this process's GPU memory.
    """

    def __init__(
        self, model: Path, home: Path, dtype: str, is_on_cpu: bool, shares: bool = False
    ) -> None:
        self.model = model
        self.home = home
        self.dtype = getattr(torch, dtype)
        self.config = read_model_config(model)
        spec = None
        if is_known(self.config):
            spec = parse_model_config(self.config, str(model / "config.json"))
        self.spec = spec
        # vLLM skips names that it does not know in silence: those of its files are right.
        self.names = {} if spec is None else stored_names(self._build_empty("meta"), model)
        # vLLM's CPU build keeps its first packed copy of a tied head (docs/inference.md).
        self.has_to_untie = is_on_cpu and spec is not None and spec.tie_word_embeddings
        self.receivers = Receivers()
        self._host: Tensors | None = None  # weights received from a transport other than files
        self.shares = shares and self.spec is not None
        self._owned: Owned | None = None  # … on vLLM's GPU

    @property
    def is_text_part(self) -> bool:
        """Return True if the model's files have other parts too, such as a vision tower."""
        return self.spec is not None and self.spec.is_text_part

    def cache_gib(self, sequences: int | None, length: int | None) -> float:
        """Return the size in GiB of the KV cache that vLLM allocates at start on a CPU.

        It is enough for `sequences` sequences of `length` tokens, and at most `cpu_gib()`.
        """
        if self.spec is None:
            return cpu_gib()
        tokens = (sequences or DEFAULT_BATCH_SIZE) * (length or self.spec.max_position_embeddings)
        return min(cpu_gib(), tokens * self.spec.cache_numbers * self.dtype.itemsize / 2**30)

    def choose_context_length(self, wanted: int | None) -> int | None:
        """Return the context length for vLLM: the one wanted, or more if the canary needs more."""
        if wanted is None or self.spec is None:
            return wanted
        needed = canary_length(self.spec) + 1  # vLLM scores a text only with room for a token
        return max(wanted, min(needed, self.spec.max_position_embeddings))

    def prepare_first(self) -> Path:
        return self._write_untied(self.model) if self.has_to_untie else self.model

    def take_version(self, place: Path, version: int, message: Message) -> Path | dict[str, Any]:
        """Receive a version; return its directory, or the handle of GPU memory that holds it.

        Raises ValueError if vLLM cannot load it, and Superseded if the trainer has a later version.
        """
        if message.get("type", "filesystem") == "filesystem":
            self._check_shape(place)
        elif message["type"] == "nccl" and (room := self._allocate_copy()) is not None:
            into = {name: room.tensors[self.names[name]] for name in self.names}
            self.receivers.receive_version(message, version, place, into)
            torch.cuda.synchronize()
            return room.describe_memory()
        else:
            place = self._receive_version(place, version, message)
        return self._write_untied(place) if self.has_to_untie else place

    def _check_shape(self, place: Path) -> None:
        config = read_model_config(place)
        keys = (self.config.keys() | config.keys()) - set(NO_SHAPE)
        if "quantization_config" in self.config and "quantization_config" not in config:
            raise ValueError(
                f"{self.model / 'config.json'} has a quantization_config, and weights are trained in bfloat16: "
                "save the model in bfloat16 first, or take backend hone"
            )
        for key in sorted(keys):
            if self.config.get(key) != config.get(key):
                raise ValueError(
                    f"{place / 'config.json'}: {key} is {config.get(key)!r}, that of the served model is "
                    f"{self.config.get(key)!r}; vLLM keeps the shape of model that it was started with"
                )
        if self.spec is None:
            find_weights(None, place)
        else:
            wanted = self._name_as_stored(self._allocate_tensors("meta"))
            find_weights(wanted, place, self.is_text_part, self.spec.is_unused)

    def _build_empty(self, device: str) -> LanguageModel:
        if self.spec is None:
            raise ValueError(
                "this model is not one of Hone's families: its weights come as files alone"
            )
        return empty_model(self.spec, self.dtype, device)

    def _allocate_tensors(self, device: str) -> Tensors:
        return dict(hf_tensors(self._build_empty(device)))

    def _name_as_stored(self, tensors: Tensors) -> Tensors:
        return {self.names[name]: tensor for name, tensor in tensors.items()}

    def _allocate_copy(self) -> Owned | None:
        """Return GPU memory for a second copy of the weights, or None.

        It is None if vLLM cannot read this process's memory, or if too little GPU memory is free.
        """
        if self.shares and self._owned is None:
            try:
                wanted = self._name_as_stored(self._allocate_tensors("meta"))
                self._owned = Owned(wanted, "cuda")
            except torch.OutOfMemoryError:
                self.shares = False
                logging.getLogger("hone.inference").warning(
                    "The GPU has no room for a second copy of the weights: they go to vLLM as files, which is slower "
                    "(a lower gpu_memory_utilization leaves some)"
                )
        return self._owned

    def _receive_version(self, place: Path, version: int, message: Message) -> Path:
        if self._host is None:
            self._host = self._allocate_tensors("cpu")
        self.receivers.receive_version(message, version, place, self._host)
        directory = self.home / "received"
        directory.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.home) as fresh:
            write_weights(self._name_as_stored(self._host), Path(fresh))
            for file in Path(fresh).iterdir():
                file.replace(directory / file.name)
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory

    def _write_untied(self, source: Path) -> Path:
        """Write a directory with the embedding copied as an untied head; link the other files."""
        place = self.home / "untied"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for file in source.iterdir():
            if file.name not in ("config.json", INDEX):
                (place / file.name).symlink_to(file.resolve())
        untied: dict[str, Any] = {"tie_word_embeddings": False}
        if "text_config" in self.config:
            untied["text_config"] = self.config["text_config"] | untied
        (place / "config.json").write_text(json.dumps(self.config | untied))
        where = find_weights(None, source) if any(source.glob("*.safetensors")) else {}
        embedding = self.names.get(EMBEDDING, EMBEDDING)
        # The head has the prefix of the embedding's `model`, if there is one (language_model.model).
        is_beside = embedding.endswith(f".{EMBEDDING}")
        head = embedding.removesuffix(EMBEDDING) + HEAD if is_beside else HEAD
        if embedding in where and head not in where:
            file = place / "head.safetensors"
            with safe_open(where[embedding], framework="pt") as reader:
                save_file({head: reader.get_tensor(embedding)}, file, {"format": "pt"})
            where[head] = file
        if (source / INDEX).is_file():
            index = {
                "metadata": {},
                "weight_map": {name: file.name for name, file in where.items()},
            }
            (place / INDEX).write_text(json.dumps(index))
        return place
