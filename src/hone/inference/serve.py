"""`inference`: start a backend, serve its routes, and run both until interrupted.

config ─► backend (backends.py, engine_process.py), which loads the model ─► Served ─► routes (app.py) on an open socket
"""

import contextlib
import logging
import os
import time

from hone import STARTED
from hone.config.inference_config import InferenceConfig
from hone.config.sections import CLIENT_KEY_VARIABLE, LOOPBACK, own_key
from hone.inference.backends import Embedded, Vllm, is_apart, takes_vllm
from hone.inference.engine_process import Apart
from hone.inference.socket_binding import bind_socket
from hone.process_report import write_report
from hone.server_starts import announce_start

log = logging.getLogger("hone.inference")


def serve_model(config: InferenceConfig) -> None:
    """Load the model on the configured backend and serve it until interrupted."""
    api_key = config.api_key or own_key()
    host = config.server.host or ("127.0.0.1" if api_key is None else "0.0.0.0")
    if api_key is None and host not in LOOPBACK:
        log.warning(
            "serving on %s without an API key: whoever reaches this address can use the model", host
        )
    if config.headless:
        return Vllm.run_headless(config)
    sock = bind_socket(host, config.server.port)
    engine = Apart if is_apart(config) else Embedded
    backend: type[Apart | Embedded | Vllm] = Vllm if takes_vllm(config) else engine
    starting = contextlib.ExitStack()  # closed explicitly once the socket listens
    starting.enter_context(announce_start(sock.getsockname()[1]))
    with starting, backend(config) as opened:
        # Imported while an engine process loads the model.
        from hone.inference.app import build_app
        from hone.inference.http_server import build_server, format_url

        app = build_app(
            opened.wait(), api_key, config.client_key or os.environ.get(CLIENT_KEY_VARIABLE) or None
        )
        # Connections are accepted from now on, and answered once the event loop runs.
        sock.listen(2048)
        starting.close()
        url = f"{format_url(host, sock.getsockname()[1])}/v1"
        write_report(url=url)
        log.info(
            "Serving %s at %s (ready after %.1f s)",
            config.model.name,
            url,
            time.perf_counter() - STARTED,
        )
        opened.run(build_server(app).serve(sockets=[sock]))
