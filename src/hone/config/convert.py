"""Convert prime-rl's configuration files into Hone's: `hone convert FILE…`.

    file ─► keys of `rl` ─ environments, values that change ─ renamed keys ─► Hone's keys ─ validate ─► file
                     └─ each key: kept, renamed, changed, not needed, or lost ─► report

No key is dropped in silence. The exit code is EXIT_LOST if a key has no counterpart.
"""

import argparse
import copy
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from hone.config.base import Config, ConfigError, clear_none, find_sections, users_keys
from hone.config.help import format_toml
from hone.config.prime_rl_keys import RENAMED, find_counterpart

EXIT_LOST = 3
MISSING: Any = object()
COMPONENTS = ("trainer", "orchestrator", "inference")
Command = Literal["rl", "sft", "trainer", "orchestrator", "inference", "eval"]
# Keys by which a file's command is recognized, the most telling first.
MARKS: list[tuple[Command, tuple[str, ...]]] = [
    ("rl", ("orchestrator", "toml_files")),
    ("sft", ("data",)),
    ("rl", ("trainer", "inference")),
    ("orchestrator", ("batch_size", "train")),
    ("eval", ("select", "num_rollouts", "client", "source", "env")),
    ("orchestrator", ("rollouts_per_example", "group_size")),
    ("inference", ("vllm", "server", "parallel", "gpu_memory_utilization")),
    ("trainer", ("optim", "loss", "scheduler")),
]
TRAINED = ("model", "optim", "scheduler")  # sections of `sft` that `rl` has below trainer
# Files of three components often have these names.
FILE_NAMES: dict[str, Command] = {"train": "trainer", "orch": "orchestrator", "infer": "inference"}
PRIME_SEQ_LEN = 2048  # prime-rl's default
# Beginnings of keys that prime-rl has had since 2026.
SINCE_2026 = ("monitors.", "orchestrator.train.", "orchestrator.group_size", "orchestrator.algo")
ALL_EXAMPLES = 1_000_000  # in place of -1
WITHOUT_ARGS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}  # Hone's defaults
# Keys of a source of prime-rl, and of an environment's entry.
SOURCE_KEYS = {
    "group_size": "rollouts_per_example",
    "sampling.temperature": "temperature",
    "sampling.max_completion_tokens": "max_tokens",
}
MOST_GPUS = 1024  # in a file that is not a mistake
# Sections of files that must be tables.
SECTIONS = (*COMPONENTS, "model", "data", "optim", "ckpt", "log", "monitors")
KEPT_SECTIONS = ("orchestrator.buffer.",)  # whose keys Hone has in part
PENALTIES = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TOOL_CALLS = {"qwen3_coder": "qwen3_coder", "qwen3_xml": "qwen3_coder", "mistral": "mistral"}


@dataclass(frozen=True)
class Change:
    """What became of a key.

    Attributes:
        kind: what was done.
        key: the key as the file spells it.
        value: its value in the file.
        result: Hone's key and value as text; "" if there is none.
        why: reason, for people.
    """

    kind: Literal["kept", "renamed", "changed", "added", "not needed", "lost"]
    key: str
    value: Any = None
    result: str = ""
    why: str = ""


@dataclass
class Conversion:
    """Conversion of one file: `source` has the keys that are still to be converted."""

    source: dict[str, Any]
    command: Command = "rl"
    result: dict[str, Any] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def take(self, key: str) -> Any:
        """Remove and return the value of a dotted key, or MISSING; remove tables that it leaves empty."""
        value = self.source_value(key)
        names = key.split(".")
        for count in range(len(names) if value is not MISSING else 0, 0, -1):
            table = self.source
            for name in names[: count - 1]:
                table = table[name]
            if count < len(names) and table[names[count - 1]]:
                break
            del table[names[count - 1]]
        return value

    def source_value(self, key: str) -> Any:
        """Return the value of a dotted key that is still to be converted, or MISSING."""
        table: Any = self.source
        for part in key.split("."):
            table = table.get(part, MISSING) if isinstance(table, dict) else MISSING
        return table

    def put(self, key: str, value: Any) -> bool:
        """Set a dotted key of the result; return False if it has another value already."""
        *path, last = key.split(".")
        table = self.result
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                return False
        return bool(table.setdefault(last, value) == value)

    def table(self, key: str) -> dict[str, Any]:
        """Return a table that is still to be converted; an empty one if there is none."""
        found = self.source_value(key)
        return found if isinstance(found, dict) else {}

    def spell(self, key: str) -> str:
        """Return a key as the file spells it: without the component whose own file it is."""
        component = "trainer" if self.command == "sft" else self.command
        return key.removeprefix(f"{component}.")

    def note(self, kind: Any, key: str, value: Any, result: str = "", why: str = "") -> None:
        self.changes.append(Change(kind, self.spell(key), value, result, why))

    def change(self, old: str, value: Any, new: str, converted: Any, why: str = "") -> None:
        """Record and set a key whose value changes."""
        if self.put_or_lose(old, value, new, converted):
            self.note("changed", old, value, _spell(self.spell(new), converted), why)

    def rename(self, old: str, value: Any, new: str) -> None:
        """Record and set a key that has another name here."""
        if self.put_or_lose(old, value, new, value):
            self.note("renamed", old, value, self.spell(new))

    def put_or_lose(self, old: str, value: Any, new: str, converted: Any) -> bool:
        """Set key `new`; return False, and record `old` as lost, if it has another value already."""
        is_set = self.put(new, converted)
        if not is_set:
            self.lose(old, value, f"{self.spell(new)} has another value already")
        return is_set

    def lose(self, key: str, value: Any, why: str) -> None:
        self.note("lost", key, value, why=why)

    @property
    def lost(self) -> list[Change]:
        return [one for one in self.changes if one.kind == "lost"]


