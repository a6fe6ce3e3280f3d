"""The flags of `vf-eval`. Imports nothing heavy."""

import argparse
from typing import Any


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vf-eval", description="Evaluate a model behind an OpenAI-compatible server on an environment."
    )
    add = parser.add_argument
    add("env", help="environment id, as in reverse-text")
    add("-m", "--model", default="default", help="model name, or an alias of the endpoint registry")
    add("-b", "--api-base-url", help="server, as in http://localhost:8000/v1")
    add(
        "-k",
        "--api-key-var",
        default="OPENAI_API_KEY",
        help="environment variable that holds the API key; may be unset",
    )
    add(
        "-e", "--endpoints-path", default="configs/endpoints.py", help="endpoint registry (.py or .toml) with ENDPOINTS"
    )
    add("-p", "--env-dir-path", default="environments", help="folder with environments that are not installed")
    add("-n", "--num-examples", type=positive, default=5, help="examples to evaluate (default 5)")
    add("-r", "--rollouts-per-example", type=positive, default=3, help="rollouts of each (default 3)")
    add("-c", "--max-concurrent", type=positive, default=32, help="requests in flight (default 32)")
    add("-t", "--max-tokens", type=positive, default=1024, help="longest completion (default 1024)")
    add("-T", "--temperature", type=float, default=1.0, help="softmax temperature; 0 is greedy (default 1.0)")
    add(
        "-S",
        "--sampling-args",
        type=json_object,
        default={},
        help="further request fields as JSON; they win over -t and -T",
    )
    add("-a", "--env-args", type=json_object, default={}, help="arguments of load_environment as JSON")
    add("-s", "--save-results", action="store_true", help="write results.jsonl and metadata.json under outputs/evals")
    add("-v", "--verbose", action="store_true", help="print every rollout")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--timeout", type=float, default=600.0, help="seconds until a request is given up (default 600)")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {text}")
    return value


def json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is wanted, found {text}")
    return value
