"""`vf-eval`: evaluate a served model on an environment, with standard errors.

    examples x rollouts ─► env.rollout(HttpClient) ─► rewards, metrics ─► printed; with -s, rollouts
    saved as they finish

Exits with 1 when too many rollouts failed (--fail-above).
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hone.clients.http import HttpClient
from hone.config.secrets import redact_secrets
from hone.environments import Environment
from hone.environments.registry import add_folder, load_environment
from hone.environments.rollout_rows import row_of
from hone.evals.arguments import list_evaluations, parse_arguments
from hone.evals.endpoints import Endpoint
from hone.evals.eval_progress import Progress
from hone.evals.held_out import RolloutPlan, attempt_rollouts
from hone.evals.own_server import endpoint_for
from hone.evals.paired_statistics import SIGMAS, clustered_error, pass_at_k
from hone.evals.results import Folder, find_unfinished
from hone.records import Example, Rollout, Sampling
from hone.text.messages import show_message, show_role
from hone.text.printable import make_line, make_printable

MAX_LEADING_FAILURES = 16  # failures before any success after which the rest is skipped


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.compare is not None:
        from hone.evals.compare import compare_results

        return compare_results(*map(Path, args.compare))
    wanted = list_evaluations(args)
    found = []
    failed = []
    for entry in wanted:
        try:
            found.append(run_evaluation(entry))
        except (ValueError, ConnectionError) as error:
            if len(wanted) == 1:
                raise
            failed.append(entry.env)
            print(f"vf-eval: error: {entry.env}: {error}", file=sys.stderr)
    if len(found) > 1:
        print_overview(found)
    if failed:
        print(
            f"vf-eval: error: {len(failed)} of {len(wanted)} evaluations failed: {', '.join(failed)}",
            file=sys.stderr,
        )
    return int(
        bool(failed)
        or any(
            settings["failed"] > settings["fail_above"] * settings["rollouts"] for settings in found
        )
    )


def run_evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Run one evaluation, print and save its results, and return their metadata."""
    with endpoint_for(
        args.model, args.api_base_url, args.api_key_var, args.endpoints_path, args.chat_template
    ) as await_endpoint:
        return _run_evaluation(args, await_endpoint)


def _run_evaluation(
    args: argparse.Namespace, await_endpoint: Callable[[], Endpoint]
) -> dict[str, Any]:
    add_folder(args.env_dir_path, args.env)
    environment = load_environment(args.env, **args.env_args)
    examples = environment.get_eval_dataset(args.num_examples)
    if not examples:
        raise ValueError(f"{args.env} has no examples to evaluate on")
    endpoint = await_endpoint()
    settings: dict[str, Any] = {
        "env": args.env,
        "env_args": redact_secrets(args.env_args),
        "model": endpoint.model,
        "base_url": "own server" if endpoint.is_own else endpoint.base_url,
        "num_examples": len(examples),
        "rollouts_per_example": args.rollouts_per_example,
        "temperature": args.sampling_args.get("temperature", args.temperature),
        "max_tokens": args.sampling_args.get("max_tokens", args.max_tokens),
        "sampling_args": redact_secrets(args.sampling_args),
        "seed": args.seed,
    }
    folder, known = choose_folder(args, settings)
    progress = Progress(args.env, len(examples) * args.rollouts_per_example, folder)
    start = time.perf_counter()
    try:
        with progress:
            rollouts, used = asyncio.run(
                collect_rollouts(environment, examples, endpoint, args, known, progress)
            )
    except KeyboardInterrupt:
        hint = "nothing of it is kept: -s saves rollouts as they come, and --resume continues"
        if folder is not None:
            hint = f"what is done is in {folder.path}; to continue: --resume {folder.path}"
        print(hint, file=sys.stderr)
        raise
    settings["seconds"] = round(time.perf_counter() - start, 2)
    settings |= summarize_rollouts(rollouts, args.rollouts_per_example, args.pass_at) | used
    if args.price and used["prompt_tokens"]:
        counts = used["prompt_tokens"], used["completion_tokens"]
        dollars = sum(n * price for n, price in zip(counts, args.price, strict=True)) / 1e6
        settings["dollars"] = round(dollars, 6)
    _save_results(args, settings, rollouts, folder)
    if settings["failed"] == len(rollouts):
        first = next(r.error for r in rollouts if r.error)
        raise ValueError(f"every rollout failed; the first said: {first}")
    return settings | {"fail_above": args.fail_above}