def convert_rl(conversion: Conversion) -> None:
    """Convert the keys of `rl`, or of one of its components."""
    _convert_environments(conversion)
    for step in (
        _convert_algorithm,
        _convert_selection,
        _convert_run,
        _convert_gpus,
        _convert_logs,
        _convert_lora,
        _convert_memory,
        _convert_optimizer,
        _convert_loss,
        _convert_sampler,
    ):
        step(conversion)
    _convert_rest(conversion)
    add_defaults(conversion)


def convert_sft(conversion: Conversion) -> None:
    """Convert the keys of `sft`, which has the trainer's keys at the top."""
    _convert_data(conversion)
    if isinstance(conversion.source.get("eval"), dict):
        _convert_evaluation(conversion, "eval")
    shared = {key: conversion.source.pop(key) for key in TRAINED if key in conversion.source}
    conversion.source["trainer"] = shared
    for step in (_convert_lora, _convert_memory, _convert_optimizer):
        step(conversion)
    conversion.source |= conversion.source.pop("trainer", {})
    conversion.result |= conversion.result.pop("trainer", {})
    for step in (_convert_run, _convert_logs, _convert_gpus):
        step(conversion)
    _convert_rest(conversion)


def add_defaults(conversion: Conversion) -> None:
    """Add keys that the file leaves out and whose defaults in prime-rl make another run."""
    result = conversion.result
    own = result.get("orchestrator", {})
    if "batch_size" in own or "env" in own:
        length = own.get("seq_len") or result.get("seq_len") or PRIME_SEQ_LEN
        evaluation = own.get("eval")
        for at in ("sampling", *(["eval"] if evaluation else [])):
            if "max_tokens" not in own.get(at, {}):
                key = f"orchestrator.{at}.max_tokens"
                conversion.put(key, length)
                why = "prime-rl samples up to seq_len"
                conversion.note("added", key, None, _spell(conversion.spell(key), length), why)
    is_of_2026 = any(one.key.startswith(SINCE_2026) for one in conversion.changes)
    has_loss = any(
        one.key.startswith("trainer.loss.type") for one in conversion.changes
    ) or "type" in result.get("trainer", {}).get("loss", {})
    if is_of_2026 and conversion.command == "rl" and not has_loss and "algorithm" not in result:
        key, why = "trainer.loss.type", "prime-rl's default since 2026"
        conversion.put(key, "dppo")
        conversion.note("added", key, None, _spell(key, "dppo"), why)


# ------------------------------------------------------------------------------------ environments


def _convert_environments(conversion: Conversion) -> None:
    entries: list[Any] = []
    new = conversion.spell("orchestrator.env")
    for key in (
        "environment",
        "orchestrator.environment",
        "orchestrator.env",
        "orchestrator.train.env",
        "orchestrator.train.source",
    ):
        found = conversion.take(key)
        if found is not MISSING:
            listed = found if isinstance(found, list) else [found]
            entries += [
                _convert_source(conversion, f"{key}[{i}]", one, f"{new}[{len(entries) + i}]")
                for i, one in enumerate(listed)
            ]
            kind = "kept" if key == "orchestrator.env" else "renamed"
            conversion.note(kind, key, None, "" if kind == "kept" else new)
    shares = conversion.take("orchestrator.env_mix.probabilities")
    if shares is not MISSING:
        key = "orchestrator.env_mix.probabilities"
        if isinstance(shares, list) and len(shares) == len(entries):
            for entry, share in zip(entries, shares, strict=True):
                entry["ratio"] = share
            conversion.note("changed", key, shares, f"{new}.ratio")
        else:
            conversion.lose(key, shares, "one number for each environment is wanted")
    if entries:
        conversion.put("orchestrator.env", entries)
    if conversion.table("orchestrator.eval"):
        _convert_evaluation(conversion, "orchestrator.eval")


def _convert_source(conversion: Conversion, place: str, source: Any, new: str) -> dict[str, Any]:
    """Return Hone's entry for an environment of any generation; report what changes in it.

    `place` and `new` are the entry's names in the file and in the result.
    """
    source = copy.deepcopy(source) if isinstance(source, dict) else {"id": source}
    entry: dict[str, Any] = {}
    env = _take_env_table(source)
    if env:
        taskset = _make_table(env.pop("taskset", {}))
        entry["id"] = str(taskset.pop("id", source.pop("id", "")))
        roles = {name: value for name, value in env.items() if not _is_default_role(value)}
        for name in sorted(env.keys() - roles.keys()):
            why = "harness null in a subprocess is the default"
            conversion.note("not needed", f"{place}.{name}", env[name], why=why)
        args = ({"taskset": taskset} if taskset else {}) | roles
        if args:
            entry["args"] = args
            why = "verifiers' [env] table"
            conversion.note("changed", f"{place}.env", None, f"{new}.args", why)
    else:
        entry["id"] = str(source.pop("id", ""))
        if isinstance(source.get("args"), dict):
            entry["args"] = source.pop("args")
    if isinstance(source.get("select"), dict) and "limit" in source["select"]:
        limit = entry.setdefault("args", {})["limit"] = source["select"].pop("limit")
        if not source["select"]:
            del source["select"]
        conversion.note("changed", f"{place}.select.limit", limit, f"{new}.args.limit")
    entry |= {name: source.pop(name) for name in ("name", "ratio") if name in source}
    if entry.get("name") == entry["id"]:
        del entry["name"]
    for key, value in list(_list_leaves(source)):
        if key:
            _convert_source_key(conversion, (place, key, value), entry, new)
    return entry


