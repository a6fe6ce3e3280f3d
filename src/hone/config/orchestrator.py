"""Configuration of the orchestrator: which rollouts are made, what they are worth, which are trained on."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hone.config.algorithms import ALGORITHMS, Algorithm
from hone.config.base import Config, Free
from hone.config.sections import ClientConfig, EnvConfig, EvalConfig, Positive, SamplingConfig, Share, as_list, distinct

GroupSize = Annotated[int, Field(ge=2)]
Advantage = Literal["mean", "std", "rloo", "length_corrected", "max_rl"]
Sampler = Literal["policy", "teacher"]
Truncated = Literal["keep", "mask", "zero", "drop"]
Failed = Literal["drop", "zero"]


class GroupConfig(Config):
    """How the groups of an environment are made and judged."""

    rollouts_per_example: GroupSize = 16
    """Rollouts of one prompt (a group); the advantage is the reward minus the group's mean, so at least 2."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: Advantage = "mean"
    """Reward minus its group's mean; over its deviation too (std); minus the others' mean (rloo); minus the mean over
    the group's tokens (length_corrected); over the mean (max_rl)."""
    overlong_share: Share = 0.0
    """Over the last share of max_tokens a reward falls in a line by up to 1 (soft overlong punishment, DAPO)."""
    truncated: Truncated = "keep"
    """Completions that ran into max_tokens: like any other; without loss, but in their group's mean (mask); with
    reward 0 (zero); as if they were not there (drop)."""
    failed: Failed = "drop"
    """Rollouts that failed in all their attempts: as if they were not there, or with reward 0 in their group's mean."""
    drop_zero_signal: bool = True
    """Leave out groups whose rollouts all have the same reward: their advantages are 0."""
    refill: bool = False
    """Sample others instead of groups that are left out (dynamic sampling, DAPO), up to four batches in a step."""
    sampler: Sampler = "policy"
    """Who writes the completions: teacher, for distillation of its text (loss sft)."""
    teacher_logprobs: bool = False
    """Ask the teacher for its logprobs of the policy's tokens (loss opd)."""


class TrainEnvConfig(EnvConfig):
    """An environment to train on. What it does not say of its groups is as for all."""

    ratio: float | list[tuple[int, float]] | None = None
    """Its share of the groups, beside the others' ratios; [[1, 1.0], [100, 0.2]] goes from the one at step 1 in a line
    to the other at step 100. Without ratios the examples of all environments are mixed."""
    algorithm: Algorithm | None = None
    """Its own, as for all (docs/algorithms.md)."""
    rollouts_per_example: GroupSize | None = None
    """Its own, and so below."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Of sampling."""
    max_tokens: Positive | None = None
    """Of sampling."""
    advantage: Advantage | None = None
    """As for all."""
    overlong_share: Share | None = None
    """As for all."""
    truncated: Truncated | None = None
    """As for all."""
    failed: Failed | None = None
    """As for all."""
    drop_zero_signal: bool | None = None
    """As for all."""
    refill: bool | None = None
    """As for all."""
    sampler: Sampler | None = None
    """As for all."""
    teacher_logprobs: bool | None = None
    """As for all."""

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
            raise ValueError(f"env.ratio {self.ratio}: at least one [step, ratio], steps rising, ratios not below 0")
        return self


class BufferConfig(Config):
    """What is known of examples from their earlier groups, and what is done with it."""

    easy_threshold: Share | None = None
    """Examples whose running mean reward is at least this are easy."""
    hard_threshold: Share | None = None
    """Examples whose running mean reward is at most this are hard."""
    easy_fraction: Share = 0.0
    """Of the easy examples, the share that is sampled all the same when its turn comes."""
    hard_fraction: Share = 0.0
    """Of the hard ones."""
    newest_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest group in an example's running mean."""
    online_difficulty_filtering: bool = False
    """Leave out groups too whose own mean reward is at a threshold, 1 and 0 where none is given."""
    replay: Annotated[int, Field(ge=0)] = 0
    """How often a group of an earlier step may stand in for one that is left out; its tokens are no older than
    max_off_policy_steps."""


class TeacherConfig(ClientConfig):
    """A model that samples or judges tokens, served by `inference` with the tokenizer of the policy."""

    model: str
    """Its name there."""


class OrchestratorConfig(GroupConfig):
    env: Annotated[list[TrainEnvConfig], BeforeValidator(as_list), Field(min_length=1), AfterValidator(distinct)]
    """Environments."""
    batch_size: Positive = 128
    """Rollouts in a step: prompts_per_step x rollouts_per_example. An environment with groups of another size gives
    more or fewer."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups under way for a step, of those that it takes: the slowest go into later steps."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """Groups with older tokens than this are given up and begun again."""
    buffer: BufferConfig = BufferConfig()
    rollout_timeout: Free[Annotated[float, Field(gt=0)]] = 600.0
    """Seconds until a rollout is given up."""
    rollout_retries: Free[Annotated[int, Field(ge=0)]] = 1
    """How often a rollout that fails is tried again before the step goes on without it."""
    eval: Free[EvalConfig | None] = None
    """Evaluate on environments while training, every version by itself."""
    teacher: TeacherConfig | None = None
    """For distillation, when a key of it is given."""
    client: ClientConfig = ClientConfig()
    weights_timeout: Free[Annotated[float, Field(gt=0)]] = 3600.0
    """Seconds until waiting for a version of the weights is given up."""
    canary_tolerance: Free[Annotated[float, Field(gt=0)] | None] = None
    """Largest difference between the logprobs of trainer and server on the canary; 1e-3 in fp32 and 0.1 in bf16."""

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
        low, high = self.buffer.hard_threshold, self.buffer.easy_threshold
        if low is not None and high is not None and low >= high:
            raise ValueError(f"buffer.hard_threshold {low} is not below buffer.easy_threshold {high}")
        settings = [self.of(env.known_as) for env in self.env]
        if self.teacher is None and any(one.sampler == "teacher" or one.teacher_logprobs for one in settings):
            raise ValueError("distillation needs a teacher: --orchestrator.teacher.model NAME, and its base-url")
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size // self.rollouts_per_example

    @property
    def ratios(self) -> dict[str, list[tuple[int, float]]] | None:
        """Of the environments, at steps; None where all are mixed."""
        found = {}
        for env in self.env:
            if env.ratio is None:
                return None
            found[env.known_as] = env.ratio if isinstance(env.ratio, list) else [(1, env.ratio)]
        return found

    def of(self, name: str) -> GroupConfig:
        """How the groups of an environment are made: as it says itself, else as for all."""
        env = next(env for env in self.env if env.known_as == name)
        keys = GroupConfig.model_fields.keys()
        own = {key: getattr(env, key, None) for key in keys if getattr(env, key, None) is not None}
        drawn = {key: getattr(env, key) for key in ("temperature", "max_tokens") if getattr(env, key) is not None}
        own["sampling"] = self.sampling.model_copy(update=drawn)
        return GroupConfig(**{key: getattr(self, key) for key in keys} | own)
