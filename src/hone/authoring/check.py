"""Checks behind `hone env check`: examples, rewards, prompt lengths and, with -m, rollouts."""

import argparse
import asyncio
import math
import statistics
import time
from dataclasses import dataclass, field

from hone.authoring.demonstrations import NotKnown, demonstrate_rollout
from hone.clients.http import HttpClient
from hone.environments import Environment
from hone.environments.attempt import attempt
from hone.evals.held_out import RolloutPlan, attempt_rollouts
from hone.records import Completion, Example, Prompt, Rollout, Sampling, Turn
from hone.text.printable import make_printable
from hone.text.tokenizer import Tokenizer
from hone.users_code import CONTAINED

SOLVED_REWARD = 0.8  # mean reward from which a task counts as solved
SLOW_SECONDS = 0.05  # seconds of scoring that block everything else


class FixedAnswer:
    """A model that gives the same answer to every prompt."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        return Turn([0], Completion([0], [0.0], [0], "stop"), self.text)


@dataclass
class CheckReport:
    problems: int = 0
    warnings: int = 0
    lines: list[str] = field(default_factory=list)

    def print_good(self, text: str) -> None:
        print(f"  ok       {make_printable(text)}", flush=True)

    def print_warning(self, text: str) -> None:
        self.warnings += 1
        print(f"  careful  {make_printable(text)}", flush=True)

    def print_bad(self, text: str) -> None:
        self.problems += 1
        print(f"  wrong    {make_printable(text)}", flush=True)


def check_environment(environment: Environment, args: argparse.Namespace) -> int:
    """Check an environment and print a report. Return 1 if a check failed, else 0."""
    report = CheckReport()
    print(f"{args.env}:")
    check_examples(environment, report)
    asyncio.run(_try_answers(environment, args, report))
    if args.tokenizer is not None:
        check_lengths(environment, args, report)
    print(f"{report.problems} wrong, {report.warnings} to be careful with")
    return int(report.problems > 0)


def check_examples(environment: Environment, report: CheckReport) -> None:
    train = environment.get_dataset()
    held_out = environment.get_eval_dataset()
    text = f"{len(train)} examples to train on, {len(held_out)} for evaluation"
    report.print_good(text) if train else report.print_bad(text)
    asked = {_question_of(example) for example in train}
    if len(asked) < len(train):
        same = len(train) - len(asked)
        report.print_warning(f"{same} examples to train on repeat the prompt and answer of others")
    both = sum(_question_of(example) in asked for example in held_out)
    if environment.get_eval_dataset() is not train and both:
        report.print_warning(
            f"{both} of {len(held_out)} held-out examples are trained on too: an evaluation will look too good"
        )


def _question_of(example: Example) -> str:
    return f"{example.prompt} {example.answer} {example.info}"


async def _try_answers(
    environment: Environment, args: argparse.Namespace, report: CheckReport
) -> None:
    chosen = environment.get_dataset()[: args.num_examples]
    try:
        own = await own_answers(environment, chosen, args.seed, report)
        await check_other_answers(environment, chosen, own, report)
        await check_repeated_rewards(environment, chosen, args.seed, own, report)
        if args.model is not None:
            await check_signal(environment, chosen, args, report)
    finally:
        await environment.close()


async def own_answers(
    environment: Environment, chosen: list[Example], seed: int, report: CheckReport
) -> list[Rollout]:
    found: list[Rollout] = []
    start = time.perf_counter()
    for example in chosen:
        try:
            with CONTAINED:
                found.append((await demonstrate_rollout(environment, example, seed))[0])
        except NotKnown as error:
            report.print_warning(f"its rewards were not tried on right answers: {error}")
            return []
        except Exception as error:  # the environment is the user's code
            report.print_bad(
                f"its own answer to example {example.id} fails: {type(error).__name__}: {error}"
            )
            return found
    rewards = [rollout.reward for rollout in found]
    mean = statistics.fmean(rewards)
    text = f"its own answers have reward {mean:.3f} ({min(rewards):.3f} to {max(rewards):.3f})"
    report.print_good(text) if min(rewards) > 0 else report.print_bad(
        text + ": what it demonstrates is worth nothing"
    )
    scoring = max(rollout.timings.get("scoring", 0.0) for rollout in found)
    each = (time.perf_counter() - start) / len(found)
    text = f"a rollout takes {1000 * each:.1f} ms beside the model, scoring at most {1000 * scoring:.1f} ms"
    if scoring > SLOW_SECONDS:
        report.print_warning(
            f"{text}: scoring blocks everything else; run it in separate processes (orchestrator.env.workers)"
        )
    else:
        report.print_good(text)
    if max(map(abs, rewards)) > 10:
        report.print_warning(
            f"rewards up to {max(map(abs, rewards)):g}: advantages, and so steps, grow with them"
        )
    return found


async def check_other_answers(
    environment: Environment, chosen: list[Example], own: list[Rollout], report: CheckReport
) -> None:
    """Check that an empty answer and another example's answer earn less than the right one."""
    texts = {"an empty answer": ""}
    said = (
        [m for m in own[-1].messages if m["role"] == "assistant" and m.get("content")]
        if own
        else []
    )
    if said and len(chosen) > 1:
        texts["the answer to another example"] = said[-1]["content"]
    best = statistics.fmean(rollout.reward for rollout in own) if own else math.inf
    for name, text in texts.items():
        tried = [
            await attempt(environment, FixedAnswer(text), example, Sampling())
            for example in chosen[:-1] or chosen
        ]
        failed = next((rollout.error for rollout in tried if rollout.error), None)
        if failed:
            report.print_bad(f"{name} fails: {failed}")
            continue
        mean = statistics.fmean(rollout.reward for rollout in tried)
        line = f"{name} has reward {mean:.3f}"
        report.print_good(line) if mean < best else report.print_bad(
            f"{line}, no less than its own answers"
        )