def _take_env_table(source: dict[str, Any]) -> dict[str, Any]:
    """Remove and return verifiers' [env] table of an entry, as it has been since August 2026."""
    if isinstance(source.get("env"), dict):
        env: dict[str, Any] = source.pop("env")
    else:  # before it had a table of its own
        names = ("taskset", "harness", "agent")
        env = {name: source.pop(name) for name in names if name in source}
    if "harness" in env:  # it was beside the taskset, with its runtime
        harness = _make_table(env.pop("harness"))
        runtime = harness.pop("runtime", None)
        agent = {"harness": harness} | ({} if runtime is None else {"runtime": runtime})
        env["agent"] = agent | _make_table(env.get("agent") or {})
    return env


def _make_table(value: Any) -> dict[str, Any]:
    """Return a table, also of one that is given by its id alone."""
    return dict(value) if isinstance(value, dict) else {"id": value}


def _is_default_role(value: Any) -> bool:
    return isinstance(value, dict) and all(
        WITHOUT_ARGS.get(name) == one for name, one in value.items()
    )


def _convert_source_key(
    conversion: Conversion, given: tuple[str, str, Any], entry: dict[str, Any], new: str
) -> None:
    """Convert another key of an environment's entry; `given` is the entry's name, key and value."""
    place, key, value = given
    old = f"{place}.{key}"
    is_trained = not place.startswith(("eval", "orchestrator.eval"))
    if key in SOURCE_KEYS and is_trained:
        entry[SOURCE_KEYS[key]] = value
        conversion.note("renamed", old, value, f"{new}.{SOURCE_KEYS[key]}")
    elif key.startswith("serve."):
        why = "an environment runs in one process, or in `workers` of them"
        conversion.note("not needed", old, value, why=why)
    elif key == "algo.type" and _name_algorithm(value):
        entry["algorithm"] = _name_algorithm(value)
        conversion.note("renamed", old, value, f"{new}.algorithm")
    elif key == "algo.type" and value == "grpo":
        conversion.note("not needed", old, value, why="it is the default")
    elif key.startswith("algo.teacher.") and _put_teacher(conversion, key, value):
        conversion.note("changed", old, value, "orchestrator.teacher")
    else:
        conversion.lose(old, value, "an environment's entry has no such key")


def _convert_evaluation(conversion: Conversion, at: str) -> None:
    """Convert the environments of an evaluation, and its keys that change."""
    entries = []
    for key in (f"{at}.env", f"{at}.source"):
        found = conversion.take(key)
        if found is MISSING:
            continue
        found = found if isinstance(found, list) else [found]
        for i, one in enumerate(found):
            entry = _make_table(one)
            _raise_keys(conversion, at, entry, is_single=len(found) == 1, place=f"{key}[{i}]")
            place = f"{key}[{i}]"
            entries.append(
                _convert_source(conversion, place, entry, conversion.spell(f"{at}.env[{i}]"))
            )
        kind = "kept" if key.endswith(".env") else "renamed"
        conversion.note(kind, key, None, "" if kind == "kept" else conversion.spell(f"{at}.env"))
    if entries:
        conversion.put(f"{at}.env", entries)
    if (skips := conversion.take(f"{at}.skip_first_step")) is not MISSING:
        conversion.change(f"{at}.skip_first_step", skips, f"{at}.at_start", not skips)
    count = conversion.take(f"{at}.num_examples")
    if isinstance(count, int) and count < 0:
        conversion.change(f"{at}.num_examples", count, f"{at}.num_examples", ALL_EXAMPLES, "all")
    elif count is not MISSING:
        conversion.put(f"{at}.num_examples", count)
        conversion.note("kept", f"{at}.num_examples", count)
    for old, new in (
        ("group_size", "rollouts_per_example"),
        ("sampling.temperature", "temperature"),
        ("sampling.max_tokens", "max_tokens"),
        ("sampling.max_completion_tokens", "max_tokens"),
    ):
        if (value := conversion.take(f"{at}.{old}")) is not MISSING:
            conversion.rename(f"{at}.{old}", value, f"{at}.{new}")


def _raise_keys(
    conversion: Conversion, at: str, entry: dict[str, Any], is_single: bool, place: str
) -> None:
    """Move what only all environments have in Hone from a single entry to the evaluation."""
    names = {
        "num_examples": "num_examples",
        "rollouts_per_example": "rollouts_per_example",
        "group_size": "rollouts_per_example",
        "interval": "interval",
    }
    for old, new in names.items():
        if is_single and old in entry:
            value = entry.pop(old)
            conversion.change(f"{place}.{old}", value, f"{at}.{new}", value)


# ------------------------------------------------------------------------------- algorithm, selection


