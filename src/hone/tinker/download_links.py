"""Links to files of exported weights, which Tinker's SDK opens without its key.

A link carries the time when it expires and a signature by a secret of this server's process, so it
opens one file for a while and nothing else.
"""

import hashlib
import hmac
import secrets
from urllib.parse import parse_qs, quote, urlencode

from hone.tinker.checkpoints import wall_clock

LINK_SECONDS = 3600.0


class DownloadLinks:
    """Make and check signed paths."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign_path(self, path: str, expires: float) -> str:
        """Return a URL path with the query that opens it until `expires` (seconds since 1970)."""
        until = str(int(expires))
        query = {"expires": until, "signature": self._compute_signature(path, until)}
        return f"{quote(path)}?{urlencode(query)}"

    def is_valid(self, path: str, query: str) -> bool:
        """Return True if the query opens this path now."""
        found = parse_qs(query)
        until = found.get("expires", [""])[0]
        given = found.get("signature", [""])[0]
        if not (until.isascii() and until.isdigit() and given.isascii()):
            return False
        is_signed = hmac.compare_digest(given, self._compute_signature(path, until))
        return is_signed and int(until) > wall_clock()

    def _compute_signature(self, path: str, until: str) -> str:
        return hmac.digest(self._secret, f"{until} {path}".encode(), hashlib.sha256).hex()
