"""Escape untrusted text (models, clients, environments) for terminals and logs."""

import re

# Control characters except tab and line break, and characters that change direction or lines.
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")


def make_printable(text: str) -> str:
    r"""Return text with control characters escaped, as in `\x1b[2J`."""
    return (
        ACTING.sub(lambda found: _escape_character(found[0]), text) if ACTING.search(text) else text
    )


def make_line(text: str) -> str:
    """Return text as one line, with control characters and line breaks escaped."""
    return make_printable(text).replace("\n", "\\n")


def indent_lines(text: str) -> str:
    """Return text with all lines but the first indented, so that none looks like a log line."""
    return make_printable(text).replace("\n", "\n    ") if "\n" in text else make_printable(text)


def _escape_character(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
