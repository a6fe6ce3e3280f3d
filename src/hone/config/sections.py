"""Sections that several commands share. Imports no torch."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hone.config.base import COMMAND_LINE, Config, Free, parse_untyped
from hone.records import Sampling

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ToolCalls = Literal[
    "auto",
    "hermes",
    "json",
    "qwen3_coder",
    "glm",
    "mistral",
    "mistral_args",
    "deepseek",
    "kimi",
    "list",
    "granite",
    "function",
]
OnBadStep = Literal["stop", "skip"]
Sharding = Literal["auto", "full", "none"]
Implementation = Literal["auto", "hone", "transformers"]
Layout = Literal["hone", "trainer"]
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # this machine, as a host
BACKEND_LOST = 75  # exit code of a server whose vLLM died: restart it
# Passes a server its key without showing it in the list of processes.
API_KEY_VARIABLE = "HONE_API_KEY"
CLIENT_KEY_VARIABLE = "HONE_CLIENT_KEY"  # passes a server a second key, for clients
API_KEY_FILE_VARIABLE = "HONE_API_KEY_FILE"  # names a file with the key


def own_key(url: str = "http:") -> str | None:
    """Return the API key of Hone's own servers, or None for an https URL or without a key.

    https URLs belong to other services, which must not see the key. Raises ValueError if the key's
    file cannot be read.
    """
    if not url.startswith("http:"):
        return None
    if key := os.environ.get(API_KEY_VARIABLE, "").strip():
        return key
    if not (file := os.environ.get(API_KEY_FILE_VARIABLE)):
        return None
    try:
        return Path(file).read_text().strip() or None
    except OSError as error:
        raise ValueError(
            f"{API_KEY_FILE_VARIABLE}: {file} cannot be read: {error.strerror}"
        ) from None


def as_list(value: Any) -> Any:
    """Wrap a bare value in a list where a list is expected."""
    return value if isinstance(value, list) or value is None else [value]


def to_python_names(value: Any) -> Any:
    """Replace dashes by underscores in the keys of a table, which are Python arguments."""
    value = parse_untyped(value)
    return (
        {key.replace("-", "_"): one for key, one in value.items()}
        if isinstance(value, dict)
        else value
    )


Arguments = Annotated[dict[str, Any], BeforeValidator(to_python_names)]


DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # of the components that may be started without naming one


class ModelConfig(Config):
    name: str
    """Model to load: a directory in Hugging Face format, or a hub id (owner/model)."""
    chat_template: str | None = None
    """Chat template instead of the model's own: a file, the name of one that Hone ships (chatml, llama3, zephyr), or
    its text. It is saved with the weights."""
    template_arguments: Arguments = Field(default={})
    """Arguments of the chat template in every rendering, as enable_thinking of Qwen3."""
    tool_calls: ToolCalls = "auto"
    """How the model writes tool calls (docs/inference.md); auto is as its chat template teaches."""
    random_init: bool = False
    """Start from random weights drawn with `seed`; the directory then needs only a config and a tokenizer."""
    implementation: Implementation = "auto"
    """What computes the model: hone is Hone's own blocks and kernels; transformers is transformers' modules, for any of
    its causal language models, and slower; auto takes Hone's where there are some for the model. The log says which."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model is loaded on; auto is the GPU if there is one, else the CPU."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact gives a token the same logprob to the bit, whatever is computed beside it, when it is sampled and when it
    is trained on, on a GPU in bfloat16; fast takes what is quickest for so many tokens (docs/exact.md)."""


class WandbConfig(Config):
    project: str = "hone"
    """Weights & Biases project that the run is logged to."""
    name: str | None = None
    """Name of the run in Weights & Biases; it picks one unless given."""
    group: str | None = None
    """Group of runs in Weights & Biases that this one belongs to."""
    offline: bool = False
    """Log to disk only; `wandb sync` uploads it later."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Rollouts of a step that are logged as a table, from the lowest reward to the highest; 0 logs none, and no
    histograms of rewards, advantages and lengths."""
    interval: Positive = 10
    """Steps between those whose rollouts are logged; the first and the last step's are too."""


