"""`hone lab`: set up a training workspace, and run job files of hosted training.

    setup   pyproject.toml, configs/, environments/ (as sources), models/; existing files are kept
    run     configs/lab/JOB.toml ─► rl

The files of a workspace are copies of templates that come with Hone.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hone.authoring.install import find_uv
from hone.environments.registry import add_folder

TEMPLATES = Path(__file__).parent / "workspace"
SIX = ("alphabet_sort", "gsm8k", "math_python", "reverse_text", "wiki_search", "wordle")
EXTRAS = ("cpu", "math")
IGNORED = ".hone/\n.venv/\noutputs/\nruns/\nwandb/\n__pycache__/\n"
ALWAYS = ("configs/endpoints.py", "configs/lab", "environments/AGENTS.md", "models")
PROJECT = """[project]
name = "{name}"
version = "0.1.0"
requires-python = ">={python},<3.14"
dependencies = []
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hone lab", description="A folder to train in, and jobs in it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "Make this folder one to train in: a Python project, configurations, environments, a tiny model."
    add = commands.add_parser("setup", help=words, description=words).add_argument
    add("--vf-rl", action="store_true", help="with configs/vf-rl, for `vf-rl @ FILE`")
    add("--prime-rl", action="store_true", help="with configs/prime-rl, for `rl @ FILE`")
    add("--no-install", action="store_true", help="write files, install nothing")
    words = "Run a job file of hosted training on this machine; keys of it may follow, as --max-steps 10."
    keys = _describe_keys() if {"-h", "--help"} & set(argv) else None
    form = argparse.RawDescriptionHelpFormatter
    one = commands.add_parser(
        "run", help=words, description=words, epilog=keys, formatter_class=form
    )
    one.add_argument("file", help="as in configs/lab/reverse-text-tiny.toml")
    args, rest = parser.parse_known_args(argv)
    if args.command == "run":
        return run_recipe(args.file, rest)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    return setup_workspace(Path.cwd(), args.vf_rl, args.prime_rl, not args.no_install)


def setup_workspace(place: Path, vf_rl: bool, prime_rl: bool, installs: bool) -> int:
    """Write the files of a workspace into `place`; return an exit code.

    `vf_rl` and `prime_rl` add configurations for these commands, `installs` adds Hone to the
    project. Prints each action. Raises ValueError if a file cannot be written.
    """
    if place == Path.home():
        raise ValueError(
            "hone lab setup: this is the home directory; make a folder for the project and go there"
        )
    check_project(place / "pyproject.toml")
    project = place / "pyproject.toml"
    wanted = [*ALWAYS, *(["configs/vf-rl"] if vf_rl else [])]
    wanted += ["configs/prime-rl"] if prime_rl else []
    try:
        was_there = project.exists()
        if not was_there:
            project.write_text(
                PROJECT.format(
                    name=project_name(place), python=".".join(map(str, sys.version_info[:2]))
                )
            )
        _print_line("Python project is there" if was_there else "Created Python project")
        ignored = {} if (place / ".gitignore").exists() else {".gitignore": IGNORED.encode()}
        written, kept = write_templates(dict(list_templates(wanted)) | ignored, place)
    except OSError as error:
        raise ValueError(f"hone lab setup: {error.filename}: {error.strerror}") from None
    _print_line("Created workspace structure" if written else "Workspace structure is there")
    _print_line(
        f"Wrote {written} files in configs/, environments/ and models/"
        if written
        else "Wrote no file: all are there"
    )
    for path in kept:
        print(f"  kept {path}, which differs from its template")
    code = install_project(place) if installs else 0
    if code == 0:
        print(f"next: {'uv run ' if shutil.which('uv') else ''}{_describe_next(vf_rl, prime_rl)}")
    return code


def check_project(file: Path) -> None:
    """Raise ValueError if the project in a pyproject.toml cannot depend on Hone.

    Called before anything is written.
    """
    if not file.exists():
        return
    try:
        project = tomllib.loads(file.read_text()).get("project")
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"hone lab setup: {file} cannot be read: {error}") from None
    if project is None:
        raise ValueError(f"hone lab setup: {file} has no [project]; take another folder")
    if project.get("name") == "hone-rl":
        raise ValueError(
            "hone lab setup: this is Hone's own source; make a folder elsewhere and go there"
        )
    wanted = str(project.get("requires-python", ""))
    lowest = re.search(r">=?\s*3\.(\d+)", wanted)
    if lowest is not None and int(lowest[1]) < 11:
        raise ValueError(
            f'hone lab setup: {file} has requires-python = "{wanted}"; Hone needs Python 3.11 to 3.13, so write '
            '">=3.11,<3.14" there'
        )


