"""Requests and tools made to cost more than they weigh."""

import asyncio
import time

import httpx
import pytest

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