class TensorBoardConfig(Config):
    dir: Path | None = None
    """Directory of the event files, for `tensorboard --logdir`; tensorboard/ in the run's directory unless given."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Rollouts of a step that are written as text, from the lowest reward to the highest; 0 writes none, and no
    histograms of rewards, advantages and lengths."""
    interval: Positive = 10
    """Steps between those whose rollouts are written; the first and the last step's are too."""


class OptimConfig(Config):
    type: Literal["adamw", "muon"] = "adamw"
    """Optimiser. adamw updates every weight by AdamW. muon updates the matrices of the transformer blocks by their
    orthogonalised momentum, and the other weights by AdamW with the same learning rate."""
    lr: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Peak learning rate, reached at the end of warm-up. auto: for AdamW 1e-6 in `rl` for all weights of a model of 4
    billion or more, and more for smaller ones (1e-5 for 130 million, 3e-4 for a million); ten times that with LoRA; and
    ten times that again in `sft`. For Muon 2e-3."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay, applied to matrices only, not to norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments; closer to 1 averages over more steps. Muon's momentum is
    fixed."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Number that AdamW adds to the root of the second moment; a larger one damps weights with small gradients."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW keeps its two moments of every weight. bfloat16 takes half of the memory and rounds them up
    or down at random, so that small changes count on average."""
    offload: Free[bool] = False
    """Keep the optimiser's fp32 weights and moments in the machine's memory; in each step they come to the GPU in
    portions and go back. The GPU's memory is then left to weights, gradients and activations. It changes nothing on a
    CPU, and is for one trainer process."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip gradients to this global L2 norm; a smaller value limits each step more."""
    skip_norm: Annotated[float, Field(gt=0)] | None = None
    """Treat a step whose gradient norm is above this as bad; on_bad_step says what then happens. No limit unless
    given."""

    @property
    def moment_bytes(self) -> int:
        """Return the bytes that one AdamW moment takes per weight."""
        return 4 if self.state_dtype == "float32" else 2


class SchedulerConfig(Config):
    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up: constant; falling to min_lr over all steps (linear, cosine); or constant and then
    falling linearly over the last decay_fraction of the steps (wsd)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0 to lr."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3
    """wsd: share of all steps, at the end, over which the learning rate falls linearly."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that linear, cosine and wsd fall to; it is what a step after the last would have."""


class WeightsConfig(Config):
    interval: Positive | None = None
    """Save the weights as weights/step_N every this many steps; the last step is always saved."""

    def list_steps(self, max_steps: int) -> list[int]:
        """Return the steps after which a run of `max_steps` steps saves its weights."""
        return (
            [*range(self.interval, max_steps, self.interval), max_steps]
            if self.interval
            else [max_steps]
        )


class FilesystemConfig(Config):
    type: Literal["filesystem"] = "filesystem"
    """How inference servers receive new weights: as files in broadcasts/; with LoRA the adapter alone."""


class NcclConfig(Config):
    type: Literal["nccl"]
    """How inference servers receive new weights: from memory to memory (servers with a GPU on the trainer's machine
    read its GPU's memory; NCCL brings them to others, Gloo to CPUs); with LoRA already merged."""
    host: str = "127.0.0.1"
    """Address of the trainer that inference servers connect to; servers on other machines need one they can reach."""


def with_type(kind: str) -> BeforeValidator:
    """Return a validator that adds the default `type` to a table of a discriminated union."""
    return BeforeValidator(
        lambda value: {"type": kind, **value} if isinstance(value, dict) else value
    )


BroadcastConfig = Annotated[
    FilesystemConfig | NcclConfig, Field(discriminator="type"), with_type("filesystem")
]


