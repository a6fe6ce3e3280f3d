"""HTTP server of an app, with the limits and signal handlers that all of Hone's servers have."""

import signal

import uvicorn
from fastapi import FastAPI

from hone.http_limits import bounded_config


def build_server(app: FastAPI) -> uvicorn.Server:
    """Return the server of an app; SIGTERM and SIGINT end it. Call this on the main thread."""
    # No proxy headers: the connection decides who may control the server. Open requests get some
    # seconds to end.
    settings = bounded_config(
        app,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(settings)

    def request_stop(*_: object) -> None:
        server.force_exit = server.should_exit  # the second signal exits at once
        server.should_exit = True

    # uvicorn sets handlers on the main thread only, which may be the compute thread.
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    return server


def format_url(host: str, port: int) -> str:
    """Return the URL by which clients on this machine reach a server."""
    return f"http://{'localhost' if host in ('127.0.0.1', '0.0.0.0') else host}:{port}"
