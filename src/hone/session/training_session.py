"""`hone.TrainingSession`: a model that a loop of your own trains and samples from.

    forward_backward(data, loss) ─ gradients are added ─► optim_step(adam) ─► save_for_sampling() ─► sample

The passes, the packing and the optimizer are those of `rl` and `sft`; only the normalization differs: losses are sums.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.config.lora_config import LoRAConfig
from hone.config.sections import ModelConfig, OptimConfig
from hone.engine.engine import Engine
from hone.models.adapters import Adapter
from hone.models.device_memory import total_bytes
from hone.models.hf import save_model
from hone.models.language_model import LanguageModel
from hone.models.loading import load_configured
from hone.models.lora import adapter_tensors, add_lora, lora_modules, share_base, write_adapter
from hone.records import Completion, Prompt
from hone.run_directory import appearing_directory
from hone.session.frozen_base import FrozenBase
from hone.session.packed_data import Arrays, pack_data, select_targets, split_by_datum
from hone.session.session_data import AdamParams, Datum, ForwardOutput
from hone.session.session_losses import LOSSES, NEEDED, WHOLE_SEQUENCES, Targets, check_loss
from hone.session.snapshot_sampler import SnapshotSampler
from hone.trainer.memory_estimate import micro_batch_tokens
from hone.trainer.optim import Optimizer
from hone.trainer.packing import split_by_tokens

STATE_FILE = "state.safetensors"
DESCRIPTION_FILE = "session.json"
LIVE = "live"  # name of the adapter that follows the trained one
# Of the log-probabilities of each datum's targets; returns the loss and metrics.
CustomLoss = Callable[[list[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]


class TrainingSession:
    """A model in training, in this process.

        session = hone.TrainingSession("Qwen/Qwen3-0.6B", lora={"rank": 32})
        session.forward_backward(data, "importance_sampling")
        session.optim_step(hone.AdamParams(lr=1e-4))
        completions = session.sample([prompt], count=8)

    Not thread-safe: one thread owns it.

    Attributes:
        model: the model that is trained.
        tokenizer: the model's tokenizer: `encode`, `decode`, `stop_ids`.
        steps: number of optimizer steps so far.
    """

    def __init__(
        self,
        model: "str | Path | FrozenBase",
        *,
        lora: LoRAConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        micro_batch: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        optim: Mapping[str, Any] | None = None,
        **model_keys: Any,
    ) -> None:
        """Load a model and prepare to train it.

        Args:
            model: a directory in Hugging Face format, or a hub id; or a FrozenBase, on which other
                sessions train adapters of their own.
            lora: keys of `trainer.lora`, to train an adapter; None: train all weights.
            seed: seed of the adapter's first values, and of random weights.
            micro_batch: most tokens that are computed at once; None: as many as suit the device.
            sampling: arguments of the sampling engine, such as `max_batch_size` and `kv_cache_gib`;
                a FrozenBase has its own.
            optim: keys of `trainer.optim` that hold for all steps: `state_dtype`, `offload`.
            model_keys: further keys of section `model`, such as `dtype`, `device`, `random_init`.

        Raises ValueError if the model cannot be loaded as configured, or for unknown keys.
        """
        self.lora = LoRAConfig(**lora) if isinstance(lora, Mapping) else lora
        self.base = model if isinstance(model, FrozenBase) else None
        if self.base is not None and (self.lora is None or model_keys or sampling):
            raise ValueError("a session on a FrozenBase needs lora, and takes no keys of the model")
        if self.base is not None and self.lora is not None and self.lora.base_bits == 8:
            raise ValueError("lora.base_bits 8: a FrozenBase keeps its dtype; take 16")
        if self.lora is not None and self.lora.modules_to_save:
            raise ValueError(
                "lora.modules_to_save: a session trains adapters alone, or all weights"
            )
        if isinstance(model, FrozenBase):
            loaded = model.loaded
            self.name = model.name
            self.model = share_base(loaded.model)
        else:
            config = ModelConfig(name=str(model), **model_keys)
            loaded = load_configured(config, seed, self.lora)
            self.name = config.name
            self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.directory = loaded.directory
        self.device = self.model.embed.weight.device
        if self.lora is not None:
            add_lora(self.model, self.lora, seed, allows_head=self.base is not None)
            # With the targets that it has in this model.
            self.lora = next(lora_modules(self.model)).config
            # 8-bit weights are computed for one block at a time only if blocks are recomputed.
            self.model.recomputes = self.lora.base_bits == 8
        self.optimizer = Optimizer(self.model, OptimConfig(**{"lr": 0.0, **(optim or {})}))
        sizes = (self.model.spec, self.model.embed.weight.dtype.itemsize, self.model.recomputes)
        self.micro_batch = micro_batch or micro_batch_tokens(*sizes, total_bytes(self.device))
        self.steps = 0
        self._sampling = dict(sampling or {})
        self._changes = 0  # of the weights
        self._prefix = "" if self.base is None else f"{self.base.count_session()}/"
        self._placed = -1  # change of the weights that the live adapter has
        self._live: SnapshotSampler | None = None  # of `sample`
        self._newest: SnapshotSampler | None = None

    # -------------------------------------------------------------------------------------- passes

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float
    ) -> ForwardOutput:
        """Return loss and log-probabilities without adding gradients. See `forward_backward`."""
        return self._run_passes(data, loss, settings, is_training=False)

    def forward_backward(
        self, data: Sequence[Datum], loss: str | CustomLoss = "cross_entropy", **settings: float
    ) -> ForwardOutput:
        """Add the gradients of the sum of the targets' losses to those since the last `optim_step`.

        Args:
            data: sequences; they are computed independently of each other.
            loss: a name of `session_losses.LOSSES`; or a function of the data and of a tensor of
                log-probabilities for each datum (temperature 1, shaped like its targets), which
                returns a scalar tensor, with gradient, and metrics.
            settings: settings of the named loss, such as `clip_low_threshold`.

        Raises ValueError for unknown losses, settings and token ids, wrong lengths, and missing
        inputs; then no gradient is added.
        """
        if callable(loss):
            return self._run_custom(data, loss)
        return self._run_passes(data, loss, settings, is_training=True)

    def _run_custom(self, data: Sequence[Datum], loss: CustomLoss) -> ForwardOutput:
        """Compute the loss's gradient in the log-probabilities, then that of the weights."""
        found = self.forward(data)
        leaves = [torch.tensor(one, requires_grad=True) for one in found.logprobs]
        total, metrics = loss(list(data), leaves)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        slopes = [
            np.zeros_like(x) if g is None else g.numpy()
            for x, g in zip(found.logprobs, gradients, strict=True)
        ]
        weighted = [
            Datum(one.tokens, one.targets, weights=-g) for one, g in zip(data, slopes, strict=True)
        ]
        self._run_passes(weighted, "cross_entropy", {}, is_training=True)
        return ForwardOutput(float(total.detach()), found.logprobs, metrics)

    def _run_passes(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], is_training: bool
    ) -> ForwardOutput:
        check_loss(loss, settings)
        if not data:
            raise ValueError("data: there is no datum")
        arrays = [
            one.build_arrays(self.model.spec.vocab_size, f"data[{i}]") for i, one in enumerate(data)
        ]
        for i, one in enumerate(arrays):
            for name in NEEDED[loss]:
                if name not in one:
                    raise ValueError(f"data[{i}]: loss {loss} needs {name}")
        logprobs: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(data)
        total = 0.0
        with torch.set_grad_enabled(is_training):
            for members in split_by_tokens(
                [len(one["tokens"]) for one in arrays], self.micro_batch
            ):
                own = [arrays[i] for i in members]
                share, rows = self._run_micro_batch(own, loss, settings, is_training)
                total += share
                for i, row in zip(members, rows, strict=True):
                    logprobs[i] = row
        targets = sum(one["targets"].size for one in arrays)
        return ForwardOutput(total, logprobs, {"loss:sum": total, "targets:sum": float(targets)})

    def _run_micro_batch(
        self, data: Sequence[Arrays], loss: str, settings: Mapping[str, float], is_training: bool
    ) -> tuple[float, list[NDArray[np.float32]]]:
        """Return the sum of the losses, and the log-probabilities of each datum's targets."""
        packed = pack_data(data, self.device)
        targets = select_targets(data, packed)
        temperature_N = torch.ones(len(packed.targets_N), device=self.device)
        found: list[Tensor] = []

        def sum_losses(part: slice, logprobs: Tensor, entropies: Tensor) -> Tensor:
            found.append(logprobs.detach())
            own: Targets = targets.select_slice(part)
            return LOSSES[loss](logprobs, own, **settings)

        if loss in WHOLE_SEQUENCES:
            computed = packed.target_logprobs(self.model, temperature_N)
            total = sum_losses(slice(None), *computed)
        else:
            total = packed.compute_loss(self.model, temperature_N, sum_losses)
        if is_training:
            total.backward()
            self.optimizer.accumulate_gradients()
        values = torch.cat(found).float().cpu().numpy()
        return float(total.detach()), split_by_datum(values, data)

    def optim_step(self, adam: AdamParams | None = None) -> dict[str, float]:
        """Update the weights by the summed gradients, and clear these.

        Returns the gradient's norm before clipping and the learning rate. A gradient that is not
        finite changes nothing; `optim/skipped` is 1 then.
        """
        adam = adam or AdamParams()
        keys = {
            "betas": adam.betas,
            "eps": adam.eps,
            "weight_decay": adam.weight_decay,
            "max_norm": math.inf if adam.max_norm is None else adam.max_norm,
        }
        self.optimizer.change_settings(self.optimizer.config.model_copy(update=keys))
        norm = self.optimizer.step(adam.lr)
        is_bad = self.optimizer.is_bad(norm)
        if is_bad:
            self.clear_gradients()
        else:
            self.steps += 1
            self._note_change()
        return {"optim/grad_norm": norm, "optim/lr": adam.lr, "optim/skipped": float(is_bad)}

    def clear_gradients(self) -> None:
        """Discard the gradients since the last optimizer step."""
        self.optimizer.discard_gradients()

    # ------------------------------------------------------------------------------------ sampling

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, to the point where the model answers."""
        return self.tokenizer.prompt_ids(Prompt(messages, tools))

    def save_for_sampling(self) -> SnapshotSampler:
        """Return a sampler of the present weights, which later steps do not change.

        With LoRA it holds a copy of the adapter, and all snapshots sample in one engine; else it
        holds a copy of all weights.
        """
        if self._newest is None:
            name = f"{self._prefix}snapshot-{self._changes}" if self.lora is not None else None
            if name is None:
                engine = Engine(copy.deepcopy(self.model).requires_grad_(False), **self._sampling)
            else:
                engine = self._sampler().engine
                engine.place_adapter(name, copy_adapter(self.model))
            self._newest = SnapshotSampler(engine, name, self.tokenizer.stop_ids, self.steps)
        return self._newest

    def sample(
        self, prompts: Sequence[Sequence[int]], count: int = 1, **how: Any
    ) -> list[list[Completion]]:
        """Sample from the present weights. See `SnapshotSampler.sample`."""
        return self._sampler().sample(prompts, count, **how)

    def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1."""
        return self._sampler().compute_logprobs(tokens)

    def _sampler(self) -> SnapshotSampler:
        """Return the sampler that follows the weights."""
        has_adapter = self.lora is not None
        if self._live is None:
            name = f"{self._prefix}{LIVE}" if has_adapter else None
            stops = self.tokenizer.stop_ids
            self._live = SnapshotSampler(self._start_engine(), name, stops, self.steps)
        live = self._live
        if self._placed != self._changes:
            if live.adapter is not None:
                live.engine.place_adapter(live.adapter, copy_adapter(self.model))
            else:
                live.engine.set_version(self._changes)
            self._placed = self._changes
            live.version = self.steps
        return live

    def _start_engine(self) -> Engine:
        """Return the engine that samples: the base's, or a new one."""
        if self.base is not None:
            return self.base.engine
        model = self.model if self.lora is None else share_base(self.model)
        return Engine(model, **self._sampling, version=-1)

    def _note_change(self) -> None:
        self._changes += 1
        self._newest = None

    # --------------------------------------------------------------------------------------- files

    def save_state(self, directory: str | Path) -> Path:
        """Write weights and the optimizer's state, from which `load_state` continues to the bit.

        Gradients since the last optimizer step are not written. The directory appears when it is
        whole.
        """
        place = Path(directory)
        tensors = {name: x.contiguous().cpu() for name, x in self.optimizer.state_tensors().items()}
        described = {"model": self.name, "steps": self.steps, "lora": self._describe_lora()}
        with appearing_directory(place) as partial:
            save_file(tensors, partial / STATE_FILE)
            (partial / DESCRIPTION_FILE).write_text(json.dumps(described, indent=2) + "\n")
        return place

    @torch.no_grad()
    def load_state(self, directory: str | Path, optimizer: bool = True) -> None:
        """Load weights and the optimizer's state; without `optimizer` its moments begin anew.

        Gradients since the last step are discarded. Raises ValueError if the directory holds no
        state, or that of another model or adapter; then nothing is changed.
        """
        place = Path(directory)
        try:
            described = json.loads((place / DESCRIPTION_FILE).read_text())
            reader = safe_open(place / STATE_FILE, framework="pt")
        except (OSError, ValueError) as error:
            raise ValueError(f"{place} holds no state of a session: {error}") from None
        except Exception as error:  # safetensors raises its own class for a damaged file
            raise ValueError(f"{place / STATE_FILE} is not readable: {error}") from None
        if described["lora"] != self._describe_lora():
            raise ValueError(
                f"{place}: it was trained with lora = {described['lora']}, this session has {self._describe_lora()}"
            )
        wanted = self.optimizer.state_tensors()
        with reader as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            for name, tensor in wanted.items():
                if shapes.get(name) != list(tensor.shape):
                    raise ValueError(
                        f"{place}: {name} has shape {shapes.get(name)}, this session's has {list(tensor.shape)}"
                    )
            for name, tensor in wanted.items():
                if name.startswith("master.") or optimizer:
                    tensor.copy_(file.get_tensor(name))
                else:
                    tensor.zero_()
        self.optimizer.follow_masters()
        torch.autograd.graph.increment_version(self.optimizer.parameters)
        self.clear_gradients()
        self.steps = described["steps"]
        self._note_change()

    def export_weights(self, directory: str | Path) -> Path:
        """Write the weights in Hugging Face format; of LoRA the adapter, as peft reads it."""
        place = Path(directory)
        if self.lora is None:
            save_model(self.model, self.directory, place)
        else:
            with appearing_directory(place) as partial:
                tensors = adapter_tensors(self.model)
                write_adapter(tensors, self.lora, self.model.spec, self.name, partial)
        return place

    def _describe_lora(self) -> dict[str, Any] | None:
        if self.lora is None:
            return None
        return {"rank": self.lora.rank, "alpha": self.lora.alpha, "targets": self.lora.targets}


@torch.no_grad()
def copy_adapter(model: LanguageModel) -> Adapter:
    """Return a copy of the adapter that is trained in a model, as engines load adapters."""
    weights = {}
    rank = 0
    for lora in lora_modules(model):
        rank = lora.config.rank
        for name, a, b in lora.named_pairs():
            weights[name] = (a.clone(), b * lora.config.scale)
    return Adapter(rank, weights)
