"""Flags of `vf-eval`. Imports nothing heavy."""

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Keys of an [[eval]] entry of a TOML file by the flag's name; `env_id` and `id` name the environment.
FROM_FILE = (
    "env",
    "model",
    "api_base_url",
    "api_key_var",
    "num_examples",
    "rollouts_per_example",
    "max_concurrent",
    "max_tokens",
    "temperature",
    "sampling_args",
    "env_args",
    "seed",
    "timeout",
    "max_retries",
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vf-eval",
        description="Evaluate a model behind an OpenAI-compatible server on an environment.",
        epilog="Exit code 1 when more rollouts failed than --fail-above allows.",
    )
    _add_task_options(parser.add_argument_group("what is evaluated").add_argument)
    _add_model_options(parser.add_argument_group("the model").add_argument)
    _add_sampling_options(parser.add_argument_group("sampling").add_argument)
    _add_result_options(parser.add_argument_group("results").add_argument)
    args = parser.parse_args(argv)
    args.sampling_args = with_template(
        flatten_extra_body(args.sampling_args), args.template_arguments
    )
    if args.env is None and args.compare is None:
        parser.error(
            "which environment? As in: vf-eval reverse-text -m MODEL -b http://localhost:8000/v1"
        )
    return args


def _add_task_options(add: Callable[..., Any]) -> None:
    add(
        "env",
        nargs="?",
        help="environment id, as in reverse-text; or a TOML file with [[eval]] entries",
    )
    add(
        "-a",
        "--env-args",
        type=json_object,
        default={},
        help="arguments of load_environment as JSON",
    )
    add(
        "-p",
        "--env-dir-path",
        default="environments",
        help="folder with environments that are not installed",
    )
    add(
        "-n",
        "--num-examples",
        type=parse_example_count,
        default=5,
        help="examples to evaluate, -1 for all (default 5)",
    )
    add(
        "-r",
        "--rollouts-per-example",
        type=parse_positive,
        default=3,
        help="rollouts of each (default 3)",
    )
    add("--seed", type=int, default=0, help="of the draws (default 0)")


def _add_model_options(add: Callable[..., Any]) -> None:
    add(
        "-m",
        "--model",
        default="default",
        help="model name, an alias of the endpoint registry; or a directory or hub id, loaded here",
    )
    add(
        "-b",
        "--api-base-url",
        help="server, as in http://localhost:8000/v1; unless given, the registry's, or one for this model alone",
    )
    add(
        "-k",
        "--api-key-var",
        default="OPENAI_API_KEY",
        help="environment variable that holds the API key; where unset, HONE_API_KEY for a server of Hone's",
    )
    add(
        "-e",
        "--endpoints-path",
        default="configs/endpoints.py",
        help="endpoint registry (.py or .toml) with ENDPOINTS",
    )
    add(
        "--chat-template",
        help="of a model that is loaded here: a file, the name of one of Hone's, or its text",
    )
    add(
        "--template-arguments",
        type=json_object,
        default={},
        help="arguments of the chat template as JSON",
    )
    add(
        "-c",
        "--max-concurrent",
        type=parse_positive,
        default=32,
        help="requests in flight (default 32)",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds until a request is given up (default 600)",
    )
    add(
        "--max-retries",
        type=int,
        default=0,
        help="further attempts at a rollout that failed (default 0)",
    )


def _add_sampling_options(add: Callable[..., Any]) -> None:
    add(
        "-t",
        "--max-tokens",
        type=parse_positive,
        default=1024,
        help="longest completion (default 1024)",
    )
    add(
        "-T",
        "--temperature",
        type=float,
        default=1.0,
        help="softmax temperature; 0 is greedy (default 1.0)",
    )
    add(
        "-S",
        "--sampling-args",
        type=json_object,
        default={},
        help="further request fields as JSON; they win",
    )


