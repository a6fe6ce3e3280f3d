"""What of a conversation goes on from which tokens, with which draws."""

import asyncio

from hone.environments.conversation import Conversation
from hone.records import Completion, Sampling, Turn


class Model:
    def __init__(self):
        self.asked = []

    async def chat(self, prompt, sampling):
        self.asked.append((sampling.seed, prompt.before, prompt.covered))
        n = len(self.asked)
        return Turn(
            [*(prompt.before or []), 100 + n], Completion([n], [-0.5], [0], "stop"), f"reply {n}"
        )


def test_turns_go_on_from_the_longest_that_they_repeat():
    model = Model()

    async def program():
        talk, messages = Conversation(model), [{"role": "user", "content": "q"}]
        first = await talk.chat(messages, Sampling(seed=7))
        messages.append({"role": "assistant", "content": first.text})
        messages.append({"role": "user", "content": "more"})
        second = await talk.chat(messages, Sampling(seed=7))
        branch = [*messages[:2], {"role": "user", "content": "other"}]
        await talk.chat(branch, Sampling(seed=7))  # from the first again
        on = [
            *messages,
            {"role": "assistant", "content": second.text},
            {"role": "tool", "content": "5"},
        ]
        await talk.chat(on, Sampling(seed=7))
        changed = [messages[0], {"role": "assistant", "content": "not what it said"}, messages[2]]
        await talk.chat(changed, Sampling(seed=7))

    asyncio.run(program())
    before = [(b, n) for _, b, n in model.asked]
    assert before == [(None, 0), ([101, 1], 2), ([101, 1], 2), ([101, 1, 102, 2], 4), (None, 0)]
    seeds = [seed for seed, _, _ in model.asked]
    assert seeds[0] == 7 and len(set(seeds)) == 5
