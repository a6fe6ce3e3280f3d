"""Estimate the device memory of a command from its configuration. Imports no torch."""

from pathlib import Path

from hone import machine
from hone.config.base import Config
from hone.config.inference_config import InferenceConfig
from hone.config.rl_config import RLConfig, TrainerRunConfig
from hone.config.sections import ModelConfig
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, SFTConfig
from hone.models.families import is_known, parse_model_config
from hone.models.spec import ModelSpec, read_model_config
from hone.trainer.memory_estimate import FEW_TOKENS, Estimate, estimate_rl, estimate_step


def memory_lines(config: Config) -> list[str]:
    """Return a line of estimated memory for training and lines for sampling, where they apply.

    If the model's config.json is not on this machine, or vLLM computes the model, return one line
    with that reason. Raises ValueError if config.json cannot be read.
    """
    model = getattr(config, "model", None)
    if not isinstance(model, ModelConfig):
        return []
    if (directory := _find_directory(model.name)) is None:
        return [f"not known: the config.json of {model.name} is not on this machine"]
    shape = read_model_config(directory)
    if isinstance(config, InferenceConfig) and config.backend != "hone" and not is_known(shape):
        return ["not known: vLLM computes a model of this kind"]
    spec = parse_model_config(shape, str(directory / "config.json"))
    on_cpu = model.device == "cpu" or (model.device == "auto" and not machine.usable_gpus())
    is_single = model.dtype == "float32" or (model.dtype == "auto" and on_cpu)
    itemsize, kind = (4, "float32") if is_single else (2, "bfloat16")
    training = _estimate_training(config, spec, itemsize)
    found = [] if training is None else [_training_line(config, kind, *training)]
    return found + _sampling_lines(config, spec, kind, itemsize)


def _training_line(config: Config, kind: str, tokens: int, expected: "Estimate") -> str:
    is_guessed = isinstance(config, SFTConfig) and config.data.seq_len is None
    guess = (
        f" (rows of {UNKNOWN_ROW_TOKENS:,} tokens, data.seq-len is not given)" if is_guessed else ""
    )
    return f"training in {kind}, up to {tokens:,} tokens in a micro-batch{guess}: {expected.describe_estimate()}"


def _sampling_lines(config: Config, spec: "ModelSpec", kind: str, itemsize: int) -> list[str]:
    found = []
    limit = spec.max_position_embeddings
    sequences = 0
    if isinstance(config, RLConfig):
        limit = min(limit, config.seq_len)
        sequences = config.orchestrator.batch_size
    elif isinstance(config, InferenceConfig):
        limit = min(limit, config.max_model_len or limit)
        sequences = 1
        found.append(
            f"serving in {kind}: weights {spec.parameter_count() * itemsize / 2**30:.2f} GiB"
        )
    if sequences:
        of_token = spec.cache_numbers * itemsize
        gib = sequences * limit * of_token / 2**30
        longest = (
            "the longest sequence" if sequences == 1 else f"{sequences:,} of the longest sequences"
        )
        found.append(
            f"keys and values in {kind}: {of_token / 2**10:.1f} KiB a token, {gib:.2f} GiB for {longest}, "
            f"{limit:,} tokens"
        )
    return found


def _estimate_training(
    config: Config, spec: ModelSpec, itemsize: int
) -> tuple[int, Estimate] | None:
    """Return the tokens of a micro-batch and the memory of a step, None if nothing is trained."""
    if isinstance(config, SFTConfig):
        rows = config.data.micro_batch_size or config.data.batch_size
        tokens = rows * (config.data.seq_len or UNKNOWN_ROW_TOKENS)
        return tokens, estimate_step(
            spec,
            config.lora,
            config.optim,
            tokens,
            itemsize,
            recomputes=config.activation_checkpointing,
            is_split=rows < config.data.batch_size,
        )
    if isinstance(config, RLConfig):
        trainer = config.trainer
        step = config.orchestrator.batch_size * config.seq_len
    elif isinstance(config, TrainerRunConfig):
        trainer = config
        step = config.micro_batch_tokens or FEW_TOKENS
    else:
        return None
    most = trainer.micro_batch_tokens or FEW_TOKENS
    return min(step, most), estimate_rl(spec, trainer, step, itemsize, most)


def _find_directory(name: str) -> Path | None:
    path = Path(name).expanduser()
    if not path.is_dir() and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
        path = Path(file).parent if isinstance(file, str) else path
    return path if (path / "config.json").is_file() else None
