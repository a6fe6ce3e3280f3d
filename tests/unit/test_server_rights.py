"""A server without a key is not a server for web pages; a client's key does not control a server."""

import asyncio

import pytest

from hone.config.inference_config import InferenceConfig
from hone.inference.app import KeyGuard, PageGuard, build_app
from hone.inference.control import CONTROL_PATHS
from hone.inference.served_model import Served, find_allowed_directories


def ask(guard, path="/v1/completions", method="POST", headers=(), server="127.0.0.1"):
    """Return the status that a guard answers with; 200 is that of the app behind it."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    pairs = [(name.encode(), value.encode("latin-1")) for name, value in dict(headers).items()]
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": pairs,
        "server": (server, 8000),
    }
    asyncio.run(guard(app)(scope, None, send))
    return sent[0]["status"]


JSON = {"content-type": "application/json", "content-length": "2"}


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", "LOCALHOST"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_hosts_that_no_name_server_gave_are_answered(host, method):
    assert ask(PageGuard, method=method, headers=JSON | {"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "a@evil.example",
        "127.0.0.1@evil.example",
        "[::1",
        "localhost, evil.example",
        "évil.example",
    ],
)
@pytest.mark.parametrize(
    "path", ["/version", "/v1/models", "/metrics", "/openapi.json", "/v1/completions", "/pause"]
)
def test_a_name_that_was_led_here_is_refused(host, path):
    for method in ("GET", "POST", "OPTIONS"):
        assert ask(PageGuard, path, method, JSON | {"host": host}) == 403
    assert ask(PageGuard, "/health", "GET", {"host": host}) == 200
    # A service's name in a cluster
    assert ask(PageGuard, "/version", "GET", {"host": host}, server="10.0.0.7") == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:5", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("", 403),
        ("http://localhost.evil.example", 403),
        ("http://[", 403),
    ],
)
def test_only_pages_of_this_machine_act(origin, status):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for server in ("127.0.0.1", "10.0.0.7"):
            assert (
                ask(PageGuard, method=method, headers=JSON | {"origin": origin}, server=server)
                == status
            )


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
def test_what_a_page_can_send_without_a_preflight_request_is_no_body(kind):
    given = {"content-type": kind} if kind else {}
    assert ask(PageGuard, headers=given | {"content-length": "5"}) == 403
    assert ask(PageGuard, headers=given | {"transfer-encoding": "chunked"}) == 403
    assert ask(PageGuard, headers=JSON) == 200
    assert ask(PageGuard, "/pause", headers={"content-length": "0"}) == 200


class Sampler:
    context, adapters, is_paused = 8, [], False

    def __getattr__(self, name):
        return None


class Tokenizer:
    stop_ids = ()


def guard_with_keys(app):
    return KeyGuard(app, "owner", "client")


def test_a_clients_key_opens_what_uses_the_model_and_no_control():
    for key, use, control in (
        ("owner", 200, 200),
        ("client", 200, 403),
        ("other", 401, 401),
        ("", 401, 401),
    ):
        headers = {"authorization": f"Bearer {key}"}
        for path in ("/v1/chat/completions", "/v1/models", "/tokenize", "/metrics", "/version"):
            assert ask(guard_with_keys, path, headers=headers) == use, path
        for path in CONTROL_PATHS:
            for other in (path, path + "/", path + "//"):
                assert ask(guard_with_keys, other, headers=headers) == control, other
        assert ask(guard_with_keys, "/health", headers=headers) == 200


def test_every_route_that_acts_on_a_server_is_a_control_path():
    """A new route must be listed here, or a client's key would open it."""
    app = build_app(Served(Sampler(), Tokenizer(), "m", []), "owner", "client")
    uses = {
        "/health",
        "/metrics",
        "/version",
        "/score",
        "/v1/models",
        "/v1/models/{name:path}",
        "/openapi.json",
        "/v1/chat/completions",
        "/v1/chat/completions/tokens",
        "/v1/completions",
        "/v1/responses",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
    }
    assert {route.path for route in app.routes} == uses | CONTROL_PATHS


def test_weights_come_from_the_working_directory_or_beside_the_model_unless_told(
    tmp_path, monkeypatch
):
    for place in ("work/out/step_1", "models/base", "models/next", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "work" / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("OUTPUT_DIR", raising=False)

    def is_taken(directory, **keys):
        config = InferenceConfig(model={"name": str(tmp_path / "models" / "base")}, **keys)
        served = Served(Sampler(), Tokenizer(), "m", find_allowed_directories(config))
        try:
            served._check_directory(tmp_path / directory)
        except ValueError as error:
            assert "allowed_dirs" in str(error)
            return False
        return True

    found = {
        place: is_taken(place)
        for place in ("work/out/step_1", "models/next", "elsewhere", "work/link", ".")
    }
    assert found == {
        "work/out/step_1": True,
        "models/next": True,
        "elsewhere": False,
        "work/link": False,
        ".": False,
    }
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "elsewhere"))
    assert is_taken("elsewhere") and is_taken("work/link")
    assert is_taken("elsewhere", allowed_dirs=[tmp_path]) and not is_taken("work", allowed_dirs=[])
