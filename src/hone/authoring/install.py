"""Install environments into Hone's Python environment or into isolated virtual environments."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hone.environments.protocols.verifiers_v0 import (
    V0_REQUIREMENTS,
    V1_REQUIREMENTS,
    isolated_place,
)


def install_environment(env: str, place: Path, isolated: bool, extra: list[str]) -> int:
    """Install an environment and return the installer's exit code.

    Args:
        env: folder with a pyproject.toml, or id of a package.
        place: folder that is searched for the id before the package index.
        isolated: install into a separate virtual environment, together with verifiers.
        extra: further requirements, such as verifiers==0.1.14.

    An environment of verifiers' v1 API gets verifiers 0.4, others an older one; which API a package
    of the index uses is seen by what can be installed with it.

    Raises:
        ValueError: `env` is neither such a folder nor a valid package name.
    """
    name = env.rstrip("/").rpartition("/")[2].replace("_", "-")
    module = name.replace("-", "_")
    folder = next(
        (path for path in (Path(env), place / module) if (path / "pyproject.toml").is_file()), None
    )
    parent = Path(env).parent
    is_path = (
        env.startswith((os.sep, ".", "~"))
        or Path(env).exists()
        or (parent != Path(".") and parent.is_dir())
    )
    if folder is None and (is_path or not module.isidentifier()):
        raise ValueError(
            f"hone env install: {env} is no folder with a pyproject.toml, and no name of a package"
        )
    what = ["-e", str(folder)] if folder is not None else [name]
    if not isolated:
        return subprocess.run(
            [*_installer_words(sys.executable), *what, *extra], check=False
        ).returncode
    home = isolated_place(name)
    python = home / "bin" / "python"
    if not python.exists():
        uv = find_uv()
        words = (
            [uv, "venv", "--quiet", "--python", sys.executable, str(home)]
            if uv
            else [sys.executable, "-m", "venv", str(home)]
        )
        if subprocess.run(words, check=False).returncode:
            return 1
    has_version = any(word.startswith("verifiers") for word in extra)
    for bounded in [[]] if has_version else _list_requirements(folder):
        words = [*_installer_words(str(python)), *what, *bounded, *extra]
        code = subprocess.run(words, check=False).returncode
        if code == 0:
            break
    if code == 0:
        print(f"{name} has a virtual environment of its own: {home}")
    return code


def _list_requirements(folder: Path | None) -> list[list[str]]:
    """Return the library's requirements to try, in order: of v0 environments, of v1."""
    if folder is None:
        return [V0_REQUIREMENTS, V1_REQUIREMENTS]
    is_v1 = any("verifiers.v1" in file.read_text() for file in folder.rglob("*.py"))
    return [V1_REQUIREMENTS if is_v1 else V0_REQUIREMENTS]


def find_uv() -> str | None:
    own = Path(sysconfig.get_path("scripts")).parent.parent / ".uv" / "bin" / "uv"
    return shutil.which("uv") or (str(own) if own.is_file() else None)


def _installer_words(python: str) -> list[str]:
    uv = find_uv()
    return [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