def named_or_own(value: str, names: Iterable[str], key: str) -> str:
    """Return `value` if it is one of `names` or the import path of a user's function.

    Raises ValueError, which names `key` and the nearest of `names`.
    """
    if value not in names and ":" not in value:
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{key} {value!r} is not one of {', '.join(names)}, nor package.module:function; did you mean {near}?"
        )
    return value


def true_or_false(value: Any) -> Any:
    return (
        {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


class EnvConfig(Config):
    id: str
    """Environment to load, by id: `reverse-text` is the installed Python module reverse_text."""
    name: str | None = None
    """Name of the environment in metrics and logs; its id unless given. Two entries with the same id need different
    names."""
    args: Arguments = Field(default={})
    """Keyword arguments for the environment's load_environment."""
    on_reward_error: Literal["fail", "zero"] | None = None
    """What a reward function that raises, or gives no finite number, does. fail: its rollout counts as failed and is
    tried again; zero: it counts 0, which is the default for environments of the verifiers library."""
    template_arguments: Arguments = Field(default={})
    """Arguments of the chat template for prompts of this environment, over those of model.template_arguments."""
    venv: Free[str | None] = None
    """Virtual environment whose Python runs the environment, one of the verifiers library; `hone env install ID
    --isolated` makes one that is found without this key."""
    workers: Free[Annotated[int, Field(ge=0)]] = 0
    """Separate processes to run the environment in, for one that blocks, crashes or hangs; 0 runs it in Hone's own
    process."""

    @property
    def known_as(self) -> str:
        return self.name or self.id


class SamplingConfig(Config):
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature that completions are sampled with; higher is more varied. The trainer computes its logprobs
    at the same temperature."""
    max_tokens: Positive = 128
    """Most tokens in a completion; a longer one is cut there."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens alone that have this probability together. This key and the next five change what
    is drawn and not the logprobs that are trained on, so that the importance ratio leaves them out."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many of the likeliest tokens alone; 0 draws from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw only tokens with at least this share of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divide positive logits of tokens that the prompt or the completion has, and multiply negative ones, by this."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Take this off the logits of tokens that the completion has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Take this off the logits of tokens for each time that the completion has them."""

    def to_sampling(self, seed: int) -> Sampling:
        return Sampling(**self.model_dump(), seed=seed)


E = TypeVar("E", bound=EnvConfig)


def require_distinct(envs: list[E]) -> list[E]:
    """Raise ValueError if two environments have the same name."""
    names = [env.known_as for env in envs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; give one of them another name")
    return envs


class EvalConfig(Config):
    env: Annotated[
        list[EnvConfig],
        BeforeValidator(as_list),
        Field(min_length=1),
        AfterValidator(require_distinct),
    ]
    """Environments to evaluate on, each on its held-out examples."""
    interval: Positive = 100
    """Evaluate every this many steps, and after the last."""
    at_start: bool = True
    """Also evaluate before the first step."""
    num_examples: Positive = 64
    """How many examples of each environment to evaluate on, taken from the start of its data set."""
    rollouts_per_example: Positive = 1
    """Completions to sample for each example; their rewards are averaged."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Softmax temperature of evaluation; 0 always takes the likeliest token."""
    max_tokens: Positive = 128
    """Most tokens in a completion; a longer one is cut there."""
    timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that one rollout of an evaluation may take, waiting for the server included; after that it counts as
    failed."""

    def is_due(self, step: int, last: int) -> bool:
        """Return True if the model is evaluated after this step (0: before the first)."""
        return self.at_start if step == 0 else step == last or step % self.interval == 0


class EngineConfig(Config):
    max_batch_size: Positive | None = None
    """Most sequences decoded at once; more are faster together and need more memory. Unless given: 256, or up to 1,024
    on a GPU that has memory for them at full length."""
    max_model_len: Positive | None = None
    """Most tokens in a prompt and its completion together; the model's own limit unless given."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for cached keys and values, in GiB; more lets more sequences run at once. Unless given: on a CPU a
    quarter of the machine's, 8 at most; on a GPU what weights and training leave free."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that weights, training and cached keys and values may use together; ignored where
    kv_cache_gib is given."""


class ServerConfig(Config):
    host: str | None = None
    """Network address to listen on. Unless given: 127.0.0.1 (this machine only) without an API key, every address with
    one."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port to listen on; 0 picks a free one and prints it."""


class BackendConfig(Config):
    """The backend of a server, and flags that only vLLM has, as vLLM spells them."""

    backend: Free[Literal["auto", "hone", "vllm"]] = "auto"
    """What samples: hone is Hone's own engine, on one device; vllm starts vLLM, which has to be installed, and serves
    it by the same routes. auto is vllm where tensor or data parallelism is asked for or Hone does not have the
    model's family, else hone."""
    vllm_python: Free[str | None] = None
    """Python of the environment that vLLM is installed in; Hone's own unless given."""
    enforce_eager: Free[bool] = False
    """vllm: run without compiled graphs, which starts faster and samples slower. Hone's engine takes the flag and needs
    nothing of it."""
    tensor_parallel_size: Free[Positive] = 1
    """vllm: GPUs that share each layer of the model."""
    data_parallel_size: Free[Positive] = 1
    """vllm: copies of the model, each on GPUs of its own, that share the requests."""
    data_parallel_size_local: Free[Positive | None] = None
    """vllm: how many of those copies run on this machine; all unless given."""
    data_parallel_address: Free[str | None] = None
    """vllm: address of the machine that runs the first copy."""
    data_parallel_rpc_port: Free[Annotated[int, Field(gt=0, lt=65536)] | None] = None
    """vllm: port of that machine over which the copies agree."""
    data_parallel_start_rank: Free[Annotated[int, Field(ge=0)] | None] = None
    """vllm: number of the first copy on this machine."""
    headless: Free[bool] = False
    """vllm: run copies of the model for a server on another machine, and serve nothing here."""
    vllm_args: Free[Arguments] = Field(default={})
    """Further flags of vLLM's server, as {flag: value}; true stands for a flag without a value."""

    @property
    def needs_vllm(self) -> bool:
        """Return True if the configuration asks for something that only vLLM supports."""
        return (
            self.tensor_parallel_size > 1
            or self.data_parallel_size > 1
            or self.headless
            or bool(self.vllm_args)
        )

    @model_validator(mode="after")
    def _is_possible(self) -> "BackendConfig":
        if self.backend != "hone":
            return self
        untouched = type(self).model_fields
        for key in VLLM_KEYS:
            if getattr(self, key) != untouched[key].get_default(call_default_factory=True):
                raise ValueError(
                    f'{key}: Hone\'s engine computes on one device and cannot do it; backend = "vllm" can'
                )
        return self


VLLM_KEYS = (
    "tensor_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_start_rank",
    "headless",
    "vllm_python",
    "vllm_args",
)


class ServeConfig(BackendConfig, EngineConfig):
    server: ServerConfig = ServerConfig()
    api_key: str | None = None
    """Secret that clients must send as a bearer token; also read from the environment variable HONE_API_KEY, or from
    the file that HONE_API_KEY_FILE names."""
    client_key: str | None = None
    """A second key, for clients: it opens the routes that use the model, and none that controls the server. Also read
    from the environment variable HONE_CLIENT_KEY."""
    engine_apart: bool | None = None
    """Sample in a process of its own, which answering requests takes no time from; by default on a GPU."""
    allowed_dirs: Free[Annotated[list[Path], BeforeValidator(as_list)] | None] = None
    """Directories, with all that is in them, that new weights and adapters may be read from by the control routes. By
    default the working directory, the one that the environment variable OUTPUT_DIR names, and the one that the model's
    directory is in; `rl` gives its servers its output_dir."""


def as_url(value: str) -> str:
    """Validate http(s)://host[:port][/path]. Raises ValueError with what is wrong."""
    try:
        parts = urlsplit(value)
        is_url = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
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
    """URLs of the inference servers; groups of rollouts are spread over them."""
    api_key_var: Free[str | None] = None
    """Name of the environment variable that holds the servers' API key; HONE_API_KEY, or the file that
    HONE_API_KEY_FILE names, where none is given."""
    ready_timeout: Free[Annotated[float, Field(gt=0)]] = 600.0
    """Seconds to wait for a server to start answering before the run is ended."""


class CkptConfig(Config):
    interval: Positive | None = None
    """Write a checkpoint, from which --resume continues, every this many steps and after the last. Unless given, one is
    written every `minutes`."""
    minutes: Annotated[float, Field(gt=0)] = 10.0
    """Without interval: minutes from one checkpoint to the next, at least."""
    keep: Positive = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: Positive | None = None
    """Also keep, for good, the checkpoints of every this many steps; without interval it is the interval too."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this metric of metrics.jsonl: the highest, or the lowest where
    the name contains loss."""


class RunConfig(Config):
    """Base class of configurations of commands that train."""

    model: ModelConfig
    output_dir: Free[Path] = Path("outputs")
    """Directory of the run: its logs, metrics, rollouts, weights and checkpoints are written there."""
    clean: Free[bool] = False
    """Delete what an earlier run of the same command left in output_dir, and start again."""
    layout: Free[Layout] = "hone"
    """Names of what is written to output_dir. hone: weights/step_N and logs/. trainer: as transformers' Trainer and
    verifiers' RLTrainer have them, checkpoint-N, which holds the adapter alone where one is trained, and
    trainer_state.json, and runs/ for the logs."""
    seed: int = 0
    """Seed of every random choice: initial weights, order of the data, sampling."""
    wandb: Free[WandbConfig | None] = None
    tensorboard: Free[TensorBoardConfig | None] = None
    log_level: Free[Literal["debug", "info", "warning"]] = "info"
    """Least important kind of message that is printed and logged."""
    log_format: Free[Literal["text", "json"]] = "text"
    """Form of the lines on the console: text for people, json for programs that collect them, an object a line."""
    log_interval: Free[Annotated[int, Field(ge=0)]] = 1
    """Print the lines of every this many steps, and of the last; 0 prints none. Log files have every step."""


class ResumableConfig(RunConfig):
    """Base class of configurations of commands that can resume."""

    ranks_timeout: Free[Annotated[float, Field(gt=0)]] = 1800.0
    """With several trainer processes: seconds that one waits for another before the run is ended."""

    resume: Free[Annotated[bool | str, BeforeValidator(true_or_false)]] = False
    """Continue an earlier run. true: from the newest intact checkpoint in output_dir; auto: the same, or from the
    start if there is none; false or never: do not; a path: from that checkpoint (checkpoints/step_N)."""
    ckpt: Free[CkptConfig | None] = CkptConfig()
    """Checkpoints to resume from. Ctrl-C writes one too; `--ckpt None` writes none."""

    @property
    def may_start_anew(self) -> bool:
        """Return True if an earlier run may be removed when there is no checkpoint."""
        return self.clean or self.resume == "auto"

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "ResumableConfig":
        if self.clean and self.resume not in (False, "never"):
            raise ValueError("--clean and --resume exclude each other: start again, or continue")
        return self

    @classmethod
    def prepare_values(
        cls, values: dict[str, Any], origins: dict[str, str], files_for: set[str]
    ) -> dict[str, Any]:
        """Let `--resume` on the command line win over `clean = true` in a file."""
        is_typed = origins.get("resume") == COMMAND_LINE and values.get("resume") not in (
            False,
            "never",
        )
        return (
            values | {"clean": False}
            if is_typed and origins.get("clean") != COMMAND_LINE
            else values
        )
