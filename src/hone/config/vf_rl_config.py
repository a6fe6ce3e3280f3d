"""Configuration of `vf-rl`: a file of verifiers' RLTrainer, mapped to a run of `rl`.

Imports no torch.

    model  [env]  [inference] gpus, args  [trainer] gpus, args  ─ as_rl(available GPUs) ─► RLConfig
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from hone import machine
from hone.config.base import Config, ConfigError, validate_values
from hone.config.lora_config import LoRAConfig, Saved, Target
from hone.config.rl_config import RLConfig
from hone.config.sections import (
    Arguments,
    EnvConfig,
    Positive,
    ServeConfig,
    Share,
    WandbConfig,
    as_list,
    to_python_names,
    true_or_false,
)

REASONS = {  # keys of verifiers or transformers that are not supported here, with the reason
    "mask_env_responses": "what the environment says is never trained on",
    "per_device_train_batch_size": "it is micro_batch_size",
    "gradient_accumulation_steps": "it follows: batch_size / (micro_batch_size x gpus)",
    "num_train_epochs": "the length of training is max_steps",
    "loss_type": "the loss is masked importance sampling; `rl` has others (--trainer.loss.type)",
    "epsilon": "nothing is clipped: tokens out of mask_ratio_low to mask_ratio_high have no loss",
    "scale_rewards": "advantages are rewards minus their group's mean; `rl` has others (--orchestrator.advantage)",
    "importance_sampling_level": "ratios are per token; `rl` also has ratios per sequence (--trainer.loss.ratio-type)",
    "vllm_importance_sampling_cap": "ratios are masked, not capped: mask_ratio_high",
    "async_generation_timeout": "it is generation_timeout",
    "async_max_queue_size": "it follows from num_batches_ahead",
    "lora_config": "its fields are keys here: lora_rank, lora_alpha, lora_dropout, …",
    "save_only_model": "resume state is written separately, to checkpoints/step_N",
    "resume_from_checkpoint": "it is --resume",
    "deepspeed": "several GPUs are used by torch's FSDP2",
    "fsdp": "several GPUs are used by torch's FSDP2 without a key",
    "fp16": "numbers are bfloat16 or float32: bf16",
    "optim": "it is AdamW; `rl` has Muon (--trainer.optim.type)",
    "remove_unused_columns": "columns are what the environment makes of them",
    "shuffle_dataset": "examples come in a new order in each epoch",
}
HARMLESS: dict[str, tuple[Any, ...]] = {  # values of such keys that ask for the default behaviour
    "mask_env_responses": (True,),
    "save_only_model": (True,),
    "remove_unused_columns": (False,),
    "shuffle_dataset": (True,),
    "fp16": (False,),
    "scale_rewards": ("none", False),
    "importance_sampling_level": ("token",),
    "gradient_accumulation_steps": (1,),
    "lora_config": (None,),
    "async_max_queue_size": (None,),
}


# Keys and flags of `rl` that messages name, as `vf-rl` and hone.RLTrainer spell them.
VF_RL_KEY_NAMES = {
    "orchestrator.max_prompt_tokens": "trainer.args.max_prompt_len",
    "orchestrator.sampling.max_tokens": "trainer.args.max_tokens",
    "trainer.micro_batch_tokens": "trainer.args.micro_batch_size",
    "trainer.activation_checkpointing": "trainer.args.gradient_checkpointing",
    "trainer.lora": "use_lora, or another key of the adapter,",
    "model.name": "model",
    "--ckpt.interval N": "--trainer.args.save-steps N",
    "--fork": "rl --fork",
    "--wandb.offline": "--trainer.args.wandb.offline true",
    "--output-dir DIR": "--trainer.args.run-name NAME",
}
PYTHON_KEY_NAMES = {
    **{
        key: name.removeprefix("--").removeprefix("trainer.args.").replace("-", "_")
        for key, name in VF_RL_KEY_NAMES.items()
    },
    "--fork": "rl --fork",
    "--clean": "train(clean=True)",
    "--resume": "train(resume=True)",
    "--output-dir DIR": "another run_name",
}

# Flags of vLLM that Hone's server does not need.
NEEDLESS = {
    "enable_auto_tool_choice",
    "tool_call_parser",
    "disable_log_requests",
    "disable_log_stats",
}


class RLTrainerArgs(Config):
    """Arguments of `hone.RLTrainer`: the section `[trainer.args]`, exported as `hone.RLConfig`."""

    model_config = ConfigDict(title="RLConfig")

    run_name: str | None = None
    """Name of the run: what it writes is in outputs/NAME. The environment's name unless given."""
    output_dir: Path | None = None
    """Directory of the run; outputs/ and run_name unless given."""
    seed: int = 0
    """Seed of every random choice."""
    use_lora: bool = True
    """Train LoRA adapters beside the model's weights; false trains the weights themselves."""
    lora_rank: Positive = 8
    """Rank of the adapters."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters: their product is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that is set to zero at random while training."""
    lora_target_modules: (
        Literal["all-linear"]
        | Annotated[list[Target], BeforeValidator(as_list), Field(min_length=1)]
        | None
    ) = None
    """Linear layers that get an adapter; all of the blocks unless given, which "all-linear" says too."""
    lora_modules_to_save: Annotated[list[Saved], BeforeValidator(as_list)] | None = None
    """Modules whose own weights are trained and saved with the adapter."""
    lora_use_rslora: bool = False
    """Multiply the adapters' product by lora_alpha / sqrt(lora_rank)."""
    rollouts_per_example: Annotated[int, Field(ge=2)] = 16
    """Completions of each prompt, whose rewards are compared with each other."""
    batch_size: Positive = 512
    """Rollouts of a training step: prompts x rollouts_per_example."""
    micro_batch_size: Positive = 8
    """Rollouts of full length, max_seq_len, that go through a GPU at once; shorter ones go through in larger numbers.
    Fewer need less memory and give the same step."""
    max_seq_len: Positive = 2048
    """Most tokens of a prompt and what follows it together."""
    max_prompt_len: Positive | None = 512
    """Examples whose prompt has more tokens are left out."""
    max_steps: Positive = 500
    """Training steps."""
    max_concurrent: Positive | None = None
    """Most completions that are sampled at once, 1024 at verifiers; what memory allows unless given."""
    num_batches_ahead: Annotated[int, Field(ge=0)] = 1
    """Steps that sampling may be ahead of training where both have GPUs of their own; on one device it never is."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to 0 over all steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    adam_beta1: Share = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: Share = 0.999
    """Decay rate of AdamW's second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    bf16: bool = True
    """Numbers are bfloat16 on a GPU; false: float32. On a CPU they are float32."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the transformer blocks and recompute the rest: less memory, about a quarter more time."""
    mask_ratio_low: Annotated[float, Field(ge=0)] = 0.125
    """Tokens whose importance ratio is below this have no loss."""
    mask_ratio_high: Annotated[float, Field(gt=0)] = 8.0
    """Tokens whose importance ratio is above this have no loss."""
    mask_truncated_completions: bool = False
    """Completions that were cut at max_tokens have no loss; their rewards count in the group."""
    zero_truncated_completions: bool = False
    """Completions that were cut at max_tokens have reward 0."""
    max_tokens: Positive = 512
    """Most tokens of a completion (of each turn, where there are several)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of sampling; higher is more varied."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens alone that have this probability together."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Draw from this many of the likeliest tokens alone; from all unless given."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw only tokens with at least this share of the likeliest token's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Make tokens less likely that the prompt or the completion has."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Make tokens less likely that the completion has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Make tokens less likely for each time that the completion has them."""
    generation_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a rollout may take before it counts as failed."""
    vllm_server_host: str | None = None
    """Address of the inference server, where one is started: with GPUs of its own, or a flag that only vLLM has. This
    machine alone unless given."""
    vllm_server_port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port of that server; 0 takes a free one."""
    vllm_server_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that the server may take to start."""
    save_strategy: Literal["steps", "no"] = "steps"
    """Whether checkpoints are written before the last step, every save_steps."""
    save_steps: Positive = 50
    """Steps from one checkpoint to the next."""
    eval_strategy: Literal["steps", "no"] = "no"
    """Whether held-out examples are evaluated, before the first step and every eval_steps."""
    eval_steps: Positive = 50
    """Steps from one evaluation to the next."""
    logging_steps: Positive = 1
    """Print every this many steps."""
    sample_steps: Annotated[int, Field(ge=0)] = 5
    """Print a prompt and its completion every this many steps; 0 prints none."""
    report_to: (
        Annotated[list[Literal["wandb", "tensorboard", "none"]], BeforeValidator(as_list)] | None
    ) = None
    """Where metrics go beside the run's own files: wandb, tensorboard, both, or none. Unless given, wandb where a key
    of wandb is."""
    wandb: WandbConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Drop unsupported keys whose value is the default behaviour; refuse the others.

        Raises ValueError with the reason if a key of verifiers or transformers is not supported.
        """
        if not isinstance(values, dict):
            return values
        kept = {}
        for key, value in values.items():
            if key in cls.model_fields or key not in REASONS:
                kept[key] = value
            elif true_or_false(value) not in HARMLESS.get(key, ()):
                raise ValueError(f"{key} = {value!r} is not possible: {REASONS[key]}")
        return kept

    @model_validator(mode="after")
    def _check_batch(self) -> "RLTrainerArgs":
        if self.batch_size % self.rollouts_per_example:
            near = max(1, self.batch_size // self.rollouts_per_example) * self.rollouts_per_example
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of rollouts_per_example {self.rollouts_per_example}: "
                f"a step has whole groups; {near} is"
            )
        idle = (
            sorted(key for key in self.model_fields_set if key.startswith("lora_"))
            if not self.use_lora
            else []
        )
        if idle:
            raise ValueError(f"{idle[0]} has no effect with use_lora = false")
        if self.mask_truncated_completions and self.zero_truncated_completions:
            raise ValueError(
                "mask_truncated_completions and zero_truncated_completions: choose one of them"
            )
        if self.lr_scheduler_type == "constant_with_warmup" and not self.warmup_steps:
            raise ValueError("lr_scheduler_type constant_with_warmup needs warmup_steps")
        if self.report_to == ["none"] and self.wandb is not None:
            raise ValueError('wandb has no effect with report_to = "none"')
        return self

    @property
    def truncation_handling(self) -> str:
        return (
            "mask"
            if self.mask_truncated_completions
            else "zero"
            if self.zero_truncated_completions
            else "keep"
        )