def _save_results(
    args: argparse.Namespace,
    settings: dict[str, Any],
    rollouts: list[Rollout],
    folder: Folder | None,
) -> None:
    """Print the results; write the result folder and the HTML page if they are requested."""
    if folder is not None:
        folder.rewrite_rollouts(rollouts)
        folder.write_about(settings)
    print_results(settings, rollouts, args.verbose)
    if folder is not None:
        print(f"saved in {folder.path}")
    if args.html is not None:
        from hone.evals.page import write_page

        place = folder.path if folder else Path(".")
        file = Path(args.html) if args.html else place / "rollouts.html"
        rows = [row_of(rollout, args.env, token_ids=False) for rollout in rollouts]
        write_page(file, settings, rows)
        print(f"rollouts in {file}")


def choose_folder(
    args: argparse.Namespace, settings: dict[str, Any]
) -> tuple[Folder | None, dict[int, Rollout]]:
    """Return the result folder (None if nothing is saved) and its finished rollouts by number.

    Raises ValueError if there is nothing to resume, or if the folder for a new evaluation already
    holds results.
    """
    if args.resume is None:
        is_saved = args.save_results or args.output_dir is not None
        new = Folder.create(settings, args.token_ids, args.output_dir) if is_saved else None
        return new, {}
    folder = Folder.open(Path(args.resume)) if args.resume else find_unfinished(settings)
    if folder is None:
        raise ValueError(
            "--resume: no evaluation with these settings was left unfinished under outputs/evals"
        )
    known = folder.read_known(settings)
    folder.token_ids = args.token_ids
    folder.end_line()
    print(f"continuing {folder.path}: {len(known)} rollouts are done")
    return folder, known


async def collect_rollouts(
    environment: Environment,
    examples: list[Example],
    endpoint: Endpoint,
    args: argparse.Namespace,
    known: dict[int, Rollout],
    progress: Progress,
) -> tuple[list[Rollout], dict[str, Any]]:
    """Return all rollouts, and the server's counts of prompt and completion tokens."""
    server = (endpoint.base_url, endpoint.model, endpoint.api_key)
    most = args.max_concurrent
    failed = 0
    succeeds = False

    def record_rollout(number: int, rollout: Rollout) -> None:
        nonlocal failed, succeeds
        failed = failed + bool(rollout.error)
        succeeds = succeeds or not rollout.error
        progress.add_rollout(number, rollout)

    async with HttpClient(*server, args.sampling_args, args.timeout) as client:
        await client.wait_until_serving()
        sampling = Sampling(args.temperature, args.max_tokens, args.seed)
        try:
            rollouts = await attempt_rollouts(
                environment,
                client,
                examples,
                RolloutPlan(
                    args.rollouts_per_example,
                    sampling,
                    retries=args.max_retries,
                    max_in_flight=most,
                    finished=known or {},
                    on_rollout=record_rollout,
                    gives_up=lambda: failed >= MAX_LEADING_FAILURES and not succeeds,
                ),
            )
        finally:
            await environment.close()
        return rollouts, {
            "prompt_tokens": client.prompt_tokens,
            "completion_tokens": client.completion_tokens,
        }


def summarize_rollouts(rollouts: list[Rollout], n: int, passed: float) -> dict[str, Any]:
    """Return means, clustered standard errors, pass@k and stop reasons of an evaluation.

    Failed rollouts are counted, and left out of everything else.

    Args:
        rollouts: all rollouts, grouped by example.
        n: rollouts per example.
        passed: reward from which a rollout counts as a success.
    """
    scored = [r for r in rollouts if not r.error]
    reward: dict[str, Any] = {"reward": None, "reward_std": None, "reward_error": None}
    if scored:
        rewards = [r.reward for r in scored]
        reward = {
            "reward": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "reward_error": clustered_error(rewards, [r.example.id for r in scored]),
        }
    return {
        "rollouts": len(rollouts),
        "failed": len(rollouts) - len(scored),
        **reward,
        **_summarize_metrics(scored),
        "pass_at": _pass_rates(rollouts, n, passed) if scored else {},
        "stops": dict(Counter(r.stop or "none" for r in scored).most_common()),
        "truncated": sum(r.is_truncated for r in scored),
    }


