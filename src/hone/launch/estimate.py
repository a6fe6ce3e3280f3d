"""Estimate the device memory of a command from its configuration. Imports no torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hone import machine
from hone.config.base import Config
from hone.config.inference_config import InferenceConfig
from hone.config.rl_config import RLConfig, TrainerConfig
from hone.config.sections import ModelConfig
from hone.config.sft_config import UNKNOWN_ROW_TOKENS, SFTConfig
from hone.launch.card_fit import fit_lines
from hone.models.families import is_known, parse_model_config
from hone.models.spec import ModelSpec, read_model_config
from hone.trainer.division_checks import check_division
from hone.trainer.memory_estimate import Estimate
from hone.trainer.memory_plan import choose_memory, estimate_training

HUB_TIMEOUT_SECONDS = 5.0


def memory_lines(config: Config, card_bytes: int | None = None) -> list[str]:
    """Return lines of text that estimate the memory of training and of sampling.

    "auto" keys have the values that they get on this CPU, or on a GPU of `card_bytes`; None: not
    known. A part that `config` does not run has no line. If the model's config.json is neither here nor available from
    the hub, or if vLLM runs the model, the only line says so. Raises ValueError if config.json
    cannot be read.
    """
    found = _find_model(config)
    if isinstance(found, str):
        return [found] if found else []
    device_bytes = machine.usable_memory() if found.on_cpu else card_bytes
    config = choose_memory(config, found.spec, found.itemsize, device_bytes, not found.on_cpu)
    training = estimate_training(config, found.spec, found.itemsize)
    lines = [] if training is None else [_training_line(config, found.dtype, *training)]
    return lines + _sampling_lines(config, found.spec, found.dtype, found.itemsize)


def card_lines(config: Config) -> list[str]:
    """Return lines on the GPUs that the command fits, in the dtype it would have there.

    Raises ValueError as `memory_lines`.
    """
    found = _find_model(config)
    if isinstance(found, str) or config.model.device == "cpu":  # type: ignore[attr-defined]
        return []
    dtype = "float32" if config.model.dtype == "float32" else "bfloat16"  # type: ignore[attr-defined]
    return [
        f"{dtype} {line}" for line in fit_lines(config, found.spec, 4 if dtype == "float32" else 2)
    ]


@dataclass(frozen=True)
class _Model:
    spec: ModelSpec
    dtype: str
    itemsize: int
    on_cpu: bool


def _find_model(config: Config) -> _Model | str:
    """Return the model of a command, or why its memory is not known; "" if there is no model."""
    model = getattr(config, "model", None)
    if not isinstance(model, ModelConfig):
        return ""
    if (found := _read_shape(model.name)) is None:
        return (
            f"not known: the config.json of {model.name} is not here, and the hub does not send it"
        )
    shape, place = found
    if isinstance(config, InferenceConfig) and config.backend != "hone" and not is_known(shape):
        return "not known: vLLM computes a model of this kind"
    spec = parse_model_config(shape, place, model.implementation)
    trainer = config.trainer if isinstance(config, RLConfig) else config
    if isinstance(trainer, TrainerConfig | SFTConfig):
        check_division(spec, trainer.context_parallel, trainer.expert_parallel)
    on_cpu = model.device == "cpu" or (model.device == "auto" and not machine.usable_gpus())
    is_single = model.dtype == "float32" or (model.dtype == "auto" and on_cpu)
    dtype, itemsize = ("float32", 4) if is_single else ("bfloat16", 2)
    return _Model(spec, dtype, itemsize, on_cpu)


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
    of_state = spec.state_bytes(itemsize)
    if sequences and of_state:
        found.append(f"states: {of_state / 2**20:.1f} MiB for each sequence that decodes")
    return found


@cache
def _read_shape(name: str) -> tuple[dict[str, Any], str] | None:
    """Return a model's config.json and where it is: a directory, the hub cache, or the hub; None if nowhere.

    Raises ValueError if it cannot be read.
    """
    path = Path(name).expanduser()
    if not path.is_dir() and name.count("/") == 1:
        from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json")
        if not isinstance(file, str):
            # One attempt; the hub's client retries for half a minute.
            return (
                None if constants.HF_HUB_OFFLINE else _fetch_config(hf_hub_url(name, "config.json"))
            )
        path = Path(file).parent
    return (
        (read_model_config(path), str(path / "config.json"))
        if (path / "config.json").is_file()
        else None
    )


def _fetch_config(url: str) -> tuple[dict[str, Any], str] | None:
    import httpx
    from huggingface_hub import get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=HUB_TIMEOUT_SECONDS, follow_redirects=True)
        found = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return (found, url) if isinstance(found, dict) else None
