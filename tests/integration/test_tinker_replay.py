"""Calls that Tinker's SDK made, as recorded by tinker_traffic.py, are answered as they were then."""

import base64
import json
import math

import httpx
import numpy as np
import pytest

import hone
from hone.tinker.messages import parse_message
from tests.hangs import HANG_SECONDS
from tests.integration.test_tinker import MODEL, Server
from tests.integration.tinker_traffic import FILE, NAME

VOLATILE = ("time", "last_request_time", "expires_at", "size_bytes")
TOLERANCE = 1e-3  # of numbers that other processors round differently


@pytest.fixture
def server(tmp_path):
    session = hone.TrainingSession(MODEL, random_init=True, device="cpu")
    session.export_weights(tmp_path / "model")
    opened = Server(tmp_path, "--served-names", NAME)
    yield opened
    opened.close()


def send_call(server, call, ids):
    """Send a recorded call with the ids that this server gave; return its answer."""

    def with_ids(content):
        for recorded, given in ids.items():
            content = content.replace(recorded, given)
        return content

    while True:
        answer = httpx.request(
            call["method"],
            server.url + with_ids(call["path"].encode()).decode(),
            headers=call["headers"],
            content=with_ids(base64.b64decode(call["body"])),
            timeout=HANG_SECONDS,
        )
        if b'"try_again"' not in answer.content:
            return answer


def note_ids(recorded, given, ids):
    """Map the session's id and the prefix of request ids of the recording to those of this server."""
    for key in ("session_id", "request_id"):
        if key in recorded:
            pair = (str(one[key]).partition("-")[0].encode() for one in (recorded, given))
            ids.setdefault(*pair)


def assert_same_json(found, wanted, place):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), place
        for key in wanted.keys() - set(VOLATILE):
            assert_same_json(found[key], wanted[key], f"{place}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), place
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same_json(one, other, f"{place}[{i}]")
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=TOLERANCE), place
    else:
        assert found == wanted, place


def read_numbers(body, has_seed):
    """Return the numbers of a protobuf answer: log-probabilities, sampled tokens and metrics.

    Without a seed, what was sampled differs from call to call, and is left out.
    """
    if b"ArrayRecord" in body[:16]:
        passed = parse_message("ForwardBackwardOutput", body)
        arrays = [np.frombuffer(one.fields[0].value.data, np.float32) for one in passed.records]
        return [*arrays, *(np.array(metric.value) for metric in passed.metrics)]
    sampled = parse_message("SampleResponse", body)
    sequences = sampled.sequences if has_seed else []
    tokens = [np.frombuffer(one.tokens, np.int32) for one in sequences]
    logprobs = [np.frombuffer(one.logprobs, np.float32) for one in sequences]
    return [*tokens, *logprobs, np.frombuffer(sampled.prompt_logprobs, np.float32)]


def test_recorded_calls_are_answered_as_they_were(server, tmp_path):
    calls = [json.loads(line) for line in FILE.open()]
    ids = {}
    kinds = set()
    seeded = {
        json.loads(base64.b64decode(call["answer"]))["request_id"]
        for call in calls
        if b'"seed"' in base64.b64decode(call["body"])
    }
    for number, call in enumerate(calls):
        recorded = base64.b64decode(call["answer"])
        if b'"try_again"' in recorded:
            continue
        place = f"call {number}, {call['path']}"
        answer = send_call(server, call, ids)
        assert answer.status_code == call["status"], place
        assert answer.headers.get("content-type", "") == call["answer_type"], place
        kinds.add(call["path"].rpartition("/")[2])
        if "protobuf" in call["answer_type"]:
            has_seed = json.loads(base64.b64decode(call["body"]))["request_id"] in seeded
            found, wanted = (read_numbers(one, has_seed) for one in (answer.content, recorded))
            assert len(found) == len(wanted), place
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=TOLERANCE, err_msg=place)
        elif recorded:
            wanted = json.loads(recorded)
            note_ids(wanted, answer.json(), ids)
            text = answer.text.replace(str(tmp_path), "/models")
            for old, new in ids.items():
                text = text.replace(new.decode(), old.decode())
            assert_same_json(json.loads(text), wanted, place)
    assert {"create_model", "forward_backward", "optim_step", "asample", "load_weights"} <= kinds