def _summarize_metrics(scored: list[Rollout]) -> dict[str, dict[str, float]]:
    """Return the mean and the clustered error of each metric, over the rollouts that have it."""
    means = {}
    errors = {}
    for name in sorted({name for rollout in scored for name in rollout.metrics}):
        having = [rollout for rollout in scored if name in rollout.metrics]
        values = [rollout.metrics[name] for rollout in having]
        means[name] = float(np.mean(values))
        errors[name] = clustered_error(values, [rollout.example.id for rollout in having])
    return {"metrics": means, "metrics_error": errors}


def _pass_rates(rollouts: list[Rollout], n: int, passed: float) -> dict[str, float]:
    """Return pass@k for powers of 2 up to n, from rollouts that did not fail."""
    groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
    successes = [[r.reward >= passed for r in group if not r.error] for group in groups]
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= n]
    return {str(k): pass_at_k(successes, k) for k in ks}


SHOWN_SETTINGS = (
    "env",
    "model",
    "base_url",
    "num_examples",
    "rollouts_per_example",
    "temperature",
    "max_tokens",
)


def print_results(settings: dict[str, Any], rollouts: list[Rollout], verbose: bool) -> None:
    console = Console(highlight=False)
    console.print("--- Evaluation ---")
    for key in SHOWN_SETTINGS:
        console.print(f"{key}: {escape(make_line(str(settings[key])))}")
    for rollout in rollouts if verbose else rollouts[:1]:
        _print_rollout(console, rollout)
    console.print("--- All ---")
    if settings["reward"] is not None:
        _print_rewards(console, settings, rollouts)
    if settings["failed"]:
        console.print(f"failed: {settings['failed']} of {len(rollouts)}")
    spent = f" ({settings['dollars']:.4f} dollars)" if "dollars" in settings else ""
    read = settings["prompt_tokens"]
    written = settings["completion_tokens"]
    if read:
        console.print(f"tokens: {read} read, {written} written{spent}")
    console.print(f"time: {settings['seconds']:.1f} s")


def _print_rollout(console: Console, rollout: Rollout) -> None:
    console.print("--- Example ---")
    for message in [*rollout.example.prompt, *rollout.messages]:
        said = make_printable(f"{show_role(message)}: {show_message(message)}")
        console.print(escape(said), soft_wrap=True)
    error = escape(make_printable(rollout.error or ""))
    console.print(f"error: {error}" if error else f"reward: {rollout.reward:.3f}")


def _print_rewards(console: Console, settings: dict[str, Any], rollouts: list[Rollout]) -> None:
    console.print(f"reward: avg - {settings['reward']:.3f}, std - {settings['reward_std']:.3f}")
    n = settings["rollouts_per_example"]
    for k in range(n):
        row = ["failed" if r.error else f"{r.reward:.3f}" for r in rollouts[k::n]]
        more = ", …" if len(row) > 10 else ""
        console.print(f"r{k + 1}: [{', '.join(row[:10])}{more}]", markup=False)
    for name, value in settings["metrics"].items():
        error = SIGMAS * settings["metrics_error"][name]
        console.print(f"{name}: avg - {value:.3f}, 95 % ± {error:.3f}")
    console.print(f"95 % of the mean reward: {format_interval(settings)} (clustered by example)")
    rates = ", ".join(f"{k}: {value:.3f}" for k, value in settings["pass_at"].items())
    console.print(f"pass@k: {rates}")
    stops = ", ".join(f"{name} {count}" for name, count in settings["stops"].items())
    console.print(f"ended by: {stops}; cut at max_tokens: {settings['truncated']}")


def format_interval(settings: dict[str, Any]) -> str:
    half = SIGMAS * settings["reward_error"]
    return (
        f"{settings['reward'] - half:.3f} to {settings['reward'] + half:.3f}"
        if half == half
        else "one example alone"
    )


def print_overview(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("env", "model", "reward", "95 %", "failed"):
        table.add_column(heading)
    for settings in found:
        failed = f"{settings['failed']} of {settings['rollouts']}"
        reward = f"{settings['reward']:.3f}"
        table.add_row(settings["env"], settings["model"], reward, format_interval(settings), failed)
    Console(highlight=False).print(table)
