"""Environment of verifiers' v1 API: hands of Kuhn poker, both players trained, without an end."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["KuhnEnv", "KuhnTaskset"]
CARDS = "JQK"
# By the moves so far, of which p is pass and b is bet: the chips that the first player wins, where
# None is a showdown, and how many are at stake.
ENDS = {"pp": (None, 1), "bp": (1, 1), "pbp": (-1, 1), "bb": (None, 2), "pbb": (None, 2)}


class KuhnData(vf.TaskData):
    seed: int


class KuhnTask(vf.Task[KuhnData]):
    pass


class KuhnConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class KuhnEnv(vf.Env[KuhnConfig]):
    async def run(self, task, agents):
        cards = random.Random(task.data.seed).sample(CARDS, 2)
        tasks = [
            vf.Task(vf.TaskData(idx=task.data.idx, prompt=None, system_prompt=f"card {card}"))
            for card in cards
        ]
        moves = ""
        loser = None
        async with (
            agents.first.interaction(tasks[0]) as first,
            agents.second.interaction(tasks[1]) as second,
        ):
            while moves not in ENDS and loser is None:
                player = len(moves) % 2
                segment = await (first, second)[player].turn(f"moves: {moves or 'none'}")
                move = "" if segment.terminated else segment.last_reply
                if move in ("p", "b"):
                    moves += move
                else:
                    loser = player  # by a move that the game does not have
        self.pay(cards, moves, loser, (first.trace, second.trace))

    def pay(self, cards, moves, loser, traces):
        sign, stake = ENDS[moves] if loser is None else (1 if loser else -1, 1)
        if sign is None:
            sign = 1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1
        for player, trace in enumerate(traces):
            trace.record_reward("chips", float(sign * stake * (-1 if player else 1)))
            trace.record_metric("forfeits", float(loser == player))


class KuhnTaskset(vf.Taskset[KuhnTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield KuhnTask(KuhnData(idx=i, name=f"hand {i}", prompt=None, seed=i))
