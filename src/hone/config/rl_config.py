"""Configuration of `rl`, `trainer` and `orchestrator`.

In `rl`, keys that several components share are given once, at the top level. A component's own file
(`--trainer @ train.toml`) has them too: `rl` moves them to the top level, and raises ConfigError if
two components differ.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hone.config.algorithms import Algorithm, as_its_algorithm, with_algorithms
from hone.config.base import Config, ConfigError, Free, merge_tables
from hone.config.loss_config import LossConfig
from hone.config.orchestrator_config import OrchestratorConfig
from hone.config.sections import (
    DEFAULT_MODEL,
    BroadcastConfig,
    FilesystemConfig,
    ModelConfig,
    OnBadStep,
    Positive,
    ResumableConfig,
    RunConfig,
    ServeConfig,
    WeightsConfig,
    as_list,
)
from hone.config.training_config import TrainingConfig


class TrainerConfig(TrainingConfig):
    loss: LossConfig = LossConfig()
    loss_of: dict[str, LossConfig] = Field(default={})
    """Loss of single environments, by the environment's name, where it differs from `loss`; an environment's
    `algorithm` sets it too."""
    micro_batch_tokens: Free[Positive | None] = None
    """Most tokens of one process in a forward and backward pass; fewer need less memory and give the same step. By
    default 16,384, and on a GPU up to 32,768 where their activations take a fifth of its memory at most, or down to
    2,048 where a step would not fit otherwise."""
    replay_routing: bool = False
    """Send the tokens of a mixture of experts through the experts that the sampler chose, instead of choosing again
    with the trainer's numbers. The metric routing/differs is the share that the trainer would have sent elsewhere."""
    on_bad_step: Free[OnBadStep] = "stop"
    """What to do when gradients are not finite or above optim.skip_norm: stop ends the run, skip continues without that
    step. Either way the worst samples are written to bad_steps/."""
    batch_timeout: Free[Annotated[float, Field(gt=0)]] = 3600.0
    """Seconds that the trainer waits for the rollouts of a step before the run is ended."""


AsyncLevel = Annotated[int, Field(ge=0)]


class BenchConfig(Config):
    sequences: Positive = 128
    """How many random sequences each measured step trains on."""
    tokens: Positive = 256
    """Tokens of each random sequence; all but the first have a loss."""
    steps: Positive = 10
    """Steps to measure, after 3 steps of warm-up."""


class TrainerRunConfig(ResumableConfig, TrainerConfig):
    """Configuration of the trainer as a separate process."""

    PRIME_RL_SECTION: ClassVar[str] = "trainer."

    model: ModelConfig = ModelConfig(name=DEFAULT_MODEL)
    max_steps: Free[Positive] = 100
    """Optimiser steps to train for."""
    algorithm: Algorithm | None = None
    """Named algorithm whose loss settings are used where they are not given themselves (docs/algorithms.md)."""
    bench: Free[BenchConfig | None] = None
    """Measure speed on random sequences instead of training, when a key of this section is given, for example
    --bench.sequences 128; nothing is written."""
    max_async_level: AsyncLevel = 1
    """Steps that sampling may be ahead of training; the trainer keeps this many versions of the weights for it."""
    weights: Free[WeightsConfig] = WeightsConfig()
    weight_broadcast: Free[BroadcastConfig] = FilesystemConfig()

    @classmethod
    def prepare_values(
        cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]
    ) -> dict[str, Any]:
        return super().prepare_values(as_its_algorithm("trainer", values), origins, files_for)


class OrchestratorRunConfig(RunConfig, OrchestratorConfig):
    """Configuration of the orchestrator as a separate process."""

    PRIME_RL_SECTION: ClassVar[str] = "orchestrator."

    model: ModelConfig = ModelConfig(name=DEFAULT_MODEL)
    max_steps: Free[Positive] = 100
    """Optimiser steps to train for."""
    max_async_level: AsyncLevel = 1
    """Steps that sampling may be ahead of training; 0 waits for each new version, more keeps both sides busy on older
    weights."""
    seq_len: Positive = 2048
    """Most tokens in a prompt and its completion together; completions are limited to what their prompt leaves."""
    algorithm: Algorithm | None = None
    """Named algorithm whose advantage and filters are used where they are not given themselves
    (docs/algorithms.md)."""

    @classmethod
    def prepare_values(
        cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]
    ) -> dict[str, Any]:
        return super().prepare_values(as_its_algorithm("orchestrator", values), origins, files_for)


