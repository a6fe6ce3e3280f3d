"""Builds the wheel and tries it where nothing else is: files that have to be in it, versions, commands that answer.

python scripts/package.py [--tag vX.Y.Z]
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = (
    "hone/dashboard/assets/index.html", "hone/dashboard/assets/app.js", "hone/dashboard/assets/vendor/uplot.js",
    "hone/launch/slurm.sh.jinja", "hone/launch/workspace/models/reverse-text-tiny-sft/model.safetensors",
    "hone/launch/workspace/environments/wordle/pyproject.toml", "hone/launch/workspace/configs/vf-rl/wordle.toml",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--tag", default="", help="that the version has to be")
    args = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if args.tag and args.tag != f"v{version}":
        sys.exit(f"the tag is {args.tag}, the version in pyproject.toml {version}")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run([args.uv, "build", "--quiet", "--package", "hone-rl", "--out-dir", dist], cwd=ROOT, check=True)
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    strange = [name for name in names if not name.startswith(("hone/", f"hone_rl-{version}.dist-info/"))]
    if missing or strange:
        sys.exit(f"{wheel.name}: missing {missing}, out of place {strange}")
    with tempfile.TemporaryDirectory() as place:
        python = Path(place) / "bin" / "python"
        subprocess.run([args.uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
        subprocess.run([args.uv, "pip", "install", "--quiet", "--python", python, wheel], check=True)
        for words in (["rl", "--help"], ["hone", "--help"], ["hone", "dashboard", "--help"], ["sft", "--help"]):
            subprocess.run([python.parent / words[0], *words[1:]], check=True, stdout=subprocess.DEVNULL, cwd=place)
        said = "import hone, importlib.metadata as m; assert hone.__version__ == m.version('hone-rl')"
        subprocess.run([python, "-c", said], check=True, cwd=place)
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 2**20:.1f} MiB, its commands answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
