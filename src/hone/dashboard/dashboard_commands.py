"""`hone dashboard`, `hone doctor` and `hone plot`: inspect runs in a browser, terminal or picture."""

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

from hone.dashboard.index import Index
from hone.dashboard.runs import Run, find_runs

PORT = 8500
TOKEN_VARIABLE = "HONE_DASHBOARD_TOKEN"  # sets the page's token, which is not a server's key
PORTS_TO_TRY = 20  # ports to try from the default on


def run_dashboard(argv: list[str]) -> int:
    """Run `hone dashboard` until it is interrupted."""
    parser = argparse.ArgumentParser(
        prog="hone dashboard",
        allow_abbrev=False,
        description="A web page over the runs and evaluations below a directory, live while they run.",
    )
    parser.add_argument(
        "dir",
        nargs="?",
        type=Path,
        default=Path(),
        help="directory to look below (default: this one)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"port; 0: a free one (default {PORT}, or the next free)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    args = parser.parse_args(argv)
    return serve_dashboard(args.dir, args.host, args.port, args.open)


def serve_dashboard(root: Path, host: str, port: int, opens: bool = False) -> int:
    """Serve the dashboard over the runs below `root` until interrupted.

    `opens` also opens it in a browser. Raises ValueError for a missing directory or a port in use.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no directory")
    import uvicorn

    from hone.config.sections import LOOPBACK
    from hone.dashboard.dashboard_app import build_app
    from hone.http_limits import bounded_config

    token = os.environ.get(TOKEN_VARIABLE, "").strip() or secrets.token_urlsafe(18)
    sock = bind_near(host, port)
    app = build_app(root, token, host)
    sock.listen(128)
    url = f"http://{'127.0.0.1' if host in ('127.0.0.1', '0.0.0.0', '::') else host}:{sock.getsockname()[1]}"
    print(f"Dashboard over {root.resolve()}", flush=True)
    print(f"  read and start runs: {url}/#token={token}", flush=True)
    if host in LOOPBACK:
        print(f"  read alone:          {url}/", flush=True)
    print("  end it with Ctrl-C; runs that it has started go on", flush=True)
    if opens:
        open_in_browser(f"{url}/#token={token}")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    settings = bounded_config(
        app,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[sock])
    return 0


def open_in_browser(url: str) -> None:
    """Open an address that holds a secret, through a private file that redirects to it."""
    import tempfile
    import webbrowser

    descriptor, name = tempfile.mkstemp(prefix="hone-", suffix=".html")  # readable only by its user
    with os.fdopen(descriptor, "w") as file:
        file.write(f"<script>location.replace({json.dumps(url)})</script>")
    webbrowser.open(Path(name).as_uri())
    timer = threading.Timer(60.0, lambda: Path(name).unlink(missing_ok=True))
    timer.daemon = True
    timer.start()


def bind_near(host: str, port: int) -> socket.socket:
    """Return a socket bound to `port`, or to the next free port if `port` is the default.

    Up to PORTS_TO_TRY ports are tried from the default port on; any other port is tried alone.
    Raises ValueError if no port is free.
    """
    from hone.inference.socket_binding import bind_socket

    for other in range(port, port + PORTS_TO_TRY) if port == PORT else ():
        with contextlib.suppress(ValueError):
            found = bind_socket(host, other)
            if other > port:
                print(f"port {port} is taken: {other} is used", flush=True)
            return found
    return bind_socket(host, port)


def run_doctor(argv: list[str]) -> int:
    """Run `hone doctor`. Return 1 if it finds a problem."""
    parser = argparse.ArgumentParser(
        prog="hone doctor",
        allow_abbrev=False,
        description="Reads a run and says what went wrong: the first bad step, what shows it, what usually helps.",
    )
    parser.add_argument("run", type=Path, help="directory of the run (its output_dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(argv)
    from hone.dashboard.doctor import examine_run
    from hone.monitors.diagnosis import Diagnosis
    from hone.monitors.step_lines import printable

    reports: list[tuple[Run, Index, Diagnosis]] = []
    for run in runs_in(args.run):
        index = Index(args.run, run)
        index.update_index()
        reports.append((run, index, examine_run(index)))
    if args.json:
        print(json.dumps({run.kind: report.as_dict() for run, _, report in reports}, indent=2))
    else:
        for run, index, report in reports:
            print(f"{run.path} ({run.kind}): {report.steps} steps")
            if not report.findings:
                print(f"  {report.note or 'no known problems found'}")
            for number, finding in enumerate(report.findings, 1):
                print(f"\n  {number}. {finding.title}, from step {finding.first_step} on")
                print(f"     {finding.evidence}")
                for words in finding.helps:
                    print(f"     - {words}")
                for rollout in finding.rollouts[:2]:
                    row = index.find_row(rollout)
                    if row is not None:
                        said = printable(row["said"]).replace("\n", "\\n")
                        print(
                            f"     rollout of step {row['step']}, reward {row['reward']:.3g}: {said[:100]}"
                        )
    found = [finding for *_, report in reports for finding in report.findings]
    return int(any(finding.is_problem for finding in found))


def run_plot(argv: list[str]) -> int:
    """Run `hone plot`: write the curves of runs as a picture."""
    parser = argparse.ArgumentParser(
        prog="hone plot",
        allow_abbrev=False,
        description="The curves of one or more runs as a picture, side by side.",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs")
    parser.add_argument(
        "-o", "--out", type=Path, help="file to write, .png, .svg or .pdf (default: RUN/curves.png)"
    )
    args = parser.parse_args(argv)
    from hone.dashboard.plots import FORMATS, draw_curves

    out = args.out or args.runs[0] / "curves.png"
    form = out.suffix.removeprefix(".")
    if form not in FORMATS:
        raise ValueError(f"--out {out}: {', '.join('.' + one for one in FORMATS)}")
    common = Path(os.path.commonpath([path.resolve() for path in args.runs]))
    root = common if len(args.runs) > 1 else common.parent
    found = []
    for path in args.runs:
        place = path.resolve()
        names = [
            (f"{place.relative_to(root).as_posix()}:{run.kind}", run.kind) for run in runs_in(path)
        ]
        found += [Index(root, Run(name, kind, place)) for name, kind in names]
    try:
        out.write_bytes(draw_curves(found, form))
    except OSError as error:
        raise ValueError(f"{out}: {error.strerror}") from None
    print(out)
    return 0


def runs_in(path: Path) -> list[Run]:
    """Return the RL and SFT runs in the directory `path`, but not those in its subdirectories.

    Raises ValueError if there are none.
    """
    found = (
        [run for run in find_runs(path).values() if run.path == path and run.kind != "eval"]
        if path.is_dir()
        else []
    )
    if not found:
        if not path.is_dir():
            raise ValueError(f"{path} is no directory")
        below = sorted({str(run.path) for run in find_runs(path).values() if run.kind != "eval"})
        hint = (
            f"; did you mean one of {', '.join(below[:5])}?"
            if below
            else ": it has no run_rl.json or run_sft.json"
        )
        raise ValueError(f"{path} holds no run{hint}")
    return found


if __name__ == "__main__":
    sys.exit(run_dashboard(sys.argv[1:]))
