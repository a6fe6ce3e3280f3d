"""Find what went wrong in a run: the first bad step, the evidence, and what usually helps.

    series (metrics.jsonl), steps (averages of the rollouts) ─► one check after another ─► findings, the worst first

A check is a function that returns a finding or None. Where one finding explains another (truncated
completions explain rewards of 0), only the explanation is reported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hone.dashboard.index import Index
from hone.dashboard.tokens import TokenTable

UNSURE_NATS = -2.0  # nats per token: below it the model is guessing
TRUNCATED_SHARE = 0.5  # share of truncated completions
STALE_STEPS = 4.0  # off-policy steps of trained tokens
MISMATCH_NATS = 0.05  # mismatch KL, nats a token
DROPPED_SHARE = 0.3  # share of tokens that the loss drops
LOST_SHARE = 0.5  # share of the reward gained that is lost again
# Growth of completions, and correlation of reward with length, that are reported.
LONGER_RATIO = 1.4
ALIKE_SHARE = 0.5
NO_SIGNAL_SHARE = 0.8  # share of steps without a signal
MIN_STEPS = 5  # steps that a judgement needs

Series = dict[str, dict[int, float]]  # metric: step: value


@dataclass(frozen=True)
class Finding:
    """A problem that a check found in a run.

    Attributes:
        kind: its code, such as "collapse".
        title: the problem in one sentence.
        first_step: first step that shows it.
        evidence: the measured values that show it, in sentences.
        helps: what usually helps.
        rollouts: index ids of rollouts that show it.
    """

    kind: str
    title: str
    first_step: int
    evidence: str
    helps: list[str]
    rollouts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class DoctorReport:
    steps: int
    findings: list[Finding]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunFacts:
    """What the checks know about a run.

    Attributes:
        series: values of the metrics, by name and step.
        steps: averages of each step's rollouts (`Index.step_means`).
        prompt: what is unusual about a prompt's tokens, or "" if nothing is.
    """

    series: Series
    steps: list[dict[str, Any]]
    prompt: str = ""  # what is unusual about a prompt's tokens

    def metric_by_step(self, name: str) -> dict[int, float]:
        return self.series.get(name, {})

    def trained_metric(self, name: str) -> dict[int, float]:
        """Return a trainer metric at the steps that had samples to train on."""
        had = self.metric_by_step("tokens/trained")
        return {
            step: value
            for step, value in self.metric_by_step(name).items()
            if had.get(step, 1.0) > 0
        }


NAMES = [
    "reward/mean",
    "entropy/mean",
    "mismatch_kl/mean",
    "is_masked/mean",
    "batch/off_policy_level/mean",
    "batch/without_signal",
    "batch/solve_all",
    "batch/solve_none",
    "optim/grad_norm",
    "optim/lr",
    "tokens/trained",
    "loss/mean",
    "val/loss",
    "optim/skipped",
    "is_truncated/mean",
]


def examine_run(index: Index) -> DoctorReport:
    """Return the findings of an SFT or RL run, the worst first."""
    kept = index.metric_series(NAMES, most=10**9)
    series = {
        name: dict(zip(map(int, steps), values, strict=True))
        for name, (steps, values) in kept.items()
    }
    facts = RunFacts(
        series, *((index.step_means(), odd_prompt(index)) if index.run.kind == "rl" else ([],))
    )
    count = len(facts.metric_by_step("reward/mean" if index.run.kind == "rl" else "loss/mean"))
    if count < MIN_STEPS:
        return DoctorReport(
            count, [], f"{count} steps are too few to say anything (it takes {MIN_STEPS})"
        )
    findings = [
        finding
        for look in (LOOKS if index.run.kind == "rl" else SFT_LOOKS)
        if (finding := look(facts))
    ]
    explained = {kind for finding in findings for kind in EXPLAINS.get(finding.kind, ())}
    told = [finding for finding in findings if finding.kind not in explained]
    return DoctorReport(count, [_with_examples(finding, index) for finding in told])


def _with_examples(finding: Finding, index: Index) -> Finding:
    """Return the finding with up to five rollouts of its first step as examples."""
    if index.run.kind != "rl":
        return finding
    sort, down = ("tokens", True) if finding.kind == "length" else ("reward", False)
    wanted: dict[str, Any] = {"step_from": finding.first_step, "step_to": finding.first_step}
    rows = index.find_rollouts(
        wanted | ({"truncated": 1} if finding.kind == "truncated" else {}), sort, down, 5, 0
    )["rows"]
    return replace(finding, rollouts=[row["id"] for row in rows])


def template(facts: RunFacts) -> Finding | None:
    """Find prompts in the wrong chat format: low reward from the start, improbable tokens."""
    first = facts.steps[:MIN_STEPS]
    known = [row["logprob"] for row in first if row["logprob"] is not None]
    mean = sum(known) / len(known) if known else 0.0
    if (
        not first
        or max(row["reward"] for row in first) > 0.1
        or not (facts.prompt or mean < UNSURE_NATS)
    ):
        return None
    seen = facts.prompt or (
        f"The first tokens that were sampled had {mean:.1f} nats each on average: a model that knows the form of what "
        "it is asked is far surer"
    )
    return Finding(
        "template",
        "The prompts are not in the form that the model was trained on",
        first[0]["step"],
        f"{seen}. The reward of the first steps is {first[0]['reward']:.2f}.",
        [
            "Look at a prompt token by token: are the special tokens of the model's chat format there, once each?",
            "Compare chat_template.jinja of the model with the one of its supervised warm-up.",
            "If the model has seen no such tasks yet, warm it up with `sft` first.",
        ],
    )


def odd_prompt(index: Index) -> str:
    """Return what is unusual about the first prompt's tokens, judged by the run's tokenizer, or ""."""
    rows = index.find_rollouts({}, "step", False, 1, 0)["rows"]
    found = index.read_rollout(rows[0]["id"]) if rows else None
    turns = (found or {}).get("turns") or [{}]
    ids = turns[0].get("prompt_ids")
    return (
        TokenTable.of_run(index.root, index.run).find_oddity(ids)
        if isinstance(ids, list) and ids
        else ""
    )


def truncated(facts: RunFacts) -> Finding | None:
    """Find runs in which max_tokens cuts most completions from the first steps on."""
    cut = [row for row in facts.steps[:MIN_STEPS] if row["truncated"] > TRUNCATED_SHARE]
    if not cut or len(cut) < min(MIN_STEPS, len(facts.steps)):
        return None
    share = cut[0]["truncated"]
    tokens = cut[0]["tokens"]
    return Finding(
        "truncated",
        "Completions are cut off before they end",
        cut[0]["step"],
        f"{share:.0%} of the completions of step {cut[0]['step']} reached the limit; they had {tokens:.0f} tokens.",
        [
            "Raise orchestrator.sampling.max_tokens (and seq_len, if it is the limit).",
            "Ask for shorter answers in the system prompt, or take a model that ends its answers.",
        ],
    )


def constant(facts: RunFacts) -> Finding | None:
    """Find runs in which, in nearly all steps, all rollouts have the same reward."""
    flat = [row for row in facts.steps if row["high"] - row["low"] < 1e-9]
    is_from_the_start = all(row["high"] - row["low"] < 1e-9 for row in facts.steps[:MIN_STEPS])
    if (
        not flat
        or not is_from_the_start
        or len(flat) < NO_SIGNAL_SHARE * len(facts.steps)
        or len({round(r["reward"], 9) for r in flat}) > 1
    ):
        return None
    value = flat[0]["reward"]
    if value == 0 and flat[0]["truncated"] > TRUNCATED_SHARE:
        return None  # truncated completions explain the reward
    return Finding(
        "no_variance",
        "The reward is the same for every rollout",
        flat[0]["step"],
        f"In {len(flat)} of {len(facts.steps)} steps every rollout was given {value:.4g}: nothing to learn from.",
        [
            "Read a few rollouts beside their rewards: does the reward function see what it should (parser, answer)?",
            "If all fail: partial rewards, easier examples, or a longer warm-up. If all succeed: harder examples.",
        ],
    )


def no_signal(facts: RunFacts) -> Finding | None:
    """Find runs in whose last steps the rollouts of most groups have equal rewards."""
    idle = facts.metric_by_step("batch/without_signal")
    n = max(MIN_STEPS, len(facts.metric_by_step("batch/without_signal")) // 4)
    last = sorted(idle)[-n:]
    if not last or sum(idle[step] for step in last) / len(last) < NO_SIGNAL_SHARE:
        return None
    solved = [facts.metric_by_step("batch/solve_all").get(step, 0.0) for step in last]
    if sum(solved) / len(solved) > 0.5:
        return None  # the task is learned
    first = next(step for step in sorted(idle) if idle[step] >= NO_SIGNAL_SHARE)
    return Finding(
        "no_signal",
        "Few groups have anything to learn from",
        first,
        f"In the last {len(last)} steps {sum(idle[s] for s in last) / len(last):.0%} of the groups had one reward.",
        [
            "More rollouts an example (orchestrator.rollouts_per_example), or a finer reward.",
            "Leave out what is too easy or too hard: orchestrator.buffer.online_difficulty_filtering.",
        ],
    )


def collapse(facts: RunFacts) -> Finding | None:
    """Find a reward that was high and dropped."""
    rewards = facts.metric_by_step("reward/mean")
    steps = sorted(rewards)
    level = _running_mean([rewards[step] for step in steps])
    best = max(range(len(level)), key=level.__getitem__)
    floor = min(0.0, *level)
    threshold = floor + (1 - LOST_SHARE) * (level[best] - floor)
    lost = [step for step in steps[best:] if rewards[step] < threshold]
    last = [rewards[step] for step in steps[-MIN_STEPS:]]
    at_end = sum(last) / len(last)
    if not lost or level[best] - floor < 0.05 or at_end > threshold:
        return None
    first = lost[0]
    peak = (
        f"The reward was {level[best]:.3f} around step {steps[best]} and {at_end:.3f} at the end."
    )
    advice = [
        "Lower the learning rate (trainer.optim.lr): by 10 at first, "
        f"by 100 if the reward is lost within {MIN_STEPS} steps.",
        f"Go on from a checkpoint before it with changed keys: rl … --fork RUN@{max(1, first - 1)} or earlier.",
        "A KL term (trainer.loss) or a smaller optim.max_norm hold it back; "
        "optim.skip_norm skips single bad steps.",
    ]
    title = "The policy has collapsed: the reward is lost"
    return Finding("collapse", title, first, f"{peak} {_describe_training(facts, first)}", advice)


def _describe_training(facts: RunFacts, first: int) -> str:
    """Return entropy, gradient norm and learning rate around a step, in one sentence."""
    entropy = facts.trained_metric("entropy/mean")
    norm = facts.trained_metric("optim/grad_norm")
    before = max([entropy[s] for s in entropy if s < first] or [0.0])
    after = max([entropy[s] for s in entropy if s >= first] or [0.0])
    how = (
        "rose"
        if after > 2 * before
        else "fell"
        if after < 0.3 * before
        else "stayed about as it was"
    )
    said = f"The entropy {how} ({before:.2f} before, {after:.2f} after)"
    if norm:
        said += f"; the gradient's norm reached {max(norm.values()):.1f}"
    rates = {step: lr for step, lr in facts.metric_by_step("optim/lr").items() if step <= first}
    if rates:
        said += f"; the learning rate was {rates[max(rates)]:.1e}"
    return f"{said}."


def length(facts: RunFacts) -> Finding | None:
    """Find completions that grow longer while longer completions get higher rewards."""
    if len(facts.steps) < 2 * MIN_STEPS:
        return None
    n = max(2, len(facts.steps) // 5)
    early = facts.steps[:n]
    late = facts.steps[-n:]
    before, after = (sum(row["tokens"] for row in rows) / n for rows in (early, late))
    alike = [row["alike"] for row in facts.steps if row["high"] > row["low"]]
    if not alike or after < LONGER_RATIO * before or sum(alike) / len(alike) < ALIKE_SHARE:
        return None
    first = next(
        row["step"] for row in facts.steps if row["tokens"] > (1 + LONGER_RATIO) / 2 * before
    )
    return Finding(
        "length",
        "The reward pays for length",
        first,
        f"Completions grew from {before:.0f} to {after:.0f} tokens, and within a step the reward goes with their "
        f"length (correlation {sum(alike) / len(alike):.2f}).",
        [
            "Read the longest rollouts: do they say more, or the same again?",
            "Weigh the reward by what is right, not by how much is written; "
            "orchestrator.overlong_share takes reward off "
            "what comes near the limit.",
            "A loss that weighs sequences alike favours long wrong answers; `algorithm` dr_grpo does not.",
        ],
    )


def stale(facts: RunFacts) -> Finding | None:
    """Find training on tokens of an older policy, or on logprobs that differ from the trainer's."""
    behind = facts.metric_by_step("batch/off_policy_level/mean")
    apart = facts.trained_metric("mismatch_kl/mean")
    masked = facts.trained_metric("is_masked/mean")
    late = [step for step in behind if behind[step] >= STALE_STEPS]
    wide = [step for step in apart if apart[step] >= MISMATCH_NATS]
    dropped = [step for step in masked if masked[step] >= DROPPED_SHARE]
    if max(len(late), len(wide), len(dropped)) < max(MIN_STEPS, 0.3 * len(behind)):
        return None
    first = min([*late, *wide, *dropped])
    is_old = len(late) >= max(MIN_STEPS, 0.3 * len(behind))
    helps = [
        "Lower max_async_level (1 is usually enough) and orchestrator.max_off_policy_steps.",
        "Give the slower side more: time/generate and time/train of a step say which it is.",
    ]
    if not is_old:
        helps = [
            "The sampler's logprobs are not those of the trainer: compare dtype and engine on both sides.",
            "weights/canary_difference says how far they are apart on the same text; truncated importance sampling and "
            "masks (trainer.loss) only survive it.",
        ]
    return Finding(
        "stale",
        "The trainer learns from tokens of an old policy"
        if is_old
        else "Sampler and trainer disagree",
        first,
        f"Tokens were {_mean_of(behind):.1f} steps behind on average, the mismatch KL was {_mean_of(apart):.1e} and "
        f"{_mean_of(masked):.0%} of the tokens were left out of the loss.",
        helps,
    )


