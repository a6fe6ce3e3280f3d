"""Parts of the Tinker server: order of calls, promises, checkpoints, slots, tensors."""

import asyncio
import random
import time
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
from fastapi.testclient import TestClient

from hone.tinker import snapshot_samplers
from hone.tinker.call_order import CallOrder
from hone.tinker.checkpoints import Checkpoint, CheckpointStore
from hone.tinker.download_links import DownloadLinks
from hone.tinker.messages import decode_tensor, message_class
from hone.tinker.promises import Gone, Promises, Result
from hone.tinker.request_bodies import SamplingSettings
from hone.tinker.routes import build_app
from hone.tinker.snapshot_samplers import MergedTurns, SamplerSlots


def test_calls_start_in_the_order_of_their_numbers():
    async def arrive(numbers):
        order, started = CallOrder(), []
        for number in numbers:
            if order.find_request(number) is None:
                order.add_call(number, str(number), lambda n=number: started.append(n), print)
        return started

    draw = random.Random(0)
    for _ in range(50):
        numbers = list(range(1, 9)) * 2
        draw.shuffle(numbers)
        assert asyncio.run(arrive(numbers)) == list(range(1, 9))


def test_calls_behind_a_missing_one_fail_and_later_ones_start():
    async def arrive():
        order, started, failed = CallOrder(gap_seconds=0.05), [], []
        for number in (1, 3, 4):
            order.add_call(number, "", lambda n=number: started.append(n), failed.append)
        assert started == [1] and not failed
        await asyncio.sleep(0.2)
        assert len(failed) == 2 and all("call 2" in one for one in failed)
        order.add_call(5, "", lambda: started.append(5), failed.append)
        order.add_call(2, "", lambda: started.append(2), failed.append)  # late, not lost
        assert started == [1, 5, 2]

    asyncio.run(arrive())


def test_a_promise_is_kept_or_says_whose_fault_it_is(monkeypatch):
    async def wait():
        promises = Promises()

        async def work(error=None):
            await asyncio.sleep(0.01)
            if error is not None:
                raise error
            return Result(b"done")

        async def result_of(*error):
            request_id = promises.open_promise()
            promises.keep_promise(request_id, work(*error))
            assert await promises.wait_for(request_id, 0.0) is None
            return await promises.wait_for(request_id, 5.0)

        assert (await result_of()).body == b"done"
        for error, category in ((ValueError("x"), b"user"), (RuntimeError("x"), b"server")):
            assert category in (await result_of(error)).body
        assert promises.pending_count == 0
        (request_id,) = [one for one in promises._promises][:1]
        assert await promises.wait_for(request_id, 0.0)  # again, where the answer was lost
        monkeypatch.setattr("hone.tinker.promises.KEPT_SECONDS", -1.0)
        await promises.wait_for(request_id, 0.0)
        promises._sent.rotate(1)
        promises.open_promise()
        with pytest.raises(KeyError):
            await promises.wait_for(request_id, 0.0)
        with pytest.raises(KeyError):
            await promises.wait_for(promises.open_promise() + "0", 0.0)
        with pytest.raises(Gone):
            await promises.wait_for(Promises().open_promise(), 0.0)

    asyncio.run(wait())


def make_checkpoint(name="one", **keys):
    return Checkpoint("a:train:0", "weights", name, "m", {"rank": 1}, time.monotonic(), **keys)


