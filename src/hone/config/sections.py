"""Sections that several commands share. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hone.config.base import COMMAND_LINE, Config, Free, untyped

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
OnBadStep = Literal["stop", "skip"]
Sharding = Literal["auto", "full", "none"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # this machine, as a host
API_KEY_VARIABLE = "HONE_API_KEY"  # gives a server its key without showing it in the list of processes


def as_list(value: Any) -> Any:
    """Where a list is meant, one bare value is a list of one."""
    return value if isinstance(value, list) or value is None else [value]


class ModelConfig(Config):
    name: str
    """Directory in Hugging Face format, or hub id (owner/model)."""
    random_init: bool = False
    """Start from random weights; the directory needs a config and a tokenizer only."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto takes a GPU if there is one."""


class WandbConfig(Config):
    project: str = "hone"
    """Weights & Biases project."""
    name: str | None = None
    """Name of the run there."""
    offline: bool = False
    """Write the run to disk only, for `wandb sync` later."""


class OptimConfig(Config):
    type: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of the blocks move by their orthogonalised momentum, the rest by AdamW with the same lr."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate after warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    skip_norm: Annotated[float, Field(gt=0)] | None = None
    """A step whose gradients have a larger norm than this counts as bad: on_bad_step says what then."""


class SchedulerConfig(Config):
    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up; linear and cosine fall to min_lr at the last step, wsd stays and falls over the last steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the steps over which wsd falls, in a line."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where the falling ones end."""


class WeightsConfig(Config):
    interval: Positive | None = None
    """Write weights/step_N every so many steps; the last step is always written."""

    def steps(self, max_steps: int) -> list[int]:
        """The steps whose weights a run of that length writes."""
        return [*range(self.interval, max_steps, self.interval), max_steps] if self.interval else [max_steps]


class BroadcastConfig(Config):
    type: Literal["filesystem", "nccl"] = "filesystem"
    """How servers get new weights: files in broadcasts/, or from the trainer's GPU to theirs (between CPUs by Gloo)."""
    host: str = "127.0.0.1"
    """nccl: the trainer's address. Servers on other machines need one that they reach."""


def arguments(value: Any) -> Any:
    """Arguments of a Python function: a name has no dash."""
    value = untyped(value)
    return {key.replace("-", "_"): one for key, one in value.items()} if isinstance(value, dict) else value


def true_or_false(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


class EnvConfig(Config):
    id: str
    """Environment id: `reverse-text` is the installed module reverse_text."""
    name: str | None = None
    """By which metrics know it; its id unless given. With names an environment may stand there twice."""
    args: Annotated[dict[str, Any], BeforeValidator(arguments)] = Field(default={})
    """Arguments of its load_environment."""
    workers: Free[Annotated[int, Field(ge=0)]] = 0
    """Processes of its own that it runs in, for environments that block, crash or hang; 0: in ours."""

    @property
    def known_as(self) -> str:
        return self.name or self.id


class SamplingConfig(Config):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of rollouts; the trainer applies the same."""
    max_tokens: Positive = 128
    """Longest completion."""


E = TypeVar("E", bound=EnvConfig)


def distinct(envs: list[E]) -> list[E]:
    """Refuses two of one name."""
    names = [env.known_as for env in envs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; give one of them another name")
    return envs


class EvalConfig(Config):
    env: Annotated[list[EnvConfig], BeforeValidator(as_list), Field(min_length=1), AfterValidator(distinct)]
    """Environments to evaluate on, each on its held-out examples."""
    interval: Positive = 100
    """Evaluate every so many steps, and at the last."""
    at_start: bool = True
    """Evaluate before the first step too."""
    num_examples: Positive = 64
    """First examples of each environment."""
    rollouts_per_example: Positive = 1
    """Rollouts of each."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    max_tokens: Positive = 128
    """Longest completion."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that a rollout may take, with its wait for the others; then it counts as failed."""

    def is_due(self, step: int, last: int) -> bool:
        """Whether the model is to be evaluated after that step, 0 being before the first."""
        return self.at_start if step == 0 else step == last or step % self.interval == 0


class EngineConfig(Config):
    max_batch_size: Positive | None = None
    """Sequences decoded together. 256 unless given, and up to 1,024 where a GPU has room for so many of the longest."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion; the model's own limit unless given."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Most memory for keys and values. Unless given: 8 on a CPU, on a GPU what weights and training leave."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that weights, training, keys and values may fill, where kv_cache_gib is not given."""


class ServerConfig(Config):
    host: str | None = None
    """Address to bind; 127.0.0.1 without an API key, all interfaces with one."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port; 0 takes a free one."""


class ServeConfig(EngineConfig):
    server: ServerConfig = ServerConfig()
    api_key: str | None = None
    """Key that requests must carry as a bearer token; also taken from the environment, HONE_API_KEY."""


def as_url(value: str) -> str:
    """http(s)://host[:port][/path], or what is wrong with it."""
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"{value!r} is not a URL; write it as http://HOST:PORT/v1")
    return value