def _add_result_options(add: Callable[..., Any]) -> None:
    add(
        "-s",
        "--save-results",
        action="store_true",
        help="write results.jsonl and metadata.json under outputs/evals",
    )
    add(
        "-o",
        "--output-dir",
        type=Path,
        metavar="FOLDER",
        help="write them to this new folder; those of several evaluations to FOLDER/ENV",
    )
    add(
        "--resume",
        nargs="?",
        const="",
        help="go on with saved results: a folder, or the latest that was not finished",
    )
    add(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="compare two folders of results, paired by example",
    )
    add(
        "--token-ids",
        action="store_true",
        help="save the ids and logprobs of tokens too, where the server gives them",
    )
    add(
        "-H",
        "--html",
        nargs="?",
        const="",
        help="write the rollouts as an HTML page (default rollouts.html)",
    )
    add("-v", "--verbose", action="store_true", help="print every rollout")
    add(
        "--fail-above",
        type=float,
        default=0.1,
        help="share of failed rollouts that is an error (default 0.1)",
    )
    add(
        "--pass-at",
        type=float,
        default=1.0,
        help="reward from which a rollout counts as passed (default 1.0)",
    )
    add(
        "--price",
        type=float,
        nargs=2,
        metavar=("IN", "OUT"),
        help="dollars of a million tokens of prompt, completion",
    )


def list_evaluations(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the evaluations to run: one from the flags, or those of a TOML file.

    Keys of the file win over flags. Raises ValueError for a missing or invalid file and unknown
    keys.
    """
    if not args.env.endswith(".toml"):
        return [args]
    path = Path(args.env)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    common = {key: value for key, value in content.items() if key != "eval"}
    listed = content.get("eval") or []
    if not isinstance(listed, list):
        raise ValueError(f"{path}: evaluations are a list: write [[eval]], not [eval]")
    if not listed:
        raise ValueError(f"{path} has no [[eval]] entry")
    found = []
    for entry in listed:
        keys = common | entry
        keys["env"] = keys.pop("env_id", None) or keys.pop("id", None) or keys.get("env")
        _check_keys(path, keys)
        if "sampling_args" in keys:
            fields = flatten_extra_body(keys["sampling_args"])
            keys["sampling_args"] = with_template(fields, args.template_arguments)
        if args.output_dir is not None and len(listed) > 1:
            keys["output_dir"] = args.output_dir / keys["env"].replace("/", "--")
        found.append(argparse.Namespace(**vars(args) | keys))
    return found


def _check_keys(path: Path, keys: dict[str, Any]) -> None:
    """Raise ValueError for an unknown key or a wrong value of an [[eval]] entry."""
    for key in keys:
        if key not in FROM_FILE:
            import difflib

            near = difflib.get_close_matches(key, FROM_FILE, n=1)
            known = f"there are: env_id, {', '.join(FROM_FILE)}"
            raise ValueError(
                f"{path}: no key {key!r}; {f'did you mean {near[0]}?' if near else known}"
            )
    for key in ("num_examples", "rollouts_per_example", "max_concurrent", "max_tokens"):
        value = keys.get(key, 1)
        is_all = key == "num_examples" and value == -1
        if type(value) is not int or (value < 1 and not is_all):
            raise ValueError(f"{path}: {key} must be 1 or more, found {value!r}")
    if not keys["env"]:
        raise ValueError(f"{path}: an [[eval]] entry has no env_id")


def flatten_extra_body(given: dict[str, Any]) -> dict[str, Any]:
    """Return request fields with the entries of `extra_body` moved to the top level.

    OpenAI's client passes fields that are not in OpenAI's API as `extra_body`.
    """
    return {key: value for key, value in given.items() if key != "extra_body"} | (
        given.get("extra_body") or {}
    )


def with_template(fields: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return request fields with `arguments` added to the arguments of the chat template."""
    return (
        fields | {"chat_template_kwargs": {**fields.get("chat_template_kwargs", {}), **arguments}}
        if arguments
        else fields
    )


def parse_positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {text}")
    return value


def parse_example_count(text: str) -> int:
    return -1 if text == "-1" else parse_positive(text)


def json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is wanted, found {text}")
    return value