def test_checkpoints_are_found_by_path_alone(tmp_path):
    store = CheckpointStore(tmp_path / "saved")
    (tmp_path / "secret").mkdir()

    def write(place):
        (place / "file").write_text("x")

    store.write_checkpoint(make_checkpoint(), write)
    found, place = store.find("tinker://a:train:0/weights/one")
    assert found.name == "one" and (place / "file").read_text() == "x"
    wrong = [
        "one",
        "tinker://a:train:0/weights",
        "tinker://a:train:0/other/one",
        "tinker://../../x",
    ]
    wrong += [
        "tinker://a:train:0/weights/..",
        "tinker://a:train:0/weights/two",
        "tinker://../weights/s",
    ]
    for path in wrong:
        with pytest.raises(KeyError):
            store.find(path)
    for name in ("..", "a/b", "", ".hidden", "a" * 300):
        with pytest.raises(ValueError, match="path"):
            store.write_checkpoint(make_checkpoint(name), write)
    with pytest.raises(ValueError, match="exists"):
        store.write_checkpoint(make_checkpoint(), write)
    assert store.list_checkpoints("..") == [] and len(store.list_checkpoints()) == 1


def test_what_has_expired_or_was_not_finished_is_not_there(tmp_path):
    store = CheckpointStore(tmp_path)

    def fail(place):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.write_checkpoint(make_checkpoint("broken"), fail)
    store.write_checkpoint(make_checkpoint("old", expires=1.0), lambda place: None)
    store.write_checkpoint(make_checkpoint("new"), lambda place: None)
    assert [one.name for one in store.list_checkpoints()] == ["new"]
    store.delete_expired()
    assert [place.name for place in tmp_path.glob("*/weights/*")] == ["new"]


class Engine:
    """Adapters by name, and the one that is merged into the weights."""

    def __init__(self):
        self.placed, self.merged, self.version = {}, None, 0

    def place_adapter(self, name, adapter):
        self.placed[name] = adapter

    def merge_adapter(self, adapter):
        self.merged = adapter

    def set_version(self, version):
        self.version = version


class Service:
    def __init__(self):
        self.engine = Engine()

    async def run_on_engine(self, function):
        await asyncio.sleep(0.001)
        return function()


@pytest.mark.parametrize("kind", ["slots", "turns"])
def test_each_request_finds_its_snapshot(kind):
    """With more snapshots than slots, of which many are asked for at once."""

    async def run():
        service = Service()
        engine = service.engine
        samplers = SamplerSlots(service, 2) if kind == "slots" else MergedTurns(service, engine)
        draw = random.Random(1)
        at_once, most = [0], [0]

        async def use(key):
            await asyncio.sleep(draw.random() / 50)
            async with samplers.use_snapshot(key, lambda: key) as name:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
                for _ in range(3):
                    found = engine.merged if kind == "turns" else engine.placed.get(name)
                    assert found == key
                    await asyncio.sleep(0.001)
                at_once[0] -= 1

        keys = [None, *(f"s{i}" for i in range(5))]
        await asyncio.wait_for(asyncio.gather(*(use(draw.choice(keys)) for _ in range(100))), 20)
        assert len(engine.placed) == (2 if kind == "slots" else 0) and most[0] > 2

        def refuse():
            raise ValueError("no such adapter")

        with pytest.raises(ValueError, match="no such adapter"):
            async with samplers.use_snapshot("bad", refuse):
                pass
        await asyncio.wait_for(asyncio.gather(*(use(key) for key in keys)), 5)
        await samplers.replace_adapter("s1", "newer")
        async with samplers.use_snapshot("s1", refuse) as name:
            found = engine.merged if kind == "turns" else engine.placed[name]
            assert found == "newer"

    asyncio.run(run())