def _name_algorithm(kind: str) -> str | None:
    """Return Hone's name of an algorithm that is not its default."""
    return kind if kind in ("max_rl", "opd", "sft") else None


def _put_teacher(conversion: Conversion, key: str, value: Any) -> bool:
    name = {"name": "model", "base_url": "base_url"}.get(key.rpartition(".")[2])
    return name is not None and conversion.put(f"orchestrator.teacher.{name}", value)


def _convert_algorithm(conversion: Conversion) -> None:
    mode = conversion.take("orchestrator.training_mode")
    if mode is not MISSING:
        if _name_algorithm(mode):
            conversion.change("orchestrator.training_mode", mode, "algorithm", mode)
        elif mode != "rl":
            conversion.lose("orchestrator.training_mode", mode, "this mode is not here")
        else:
            conversion.note(
                "not needed", "orchestrator.training_mode", mode, why="it is the default"
            )
    for at in ("orchestrator.algo", "orchestrator.train.algo"):
        kind = conversion.take(f"{at}.type")
        if kind == "grpo":
            why = "rewards minus the mean of their group are the default"
            conversion.note("not needed", f"{at}.type", kind, why=why)
        elif kind is not MISSING and _name_algorithm(kind):
            conversion.change(f"{at}.type", kind, "algorithm", kind)
        elif kind is not MISSING:
            conversion.lose(
                f"{at}.type", kind, "this algorithm is not here; see docs/algorithms.md"
            )
        _convert_teacher(conversion, f"{at}.teacher", {"name": "model", "base_url": "base_url"})
    names = {"model.name": "model", "client.base_url": "base_url"}
    _convert_teacher(conversion, "orchestrator.teacher", names)
    advantage = conversion.take("orchestrator.advantage")
    if isinstance(advantage, dict) and advantage.keys() <= {"length_weighted_mean"}:
        weighted = advantage.get("length_weighted_mean", False)
        kind = "length_corrected" if weighted else "mean"
        conversion.change("orchestrator.advantage", advantage, "orchestrator.advantage", kind)
    elif isinstance(advantage, dict):
        why = "docs/algorithms.md lists advantages, and how to write one"
        conversion.lose("orchestrator.advantage", advantage, why)
    elif advantage is not MISSING:
        conversion.put("orchestrator.advantage", advantage)
        conversion.note("kept", "orchestrator.advantage", advantage)


def _convert_teacher(conversion: Conversion, at: str, names: dict[str, str]) -> None:
    for old, new in names.items():
        if (value := conversion.take(f"{at}.{old}")) is not MISSING:
            conversion.change(f"{at}.{old}", value, f"orchestrator.teacher.{new}", value)


def _convert_selection(conversion: Conversion) -> None:
    masked = conversion.take("orchestrator.mask_truncated_completions")
    if masked is not MISSING:
        key = "orchestrator.mask_truncated_completions"
        conversion.change(key, masked, "orchestrator.truncated", "mask" if masked else "keep")
    key = "orchestrator.mask_env_responses"
    if (masked := conversion.take(key)) is not MISSING:
        why = "only sampled tokens have a loss"
        conversion.note("lost" if masked is False else "not needed", key, masked, why=why)
    body = conversion.source_value("orchestrator.train.sampling.extra_body")
    for name, value in list(body.items()) if isinstance(body, dict) else []:
        old = f"orchestrator.train.sampling.extra_body.{name}"
        if name in PENALTIES:
            conversion.take(old)
            value_here = 0 if (name, value) == ("top_k", -1) else value
            conversion.change(old, value, f"orchestrator.sampling.{name}", value_here)
    held_out = conversion.take("orchestrator.val")
    if isinstance(held_out, dict):
        envs = copy.deepcopy(conversion.result.get("orchestrator", {}).get("env", []))
        keys = {key: held_out[key] for key in ("interval", "num_examples") if key in held_out}
        keys["rollouts_per_example"] = held_out.get("rollouts_per_example", 1)
        for env in envs:
            env.pop("ratio", None)
        why = "held-out examples of the same environments"
        conversion.change(
            "orchestrator.val", held_out, "orchestrator.eval", keys | {"env": envs}, why
        )


# ---------------------------------------------------------------------------------- run, GPUs, logs


def _convert_run(conversion: Conversion) -> None:
    name, directory = conversion.take("run.name"), conversion.take("run.dir")
    if name is not MISSING or directory is not MISSING:
        base = conversion.take("output_dir")
        parts = ["outputs" if base is MISSING else base]
        parts.append(name if directory in (MISSING, None) else directory)
        path = str(Path(*map(str, parts)))
        given = {"output_dir": base, "run.name": name, "run.dir": directory}
        for key, value in given.items():
            if value is not MISSING:
                conversion.change(key, value, "output_dir", path)
    place = conversion.result.get("output_dir") or conversion.source.get("output_dir", "outputs")
    for key in ("resume.step", "ckpt.resume_step"):
        if (step := conversion.take(key)) is not MISSING:
            newest: bool | str = step == -1 or f"{place}/checkpoints/step_{step}"
            conversion.change(key, step, "resume", newest)
    if (checkpoint := conversion.take("resume.dir")) is not MISSING:
        conversion.change("resume.dir", checkpoint, "resume", checkpoint)
    if conversion.source.get("resume") == {}:
        conversion.change("resume", conversion.take("resume"), "resume", True)


