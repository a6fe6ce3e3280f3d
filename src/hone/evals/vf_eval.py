"""`vf-eval`: an environment, a served model, an average reward.

    examples x rollouts ─► env.rollout(HttpClient) ─► rewards, metrics ─► printed; saved with -s

Exits with 1 when every rollout failed.
"""

import asyncio
import json
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from hone.environments import Environment, load_environment
from hone.environments.registry import add_folder
from hone.evals.arguments import parse_arguments
from hone.evals.endpoints import Endpoint, find_endpoint
from hone.evals.held_out import attempts, metric_means
from hone.inference.client import HttpClient
from hone.records import Example, Rollout, Sampling


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    endpoint = find_endpoint(args.model, args.api_base_url, args.api_key_var, args.endpoints_path)
    add_folder(args.env_dir_path, args.env)
    environment = load_environment(args.env, **args.env_args)
    examples = environment.get_eval_dataset()[: args.num_examples]
    settings: dict[str, Any] = {
        "env": args.env,
        "env_args": args.env_args,
        "model": endpoint.model,
        "base_url": endpoint.base_url,
        "num_examples": len(examples),
        "rollouts_per_example": args.rollouts_per_example,
        "temperature": args.sampling_args.get("temperature", args.temperature),
        "max_tokens": args.sampling_args.get("max_tokens", args.max_tokens),
        "sampling_args": args.sampling_args,
        "seed": args.seed,
    }
    start = time.perf_counter()
    rollouts = asyncio.run(evaluate(environment, examples, endpoint, args))
    settings["seconds"] = round(time.perf_counter() - start, 2)
    scored = [r for r in rollouts if not r.error]
    settings |= summarise(scored, failed=len(rollouts) - len(scored))
    saved = save(settings, rollouts) if args.save_results else None
    print_results(settings, rollouts, args.verbose)
    if saved:
        print(f"saved in {saved}")
    if not scored:
        raise ValueError(f"every rollout failed; the first said: {rollouts[0].error}")
    return 0


async def evaluate(environment: Environment, examples: list[Example], endpoint: Endpoint, args: Any) -> list[Rollout]:
    server, most = (endpoint.base_url, endpoint.model, endpoint.api_key), args.max_concurrent
    async with HttpClient(*server, args.sampling_args, args.timeout, most) as client:
        await client.check()
        sampling = Sampling(args.temperature, args.max_tokens, args.seed)
        return await attempts(environment, client, examples, args.rollouts_per_example, sampling, at_once=most)


def summarise(scored: list[Rollout], failed: int) -> dict[str, Any]:
    rewards = [r.reward for r in scored]
    return {
        "failed": failed,
        "reward": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "metrics": metric_means(scored),
    }


def print_results(settings: dict[str, Any], rollouts: list[Rollout], verbose: bool) -> None:
    console = Console(highlight=False)
    console.print("--- Evaluation ---")
    for key in ("env", "model", "base_url", "num_examples", "rollouts_per_example", "temperature", "max_tokens"):
        console.print(f"{key}: {escape(str(settings[key]))}")
    shown = rollouts if verbose else rollouts[:1]
    for rollout in shown:
        console.print("--- Example ---")
        for message in [*rollout.example.prompt, *rollout.messages]:
            console.print(f"{message['role']}: {escape(str(message.get('content') or ''))}", soft_wrap=True)
        console.print(f"error: {escape(rollout.error)}" if rollout.error else f"reward: {rollout.reward:.3f}")
    console.print("--- All ---")
    if settings["reward"] is not None:
        console.print(f"reward: avg - {settings['reward']:.3f}, std - {settings['reward_std']:.3f}")
        n = settings["rollouts_per_example"]
        for k in range(n):
            row = ["failed" if r.error else f"{r.reward:.3f}" for r in rollouts[k::n]]
            console.print(f"r{k + 1}: [{', '.join(row[:10])}{', …' if len(row) > 10 else ''}]", markup=False)
        for name, value in settings["metrics"].items():
            console.print(f"{name}: avg - {value:.3f}")
    if settings["failed"]:
        console.print(f"failed: {settings['failed']} of {len(rollouts)}")
    console.print(f"time: {settings['seconds']:.1f} s")


def save(settings: dict[str, Any], rollouts: list[Rollout]) -> Path:
    name = f"{settings['env']}--{settings['model']}".replace("/", "--")
    directory = Path("outputs") / "evals" / name / uuid.uuid4().hex[:8]
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text(json.dumps(settings, indent=2) + "\n")
    with (directory / "results.jsonl").open("w") as file:
        for r in rollouts:
            row = r.metrics | {
                "example_id": r.example.id,
                "prompt": r.example.prompt,
                "completion": r.messages,
                "answer": r.example.answer,
                "info": r.example.info,
                "reward": r.reward,
                "is_truncated": r.is_truncated,
                "error": r.error,
            }
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return directory