class InferencePart(Config):
    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs that sample, beside those of the trainer. With one GPU, or none, both sides share what there is."""
    args: Arguments = Field(default={})
    """Flags of the inference server, as vLLM spells them: enforce_eager, max_model_len, gpu_memory_utilization,
    tensor_parallel_size, … (the keys of `inference`; others start vLLM, which has to be installed)."""


class TrainerPart(Config):
    gpus: Positive = 1
    """GPUs that train."""
    args: RLTrainerArgs = RLTrainerArgs()


class VfRLConfig(Config):
    MEMORY_KEYS: ClassVar[str] = (
        "under [trainer.args] a smaller micro_batch_size, a smaller max_seq_len, gradient_checkpointing = true; under "
        "[inference.args] a smaller gpu_memory_utilization"
    )

    model: str
    """Model to train: a directory in Hugging Face format, or a hub id (owner/model)."""
    env: EnvConfig
    inference: InferencePart = InferencePart()
    trainer: TrainerPart = TrainerPart()
    deployment: Literal["auto", "colocated", "processes"] = "auto"
    """colocated samples and trains in one process; processes starts inference, orchestrator and trainer; auto is the
    first unless there are GPUs for both sides."""
    resume: Annotated[bool | str, BeforeValidator(true_or_false)] = False
    """Continue an earlier run: true, auto (or start, where there is none), or the path of a checkpoints/step_N."""
    clean: bool = False
    """Delete what an earlier run left in output_dir, and start again."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""

    @model_validator(mode="after")
    def _batches_divide(self) -> "VfRLConfig":
        args = self.trainer.args
        gpus = self.trainer.gpus
        at_once = args.micro_batch_size * gpus
        if args.batch_size % at_once:
            sizes = [
                n
                for n in range(1, args.batch_size // gpus + 1)
                if args.batch_size % (n * gpus) == 0
            ]
            near = min(sizes, key=lambda n: abs(n - args.micro_batch_size), default=None)
            hint = (
                f"micro_batch_size {near} fits"
                if near
                else f"batch_size must be a multiple of {gpus}"
            )
            raise ValueError(
                f"batch_size {args.batch_size} is not a multiple of micro_batch_size {args.micro_batch_size} x "
                f"{gpus} GPUs = {at_once}; {hint}"
            )
        return self

    @property
    def output_dir(self) -> Path:
        args = self.trainer.args
        return args.output_dir or Path("outputs") / (
            args.run_name or self.env.known_as.rpartition("/")[2]
        )

    def as_rl(self, gpus: int = 0) -> RLConfig:
        """Return the configuration of `rl` for a machine with `gpus` GPUs. Raises ConfigError."""
        return validate_values(RLConfig, self._as_rl() | self._place_gpus(gpus))

    def resolve_config(self) -> RLConfig:
        return self.as_rl(len(machine.usable_gpus()))

    def _as_rl(self) -> dict[str, Any]:
        args = self.trainer.args
        inference = _parse_server_flags(self.inference.args, self.trainer.args)
        wandb = args.wandb or (WandbConfig() if "wandb" in (args.report_to or []) else None)
        if wandb is not None and wandb.name is None:
            wandb = wandb.model_copy(update={"name": args.run_name})
        values: dict[str, Any] = {
            "model": {"name": self.model, "dtype": "auto" if args.bf16 else "float32"},
            "output_dir": self.output_dir,
            "layout": "trainer",
            "seed": args.seed,
            "clean": self.clean,
            "resume": self.resume,
            "log_level": self.log_level,
            "log_interval": 0,
            "max_steps": args.max_steps,
            "seq_len": args.max_seq_len,
            "max_async_level": args.num_batches_ahead,
            "deployment": self.deployment,
            "wandb": wandb and wandb.model_dump(),
            "tensorboard": {} if "tensorboard" in (args.report_to or []) else None,
            "inference": inference,
            "orchestrator": self._orchestrator_values(),
            "trainer": self._trainer_values(),
        }
        if args.save_strategy == "steps":
            values |= {
                "weights": {"interval": args.save_steps},
                "ckpt": {"interval": args.save_steps},
            }
        return values

    def _orchestrator_values(self) -> dict[str, Any]:
        args = self.trainer.args
        values: dict[str, Any] = {
            "env": [self.env.model_dump()],
            "batch_size": args.batch_size,
            "rollouts_per_example": args.rollouts_per_example,
            "sampling": {
                "temperature": args.temperature,
                "max_tokens": args.max_tokens,
                "top_p": args.top_p,
                "top_k": args.top_k or 0,
                "min_p": args.min_p or 0.0,
                "repetition_penalty": args.repetition_penalty,
                "presence_penalty": args.presence_penalty,
                "frequency_penalty": args.frequency_penalty,
            },
            "max_prompt_tokens": args.max_prompt_len,
            "truncated": args.truncation_handling,
            "rollout_timeout": args.generation_timeout,
            "client": {"ready_timeout": args.vllm_server_timeout},
        }
        if args.eval_strategy == "steps":
            values["eval"] = {
                "env": [self.env.model_dump()],
                "interval": args.eval_steps,
                "max_tokens": args.max_tokens,
            }
        return values

    def _trainer_values(self) -> dict[str, Any]:
        args = self.trainer.args
        scheduler = args.lr_scheduler_type.removesuffix("_with_warmup")
        values: dict[str, Any] = {
            "optim": {
                "lr": args.learning_rate,
                "weight_decay": args.weight_decay,
                "max_norm": args.max_grad_norm,
                "betas": [args.adam_beta1, args.adam_beta2],
            },
            "scheduler": {"type": scheduler, "warmup_steps": args.warmup_steps},
            "loss": {
                "mask_ratio_low": args.mask_ratio_low,
                "mask_ratio_high": args.mask_ratio_high,
            },
            "micro_batch_tokens": args.micro_batch_size * args.max_seq_len,
            "activation_checkpointing": args.gradient_checkpointing,
        }
        if args.use_lora:
            targets = args.lora_target_modules
            values["lora"] = LoRAConfig(
                rank=args.lora_rank,
                alpha=args.lora_alpha,
                rslora=args.lora_use_rslora,
                dropout=args.lora_dropout,
                targets=targets if isinstance(targets, list) else None,
                modules_to_save=args.lora_modules_to_save or [],
            ).model_dump()
        return values

    def _place_gpus(self, gpus: int) -> dict[str, Any]:
        """Return the keys of `rl` that assign GPUs to inference and training.

        `gpus` is the number of GPUs of the machine. Raises ConfigError if they do not suffice.
        """
        wanted = self.inference.gpus
        trains = self.trainer.gpus
        share = _parse_number(self.inference.args, "tensor_parallel_size") * _parse_number(
            self.inference.args, "data_parallel_size"
        )
        if wanted % share and gpus > 1:
            raise ConfigError(
                f"inference.gpus {wanted} is not a multiple of the {share} GPUs that inference.args asks for in "
                "tensor_parallel_size x data_parallel_size"
            )
        if gpus <= 1 or self.deployment == "colocated":
            one = [0]
            deployment = "auto" if self.deployment == "auto" else self.deployment
            return {"deployment": deployment, "inference_gpu_ids": one, "trainer_gpu_ids": one}
        if wanted + trains > gpus:
            raise ConfigError(
                f"inference.gpus {wanted} and trainer.gpus {trains} are {wanted + trains} GPUs, there are {gpus}; ask "
                "for fewer, or --deployment colocated for one that does both"
            )
        if not wanted:
            raise ConfigError("inference.gpus 0: sampling needs a GPU where training has one")
        return {
            "inference_gpu_ids": list(range(wanted)),
            "inference_replicas": wanted // share,
            "trainer_gpu_ids": list(range(wanted, wanted + trains)),
        }


def _parse_server_flags(flags: dict[str, Any], args: RLTrainerArgs) -> dict[str, Any]:
    """Convert server flags, spelled as in vLLM, to values of `inference`.

    Flags that Hone's server does not have are passed on to vLLM. Raises ConfigError for a flag that
    looks like a misspelled key.
    """
    names = {"max_num_seqs": "max_batch_size"}
    known = set(ServeConfig.model_fields) - {"server", "vllm_args"}
    own = {}
    others = {}
    server = {"host": args.vllm_server_host, "port": args.vllm_server_port}
    for flag, value in flags.items():
        name = names.get(flag, flag)
        if name in NEEDLESS:
            continue
        if name in known:
            own[name] = value
        elif name in server:
            server[name] = value
        else:
            near = difflib.get_close_matches(flag, [*known, *server, *names], n=1, cutoff=0.85)
            if near:
                raise ConfigError(f"inference.args: no flag {flag!r}; did you mean {near[0]}?")
            others[flag] = value
    if args.max_concurrent is not None:
        own.setdefault("max_batch_size", args.max_concurrent)
    return own | {"server": server, "vllm_args": to_python_names(others)}


def _parse_number(flags: dict[str, Any], name: str) -> int:
    value = flags.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"inference.args.{name}: a number of GPUs is wanted, found {value!r}")
    return value