def _convert_gpus(conversion: Conversion) -> None:
    if conversion.table("deployment").get("type", "single_node") != "single_node":
        return  # reported as lost, with what to do instead
    if (kind := conversion.take("deployment.type")) is not MISSING:
        conversion.note("not needed", "deployment.type", kind, why="it is the default")
    first = 0
    for name, new in (("infer", "inference_gpu_ids"), ("train", "trainer_gpu_ids")):
        old = f"deployment.num_{name}_gpus"
        count = conversion.source_value(old)
        number = count if isinstance(count, int) and 0 < count < MOST_GPUS else 1
        if count == number:
            conversion.take(old)
            if conversion.command == "sft":
                _report_sft_gpus(conversion, old, number)
            else:
                conversion.change(old, count, new, list(range(first, first + number)))
        first += number


def _report_sft_gpus(conversion: Conversion, old: str, count: int) -> None:
    if "infer" in old:
        conversion.note("not needed", old, count, why="the trainer evaluates by itself")
    elif count == 1:
        conversion.note("not needed", old, count, why="it is the default")
    else:
        conversion.lose(old, count, f"torchrun --nproc-per-node {count} -m hone sft @ FILE")


def _convert_logs(conversion: Conversion) -> None:
    as_json = conversion.take("log.json_logging")
    if as_json is not MISSING:
        conversion.change("log.json_logging", as_json, "log_format", "json" if as_json else "text")
    for component in ("trainer", "orchestrator"):
        level = conversion.take(f"{component}.log.level")
        if level is not MISSING:
            conversion.change(f"{component}.log.level", level, "log_level", level)
        if (rest := conversion.take(f"{component}.log")) is not MISSING:
            why = "log_level and log_format are of all components"
            conversion.note("not needed", f"{component}.log", rest, why=why)


# ------------------------------------------------------------------------------------------ trainer


def _convert_lora(conversion: Conversion) -> None:
    lora = conversion.take("trainer.model.experimental.lora")
    if isinstance(lora, dict):
        conversion.source.setdefault("trainer", {}).setdefault("model", {})["lora"] = lora
        old, new = (conversion.spell(f"trainer.{at}") for at in ("model.experimental.lora", "lora"))
        conversion.changes.append(Change("changed", old, None, new, "the section has moved"))
    saved = conversion.source_value("trainer.model.lora.modules_to_save")
    if isinstance(saved, list) and all(isinstance(name, str) for name in saved):  # patterns
        names = [name.rstrip("$") for name in saved]
        layers = ["input_layernorm", "post_attention_layernorm"]
        whole = [one for name in names for one in (layers if name == "layernorm" else [name])]
        old = "trainer.model.lora.modules_to_save"
        conversion.take(old)
        conversion.change(old, saved, "trainer.lora.modules_to_save", whole)


def _convert_memory(conversion: Conversion) -> None:
    kept = conversion.take("trainer.model.ac")
    if kept is not MISSING:
        is_on = kept not in (None, "None", False)
        conversion.change("trainer.model.ac", kept, "trainer.activation_checkpointing", is_on)
    for name in ("fsdp_cpu_offload", "optim_cpu_offload"):
        away = conversion.take(f"trainer.model.{name}")
        if away is not MISSING:
            conversion.change(f"trainer.model.{name}", away, "trainer.optim.offload", bool(away))
    tokens = conversion.take("trainer.model.seq_len")
    if tokens is not MISSING:
        key = "trainer.micro_batch_tokens"
        conversion.change("trainer.model.seq_len", tokens, key, tokens, "tokens that are packed")
    for name, key in (("cp", "context_parallel"), ("ep", "expert_parallel"), ("dp_replicate", "")):
        ranks = conversion.source_value(f"trainer.model.{name}")
        if ranks in (0, 1, False, "auto"):
            conversion.take(f"trainer.model.{name}")
            conversion.note("not needed", f"trainer.model.{name}", ranks, why="it is the default")
        elif key and ranks is not MISSING:
            conversion.take(f"trainer.model.{name}")
            why = "experts are divided among all trainer processes" if name == "ep" else ""
            value = True if name == "ep" else ranks
            conversion.change(f"trainer.model.{name}", ranks, f"trainer.{key}", value, why)
    for at in ("trainer.model", "model", "orchestrator.model", "inference.model", "inference.vllm"):
        trusts = conversion.take(f"{at}.trust_remote_code")
        if trusts is True:
            why = "code of models is not run; transformers' own classes are used"
            conversion.lose(f"{at}.trust_remote_code", trusts, why)
        elif trusts is not MISSING:
            conversion.note("not needed", f"{at}.trust_remote_code", trusts, why="it is never run")


def _convert_optimizer(conversion: Conversion) -> None:
    keys = [f"trainer.optim.betas{i}" for i in (1, 2)]
    betas = [conversion.take(key) for key in keys]
    whole = [
        default if beta is MISSING else beta
        for beta, default in zip(betas, (0.9, 0.999), strict=True)
    ]
    for key, beta in zip(keys, betas, strict=True):
        if beta is not MISSING:
            conversion.change(key, beta, "trainer.optim.betas", whole)
    decay = conversion.take("trainer.scheduler.decay_steps")
    if decay is not MISSING:
        lengths = (conversion.source_value(key) for key in ("max_steps", "trainer.max_steps"))
        steps = next((one for one in lengths if isinstance(one, int) and one > 0), 0)
        if steps and isinstance(decay, int):
            kind = conversion.take("trainer.scheduler.type")
            conversion.change("trainer.scheduler.type", kind, "trainer.scheduler.type", "wsd")
            key = "trainer.scheduler.decay_fraction"
            share = min(1.0, round(decay / steps, 6))
            why = "type wsd: constant, then falling over the last steps"
            conversion.change("trainer.scheduler.decay_steps", decay, key, share, why)
        else:
            why = "decay_fraction is a share of max_steps, which the file does not have"
            conversion.lose("trainer.scheduler.decay_steps", decay, why)


