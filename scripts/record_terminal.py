"""Run a command and draw what it prints as an SVG, as docs/demo.svg is drawn.

    python scripts/record_terminal.py --out docs/demo.svg --title "make demo" --head 12 --tail 26 -- make demo

The middle is left out, marked by a line. Lines longer than `--width` are cut.
"""

import argparse
import os
import pty
import re
import select
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

CUT = Text("  …", style="dim")


def run_in_terminal(words: list[str], width: int) -> str:
    """Run a command with a terminal as its output; return what it wrote, colours included."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "TERM": "xterm-256color"}
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 0.5)
        if ready:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the terminal is closed
                break
            if not part:
                break
            written += part
        elif process.poll() is not None:
            break
    if process.wait():
        raise SystemExit(f"{words[0]} ended with {process.returncode}")
    return written.decode(errors="replace")


def draw_terminal(text: str, head: int, tail: int, width: int, title: str) -> str:
    """Return an SVG of the first and last lines of a terminal's output."""
    lines = [Text.from_ansi(line.rstrip("\r")) for line in text.splitlines()]
    shown = lines if len(lines) <= head + tail else [*lines[:head], CUT, *lines[-tail:]]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        for line in shown:
            line.truncate(width, overflow="ellipsis")
            console.print(line, no_wrap=True)
        # Without fonts from the network: the reader's own monospace font serves.
        return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("--head", type=int, default=12)
    parser.add_argument("--tail", type=int, default=26)
    parser.add_argument("--width", type=int, default=140)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    text = run_in_terminal(args.command, args.width)
    args.out.write_text(draw_terminal(text, args.head, args.tail, args.width, args.title))


if __name__ == "__main__":
    main()
