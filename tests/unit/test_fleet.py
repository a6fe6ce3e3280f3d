"""Several servers as one model: who is asked for how much, who comes first, what is asked again and from where."""

import asyncio
import logging
import math

import pytest

from hone import machine
from hone.clients import fleet as module
from hone.clients.fleet import Fleet
from hone.clients.http import ServerLost
from hone.records import Completion, Prompt, Sampling, Turn

LOG = logging.getLogger("test")


class Client:
    """A server that answers when it is let go on, and says what it is told to say."""

    base_url = "here"

    def __init__(self):
        self.asked, self.state, self.alive = (
            [],
            {"running": 0, "waiting": 0, "without_room": 0},
            True,
        )
        self.gone = asyncio.Event()

    async def chat_group(self, prompt, sampling, count, name="", so_far=None):
        answer = asyncio.get_running_loop().create_future()
        self.asked.append((prompt.messages, sampling.seed, count, name, so_far, answer))
        lost = asyncio.ensure_future(self.gone.wait())
        await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ServerLost("killed")
        lost.cancel()
        before = so_far or [Completion([], [], [], "")] * count
        rest = [
            Completion([*one.ids, 9], [*one.logprobs, -1.0], [*one.versions, 0], "stop")
            for one in before
        ]
        return [Turn([1], completion, "") for completion in rest]

    def answer(self, i):
        self.asked[i][-1].set_result(None)

    async def call_control(self, route, body=None):
        assert route == "progress"
        written = {name: n for name, n in body["known"].items()}
        new = {
            name: {"ids": [7, 8][n:], "logprobs": [-0.5, -0.6][n:], "versions": [0, 1][n:]}
            for name, n in written.items()
        }
        return {**self.state, "partials": new}

    async def is_up(self, timeout=5.0):
        return self.alive

    async def why_down(self, timeout):
        return "" if self.alive else f"/health did not answer within {timeout:.0f} s"

    async def __aexit__(self, *_):
        pass


def run(program, monkeypatch, count=1, goes_on=False):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)

    async def whole():
        clients = [Client() for _ in range(count)]

        async def revive(client):
            return 0

        made = Fleet(clients, revive, 5.0, LOG, goes_on)
        for server in made.servers:
            server.version = 0
        try:
            return await program(made, clients)
        finally:
            await made.close()

    return asyncio.run(whole())


def ask(made, seed, prompt="p", **kwargs):
    messages = [{"role": "user", "content": prompt}]
    return asyncio.ensure_future(made.chat(Prompt(messages), Sampling(seed=seed), **kwargs))


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0.002)


async def until(holds):
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.002)


def test_a_server_is_asked_for_what_it_computes_and_a_little_more(monkeypatch):
    async def program(made, clients):
        (server,), (client,) = made.servers, clients
        # It has only begun to read
        client.state = {"running": 16, "waiting": 84, "without_room": 0}
        watching = asyncio.ensure_future(made.watch_servers())
        first = [ask(made, 2 * i, f"p{i}") for i in range(100)]
        await asyncio.sleep(0.05)
        assert len(client.asked) == 100 and server.limit == math.inf
        client.state = {"running": 40, "waiting": 60, "without_room": 60}
        await until(lambda: server.limit == 40 + 16)  # from now on
        assert len(client.asked) == 100
        later = [ask(made, 2 * i, f"q{i}") for i in range(30)]
        await turns()
        assert len(client.asked) == 100
        for i in range(60):
            client.answer(i)
        client.state = {"running": 40, "waiting": 10, "without_room": 10}
        await until(lambda: len(client.asked) == 100 + 16)
        await turns()
        assert len(client.asked) == 100 + 16 and server.busy == 56
        client.state = {"running": 56, "waiting": 0, "without_room": 0}  # it has room for more
        await until(lambda: len(client.asked) == 130)
        watching.cancel()
        for task in first + later:
            task.cancel()

    run(program, monkeypatch)