def _convert_loss(conversion: Conversion) -> None:
    loss = conversion.table("trainer.loss")
    if not loss:
        return
    at = "trainer.loss"
    kind = conversion.take(f"{at}.type")
    low, high = (conversion.take(f"{at}.dppo_mask_{end}") for end in ("low", "high"))
    if kind == "default" or low is not MISSING or high is not MISSING:
        conversion.change(f"{at}.type", kind, f"{at}.type", "dppo")
        if high is not MISSING:
            conversion.change(f"{at}.dppo_mask_high", high, f"{at}.max_shift", high)
        if low is not MISSING and low == high:
            conversion.note("not needed", f"{at}.dppo_mask_low", low, why="max_shift says it")
        elif low is not MISSING:
            conversion.lose(f"{at}.dppo_mask_low", low, "max_shift is of both directions")
    elif kind == "custom":
        path = str(conversion.take(f"{at}.import_path"))
        module, _, name = path.rpartition(".")
        why = "Hone's functions have other arguments: docs/algorithms.md"
        conversion.change(f"{at}.import_path", path, f"{at}.type", f"{module}:{name}", why)
        if (args := conversion.take(f"{at}.kwargs")) is not MISSING:
            conversion.change(f"{at}.kwargs", args, f"{at}.args", args)
    elif kind is not MISSING:
        for key, value in [("type", kind), *loss.items()]:
            conversion.lose(
                f"{at}.{key}", value, f"there is no loss {kind}; see docs/algorithms.md"
            )
        loss.clear()
    neutral = {"adv_tau": 1.0, "sequence_mask_ratio_low": 0.0, "kl_mask_type": "all"}
    for key, default in neutral.items():
        value = conversion.take(f"{at}.{key}")
        if value is not MISSING and value == default:
            conversion.note("not needed", f"{at}.{key}", value, why="it is what Hone does")
        elif value is not MISSING:
            conversion.lose(
                f"{at}.{key}", value, f"losses have no such key; Hone's is as with {default}"
            )


# ---------------------------------------------------------------------------------- sampler and data


def _convert_sampler(conversion: Conversion) -> None:
    for at in ("inference.vllm", "inference.model"):
        parser = conversion.take(f"{at}.tool_call_parser")
        if parser is not MISSING:
            name = TOOL_CALLS.get(str(parser), "auto" if parser in (None, "auto") else str(parser))
            conversion.change(f"{at}.tool_call_parser", parser, "model.tool_calls", name)
        if (reasoning := conversion.take(f"{at}.reasoning_parser")) is not MISSING:
            why = "the text is passed on as it was sampled"
            conversion.note("not needed", f"{at}.reasoning_parser", reasoning, why=why)
        for key in list(conversion.table(at)):
            old = f"{at}.{key}"
            if find_counterpart(old) in (None, find_counterpart("inference.vllm")):
                value = conversion.take(old)
                why = "with inference.backend = vllm"
                conversion.change(old, value, f"inference.vllm_args.{key}", value, why)
    for at in ("weight_broadcast", "trainer.weight_broadcast", "orchestrator.weight_broadcast"):
        if conversion.source_value(f"{at}.type") == "nixl":
            conversion.take(f"{at}.type")
            conversion.change(f"{at}.type", "nixl", "weight_broadcast.type", "nccl")


def _convert_data(conversion: Conversion) -> None:
    kind = conversion.take("data.type")
    if kind == "fake":
        conversion.change("data.type", kind, "data.fake", True)
        for key in ("length", "input_ids"):
            if (value := conversion.take(f"data.{key}")) is not MISSING:
                conversion.note(
                    "not needed", f"data.{key}", value, why="lengths vary, ids are random"
                )
    elif kind is not MISSING:
        conversion.note("not needed", "data.type", kind, why="it is the default")
    if isinstance(conversion.source_value("data.fake"), dict):
        conversion.change("data.fake", conversion.take("data.fake"), "data.fake", True)
    roles = conversion.take("data.loss_mask")
    if isinstance(roles, dict):
        trained = [role for role, is_on in ({"assistant": True} | roles).items() if is_on]
        conversion.change("data.loss_mask", roles, "data.train_on", trained)
    splits = conversion.take("data.splits")
    if splits not in (MISSING, None):
        if isinstance(splits, list) and splits and splits.count(splits[0]) == len(splits):
            conversion.change("data.splits", splits, "data.split", splits[0])
        else:
            conversion.lose("data.splits", splits, "all data sets have one split")
    if conversion.take("inference") is not MISSING:
        conversion.note("not needed", "inference", None, why="the trainer evaluates by itself")


# ------------------------------------------------------------------------------------ all other keys