def test_a_busy_snapshot_lets_others_have_their_turn(monkeypatch):
    monkeypatch.setattr(snapshot_samplers, "TURN_SECONDS", 0.02)

    async def run():
        service = Service()
        samplers = MergedTurns(service, service.engine)
        order = []

        async def use(key, seconds):
            async with samplers.use_snapshot(key, lambda: key):
                order.append(key)
                await asyncio.sleep(seconds)

        async def keep_busy():
            pending = []
            for _ in range(30):
                pending.append(asyncio.ensure_future(use("busy", 0.02)))
                await asyncio.sleep(0.005)
            await asyncio.gather(*pending)

        busy = asyncio.ensure_future(keep_busy())
        await asyncio.sleep(0.01)
        await use("other", 0.0)
        assert order.count("busy") < 20
        await busy
        assert order.count("busy") == 30

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_compressed_tensors_are_those_of_numpy(seed):
    draw = np.random.default_rng(seed)
    dense = draw.integers(0, 3, (4, 5)).astype(np.float32)
    message = message_class("Tensor")()
    message.dtype = 1
    message.shape.extend(dense.shape)
    rows, columns = dense.nonzero()
    message.sparse_csr.values = dense[rows, columns].tobytes()
    ends = np.searchsorted(rows, np.arange(5))
    message.sparse_csr.crow_indices = ends.astype(np.int64).tobytes()
    message.sparse_csr.col_indices = columns.astype(np.int64).tobytes()
    assert np.array_equal(decode_tensor(message, "x"), dense)
    message.sparse_csr.col_indices = (columns + 9).astype(np.int64).tobytes()
    with pytest.raises(ValueError, match="x: not a tensor"):
        decode_tensor(message, "x")


def test_stops_are_the_model_s_or_none_or_as_given():
    assert SamplingSettings().split_stops([1]) == ([1], [])
    assert SamplingSettings(stop=[]).split_stops([1]) == ([], [])
    assert SamplingSettings(stop=[4]).split_stops([1]) == ([4], [])
    assert SamplingSettings(stop="end").split_stops([1]) == ([], ["end"])
    assert SamplingSettings(stop=["a", "b"]).split_stops([1]) == ([], ["a", "b"])


def list_routes(app):
    return [(method, route.path) for route in app.routes for method in sorted(route.methods)]


def request_all(app, **keys):
    """Status of every route, without a body."""
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    return {
        (method, path): client.request(method, path.replace("{", "").replace("}", ""), **keys)
        for method, path in list_routes(app)
    }


def test_a_key_guards_every_route_but_health():
    app = build_app(SimpleNamespace(store=None), "secret")
    for key in (None, "tml-wrong", "secretX", "tml-"):
        headers = {} if key is None else {"X-API-Key": key}
        answers = request_all(app, headers=headers)
        assert len(answers) > 20
        for (_, path), answer in answers.items():
            assert answer.status_code == (200 if path == "/health" else 401), path
    for headers in ({"X-API-Key": "tml-secret"}, {"Authorization": "Bearer secret"}):
        answers = request_all(app, headers=headers)
        assert all(answer.status_code != 401 for answer in answers.values())


def test_a_link_opens_one_file_until_it_expires(monkeypatch):
    links = DownloadLinks()
    clock = [1000.0]
    monkeypatch.setattr("hone.tinker.download_links.wall_clock", lambda: clock[0])
    path = "/api/v1/downloads/a:train:0/external_weights/x y/adapter_model.safetensors"
    signed = urlsplit(links.sign_path(path, 1100.0))
    assert unquote(signed.path) == path and links.is_valid(path, signed.query)
    assert not links.is_valid(path + "x", signed.query)
    assert not DownloadLinks().is_valid(path, signed.query)
    signature = parse_qs(signed.query)["signature"][0]
    for query in (
        "",
        "expires=1100",
        f"expires=9999&signature={signature}",
        f"expires=٣&signature={signature}",
        f"expires=1100&signature={signature[:-1]}",
        f"expires=1100&signature={signature[:-1]}é",
    ):
        assert not links.is_valid(path, query)
    clock[0] = 1100.0
    assert not links.is_valid(path, signed.query)


def test_foreign_pages_are_refused_without_a_key():
    app = build_app(SimpleNamespace(store=None))
    answers = request_all(app, headers={"Origin": "http://evil.example"}, content=b"{}")
    changing = {key: one for key, one in answers.items() if key[0] not in ("GET", "HEAD")}
    assert len(changing) > 10 and all(one.status_code == 403 for one in changing.values())
    answers = request_all(app, headers={"Host": "evil.example"})
    assert all(one.status_code == 403 for key, one in answers.items() if key[1] != "/health")
