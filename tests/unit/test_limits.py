"""What a server bears of its clients: bodies that do not come or do not end, who does not read, too many at once."""

import asyncio
import json

import pytest

from hone.inference import app as module
from hone.inference.app import RequestLimit

MOST_BYTES = 300
SCOPE = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": []}


async def reads_all(scope, receive, send):
    """A route: the whole body, then an answer in two parts."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for more in (True, False):
        await send({"type": "http.response.body", "body": b"x", "more_body": more})


def answered(messages, send=None, app=reads_all, limit=None, path=SCOPE["path"]):
    """What a client gets who sends these messages and then nothing."""
    sent = []

    async def program():
        waiting = iter(messages)

        async def receive():
            for message in waiting:
                return message
            await asyncio.Event().wait()

        async def keep(message):
            sent.append(message)

        await (limit or RequestLimit(app, lambda: MOST_BYTES))(
            {**SCOPE, "path": path}, receive, send or keep
        )

    asyncio.run(program())
    return sent


def body(text=b"", more=False):
    return {"type": "http.request", "body": text, "more_body": more}


def test_a_body_that_comes_in_parts_is_answered():
    assert [one.get("status") for one in answered([body(b"{", True), body(b"}")])] == [
        200,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("messages", "status"),
    [([body(b"{", True)], 408), ([], 408), ([body(b"x" * 200, True)] * 2, 413)],
)
def test_a_body_that_stays_away_or_is_too_large_is_refused(monkeypatch, messages, status):
    monkeypatch.setattr(module, "STALLED_CLIENT_SECONDS", 0.05)
    with pytest.raises(module.HTTPException) as refused:  # which the routes' handler says
        answered(messages)
    assert refused.value.status_code == status


def test_a_client_that_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(module, "STALLED_CLIENT_SECONDS", 0.05)

    async def blocked(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    limit = RequestLimit(reads_all, lambda: MOST_BYTES)
    with pytest.raises(ConnectionError, match="has read nothing"):
        answered([body()], blocked, limit=limit)
    assert limit.open == 0


def test_waiting_for_an_answer_has_no_deadline_and_the_hang_up_is_heard(monkeypatch):
    monkeypatch.setattr(module, "STALLED_CLIENT_SECONDS", 0.02)

    async def slow(scope, receive, send):
        await receive()
        await asyncio.sleep(0.1)
        # Of this test: listening for the end of the connection goes on
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.1)
        await send({"type": "http.response.start", "status": 204, "headers": []})

    assert answered([body()], app=slow)[0]["status"] == 204


def test_beyond_what_may_be_open_is_refused_but_not_health(monkeypatch):
    monkeypatch.setattr(module, "MAX_OPEN_RESPONSES", 1)
    limit = RequestLimit(reads_all, lambda: MOST_BYTES)
    limit.open = 1
    start, said = answered([body()], limit=limit)
    assert (
        start["status"] == 429 and json.loads(said["body"])["error"]["type"] == "rate_limit_error"
    )
    assert answered([body()], limit=limit, path="/health")[0]["status"] == 200
    limit.open = 0
    assert answered([body()], limit=limit)[0]["status"] == 200 and limit.open == 0