def prepare(place: Path | None = None) -> None:
    """Write environments/ and models/ and make the environments importable here; for notebooks."""
    place = place or Path.cwd()
    write_templates(dict(list_templates(["models"])), place)
    for name in SIX:
        add_folder(str(place / "environments"), name)


def list_templates(wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the workspace, content) of the `wanted` templates and all environments."""
    for name in wanted:
        source = TEMPLATES / name
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield str(path.relative_to(TEMPLATES)), path.read_bytes()
    sources = environment_sources()
    for name in SIX:
        for path in sorted((sources / name).rglob("*")):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and not path.match("*.egg-info/*")
            ):
                content = path.read_bytes()
                # A checkout names the path of Hone beside it.
                if path.name == "pyproject.toml":
                    content = re.sub(rb"\n\[tool\.uv\.sources\][^\[]*\Z", b"", content)
                yield f"environments/{path.relative_to(sources)}", content


def environment_sources() -> Path:
    """Return the directory of the workspace environments' sources, in package or checkout."""
    packaged = TEMPLATES / "environments"
    return packaged if (packaged / SIX[0]).is_dir() else Path(__file__).parents[3] / "environments"


def write_templates(files: dict[str, bytes], place: Path) -> tuple[int, list[str]]:
    """Write files missing in `place`; return their number, and the existing files that differ."""
    written = 0
    kept = []
    for name, content in files.items():
        path = place / name
        if path.exists() or path.is_symlink():
            if not path.is_file() or path.read_bytes() != content:
                kept.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written += 1
    return written, kept


def install_project(place: Path) -> int:
    """Add this Hone version and the environments to the project in `place`.

    Returns uv's exit code, 0 without uv.
    """
    uv = find_uv()
    version = importlib.metadata.version("hone-rl")
    if uv is None:
        _print_line(
            f"hone-rl {version} is installed here; with uv it would be added to the project"
        )
        return 0
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    commands = [
        [uv, "add", "--quiet", *extras, *find_requirement()],
        [uv, "add", "--quiet", "--editable", *(f"./environments/{name}" for name in SIX)],
    ]
    for command in commands:
        done = subprocess.run(command, cwd=place, check=False)
        if done.returncode:
            print(
                f"hone lab setup: error: {' '.join(command)} failed; the files are written",
                file=sys.stderr,
            )
            return done.returncode
    _print_line(f"Installed hone-rl {version} and {len(SIX)} environments")
    return 0


def find_requirement() -> list[str]:
    """Return `uv add` arguments for this Hone: its checkout, wheel or index version."""
    distribution = importlib.metadata.distribution("hone-rl")
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    parts = urlsplit(origin.get("url", ""))
    path = Path(unquote(parts.path))
    if parts.scheme == "file" and path.exists():
        return (
            ["--editable", str(path)] if origin.get("dir_info", {}).get("editable") else [str(path)]
        )
    return [f"hone-rl=={distribution.version}"]


def _describe_keys() -> str:
    from hone.config.help import keys_text
    from hone.config.lab_config import LabConfig

    return f"keys of a job file:\n{keys_text(LabConfig)}"


def run_recipe(file: str, overrides: list[str]) -> int:
    from hone.config.base import load_config
    from hone.config.lab_config import LabConfig
    from hone.launch.run_rl import main as train
    from hone.monitors.logging_setup import start_logging

    config = load_config(LabConfig, ["@", file, *overrides])
    for env in config.env:
        add_folder("environments", env.id)
    start_logging(config.log_level)
    train(config.resolve_config())
    return 0


def project_name(place: Path) -> str:
    """Return a valid Python project name close to the folder's name."""
    name = re.sub(r"[^a-z0-9]+", "-", place.name.lower()).strip("-") or "lab"
    return (
        f"{name}-lab"
        if name in {"hone", "hone-rl", *(one.replace("_", "-") for one in SIX)}
        else name
    )


def _describe_next(vf_rl: bool, prime_rl: bool) -> str:
    if vf_rl:
        return "vf-rl @ configs/vf-rl/reverse-text-tiny.toml"
    if prime_rl:
        return "prime-rl @ configs/prime-rl/reverse-text-tiny.toml"
    return "hone lab run configs/lab/reverse-text-tiny.toml"


def _print_line(text: str) -> None:
    mark = "✓" if (sys.stdout.encoding or "").lower().startswith("utf") else "ok"
    print(f"{mark} {text}", flush=True)
