"""Builds the wheel and tries it where nothing else is: files that have to be in it, versions, commands that answer.

python scripts/package.py [--tag vX.Y.Z]

With a tag the version is the tag's, whatever the checkout says.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    "hone/dashboard/assets/index.html",
    "hone/dashboard/assets/app.js",
    "hone/dashboard/assets/vendor/uplot.js",
    "hone/launch/slurm.sh.jinja",
    "hone/launch/workspace/models/reverse-text-tiny-sft/model.safetensors",
    "hone/launch/workspace/environments/wordle/pyproject.toml",
    "hone/launch/workspace/configs/vf-rl/wordle.toml",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--tag", default="", help="vX.Y.Z: of the version to build")
    args = parser.parse_args()
    uv = Path(shutil.which(args.uv) or args.uv).absolute()  # it is started from other directories
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if args.tag and not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", args.tag):
        sys.exit(f"the tag is {args.tag!r}; it has to be vX.Y.Z, or vX.Y.Zrc1")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        source = ROOT
        if args.tag:
            source, version = Path(place), args.tag.removeprefix("v")
            subprocess.run(
                ["git", "checkout-index", "--all", f"--prefix={place}/"], cwd=ROOT, check=True
            )
            for file in (source / "pyproject.toml", source / "src" / "hone" / "__init__.py"):
                line = r'^((?:__)?version(?:__)? = )".*"'
                file.write_text(
                    re.sub(
                        line, rf'\g<1>"{version}"', file.read_text(), count=1, flags=re.MULTILINE
                    )
                )
        subprocess.run(
            [uv, "build", "--quiet", "--package", "hone-rl", "--out-dir", dist],
            cwd=source,
            check=True,
        )
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    strange = [
        name for name in names if not name.startswith(("hone/", f"hone_rl-{version}.dist-info/"))
    ]
    if missing or strange:
        sys.exit(f"{wheel.name}: missing {missing}, out of place {strange}")
    with tempfile.TemporaryDirectory() as place:
        python = Path(place) / "bin" / "python"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
        for words in (
            ["rl", "--help"],
            ["hone", "--help"],
            ["hone", "dashboard", "--help"],
            ["sft", "--help"],
        ):
            subprocess.run(
                [python.parent / words[0], *words[1:]],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=place,
            )
        said = (
            "import hone, importlib.metadata as m; assert hone.__version__ == m.version('hone-rl')"
        )
        subprocess.run([python, "-c", said], check=True, cwd=place)
    print(
        f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 2**20:.1f} MiB, its commands answer"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
