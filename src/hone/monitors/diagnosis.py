"""Judge a run by its metrics: what went wrong or is solved, since which step, and what usually helps.

    rows of metrics.jsonl ─► RunFacts ─► one rule after another ─► findings, the worst first

A rule is a function that returns a finding or None. Where one finding explains another (truncated
completions explain rewards of 0), only the explanation is reported. The terminal, `hone doctor`,
the dashboard and `orchestrator.stop_when` use the same rules.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

UNSURE_NATS = -2.0  # mean logprob of sampled tokens: below it the model is guessing
TRUNCATED_SHARE = 0.5  # share of truncated completions
STALE_STEPS = 4.0  # off-policy steps of trained tokens
OLD_STEPS = 0.5  # mean age of tokens from which a mismatch may come from it
MISMATCH_NATS = 0.05  # mismatch KL, nats a token
DROPPED_SHARE = 0.3  # share of tokens that the loss drops
LOST_SHARE = 0.5  # share of the reward gained that is lost again
# Growth of completions, and correlation of reward with length, that are reported.
LONGER_RATIO = 1.4
ALIKE_SHARE = 0.5
NO_SIGNAL_SHARE = 0.8  # share of groups without a signal
SOLVED_SHARE = 0.8  # share of groups that are solved in all rollouts
SOLVED_STEPS = 10  # steps for which they have to be
MIN_STEPS = 5  # steps that a judgement needs

Series = dict[int, float]  # value by step


@dataclass(frozen=True)
class Finding:
    """What a rule found in a run.

    Attributes:
        kind: its code, such as "collapse".
        title: the finding in one sentence.
        first_step: first step that shows it.
        evidence: the measured values that show it, in sentences.
        helps: what usually helps.
        is_problem: False if nothing is wrong, as with a solved task.
        rollouts: index ids of rollouts that show it; filled in by the dashboard and the doctor.
    """

    kind: str
    title: str
    first_step: int
    evidence: str
    helps: list[str]
    is_problem: bool = True
    rollouts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Diagnosis:
    """The findings of a run; `note` says why there can be none yet."""

    steps: int
    findings: list[Finding]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RunFacts:
    """What the rules know about a run.

    Attributes:
        kind: "rl" or "sft".
        series: values of the metrics, by name and step.
        read_prompt: returns what is unusual about a prompt's tokens, or "" if nothing is. It is
            called only if the rewards make it matter, since it loads a tokenizer.
        list_checkpoints: returns the steps from which the run can be forked.
        place: directory of the run, as a user types it.
    """

    kind: str
    series: dict[str, Series] = field(default_factory=dict)
    read_prompt: Callable[[], str] = str
    list_checkpoints: Callable[[], Iterable[int]] = tuple
    place: str = "RUN"

    def add_row(self, step: int, values: dict[str, float]) -> None:
        for name in METRICS:
            if name in values:
                self.series.setdefault(name, {})[step] = float(values[name])

    def metric(self, name: str) -> Series:
        return self.series.get(name, {})

    def trained_metric(self, name: str) -> Series:
        """Return a trainer metric at the steps that had samples to train on."""
        had = self.metric("tokens/trained")
        return {s: value for s, value in self.metric(name).items() if had.get(s, 1.0) > 0}

    @property
    def headline(self) -> Series:
        return self.metric("reward/mean" if self.kind == "rl" else "loss/mean")

    @property
    def steps(self) -> list[int]:
        return sorted(self.headline)

    def spread_of(self, step: int) -> float:
        """Return the largest minus the smallest reward of a step."""
        low, high = (self.metric(f"reward/{end}").get(step) for end in ("min", "max"))
        return 1.0 if low is None or high is None else high - low

    def truncated_share(self, step: int) -> float:
        """Return the share of truncated completions, or of tokens in those that were left out."""
        left_out = self.metric("tokens/dropped/truncated").get(step, 0.0)
        kept = self.metric("completion_len/total").get(step, 0.0)
        dropped = left_out / (left_out + kept) if left_out else 0.0
        return max(dropped, self.metric("is_truncated/mean").get(step, 0.0))

    def failed_share(self, step: int) -> float:
        failed = self.metric("progress/failed").get(step, 0.0)
        return failed / (failed + self.metric("progress/samples").get(step, 1.0)) if failed else 0.0


METRICS = (  # that the rules read
    "reward/mean",
    "reward/min",
    "reward/max",
    "reward/length_correlation",
    "logprob/mean",
    "completion_len/mean",
    "completion_len/total",
    "progress/failed",
    "progress/samples",
    "entropy/mean",
    "mismatch_kl/mean",
    "is_masked/mean",
    "is_truncated/mean",
    "batch/off_policy_level/mean",
    "batch/without_signal",
    "batch/solve_all",
    "tokens/trained",
    "tokens/dropped/truncated",
    "optim/grad_norm",
    "optim/lr",
    "loss/mean",
    "val/loss",
)


def diagnose_run(facts: RunFacts) -> Diagnosis:
    """Return the findings of an SFT or RL run, the worst first."""
    count = len(facts.headline)
    if count < MIN_STEPS:
        note = f"{count} steps are too few to say anything (it takes {MIN_STEPS})"
        return Diagnosis(count, [], note)
    rules = RL_RULES if facts.kind == "rl" else SFT_RULES
    findings = [finding for rule in rules if (finding := rule(facts))]
    explained = {kind for finding in findings for kind in EXPLAINS.get(finding.kind, ())}
    return Diagnosis(count, [finding for finding in findings if finding.kind not in explained])


class RunningDiagnosis:
    """Diagnosis of a run that is still running, brought up to date every few steps."""

    def __init__(self, facts: RunFacts, earlier: Iterable[dict[str, Any]] = ()) -> None:
        """`earlier` are the metrics rows of the steps before a resume."""
        self.facts = facts
        self.findings: list[Finding] = []
        for row in earlier:
            facts.add_row(row["step"], row)

    def add_step(self, step: int, values: dict[str, float]) -> list[Finding]:
        """Add a step's metrics; return the findings that are new."""
        self.facts.add_row(step, values)
        # Every rule reads all steps: with the interval growing, a run's cost stays linear.
        if step % max(MIN_STEPS, len(self.facts.headline) // 20):
            return []
        known = {finding.title for finding in self.findings}
        self.findings = diagnose_run(self.facts).findings
        return [finding for finding in self.findings if finding.title not in known]


def find_wrong_template(facts: RunFacts) -> Finding | None:
    """Find prompts in the wrong chat format: low reward from the start, improbable tokens."""
    first = facts.steps[:MIN_STEPS]
    known = [facts.metric("logprob/mean")[s] for s in first if s in facts.metric("logprob/mean")]
    mean = mean_of(known)
    highest = max(facts.metric("reward/mean")[step] for step in first)
    if highest > 0.1:
        return None
    oddity = facts.read_prompt()
    if not oddity and mean >= UNSURE_NATS:
        return None
    seen = oddity or (
        f"The first sampled tokens had a logprob of {mean:.1f} on average; a model that knows the "
        "format of its prompt is far surer"
    )
    return Finding(
        "template",
        "The prompts are not in the format that the model was trained on",
        first[0],
        f"{seen}. The reward of the first steps was at most {highest:.2f}.",
        [
            "Look at a prompt token by token: does it have the special tokens of the model's chat "
            "format, once each?",
            "Compare the model's chat_template.jinja with the one of its supervised warm-up.",
            "If the model has never seen such tasks, warm it up with `sft` first.",
        ],
    )


def find_truncation(facts: RunFacts) -> Finding | None:
    """Find runs in which max_tokens cuts most completions from the first steps on."""
    first = facts.steps[:MIN_STEPS]
    if min(map(facts.truncated_share, first)) <= TRUNCATED_SHARE:
        return None
    share = facts.truncated_share(first[0])
    tokens = facts.metric("completion_len/mean").get(first[0], 0.0)
    return Finding(
        "truncated",
        "Completions are cut off before they end",
        first[0],
        f"{share:.0%} of the completions of step {first[0]} reached the limit; the mean length was "
        f"{tokens:.0f} tokens.",
        [
            "Raise orchestrator.sampling.max_tokens (and seq_len, if it is the limit).",
            "Ask for shorter answers in the system prompt, or use a model that ends its answers.",
        ],
    )


def find_constant_reward(facts: RunFacts) -> Finding | None:
    """Find runs in which, in nearly all steps, all rollouts have the same reward."""
    rewards = facts.metric("reward/mean")
    flat = [step for step in facts.steps if facts.spread_of(step) < 1e-9]
    is_from_the_start = all(facts.spread_of(step) < 1e-9 for step in facts.steps[:MIN_STEPS])
    values = {round(rewards[step], 9) for step in flat}
    is_most = len(flat) >= NO_SIGNAL_SHARE * len(facts.steps)
    if not (is_from_the_start and is_most and len(values) == 1):
        return None
    value = rewards[flat[0]]
    if value == 0 and facts.truncated_share(flat[0]) > TRUNCATED_SHARE:
        return None  # truncated completions explain the reward
    return Finding(
        "no_variance",
        "Every rollout gets the same reward",
        flat[0],
        f"In {len(flat)} of {len(facts.steps)} steps all rollouts had reward {value:.4g}, so there "
        "was nothing to learn from.",
        [
            "Read a few rollouts with their rewards: does the reward function see what it should "
            "(parser, answer)?",
            "If all fail: partial rewards, easier examples, or a longer warm-up. If all succeed: "
            "harder examples.",
        ],
    )


def find_solved(facts: RunFacts) -> Finding | None:
    """Find a task that is learned: for some time nearly all groups are solved by all rollouts."""
    solved = facts.metric("batch/solve_all")
    steps = sorted(solved)
    last = steps[-SOLVED_STEPS:]
    share = mean_of(solved[step] for step in last)
    if len(last) < SOLVED_STEPS or share < SOLVED_SHARE:
        return None
    level = _running_mean([solved[step] for step in steps], MIN_STEPS)
    below = [i for i, mean in enumerate(level) if mean < 0.9 * SOLVED_SHARE]
    return Finding(
        "solved",
        "The task is solved: nearly all groups get the full reward in every rollout",
        steps[min(below[-1] + 1, len(steps) - 1)] if below else steps[0],
        f"In the last {len(last)} steps {share:.0%} of the groups were "
        "solved by all rollouts; they teach nothing more.",
        [
            "Stop here and evaluate the weights, or go on with harder examples.",
            'orchestrator.stop_when = ["solved"] ends such a run by itself, with its weights.',
        ],
        is_problem=False,
    )


def find_missing_signal(facts: RunFacts) -> Finding | None:
    """Find runs in whose last steps the rollouts of most groups have equal rewards."""
    idle = facts.metric("batch/without_signal")
    last = sorted(idle)[-max(MIN_STEPS, len(idle) // 4) :]
    share = mean_of(idle[step] for step in last)
    if not last or share < NO_SIGNAL_SHARE:
        return None
    if mean_of(facts.metric("batch/solve_all").get(step, 0.0) for step in last) > 0.5:
        return None  # the task is learned
    return Finding(
        "no_signal",
        "Few groups have anything to learn from",
        next(step for step in sorted(idle) if idle[step] >= NO_SIGNAL_SHARE),
        f"In the last {len(last)} steps all rollouts had the same reward in "
        f"{share:.0%} of the groups.",
        [
            "More rollouts an example (orchestrator.rollouts_per_example), or a finer reward.",
            "Leave out examples that are too easy or too hard: "
            "orchestrator.buffer.online_difficulty_filtering.",
        ],
    )


def find_collapse(facts: RunFacts) -> Finding | None:
    """Find a reward that was high and dropped."""
    rewards = facts.metric("reward/mean")
    steps = facts.steps
    level = _running_mean([rewards[step] for step in steps])
    best = max(range(len(level)), key=level.__getitem__)
    floor = min(0.0, *level)
    threshold = floor + (1 - LOST_SHARE) * (level[best] - floor)
    lost = [step for step in steps[best:] if rewards[step] < threshold]
    at_end = mean_of(rewards[step] for step in steps[-MIN_STEPS:])
    if not lost or level[best] - floor < 0.05 or at_end > threshold:
        return None
    first = lost[0]
    peak = f"The mean reward was {level[best]:.3f} around step {steps[best]} and {at_end:.3f} in the last steps."
    return Finding(
        "collapse",
        "The policy has collapsed: the reward is lost",
        first,
        f"{peak} {_describe_training(facts, first)}",
        [
            "Lower the learning rate (trainer.optim.lr): by 10 at first, "
            f"by 100 if the reward is lost within {MIN_STEPS} steps.",
            _advise_fork(facts, first),
            "A KL term (trainer.loss) or a smaller optim.max_norm holds it back; "
            "optim.skip_norm skips single bad steps.",
        ],
    )


def _advise_fork(facts: RunFacts, first_bad: int) -> str:
    """Return how to start again from before a step: from a checkpoint that exists, or anew."""
    usable = [step for step in facts.list_checkpoints() if step < first_bad]
    if usable:
        return (
            "Fork the run from its last checkpoint before that, with other keys: "
            f"rl @ {facts.place}/configs/rl.toml --fork {facts.place}@{max(usable)} "
            "--output-dir DIR --trainer.optim.lr LR"
        )
    return (
        f"No checkpoint from before step {first_bad} exists, so start the run again; with "
        "--ckpt.interval N it keeps checkpoints to fork from."
    )


def _describe_training(facts: RunFacts, first: int) -> str:
    """Return entropy, gradient norm and learning rate around a step, in one sentence."""
    entropy = facts.trained_metric("entropy/mean")
    norm = facts.trained_metric("optim/grad_norm")
    before = max([entropy[s] for s in entropy if s < first] or [0.0])
    after = max([entropy[s] for s in entropy if s >= first] or [0.0])
    change = "stayed about the same"
    if after > 2 * before:
        change = "rose"
    elif after < 0.3 * before:
        change = "fell"
    said = f"The entropy {change} ({before:.2f} before, {after:.2f} after)"
    if norm:
        said += f"; the gradient norm reached {max(norm.values()):.1f}"
    rates = {step: lr for step, lr in facts.metric("optim/lr").items() if step <= first}
    if rates:
        said += f"; the learning rate was {rates[max(rates)]:.1e}"
    return f"{said}."


def find_length_reward(facts: RunFacts) -> Finding | None:
    """Find completions that grow longer while longer completions get higher rewards."""
    steps = facts.steps
    tokens = facts.metric("completion_len/mean")
    if len(steps) < 2 * MIN_STEPS or len(tokens) < len(steps):
        return None
    n = max(2, len(steps) // 5)
    before, after = (mean_of(tokens[s] for s in some) for some in (steps[:n], steps[-n:]))
    correlation = facts.metric("reward/length_correlation")
    alike = [correlation[s] for s in steps if s in correlation and facts.spread_of(s) > 0]
    if not alike or after < LONGER_RATIO * before or mean_of(alike) < ALIKE_SHARE:
        return None
    return Finding(
        "length",
        "The reward pays for length",
        next(step for step in steps if tokens[step] > (1 + LONGER_RATIO) / 2 * before),
        f"Completions grew from {before:.0f} to {after:.0f} tokens, and within a step longer "
        f"completions get higher rewards (correlation {mean_of(alike):.2f}).",
        [
            "Read the longest rollouts: do they say more, or repeat themselves?",
            "Reward what is right instead of how much is written; orchestrator.overlong_share "
            "lowers the reward of completions near the limit.",
            "A loss that weighs sequences alike favours long wrong answers; `algorithm` dr_grpo "
            "does not.",
        ],
    )


def find_staleness(facts: RunFacts) -> Finding | None:
    """Find training on tokens of an older policy, or on logprobs that differ from the trainer's."""
    behind = facts.metric("batch/off_policy_level/mean")
    apart = facts.trained_metric("mismatch_kl/mean")
    masked = facts.trained_metric("is_masked/mean")
    late = [step for step in behind if behind[step] >= STALE_STEPS]
    wide = [step for step in apart if apart[step] >= MISMATCH_NATS]
    dropped = [step for step in masked if masked[step] >= DROPPED_SHARE]
    if max(len(late), len(wide), len(dropped)) < max(MIN_STEPS, 0.3 * len(behind)):
        return None
    title = "Sampler and trainer disagree"
    helps = [
        "The sampler's logprobs are not the trainer's: compare dtype and engine on both sides.",
        "weights/canary_difference says how far apart they are on the same text; truncated "
        "importance sampling and masks (trainer.loss) only limit the damage.",
    ]
    if len(late) >= max(MIN_STEPS, 0.3 * len(behind)):
        title = "The trainer learns from tokens of an old policy"
        helps = [
            "Lower max_async_level (1 is usually enough) and orchestrator.max_off_policy_steps.",
            "Give the slower side more: a step's time/generate and time/train say which it is.",
        ]
    elif mean_of(behind.values()) >= OLD_STEPS:
        title = "The policy changes much between sampling and training"
        helps = [
            "Lower the learning rate (trainer.optim.lr), or set max_async_level = 0.",
            "Give the slower side more: a step's time/generate and time/train say which it is.",
        ]
    return Finding(
        "stale",
        title,
        min([*late, *wide, *dropped]),
        f"Tokens were {mean_of(behind.values()):.1f} steps old on average, the mismatch KL was "
        f"{mean_of(apart.values()):.1e}, and the loss left out {mean_of(masked.values()):.0%} of "
        "the tokens.",
        helps,
    )


def find_lost_entropy(facts: RunFacts) -> Finding | None:
    """Find entropy that vanishes before the task is learned."""
    entropy = facts.trained_metric("entropy/mean")
    rewards = facts.metric("reward/mean")
    steps = sorted(entropy)
    if len(steps) < 2 * MIN_STEPS:
        return None
    start, end = (
        mean_of(entropy[s] for s in some) for some in (steps[:MIN_STEPS], steps[-MIN_STEPS:])
    )
    reward = mean_of(rewards.get(s, 0.0) for s in steps[-MIN_STEPS:])
    if end > 0.02 * start or start < 1e-3 or reward > 0.9 * max(rewards.values(), default=1.0):
        return None
    return Finding(
        "entropy",
        "The policy has stopped exploring",
        next(step for step in steps if entropy[step] < 0.05 * start),
        f"The entropy fell from {start:.3f} to {end:.4f} nats a token.",
        [
            "A lower learning rate, a higher temperature, or a higher upper clipping bound "
            "(docs/algorithms.md)."
        ],
    )


def find_failures(facts: RunFacts) -> Finding | None:
    """Find many rollouts that end in an error."""
    bad = [step for step in facts.steps if facts.failed_share(step) > 0.2]
    if len(bad) < max(2, 0.2 * len(facts.steps)):
        return None
    return Finding(
        "failures",
        "Rollouts fail",
        bad[0],
        f"In {len(bad)} of {len(facts.steps)} steps more than a fifth of the rollouts ended in an "
        "error.",
        [
            "Read the errors (Rollouts, filter: failed); the orchestrator's log has the first of "
            "each kind."
        ],
    )


def find_divergence(facts: RunFacts) -> Finding | None:
    """Find an SFT loss that rose and stayed high."""
    loss = facts.metric("loss/mean")
    steps = facts.steps
    level = _running_mean([loss[step] for step in steps])
    low = min(range(len(level)), key=level.__getitem__)
    if level[-1] < 1.3 * level[low] + 0.2 or level[-1] < 0.5 * level[0]:
        return None
    return Finding(
        "diverged",
        "The loss has risen again",
        next(steps[i] for i in range(low, len(steps)) if level[i] > 1.15 * level[low] + 0.1),
        f"It was {level[low]:.3f} around step {steps[low]} and is {level[-1]:.3f} at the end.",
        ["A lower learning rate (optim.lr), or a longer warm-up (scheduler.warmup_steps)."],
    )


def find_overfitting(facts: RunFacts) -> Finding | None:
    """Find a validation loss that has risen clearly above its minimum."""
    val = facts.metric("val/loss")
    steps = sorted(val)
    if len(steps) < MIN_STEPS:
        return None
    low = min(steps, key=val.__getitem__)
    if val[steps[-1]] < 1.1 * val[low] + 0.02 or low == steps[-1]:
        return None
    return Finding(
        "overfitted",
        "The model memorizes its data",
        low,
        f"The validation loss was {val[low]:.3f} at step {low} and is {val[steps[-1]]:.3f} at the end.",
        [f"Use the weights of step {low}, fewer epochs, or more data."],
    )


def mean_of(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(1, len(found))


def _running_mean(values: list[float], width: int = 3) -> list[float]:
    """Return for each value the mean of it and up to `width - 1` values before it."""
    starts = (max(0, i - width + 1) for i in range(len(values)))
    return [mean_of(values[start : i + 1]) for i, start in enumerate(starts)]


Rule = Callable[[RunFacts], Finding | None]
RL_RULES: tuple[Rule, ...] = (
    find_wrong_template,
    find_truncation,
    find_constant_reward,
    find_collapse,
    find_staleness,
    find_length_reward,
    find_failures,
    find_lost_entropy,
    find_missing_signal,
    find_solved,
)
SFT_RULES: tuple[Rule, ...] = (find_divergence, find_overfitting)
EXPLAINS = {  # findings that the first one explains are not reported
    "template": ("truncated", "no_variance", "no_signal", "collapse"),
    "truncated": ("no_signal",),
    "no_variance": ("no_signal", "truncated", "solved"),
    "collapse": ("no_signal", "entropy", "stale"),
    "length": ("no_signal", "solved"),
    "failures": ("no_signal",),
}
