"""The compute thread beside an event loop."""

import asyncio
import threading
import time

import pytest
import torch

from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import GenerateRequest, Sampling

SPEC = ModelSpec(
    50, 32, 64, 2, 4, 2, 8, 1e-6, make_plain_layers(1000.0, 8, 2), True, 96, 0.5, False
)


@pytest.fixture
def service():
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    return EngineService(Engine(model), lockstep=True)


def request(seed, max_tokens=40):
    return GenerateRequest([5, 6], Sampling(1.0, max_tokens, seed), frozenset())


def test_requests_made_while_a_function_computes_have_what_it_leaves(service):
    """As those of a step of RL that are made while the trainer computes: with its version, all in one piece."""
    made, tasks = threading.Event(), []

    def begin():
        tasks.extend(asyncio.ensure_future(service.generate(request(seed))) for seed in range(3))
        asyncio.get_running_loop().call_soon(made.set)

    def learn():
        service.on_loop(begin)
        assert made.wait(10)
        service.engine.set_version(7)
        return "learnt"

    async def program():
        assert await service.run_on_engine(learn) == "learnt"
        for one in await asyncio.gather(*tasks):
            assert set(one.versions) == {7}

    service.run_beside(program())


def test_idle_work_runs_while_no_request_is_there(service, caplog):
    done, asked = [], threading.Event()

    def fail(engine):
        raise ValueError("no memory")

    service.idle_work = [done.append, fail, done.append, lambda engine: asked.wait(10)]

    async def program():
        waiting = asyncio.ensure_future(service.generate(request(0)))
        await asyncio.sleep(0)  # it is asked before or while the first work runs
        asked.set()
        assert len((await waiting).ids) == 40
        while service.idle_work:
            await asyncio.sleep(0.01)
        assert len((await service.generate(request(1))).ids) == 40

    service.run_beside(program())
    assert done == [service.engine] and "no memory" in caplog.text  # work behind a failure is left


def test_in_lockstep_completions_are_held_and_what_functions_give_is_not(service, monkeypatch):
    goes_on, step = threading.Event(), service.engine.step

    def held(**options):
        assert goes_on.wait(10)
        step(**options)

    monkeypatch.setattr(service.engine, "step", held)

    async def program():
        short, long = (asyncio.ensure_future(service.generate(request(n, n))) for n in (2, 80))
        await asyncio.sleep(0)
        assert await service.run_on_engine(lambda: len(service.engine.live_sequences())) == 2
        goes_on.set()
        await asyncio.wait([short])
        assert long.done()

    service.run_beside(program())


def test_what_a_function_raises_is_raised_where_it_was_asked_for(service):
    def fail():
        raise KeyError("no such thing")

    async def program():
        with pytest.raises(KeyError, match="no such thing"):
            await service.run_on_engine(fail)
        assert len((await service.generate(request(0))).ids) == 40

    service.run_beside(program())


def test_requests_that_were_made_before_a_failure_do_not_hide_it(service, monkeypatch):
    """As Ctrl-C in a step of training: the program has ended, and its loop is closed, when they have been computed."""
    threads, step = set(threading.enumerate()), service.engine.step
    made, computes, tasks = threading.Event(), threading.Event(), []

    def slow(**options):
        computes.set()
        for thread in set(threading.enumerate()) - threads:
            while not thread.ident:  # it is only being started, and cannot be waited for yet
                time.sleep(0.001)
            thread.join(10)
        step(**options)

    def begin():
        tasks.append(asyncio.ensure_future(service.generate(request(0, 1))))
        asyncio.get_running_loop().call_later(0.05, made.set)

    def learn():
        service.on_loop(begin)
        assert made.wait(10)
        raise KeyboardInterrupt

    async def program():
        try:
            await service.run_on_engine(learn)
        finally:
            await asyncio.to_thread(computes.wait, 10)

    monkeypatch.setattr(service.engine, "step", slow)
    with pytest.raises(KeyboardInterrupt):
        service.run_beside(program())
