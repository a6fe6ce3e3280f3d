"""Configuration of the orchestrator: sampling, advantages and selection of rollouts."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hone.config.algorithms import ALGORITHMS, Algorithm
from hone.config.base import Config, Free
from hone.config.sections import (
    Arguments,
    ClientConfig,
    EnvConfig,
    EvalConfig,
    Positive,
    SamplingConfig,
    Share,
    as_list,
    named_or_own,
    require_distinct,
)

GroupSize = Annotated[int, Field(ge=2)]
ADVANTAGES = ("mean", "std", "rloo", "length_corrected", "max_rl")
Advantage = Annotated[str, AfterValidator(lambda name: named_or_own(name, ADVANTAGES, "advantage"))]
Sampler = Literal["policy", "teacher"]
Truncated = Literal["keep", "mask", "zero", "drop"]
Failed = Literal["drop", "zero"]


class GroupConfig(Config):
    """How groups of an environment are sampled and scored."""

    rollouts_per_example: GroupSize = 16
    """Rollouts of each prompt, its group, at least 2: their rewards are compared with each other."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: Advantage = "mean"
    """How a rollout's advantage follows from the rewards of its group. mean: reward minus the group's mean; std: that,
    divided by the group's standard deviation; rloo: reward minus the mean of the other rollouts; length_corrected:
    reward minus the mean weighted by completion length; max_rl: reward minus the mean, divided by the mean; or your own
    function of the group, as package.module:function."""
    advantage_args: Arguments = Field(default={})
    """Keys of an advantage of your own: the keyword-only parameters of its function."""
    overlong_share: Share = 0.0
    """Share of max_tokens, at its end, over which a reward is lowered linearly by up to 1 (the soft overlong
    punishment of DAPO); 0 lowers none."""
    truncated: Truncated = "keep"
    """What to do with completions that were cut at max_tokens. keep: train on them like any other; mask: no loss on
    them, but their reward counts in the group; zero: give them reward 0; drop: leave them out of the group."""
    failed: Failed = "drop"
    """What to do with rollouts that failed in all their attempts. drop: leave them out of the group; zero: count them
    in the group with reward 0."""
    drop_zero_signal: bool = True
    """Do not train on groups whose advantages are all 0, as they are where all rollouts have the same reward."""
    refill: bool = False
    """Sample further groups in place of those left out, up to four batches in a step (the dynamic sampling of
    DAPO)."""
    sampler: Sampler = "policy"
    """Who writes the completions: the policy, or the teacher to learn from its text (with loss sft)."""
    teacher_logprobs: bool = False
    """Ask the teacher for its logprobs of the policy's tokens, which the loss opd needs."""


class TrainEnvConfig(EnvConfig):
    """A training environment. Unset group keys take the orchestrator's values."""

    ratio: float | list[tuple[int, float]] | None = None
    """Share of groups that this environment gets, relative to the ratios of the others; [[1, 1.0], [100, 0.2]] moves
    linearly from 1.0 at step 1 to 0.2 at step 100. Without ratios the examples of all environments are mixed."""
    algorithm: Algorithm | None = None
    """Named algorithm for this environment, instead of the run's (docs/algorithms.md)."""
    rollouts_per_example: GroupSize | None = None
    """Rollouts of each prompt for this environment, instead of orchestrator.rollouts_per_example."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Sampling temperature for this environment, instead of orchestrator.sampling.temperature."""
    max_tokens: Positive | None = None
    """Most tokens in a completion for this environment, instead of orchestrator.sampling.max_tokens."""
    advantage: Advantage | None = None
    """Replaces orchestrator.advantage for this environment."""
    advantage_args: Arguments | None = None
    """Replaces orchestrator.advantage_args for this environment."""
    overlong_share: Share | None = None
    """Replaces orchestrator.overlong_share for this environment."""
    truncated: Truncated | None = None
    """Replaces orchestrator.truncated for this environment."""
    failed: Failed | None = None
    """Replaces orchestrator.failed for this environment."""
    drop_zero_signal: bool | None = None
    """Replaces orchestrator.drop_zero_signal for this environment."""
    refill: bool | None = None
    """Replaces orchestrator.refill for this environment."""
    sampler: Sampler | None = None
    """Replaces orchestrator.sampler for this environment."""
    teacher_logprobs: bool | None = None
    """Replaces orchestrator.teacher_logprobs for this environment."""

    @model_validator(mode="before")
    @classmethod
    def _as_its_algorithm(cls, values: Any) -> Any:
        name = values.get("algorithm") if isinstance(values, dict) else None
        return {**ALGORITHMS[name]["orchestrator"], **values} if name in ALGORITHMS else values

    @model_validator(mode="after")
    def _ratio_is_a_schedule(self) -> "TrainEnvConfig":
        points = self.ratio if isinstance(self.ratio, list) else [(1, self.ratio or 0.0)]
        steps = [step for step, _ in points]
        if not points or min(value for _, value in points) < 0 or steps != sorted(set(steps)):
            raise ValueError(
                f"env.ratio {self.ratio}: at least one [step, ratio], steps rising, ratios not below 0"
            )
        return self