class RLConfig(ResumableConfig):
    dashboard: Free[bool] = False
    """Serve the dashboard over output_dir during the run; its address is printed. `hone dashboard DIR` serves it
    at any time."""
    fork: Free[str | None] = None
    """RUN@N: begin with the checkpoint of step N of the run in that directory, with whatever keys differ from it. The
    new run has a directory of its own, which says where it came from."""
    max_steps: Free[Positive] = 100
    """Optimiser steps to train for."""
    seq_len: Positive = 2048
    """Most tokens in a prompt and its completion together."""
    deployment: Free[Literal["auto", "colocated", "processes"]] = "auto"
    """colocated runs everything in one process; processes starts inference, orchestrator and trainer as one each. auto
    is colocated unless there are files for components, orchestrator.client.base-url is given, or there are several
    GPUs."""
    algorithm: Algorithm | None = None
    """Named algorithm whose advantage, loss and filters are used where they are not given themselves
    (docs/algorithms.md). An environment may name another."""
    max_async_level: AsyncLevel = 1
    """Steps that sampling may be ahead of training, in separate processes; 0 waits for each new version, more keeps
    both sides busy on older weights. In one process sampling never runs ahead."""
    inference_replicas: Free[Positive] = 1
    """Inference servers to start; groups of rollouts are spread over them, and each gets its part of
    inference_gpu_ids."""
    inference_gpu_ids: Free[Annotated[list[int], BeforeValidator(as_list)]] = Field(default=[0])
    """GPUs of the inference servers, by number."""
    trainer_gpu_ids: Free[Annotated[list[int], BeforeValidator(as_list)]] = Field(default=[1])
    """GPUs of the trainer, by number, with one process for each; without GPUs, as many processes on the CPU."""
    trainer_nodes: Free[Annotated[list[str], BeforeValidator(as_list)]] = Field(default=[])
    """Nodes of a Slurm job that train one model together, each with trainer_gpu_ids; srun starts the processes there.
    `hone slurm rl --train-nodes N` gives their names."""
    inference_nodes: Free[Annotated[list[str], BeforeValidator(as_list)]] = Field(default=[])
    """Nodes of a Slurm job that sample, each with inference_gpu_ids and its part of the inference_replicas."""
    weights: Free[WeightsConfig] = WeightsConfig()
    weight_broadcast: Free[BroadcastConfig] = FilesystemConfig()
    orchestrator: OrchestratorConfig
    trainer: TrainerConfig = TrainerConfig()
    inference: Free[ServeConfig | None] = ServeConfig()
    """Settings of the inference server that is started; None uses one that already runs, which is also what happens
    when files are given for other components but not for inference."""

    @model_validator(mode="after")
    def _nodes_fit(self) -> "RLConfig":
        if bool(self.trainer_nodes) != bool(self.inference_nodes) and self.inference is not None:
            raise ValueError("trainer_nodes and inference_nodes: give both, or neither")
        if self.inference_nodes and self.inference_replicas % len(self.inference_nodes):
            raise ValueError(
                f"inference_replicas: {self.inference_replicas} servers cannot be divided among "
                f"{len(self.inference_nodes)} inference_nodes"
            )
        return self

    @model_validator(mode="after")
    def _losses_fit(self) -> "RLConfig":
        for name in (env.known_as for env in self.orchestrator.env):
            loss = self.trainer.loss_of.get(name, self.trainer.loss)
            if loss.type == "opd" and not self.orchestrator.group_config_of(name).teacher_logprobs:
                raise ValueError(
                    f"loss opd needs orchestrator.teacher_logprobs for {name}; --algorithm opd sets both"
                )
        unknown = set(self.trainer.loss_of) - {env.known_as for env in self.orchestrator.env}
        if unknown:
            raise ValueError(
                f"trainer.loss_of: no environment is named {', '.join(sorted(unknown))}"
            )
        return self

    @classmethod
    def prepare_values(
        cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]
    ) -> dict[str, Any]:
        """Move keys shared by components to the top level; choose the deployment."""
        client = (values.get("orchestrator") or {}).get("client") or {}
        if files_for & set(COMPONENTS) or "base_url" in client:
            values.setdefault("deployment", "processes")
            values.setdefault("inference", None)
        shared = cls._hoist_shared(values, origins)
        replays = (values.get("trainer") or {}).get("replay_routing")
        if replays is not None:  # the sampler has to report what it chose
            values = merge_tables({"orchestrator": {"return_routing": replays}}, values)
        return super().prepare_values(
            with_algorithms(merge_tables(shared, values)), origins, files_for
        )

    @classmethod
    def _hoist_shared(cls, values: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
        """Move the keys that components share out of their sections, and return them.

        Raises ConfigError if two components give a key different values.
        """
        shared: dict[str, Any] = {}
        said_by: dict[str, str] = {}
        for component, section in COMPONENTS.items():
            given = values.get(component)
            if not isinstance(given, dict):
                continue
            common = [
                key for key in given if key in cls.model_fields and key not in section.model_fields
            ]
            values[component] = {key: value for key, value in given.items() if key not in common}
            for name, value in _flatten_keys({key: given[key] for key in common}).items():
                origin = origins.get(f"{component}.{name}", component)
                before = _flatten_keys(shared).get(name)
                if name in said_by and str(before) != str(value) and name not in origins:
                    raise ConfigError(
                        f"{name}: {before!r} in {said_by[name]}, {value!r} in {origin}; "
                        f"the components of a run share it: give it once, --{name.replace('_', '-')} VALUE"
                    )
                shared = merge_tables(shared, _nest_key(name, value))
                said_by[name] = origin
        for name, origin in said_by.items():
            origins.setdefault(name, origin)
        return shared


def _flatten_keys(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one dict from dotted name to value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            _flatten_keys(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def _nest_key(name: str, value: Any) -> dict[str, Any]:
    """Return a dotted name and its value as nested tables."""
    for key in reversed(name.split(".")):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


COMPONENTS: dict[str, type[Config]] = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": ServeConfig,
}