def entropy_gone(facts: RunFacts) -> Finding | None:
    """Find entropy that vanishes before the task is learned."""
    entropy = facts.trained_metric("entropy/mean")
    rewards = facts.metric_by_step("reward/mean")
    steps = sorted(entropy)
    if len(steps) < 2 * MIN_STEPS:
        return None
    start, end = (
        sum(entropy[s] for s in some) / MIN_STEPS
        for some in (steps[:MIN_STEPS], steps[-MIN_STEPS:])
    )
    reward = sum(rewards.get(s, 0.0) for s in steps[-MIN_STEPS:]) / MIN_STEPS
    if end > 0.02 * start or start < 1e-3 or reward > 0.9 * max(rewards.values(), default=1.0):
        return None
    first = next(step for step in steps if entropy[step] < 0.05 * start)
    return Finding(
        "entropy",
        "The policy tries nothing new any more",
        first,
        f"The entropy fell from {start:.3f} to {end:.4f} nats a token.",
        [
            "A lower learning rate, a higher temperature, or clipping higher on the upper side (docs/algorithms.md)."
        ],
    )


def failures(facts: RunFacts) -> Finding | None:
    """Find many rollouts that end in an error."""
    bad = [row for row in facts.steps if row["failed"] > 0.2]
    if len(bad) < max(2, 0.2 * len(facts.steps)):
        return None
    return Finding(
        "failures",
        "Rollouts fail",
        bad[0]["step"],
        f"In {len(bad)} of {len(facts.steps)} steps over a fifth of the rollouts ended in an error.",
        [
            "The rollouts say why (Rollouts, filter: failed); the orchestrator's log has the first of each kind."
        ],
    )