async def check_repeated_rewards(
    environment: Environment,
    chosen: list[Example],
    seed: int,
    own: list[Rollout],
    report: CheckReport,
) -> None:
    again = (
        [(await demonstrate_rollout(environment, example, seed))[0] for example in chosen]
        if own
        else []
    )
    differ = sum(one.reward != other.reward for one, other in zip(own, again, strict=False))
    if differ:
        report.print_warning(
            f"{differ} of {len(own)} rewards differ the second time: runs will not repeat"
        )
    elif own:
        report.print_good("the same answers have the same rewards the second time")


async def check_signal(
    environment: Environment, chosen: list[Example], args: argparse.Namespace, report: CheckReport
) -> None:
    n = args.rollouts_per_example
    if args.api_base_url is None:
        raise ValueError("hone env check: -m MODEL needs its server, -b http://HOST:PORT/v1")
    async with HttpClient(args.api_base_url, args.model) as client:
        await client.wait_until_serving()
        sampling = Sampling(1.0, args.max_tokens, args.seed)
        rollouts = await attempt_rollouts(
            environment, client, chosen, RolloutPlan(n, sampling, max_in_flight=64)
        )
    groups = [rollouts[i : i + n] for i in range(0, len(rollouts), n)]
    spread = sum(len({r.reward for r in group if not r.error}) > 1 for group in groups)
    rewards = [r.reward for r in rollouts if not r.error]
    failed = [r.error for r in rollouts if r.error]
    cut = sum(r.is_truncated for r in rollouts)
    mean = statistics.fmean(rewards) if rewards else float("nan")
    line = f"{args.model}: reward {mean:.3f}, rewards differ in {spread} of {len(groups)} groups of {n}"
    if spread < len(groups) / 4:
        way = (
            "make the task harder"
            if mean > SOLVED_REWARD
            else "warm up by SFT, make the task easier, or reward parts of it"
        )
        report.print_warning(f"{line}: the others teach nothing; {way}")
    else:
        report.print_good(line)
    if cut > len(rollouts) / 10:
        report.print_warning(
            f"{cut} of {len(rollouts)} completions were cut at {args.max_tokens} tokens (-t)"
        )
    if failed:
        report.print_bad(
            f"{len(failed)} of {len(rollouts)} rollouts failed; the first said: {failed[0]}"
        )


def check_lengths(environment: Environment, args: argparse.Namespace, report: CheckReport) -> None:
    tokenizer = Tokenizer(args.tokenizer)
    examples = environment.get_dataset()
    counts = [
        len(tokenizer.prompt_ids(Prompt(one.prompt, environment.first_tools(one))))
        for one in examples
    ]
    line = f"prompts have {min(counts)} to {max(counts)} tokens, half of them at most {int(statistics.median(counts))}"
    over = sum(count >= args.seq_len for count in counts) if args.seq_len else 0
    if over:
        report.print_warning(f"{line}; {over} leave no room for an answer in {args.seq_len} tokens")
    else:
        report.print_good(line)