def _convert_rest(conversion: Conversion) -> None:
    """Rename, keep or report each key that is left; keys that Hone does not know are lost."""
    is_sft = conversion.command == "sft"
    cls = _config_class("sft" if is_sft else "rl")
    for key, value in list(_list_leaves(conversion.source)):
        short = _without_component(key)
        found = find_counterpart(key) or (find_counterpart(short) if short != key else None)
        is_here = _is_known(cls, key)
        if is_sft and found is None and not is_here and key.partition(".")[0] in TRAINED:
            found = find_counterpart(f"trainer.{key}")
        if found is not None and found.is_lost and is_here and key.startswith(KEPT_SECTIONS):
            found = None
        if found is not None and not found.key:
            conversion.note("lost" if found.is_lost else "not needed", key, value, why=found.why)
        elif found is not None and found.key not in RENAMED.values():
            conversion.lose(key, value, f"its value cannot be converted to {found.key}")
        elif found is not None:
            new = found.key.removeprefix("trainer.") if is_sft else found.key
            conversion.rename(key, value, new)
        elif is_here or _is_known(cls, short):
            if conversion.put_or_lose(key, value, key if is_here else short, value):
                conversion.note("kept", key, value)
        else:
            conversion.lose(key, value, "neither Hone nor this conversion knows it")


def _without_component(key: str) -> str:
    component, _, rest = key.partition(".")
    return rest if component in COMPONENTS and rest else key


def _is_known(cls: type[Config], key: str) -> bool:
    """Return True if a configuration has a key."""
    names = key.split(".")
    free = users_keys(cls)
    for i, name in enumerate(names):
        sections = find_sections(cls, names[:i])
        if not any(name in section.model_fields for section in sections):
            return False
        if name in free:
            return True
    return True


def _list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all values that are no tables, and of empty tables."""
    if isinstance(value, dict) and (value or not path):
        for key, one in value.items():
            yield from _list_leaves(one, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _spell(key: str, value: Any) -> str:
    return f"{key} = {json.dumps(value, default=str)}"


# ------------------------------------------------------------------------------------ files, command


def _config_class(command: str) -> type[Config]:
    from hone.config.command_table import COMMANDS, import_object

    found: type[Config] = import_object(COMMANDS[command][0])
    return found


def find_command(values: dict[str, Any], stem: str) -> Command:
    """Return the command that a file is of, by its keys, else by its name without its ending.

    Raises ConfigError if neither tells it.
    """
    for command, marks in MARKS:
        if any(mark in values for mark in marks):
            return command
    if stem in FILE_NAMES:
        return FILE_NAMES[stem]
    raise ConfigError(
        f"its keys do not tell its command; name it: --command {'|'.join(get_args(Command))}"
    )


def convert_file(values: dict[str, Any], command: Command) -> Conversion:
    """Convert the values of a file of `rl`, of one of its components, or of `sft`."""
    given = values
    values = clear_none(copy.deepcopy(values))
    for name in SECTIONS:
        if name in values and not isinstance(values[name], dict | None):
            raise ConfigError(f"{name}: a table is wanted, found {values[name]!r}")
    if command in COMPONENTS:
        conversion = Conversion({command: values}, command)
        convert_rl(conversion)
        own = conversion.result.pop(command, {})
        conversion.result = conversion.result | own
    else:
        conversion = Conversion(values, command)
        (convert_sft if command == "sft" else convert_rl)(conversion)
    _report_forgotten(conversion, given)
    _drop_invalid(conversion, command)
    return conversion


def _report_forgotten(conversion: Conversion, given: dict[str, Any]) -> None:
    """Report keys as lost that no step has reported, such as a number in place of a table."""
    named = {one.key for one in conversion.changes}
    for key, value in _list_leaves(given):
        parts = key.split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        if not (prefixes & named or any(one.startswith(f"{key}[") for one in named)):
            conversion.changes.append(Change("lost", key, value, why="it cannot be converted"))


def _drop_invalid(conversion: Conversion, command: Command) -> None:
    """Remove values that Hone does not accept, and report them as lost."""
    cls = _config_class(command)
    for _ in range(50):
        values = copy.deepcopy(conversion.result)
        try:
            cls.model_validate(cls.prepare_values(values, {}, set()))
            return
        except ConfigError as error:
            conversion.lose("", None, str(error))
            return
        except ValidationError as error:
            wrong = [item for item in error.errors(include_url=False) if item["type"] != "missing"]
            removed = [_remove(conversion.result, list(item["loc"])) for item in wrong]
            for item, (key, value) in zip(wrong, removed, strict=True):
                if key:
                    conversion.lose(key, value, str(item["msg"]).removeprefix("Value error, "))
            if not any(key for key, _ in removed):
                for item in wrong:
                    conversion.lose(".".join(map(str, item["loc"])), None, str(item["msg"]))
                return


def _remove(table: Any, path: list[Any]) -> tuple[str, Any]:
    """Remove the deepest value that a validation error names; return its key and value, or ("", None).

    A list without tables goes as a whole. A table stays: its keys contradict each other, and no one
    of them is wrong.
    """
    found: tuple[str, dict[str, Any], str] | None = None  # name, and where it is
    name = ""
    for part in path:
        if isinstance(table, dict) and part in table:
            name = f"{name}.{part}" if name else str(part)
            found = name, table, part
            table = table[part]
        elif isinstance(table, list) and isinstance(part, int) and part < len(table):
            name += f"[{part}]"
            table = table[part]
    if found is None or isinstance(table, dict):
        return "", None
    name, owner, key = found
    return name, owner.pop(key)


# Keys of an evaluation's file, or of one of its sources, and the options of vf-eval.
EVALUATION_FLAGS = {
    "model": "-m",
    "model.name": "-m",
    "client.base_url": "-b",
    "client.api_key_var": "-k",
    "num_examples": "-n",
    "select.limit": "-n",
    "num_rollouts": "-r",
    "group_size": "-r",
    "rollouts_per_example": "-r",
    "max_concurrent": "-c",
    "sampling.max_tokens": "-t",
    "sampling.max_completion_tokens": "-t",
    "sampling.temperature": "-T",
    "output_dir": "-o",
    "verbose": "-v",
}


def convert_evaluation(values: dict[str, Any]) -> tuple[list[list[str]], list[Change]]:
    """Return the words of `vf-eval` for each source of an evaluation's file, and what became of its keys."""
    conversion = Conversion(copy.deepcopy(values), "eval")
    env = conversion.take("env")
    key = "env"
    if env is MISSING:
        env, key = conversion.take("source"), "source"
    shared = _take_flags(conversion, conversion)
    commands = []
    listed = env if isinstance(env, list) else [env]
    for i, one in enumerate(listed):
        place = f"{key}[{i}]" if len(listed) > 1 else key
        if isinstance(one, dict):  # a source has the table below its key env
            source = one if "env" in one or "id" in one else {"env": one}
        else:
            source = {} if one is MISSING else {"id": one}
        alone = Conversion(copy.deepcopy(source), "eval")
        flags = shared | _take_flags(conversion, alone, f"{place}.")
        entry = _convert_source(conversion, place, alone.source, "-a")
        if not entry["id"] or entry["id"].startswith(("[", "{")):
            raise ConfigError("an evaluation needs [env] with a taskset or an id")
        for name in entry.keys() & {"name", "ratio"}:
            why = "each evaluation has its own results"
            conversion.note("not needed", f"{place}.{name}", entry[name], why=why)
        if entry.get("args"):
            flags["-a"] = json.dumps(entry["args"])
        pairs = [[flag] if value is True else [flag, str(value)] for flag, value in flags.items()]
        commands.append(["vf-eval", entry["id"], *(word for pair in pairs for word in pair)])
    for key, value in list(_list_leaves(conversion.source)):
        if key in ("push", "rich") and value is False:
            conversion.note("not needed", key, value, why="results stay here")
        else:
            conversion.lose(key, value, "vf-eval has no such option")
    return commands, conversion.changes


