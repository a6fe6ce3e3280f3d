"""Requests and tools made to cost more than they weigh."""

import asyncio
import sqlite3
import time

import httpx
import pytest
from starlette.datastructures import Headers

from hone.dashboard.guard import Guard
from hone.dashboard.index import _insert_points
from hone.dashboard.rollout_columns import row_of
from hone.inference.app import KeyGuard
from hone.text.tool_calls import argument_types


def tool(parameters):
    return [{"function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize("count", [20, 2000])
def test_references_to_itself_are_followed_once(count):
    again = [{"$ref": "#/properties/a"}] * count
    schema = {"properties": {"a": {"type": "string", "enum": ["x"], "anyOf": again}}}
    start = time.perf_counter()
    assert argument_types("f", tool(schema)) == {"a": {"string"}}
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    "schema",
    [{"enum": 5}, {"anyOf": 3}, {"type": [{}]}, {"$ref": "#/properties/a"}, {"allOf": {}}, 3],
)
def test_a_schema_of_any_form_has_types(schema):
    assert argument_types("f", tool({"properties": {"a": schema}})) == {"a": set()}
    for parameters in ([1], {"properties": [1]}, None):
        assert argument_types("f", tool(parameters)) == {}
    assert argument_types("f", [{"function": [1]}, {}]) == {}


@pytest.mark.parametrize("path", ["/pause%0a", "/pause%0A", "/update_weights%0a", "/pause%0d%0a"])
def test_a_clients_key_opens_no_control_route_by_another_spelling(path):
    async def reached(scope, receive, send):
        raise AssertionError("reached")

    async def ask():
        transport = httpx.ASGITransport(KeyGuard(reached, "owner", "client"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, headers={"Authorization": "Bearer client"})

    assert asyncio.run(ask()).status_code in (403, 404)


@pytest.mark.parametrize(
    "line", [b'{"step": 1, "loss": 1e999}', b'{"step": 1, "loss": ' + b"9" * 400 + b"}"]
)
def test_numbers_that_no_float_holds_are_no_points(line):
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE metrics(id, name)")
    connection.execute("CREATE TABLE points(metric, step, value)")
    _insert_points(connection, {}, row_of(line))
    _insert_points(connection, {}, {"step": 10**400, "loss": 1.0})
    _insert_points(connection, {}, {"step": 1, "\ud800": 1.0})
    assert connection.execute("SELECT * FROM points").fetchall() == []


@pytest.mark.parametrize("headers", [{"host": "[x"}, {"host": "localhost", "origin": "http://[x"}])
def test_a_host_that_is_no_address_is_refused(headers):
    assert (
        Guard(KeyGuard, "token", "127.0.0.1").find_refusal("GET", "/", Headers(headers))[0] == 403
    )
