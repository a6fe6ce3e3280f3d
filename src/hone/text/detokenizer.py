"""Find the bytes that each token adds to a text; decoding a token alone often gives other bytes.

A SentencePiece decoder writes a space before most words, but not at the beginning of a text; in
many tokenizers several tokens form one character. `TokenTexts` returns bytes per token, whose
concatenation is the text.
"""

import functools
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Encoder

SPACE = "\u2581"  # what SentencePiece writes for a space
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The bytes of the tokens of a tokenizer."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        state = json.loads(encoder.decoder.__getstate__()) if encoder.decoder is not None else {}
        parts = state.get("decoders", [state])
        kinds = {part.get("type") for part in parts}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_bytes = "ByteFallback" in kinds
        replaced = [
            part
            for part in parts
            if part.get("type") == "Replace" and SPACE in str(part.get("pattern"))
        ]
        metaspace = [part for part in parts if part.get("type") == "Metaspace"]
        self.has_spaces = bool(replaced or metaspace)
        strips = [
            part for part in parts if part.get("type") == "Strip" and part.get("content") == " "
        ]
        prepends = [part for part in metaspace if part.get("prepend_scheme") != "never"]
        self.drops_first_space = bool(prepends or any(part.get("start") for part in strips))
        self._added = {
            number: token.content for number, token in encoder.get_added_tokens_decoder().items()
        }

    @functools.lru_cache(maxsize=200_000)  # noqa: B019  (it lives as long as its tokenizer)
    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token that is not the first of a text; empty for unknown ids."""
        token = self.encoder.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level:
            return b"".join(_BYTES.get(character) or character.encode() for character in token)
        if self._has_bytes and (found := BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        if self.has_spaces:
            return token.replace(SPACE, " ").encode()
        return self.encoder.decode([token_id], skip_special_tokens=False).encode()

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes at the beginning of a text."""
        found = self.bytes_of(token_id)
        return (
            found.removeprefix(b" ")
            if self.drops_first_space and token_id not in self._added
            else found
        )

    def token_bytes(self, ids: Sequence[int], follows: bool) -> list[bytes]:
        """Return the bytes of each token of a text.

        `follows` is True if the text continues an earlier text.
        """
        if follows or not ids:
            return [self.bytes_of(token) for token in ids]
        return [self.first_bytes_of(ids[0]), *map(self.bytes_of, ids[1:])]


def name_of(piece: bytes, prefix: str = "") -> str:
    r"""Return a token's bytes as text, escaped as in `\xe2\x80` if they are no valid UTF-8.

    Escapes are written as OpenAI does, after `prefix`.
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in piece)


def _byte_level() -> dict[str, bytes]:
    """Return the bytes that byte-level characters stand for, as in GPT-2."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + i): bytes([b]) for i, b in enumerate(others)
    }


_BYTES = _byte_level()