class BufferConfig(Config):
    """Settings that skip or replay examples by the rewards of their earlier groups."""

    easy_threshold: Share | None = None
    """Running mean reward from which an example counts as easy."""
    hard_threshold: Share | None = None
    """Running mean reward up to which an example counts as hard."""
    easy_fraction: Share = 0.0
    """Share of the easy examples that are still sampled when it is their turn; the others are skipped."""
    hard_fraction: Share = 0.0
    """Share of the hard examples that are still sampled when it is their turn; the others are skipped."""
    newest_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest group in the running mean reward of its example; 1 forgets all earlier ones."""
    online_difficulty_filtering: bool = False
    """Also leave out groups whose own mean reward is easy or hard; the thresholds are then 1 and 0 where none are
    given."""
    replay: Annotated[int, Field(ge=0)] = 0
    """Times that a group of an earlier step may be used again in place of one that is left out, while its tokens are
    no older than max_off_policy_steps."""


class TeacherConfig(ClientConfig):
    """A model that samples or scores tokens, served by `inference` with the policy's tokenizer."""

    model: str
    """Name of the teacher model on its server."""


StopReason = Literal["solved", "collapse", "no_variance", "truncated", "template", "failures"]


class OrchestratorConfig(GroupConfig):
    env: Annotated[
        list[TrainEnvConfig],
        BeforeValidator(as_list),
        Field(min_length=1),
        AfterValidator(require_distinct),
    ]
    """Environments to train on."""
    batch_size: Positive = 128
    """Rollouts in a step: the number of prompts times rollouts_per_example. Environments with groups of another size
    give more or fewer."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups sampled at once, as a multiple of what a step needs; above 1 a step does not wait for the slowest groups,
    which go into later steps."""
    max_prompt_tokens: Positive | None = None
    """Leave out examples whose first prompt has more tokens; none unless given."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """Most steps by which a group's oldest tokens may lag behind the trained weights; older groups are discarded and
    sampled again."""
    return_routing: bool = False
    """Have servers of a mixture of experts return which experts tokens went through, for trainer.replay_routing, which
    sets this too in `rl`."""
    buffer: BufferConfig = BufferConfig()
    rollout_timeout: Free[Annotated[float, Field(gt=0)]] = 600.0
    """Seconds that one attempt at a rollout may take before it counts as failed. In one process those of the next step
    begin shortly before the trainer's step ends, where this is 60 or more."""
    rollout_retries: Free[Annotated[int, Field(ge=0)]] = 1
    """Further attempts at a rollout that failed, before the step continues without it."""
    eval: Free[EvalConfig | None] = None
    """Evaluate on environments while training; not done unless a key of this section is given."""
    teacher: TeacherConfig | None = None
    """Teacher model for distillation; none unless a key of this section is given."""
    client: ClientConfig = ClientConfig()
    weights_timeout: Free[Annotated[float, Field(gt=0)]] = 3600.0
    """Seconds to wait for a new version of the weights before the run is ended."""
    log_samples: Free[Annotated[int, Field(ge=0)]] = 0
    """Log a rollout of every this many steps, of those the one in the middle by reward: prompt, completion, reward;
    0 logs none. rollouts/ has all of them."""
    stop_when: Free[Annotated[list[StopReason], BeforeValidator(as_list)]] = Field(default=[])
    """Findings that end the run after the current step, with its weights and checkpoint. The step lines and
    `hone doctor` report them in any case."""
    canary_tolerance: Free[Annotated[float, Field(gt=0)] | None] = None
    """Largest difference allowed between the trainer's and a server's logprobs of the canary, a fixed text that shows
    whether new weights arrived. Unless given: 1e-3 in float32; in bfloat16 0.1, and 0.5 for vLLM, whose logits are
    rounded to bfloat16."""

    @model_validator(mode="after")
    def _batch_divides(self) -> "OrchestratorConfig":
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch-size {self.batch_size} is not a multiple of rollouts-per-example {self.rollouts_per_example} "
                "(batch_size counts rollouts: prompts_per_step x rollouts_per_example)"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "OrchestratorConfig":
        with_ratio = [env for env in self.env if env.ratio is not None]
        if with_ratio and len(with_ratio) < len(self.env):
            raise ValueError("env.ratio: give it to all environments or to none")
        low = self.buffer.hard_threshold
        high = self.buffer.easy_threshold
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"buffer.hard_threshold {low} is not below buffer.easy_threshold {high}"
            )
        settings = [self.group_config_of(env.known_as) for env in self.env]
        if self.teacher is None and any(
            one.sampler == "teacher" or one.teacher_logprobs for one in settings
        ):
            raise ValueError(
                "distillation needs a teacher: --orchestrator.teacher.model NAME, and its base-url"
            )
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size // self.rollouts_per_example

    @property
    def mixing_ratios(self) -> dict[str, list[tuple[int, float]]] | None:
        """Return each environment's schedule [(step, ratio), …], or None without ratios."""
        found = {}
        for env in self.env:
            if env.ratio is None:
                return None
            found[env.known_as] = env.ratio if isinstance(env.ratio, list) else [(1, env.ratio)]
        return found

    def group_config_of(self, name: str) -> GroupConfig:
        """Return an environment's group settings: its own, else the shared ones."""
        env = next(env for env in self.env if env.known_as == name)
        keys = GroupConfig.model_fields.keys()
        own = {key: getattr(env, key, None) for key in keys if getattr(env, key, None) is not None}
        drawn = {
            key: getattr(env, key)
            for key in ("temperature", "max_tokens")
            if getattr(env, key) is not None
        }
        own["sampling"] = self.sampling.model_copy(update=drawn)
        return GroupConfig(**{key: getattr(self, key) for key in keys} | own)
