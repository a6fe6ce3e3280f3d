"""The reverse-text environment behind something slow: every rollout waits 0.05 to 2 s, as for a tool or a judge."""

import asyncio
import random

import hone.environments as vf
import reverse_text


def load_environment(**arguments: object) -> vf.Environment:
    environment = reverse_text.load_environment(**arguments)
    at_once = environment.rollout

    async def rollout(client, example, sampling):
        await asyncio.sleep(random.Random(sampling.seed).uniform(0.05, 2.0))
        return await at_once(client, example, sampling)

    environment.rollout = rollout
    return environment
