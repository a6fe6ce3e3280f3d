"""Clients wait for a server on this machine that starts or listens, and give up where nothing does."""

import asyncio
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hone.clients import http
from hone.launch.plan import free_port
from hone.server_starts import announce_start, is_starting

ANNOUNCE = (
    "import sys, time; from hone.server_starts import announce_start\n"
    "with announce_start(int(sys.argv[1])): print('announced', flush=True); time.sleep(600)"
)


class ModelsRoute(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def check_server(port, model="m", **options):
    async def check():
        async with http.HttpClient(f"http://127.0.0.1:{port}/v1", model) as client:
            await client.wait_until_serving(**options)

    asyncio.run(check())


def test_a_start_is_announced_while_its_process_lives():
    port = free_port()
    assert not is_starting(port)
    with announce_start(port):
        assert is_starting(port)
    assert not is_starting(port)
    process = subprocess.Popen([sys.executable, "-c", ANNOUNCE, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"announced\n"
        assert is_starting(port)
    finally:
        process.kill()
        process.communicate()
    assert not is_starting(port)  # the file is still there


@pytest.mark.parametrize("sign", ["starts", "is silent"])
def test_a_server_that_starts_is_waited_for_beyond_the_limit_without_a_sign(
    sign, monkeypatch, capsys
):
    monkeypatch.setattr(http, "NOTICE_SECONDS", 0.3)
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), ModelsRoute, bind_and_activate=False)
    server.server_bind()
    port = server.server_address[1]

    def serve():
        if sign == "starts":
            with announce_start(port):
                time.sleep(1.0)
                server.server_activate()
        else:
            server.server_activate()  # it listens, and answers nothing yet
            time.sleep(1.0)
        server.serve_forever(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        check_server(port, no_sign_seconds=0.5)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert f"waiting for a server at http://127.0.0.1:{port}/v1" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_an_error_that_says_how_to_start_it():
    port, start = free_port(), time.monotonic()
    with pytest.raises(
        ConnectionError,
        match=rf"no server answers at http://127.0.0.1:{port}/v1 .*inference --model",
    ):
        check_server(port, no_sign_seconds=0.5)
    assert time.monotonic() - start >= 0.5


def test_the_command_that_serves_a_model_or_an_adapter(tmp_path):
    adapter = tmp_path / "my adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    assert http.serve_command(str(adapter)) == (
        f"inference --model.name owner/base --adapters.'my adapter' '{adapter}'"
    )
    assert http.serve_command("owner/model") == "inference --model.name owner/model"
    assert "--adapters.reverser" in http.serve_command("reverser")
    (adapter / "config.json").write_text("{}")
    assert http.serve_command(str(adapter)) == f"inference --model.name '{adapter}'"
