"""Lays out the pages of the site below .site/pages, each at its place in the repository, and builds it.

python scripts/site.py
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / ".site" / "pages"


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(words, text=True).splitlines():
        source = ROOT / name
        if source.is_file() and not name.startswith(("src/", "tests/", ".")):
            target = PAGES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", ROOT / "mkdocs.yml"]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
