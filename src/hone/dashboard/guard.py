"""Check the access rules of the dashboard before any route.

    Host       a loopback name if the dashboard listens on loopback (against DNS rebinding)
    Origin     absent or the dashboard's own, so that requests of other sites' pages are refused
    token      required for changes; for reading too, unless the dashboard listens on loopback

The token is sent in the header `Authorization: Bearer …`, which no form or link of another site can
set.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.config.sections import LOOPBACK

MAX_BODY_BYTES = 2**20  # bytes of a request's body
# The page itself has no data; a download's address is a secret that was requested.
OPEN = ("/assets/", "/download/")
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self.app = app
        self.token = token
        self.on_loopback = host in LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        refused = self.find_refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refused is not None:
            status, why = refused
            return await JSONResponse({"error": why}, status)(scope, receive, with_headers)
        await self.app(scope, receive, with_headers)

    def find_refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        """Return the status and reason of a refusal, or None if the request is allowed."""
        refusal = self._find_site_refusal(path, headers)
        if refusal is not None:
            return 403, refusal
        is_large = headers.get("content-length", "0")
        if not is_large.isdigit() or int(is_large) > MAX_BODY_BYTES:
            return 413, f"more than {MAX_BODY_BYTES} bytes"
        if path == "/" or path.startswith(OPEN) or (self.on_loopback and method in ("GET", "HEAD")):
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return 401, "the token of this dashboard is needed: open the address that it printed"
        return None

    def _find_site_refusal(self, path: str, headers: Headers) -> str | None:
        """Return why a request of another site or host is refused, or None."""
        host = headers.get("host", "")
        origin = headers.get("origin")
        try:
            name, netloc = urlsplit(f"//{host}").hostname or "", urlsplit(origin or "").netloc
        except ValueError:
            return "Host or Origin is no address"
        if self.on_loopback and not is_loopback(name):
            return f"Host {host!r} is not this machine's loopback address"
        if origin is not None and netloc != host:
            return f"Origin {origin!r} is another site"
        if headers.get("sec-fetch-site", "same-origin") not in (
            "same-origin",
            "none",
        ) and path.startswith("/api"):
            return "the request comes from a page of another site"
        return None


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