def diverged(facts: RunFacts) -> Finding | None:
    """Find an SFT loss that rose and stayed high."""
    loss = facts.metric_by_step("loss/mean")
    steps = sorted(loss)
    level = _running_mean([loss[step] for step in steps])
    low = min(range(len(level)), key=level.__getitem__)
    if level[-1] < 1.3 * level[low] + 0.2 or level[-1] < 0.5 * level[0]:
        return None
    first = next(steps[i] for i in range(low, len(steps)) if level[i] > 1.15 * level[low] + 0.1)
    return Finding(
        "diverged",
        "The loss went up again",
        first,
        f"It was {level[low]:.3f} around step {steps[low]} and is {level[-1]:.3f} at the end.",
        ["A lower learning rate (optim.lr), a longer warm-up (scheduler.warmup_steps)."],
    )


def overfitted(facts: RunFacts) -> Finding | None:
    """Find a validation loss that has risen clearly above its minimum."""
    val = facts.metric_by_step("val/loss")
    steps = sorted(val)
    if len(steps) < MIN_STEPS:
        return None
    low = min(steps, key=val.__getitem__)
    if val[steps[-1]] < 1.1 * val[low] + 0.02 or low == steps[-1]:
        return None
    return Finding(
        "overfitted",
        "It learns its data by heart",
        low,
        f"The validation loss was {val[low]:.3f} at step {low} and is {val[steps[-1]]:.3f} at the end.",
        [f"Take the weights of step {low}, fewer epochs, or more data."],
    )


def _mean_of(values: dict[int, float]) -> float:
    return sum(values.values()) / max(1, len(values))


def _running_mean(values: list[float], width: int = 3) -> list[float]:
    """Return for each value the mean of it and up to `width - 1` values before it."""
    return [
        sum(values[max(0, i - width + 1) : i + 1]) / (i - max(0, i - width + 1) + 1)
        for i in range(len(values))
    ]


Look = Callable[[RunFacts], Finding | None]
LOOKS: tuple[Look, ...] = (
    template,
    truncated,
    constant,
    collapse,
    stale,
    length,
    failures,
    entropy_gone,
    no_signal,
)
SFT_LOOKS: tuple[Look, ...] = (diverged, overfitted)
EXPLAINS = {  # findings that the first one explains are not reported
    "template": ("truncated", "no_variance", "no_signal", "collapse"),
    "truncated": ("no_signal",),
    "no_variance": ("no_signal", "truncated"),
    "collapse": ("no_signal", "entropy", "stale"),
    "length": ("no_signal",),
    "failures": ("no_signal",),
}