def _take_flags(conversion: Conversion, source: Conversion, place: str = "") -> dict[str, Any]:
    """Remove the keys that are options of `vf-eval`; return the options' values, and report the keys."""
    flags: dict[str, Any] = {}
    for key, flag in EVALUATION_FLAGS.items():
        if isinstance(source.source_value(key), dict):
            continue
        value = source.take(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is MISSING:
            continue
        if flag in flags:
            conversion.lose(f"{place}{key}", value, f"{flag} has another value already")
            continue
        if flag != "-v" or value is True:
            flags[flag] = value
        conversion.note("changed", f"{place}{key}", value, f"{flag} {value}")
    return flags


def print_report(file: str, command: str, changes: list[Change], stream: Any) -> None:
    """Print what became of each key, those that are lost last."""
    print(f"# {file}: a file of {command}", file=stream)
    for kind in ("renamed", "changed", "added", "not needed", "lost"):
        for one in (one for one in changes if one.kind == kind):
            value = (
                ""
                if one.value is None or one.value is MISSING
                else f" = {json.dumps(one.value, default=str)}"
            )
            result = f" -> {one.result}" if one.result else ""
            if kind == "added":
                result = result.removeprefix(f" -> {one.key}")
            why = f" ({one.why})" if one.why else ""
            print(
                f"#   {kind.upper() if kind == 'lost' else kind:<10} {one.key}{value}{result}{why}",
                file=stream,
            )
    kept = list(dict.fromkeys(one.key for one in changes if one.kind == "kept"))
    if kept:
        print(f"#   kept       {', '.join(kept)}", file=stream)


def _write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; give another directory: -o DIR") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hone convert",
        description="Convert prime-rl's configuration files, late 2025 to 2026, into Hone's.",
        epilog=f"Exit code {EXIT_LOST}: a key has no counterpart, and is listed as LOST.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a TOML file")
    parser.add_argument(
        "--command", choices=get_args(Command), help="the command that the files are of"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="directory of the new files; without it they are printed"
    )
    args = parser.parse_args(argv)
    is_whole = True
    for file in args.files:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from None
        try:
            command: Command = args.command or find_command(values, file.stem)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        if command == "eval":
            commands, changes = convert_evaluation(values)
            text = "".join(f"{shlex.join(words)}\n" for words in commands)
        else:
            conversion = convert_file(values, command)
            changes, text = conversion.changes, format_toml(conversion.result)
        print_report(str(file), command, changes, sys.stderr)
        is_whole &= not any(one.kind == "lost" for one in changes)
        if args.output is None:
            print(text, end="")
        else:
            suffix = ".sh" if command == "eval" else ".toml"
            _write_new(args.output / file.with_suffix(suffix).name, text)
    return 0 if is_whole else EXIT_LOST