Url = Annotated[str, AfterValidator(as_url)]


class ClientConfig(Config):
    base_url: Free[Annotated[list[Url], BeforeValidator(as_list), Field(min_length=1)]] = Field(
        default=["http://localhost:8000/v1"]
    )
    """Where inference servers are; groups of rollouts are spread over them."""
    api_key_var: Free[str | None] = None
    """Environment variable that holds their API key."""
    ready_timeout: Free[Annotated[float, Field(gt=0)]] = 600.0
    """Seconds until waiting for a server to come up is given up."""


class CkptConfig(Config):
    interval: Positive = 50
    """Write a checkpoint to resume from every so many steps, and at the last."""
    keep: Positive = 1
    """How many of the last to keep."""
    keep_every: Positive | None = None
    """Keep those of every so many steps too."""
    keep_best: str | None = None
    """Keep the one with the best value of this metric too: the highest, of a loss the lowest."""


class RunConfig(Config):
    """Base of the commands that train."""

    model: ModelConfig
    output_dir: Free[Path] = Path("outputs")
    """Run directory: logs, metrics, rollouts, weights, checkpoints."""
    clean: Free[bool] = False
    """Remove what an earlier run of this command left in output_dir."""
    seed: int = 0
    """Of everything random."""
    wandb: Free[WandbConfig | None] = None
    log_level: Free[Literal["debug", "info", "warning"]] = "info"
    """How much is logged."""
    log_interval: Free[Positive] = 1
    """Print every so many steps; the log file has them all."""


class ResumableConfig(RunConfig):
    """Base of the commands that can go on where they were."""

    ranks_timeout: Free[Annotated[float, Field(gt=0)]] = 1800.0
    """Under torchrun: seconds that one process waits for another before the run is given up."""

    resume: Free[Annotated[bool | str, BeforeValidator(true_or_false)]] = False
    """Go on from the last whole checkpoint in output_dir; auto: from the start if there is none; never; or from the
    checkpoint given, a checkpoints/step_N."""
    ckpt: Free[CkptConfig | None] = None
    """Checkpoints to resume from; none unless a key of it is given."""

    @property
    def may_start_anew(self) -> bool:
        """Whether an earlier run may be removed where there is nothing to resume from."""
        return self.clean or self.resume == "auto"

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "ResumableConfig":
        if self.clean and self.resume not in (False, "never"):
            raise ValueError("--clean and --resume exclude each other: start again, or continue")
        return self

    @classmethod
    def prepare(cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]) -> dict[str, Any]:
        """`--resume` on the command line wins over `clean = true` in a file."""
        is_typed = origins.get("resume") == COMMAND_LINE and values.get("resume") not in (False, "never")
        return values | {"clean": False} if is_typed and origins.get("clean") != COMMAND_LINE else values