def test_evaluations_come_first_and_groups_go_together(monkeypatch):
    async def program(made, clients):
        made.servers[0].limit = 4
        waiting = [ask(made, seed, "a") for seed in range(4)] + [
            ask(made, seed, "b") for seed in range(4)
        ]
        await turns()
        waiting += [ask(made, 0, "c"), ask(made, 0, "d", is_urgent=True)]
        await turns()
        (client,) = clients
        assert [one[2] for one in client.asked] == [4]
        client.answer(0)
        await turns()
        assert [one[0][0]["content"] for one in client.asked] == ["a", "d"]
        client.answer(1)
        await turns()
        assert [one[0][0]["content"] for one in client.asked] == ["a", "d", "b"]
        for task in waiting:
            task.cancel()

    run(program, monkeypatch)


def test_what_was_asked_of_a_sampling_does_not_part_its_group(monkeypatch):
    async def program(made, clients):
        samplings = [Sampling(seed=seed) for seed in range(3)]
        assert not samplings[1].is_filtered
        prompt = Prompt([{"role": "user", "content": "a"}])
        tasks = [asyncio.ensure_future(made.chat(prompt, one)) for one in samplings]
        await turns()
        assert [one[2] for one in clients[0].asked] == [3]
        for task in tasks:
            task.cancel()

    run(program, monkeypatch)


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_a_lost_server_had_written_is_gone_on_from_or_begun_again(goes_on, monkeypatch):
    async def program(made, clients):
        watching = asyncio.ensure_future(made.watch_servers())
        tasks = [ask(made, seed) for seed in (5, 6)]
        await until(lambda: any(client.asked for client in clients))
        first, second = sorted(clients, key=lambda client: -len(client.asked))
        runs = [run for server in made.servers for run in server.runs.values()]
        if goes_on:
            await until(lambda: [len(one.ids) for one in runs[0].so_far] == [2, 2])
        first.alive = False
        first.gone.set()
        await until(lambda: second.asked)
        ((_, seed, count, name, so_far, _),) = second.asked
        assert (seed, count) == (5, 2) and bool(name) == goes_on
        if goes_on:
            assert [(one.ids, one.logprobs, one.versions) for one in so_far] == [
                ([7, 8], [-0.5, -0.6], [0, 1])
            ] * 2
        else:
            assert not so_far
        second.answer(0)
        done = await asyncio.gather(*tasks)
        assert [turn.completion.ids for turn in done] == [[7, 8, 9] if goes_on else [9]] * 2
        watching.cancel()

    run(program, monkeypatch, 2, goes_on)


def test_where_no_server_is_left_whoever_waits_is_told(monkeypatch):
    async def program(fleet, clients):
        fleet.deadline = 0.2
        waiting = ask(fleet, 1)
        await until(lambda: clients[0].asked)
        clients[0].alive = False
        clients[0].gone.set()
        with pytest.raises(ConnectionError, match="to come up again"):
            await waiting
        with pytest.raises(ConnectionError, match="to come up again"):
            await ask(fleet, 2)
        with pytest.raises(ConnectionError):
            await fleet.ended

    run(program, monkeypatch)


def test_a_connection_that_breaks_is_no_lost_server(monkeypatch, caplog):
    async def program(made, clients):
        (client,) = clients
        task = ask(made, 5)
        await until(lambda: client.asked)
        client.gone.set()
        client.gone = asyncio.Event()
        await until(lambda: len(client.asked) == 2)
        # Under another name
        assert made.servers[0].is_up and client.asked[0][3] != client.asked[1][3]
        client.answer(1)
        assert (await task).completion.ids == [9]

    run(program, monkeypatch, goes_on=True)
    assert not caplog.records


def test_a_server_that_falls_silent_is_lost_and_what_nobody_waits_for_is_given_up(
    monkeypatch, caplog
):
    async def program(made, clients):
        watching = asyncio.ensure_future(made.watch_servers())
        one, two = ask(made, 0, "a"), ask(made, 0, "b")
        first, second = clients
        await until(lambda: first.asked and second.asked)
        one.cancel()
        await until(lambda: made.servers[0].busy == 0)
        assert made.servers[1].busy == 1
        second.alive = False
        await until(lambda: not made.servers[1].is_up and len(first.asked) == 2)
        second.alive = True
        first.answer(1)
        await two
        await until(lambda: made.servers[1].is_up)
        watching.cancel()

    with caplog.at_level(logging.INFO, logger="test"):
        run(program, monkeypatch, 2)
    lost = (
        f"Lost the server at here (/health did not answer within {machine.silence_seconds():.0f} s)"
    )
    assert lost in caplog.text and "is back" in caplog.text
