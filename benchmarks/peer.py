"""What the benchmarks share: a peer's own virtual environment, alternating runs, the closing line of JSON."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from results import append_record, describe_machine

from hone.machine import keep_to_isa
from hone.run_directory import steps_in

keep_to_isa()  # peers do, as ours
ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / ".peers"
PEER = ROOT / "benchmarks" / "trl_peer.py"


def peer_python(name: str, *requirements: str) -> Path:
    """The Python of a virtual environment that holds the peer; made on first use, kept in benchmarks/.peers."""
    directory = PEERS / name
    python = directory / "bin" / "python"
    wanted = directory / "requirements.txt"
    if not wanted.exists() or wanted.read_text() != "\n".join(requirements):
        print(f"setting up {name}: {', '.join(requirements)}", flush=True)
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        wanted.write_text("\n".join(requirements))
    return python


@contextlib.contextmanager
def beside(loops: int):
    """That many processes that want a core each."""
    words = [
        sys.executable,
        "-c",
        "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass",
    ]
    busy = [subprocess.Popen(words) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def asked_loops() -> int:
    """`--loops N` of a benchmark's command line: how many busy loops of another program run beside all of it."""
    return int(sys.argv[sys.argv.index("--loops") + 1]) if "--loops" in sys.argv else 0


def run_json(python: Path | str, program: Path, *arguments: object) -> dict:
    """Runs a program whose last line of output is JSON and returns that."""
    words = [str(python), str(program), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{program.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def with_tasks() -> dict[str, str]:
    """The environment of a command of Hone's that finds the tasks of this directory."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])
        )
    }


def last_weights(out: Path) -> Path:
    """The directory of the newest weights of a run."""
    found = steps_in(out / "weights")
    return found[max(found)]


def median(values: list[float]) -> float:
    return statistics.median(values)


def write_profile(work: Callable[[], object], file: Path) -> None:
    """Write a table of the kernels that a call runs."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        work()
    table = found.key_averages().table(sort_by="cuda_time_total", row_limit=40)
    lines = [line[:60] + line[-170:] for line in table.splitlines()]
    file.write_text("\n".join(lines))


def finish(**figures: float | str) -> None:
    """Print the figures as one line of JSON, with the machine, and append their record to the results."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(rounded | {"machine": describe_machine()}))
    append_record(rounded)
