"""`hone env`: create, install, list and check environments, and make SFT data and tiny models."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.evals.arguments import json_object, parse_positive


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    command: Callable[[argparse.Namespace], int] = args.work
    return command(args)


Add = Callable[..., Any]  # add_argument of a parser
LOADED = "environment id, as in reverse-text"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hone env", description="Make, install, list and check environments."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(
        name: str, work: Callable[[argparse.Namespace], int], words: str, takes: str = ""
    ) -> Add:
        one = commands.add_parser(name, help=words, description=words)
        one.set_defaults(work=work)
        if takes:
            one.add_argument("env", help=takes)
        return one.add_argument

    _describe_init(add_command)
    _describe_install(add_command)
    _describe_list(add_command)
    _describe_check(add_command)
    _describe_data(add_command)
    _describe_model(add_command)
    return parser.parse_args(argv)


def _add_loading_options(more: Add) -> None:
    more(
        "-a",
        "--env-args",
        type=json_object,
        default={},
        help="arguments of load_environment as JSON",
    )
    more(
        "-p",
        "--env-dir-path",
        default="environments",
        help="folder with environments that are not installed",
    )
    more("--seed", type=int, default=0, help="of the draws (default 0)")


def _describe_init(add_command: Callable[..., Add]) -> None:
    more = add_command(
        "init",
        _run_init,
        "Make a new environment: a package with a task that works, a test, a README.",
        "its name",
    )
    more(
        "-p",
        "--env-dir-path",
        default="environments",
        help="folder to make it in (default environments)",
    )


def _describe_install(add_command: Callable[..., Add]) -> None:
    more = add_command(
        "install",
        _run_install,
        "Install an environment, from a folder or the package index.",
        "folder or id",
    )
    more("-p", "--env-dir-path", default="environments", help="folder to look for it first")
    more(
        "--isolated",
        action="store_true",
        help="in a virtual environment of its own, for packages of verifiers",
    )
    more(
        "--with",
        dest="extra",
        action="append",
        default=[],
        help="a further requirement, as in verifiers==0.1.14",
    )


def _describe_list(add_command: Callable[..., Add]) -> None:
    add_command("list", _run_list, "List the environments that are installed here.")


def _describe_check(add_command: Callable[..., Add]) -> None:
    more = add_command(
        "check",
        _run_check,
        "Try an environment's rewards and say what would go wrong in training.",
        LOADED,
    )
    _add_loading_options(more)
    more(
        "-n", "--num-examples", type=parse_positive, default=16, help="examples to try (default 16)"
    )
    more(
        "-r",
        "--rollouts-per-example",
        type=parse_positive,
        default=8,
        help="rollouts of each with -m (default 8)",
    )
    more("-m", "--model", help="a served model, to see in how many groups rewards differ")
    more("-b", "--api-base-url", help="its server, as in http://localhost:8000/v1")
    more(
        "-t",
        "--max-tokens",
        type=parse_positive,
        default=128,
        help="longest completion (default 128)",
    )
    more(
        "--tokenizer",
        type=Path,
        help="model directory whose tokenizer counts the tokens of prompts",
    )
    more("--seq-len", type=parse_positive, help="most tokens that a prompt may have")


def _describe_data(add_command: Callable[..., Add]) -> None:
    more = add_command(
        "data",
        _run_data,
        "Write conversations for SFT from what the environment demonstrates.",
        LOADED,
    )
    _add_loading_options(more)
    more("-o", "--out", type=Path, required=True, help="JSONL file with a `messages` column")
    more(
        "-n",
        "--num-examples",
        type=parse_positive,
        default=1000,
        help="conversations (default 1000)",
    )


def _describe_model(add_command: Callable[..., Add]) -> None:
    more = add_command(
        "model",
        _run_model,
        "Write a tiny model without weights to try the environment with on a CPU.",
        LOADED,
    )
    _add_loading_options(more)
    more("-o", "--out", type=Path, required=True, help="its directory")
    more("--hidden", type=parse_positive, default=128, help="width, a multiple of 32 (default 128)")
    more("--layers", type=parse_positive, default=3, help="layers (default 3)")


def load_named(args: argparse.Namespace) -> Any:
    from hone.environments import load_environment
    from hone.environments.registry import add_folder

    add_folder(args.env_dir_path, args.env)
    return load_environment(args.env, **args.env_args)


def _run_init(args: argparse.Namespace) -> int:
    from hone.authoring.template import write_environment

    folder = write_environment(args.env, Path(args.env_dir_path))
    name = folder.name.replace("_", "-")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(
        f"next: hone env install {folder}, then hone env check {name}; {folder}/README.md has the rest"
    )
    return 0


def _run_install(args: argparse.Namespace) -> int:
    from hone.authoring.install import install_environment

    return install_environment(args.env, Path(args.env_dir_path), args.isolated, args.extra)


def _run_list(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from hone.environments.registry import described_environments

    table = Table(box=None, pad_edge=False)
    for heading in ("environment", "version", "protocol", "what it is"):
        table.add_column(heading)
    for row in described_environments():
        table.add_row(*row)
    Console(highlight=False).print(table if table.row_count else "no environment is installed here")
    return 0


def _run_check(args: argparse.Namespace) -> int:
    from hone.authoring.check import check_environment

    return check_environment(load_named(args), args)


def _run_data(args: argparse.Namespace) -> int:
    from hone.authoring.demonstrations import demonstrated_rows, write_rows

    rows = asyncio.run(demonstrated_rows(load_named(args), args.num_examples, args.seed))
    print(f"{write_rows(rows, args.out)} conversations in {args.out}")
    return 0


def _run_model(args: argparse.Namespace) -> int:
    from hone.authoring.demonstrations import demonstrated_rows
    from hone.authoring.tiny_model import spoken_text, write_model

    if args.hidden % 32:
        raise ValueError(f"--hidden must be a multiple of 32, found {args.hidden}")
    rows = list(asyncio.run(demonstrated_rows(load_named(args), 200, args.seed)))
    texts = [[spoken_text(message) for message in row["messages"]] for row in rows]
    count = write_model(args.out, texts, "tools" in rows[0], args.hidden, args.layers)
    print(
        f"{args.out}: {args.layers} layers of width {args.hidden}, a token a byte, and {count} phrases of one token"
    )
    print(
        f"it has no weights yet: sft --model.name {args.out} --model.random-init …", file=sys.stdout
    )
    return 0


def format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
