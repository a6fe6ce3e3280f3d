"""Run a rollout with retries; if all tries fail, return a rollout that carries the last error.

Training and evaluation count the same failures: an exception in the environment, an environment
that cancels its own task, a timeout, a reward that is not a finite number.
"""

import asyncio
import math
from collections import Counter

from hone.environments.conversation import Conversation, TokenClient
from hone.environments.environment import Environment, check_rollout
from hone.environments.rubric import RewardError
from hone.records import Example, Refused, Rollout, Sampling
from hone.users_code import CONTAINED, ExitInUserCode


async def attempt(
    environment: Environment,
    client: TokenClient,
    example: Example,
    sampling: Sampling,
    timeout: float | None = None,
    retries: int = 0,
    failures: Counter[str] | None = None,
    needs_tokens: bool = False,
) -> Rollout:
    """Run one rollout with retries; if all tries fail, return a rollout whose `error` says why.

    Args:
        timeout: seconds per try.
        retries: further tries after the first.
        failures: counter to which failed tries are added, by cause.
        needs_tokens: also count a rollout without sampled token ids as failed, since it cannot be trained on.
    """
    error = ""
    for _ in range(1 + retries):
        deadline = asyncio.timeout(timeout)
        talk = Conversation(client, environment.template_arguments)
        try:
            async with deadline:
                with CONTAINED:
                    rollout = check_rollout(
                        await environment.rollout(talk, example.copy(), sampling)
                    )
                rollout.example = example  # unchanged: the environment may have modified its copy
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise  # the caller cancelled, or the program ends
            cause = "raised"
            error = "the environment cancelled its own work"
        except Exception as failure:  # users' code may raise anything
            cause = "raised"
            error = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, ExitInUserCode):
                error = f"the environment's code wanted to end the process: {failure}"
            if isinstance(failure, RewardError):
                cause = "reward"
                error = str(failure)
            if isinstance(failure, Refused):
                cause = "refused"
            if deadline.expired():
                cause = "timeout"
                error = f"no end within {timeout:g} s"
        else:
            if not math.isfinite(rollout.reward):
                cause = "not_finite"
                error = f"the reward is {rollout.reward}"
            elif needs_tokens and not any(turn.completion.ids for turn in rollout.turns):
                cause = "empty"
                error = "nothing was sampled"
            else:
                return rollout
        if failures is not None:
            failures[cause] += 1
    return Rollout(example, [], [], error=error)


async def score_group_or_fail(
    environment: Environment, rollouts: list[Rollout], timeout: float | None = None
) -> None:
    """Add the rewards of functions that score a whole group; if one raises, the group fails."""
    if not environment.has_group_rewards:
        return
    try:
        async with asyncio.timeout(timeout):
            with CONTAINED:
                await environment.score_group(rollouts)
    except Exception as failure:  # users' code may raise anything
        said = (
            str(failure)
            if isinstance(failure, RewardError)
            else f"{type(failure).__name__}: {failure}"
        )
        for rollout in rollouts:
            rollout.error = rollout.error or said
