"""Lays out the pages of the site below .site/pages, each at its place in the repository, and builds it.

python scripts/site.py
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / ".site" / "pages"
HTML = ROOT / ".site" / "html"
# Pages that answer fewer questions than they have words: how far down search results they go.
BOOSTS = {
    "benchmarks/RESULTS.md": 0.1,
    "benchmarks/README.md": 0.3,
    "CHANGELOG.md": 0.1,
    "CONTRIBUTING.md": 0.3,
    "docs/configuration.md": 0.3,
    "docs/reference.md": 0.3,
    "docs/architecture.md": 0.5,
    "docs/exact.md": 0.5,
    "docs/tutorial.md": 0.5,
}
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
IMAGE = re.compile(r"<img\b[^>]*>")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.) ", re.MULTILINE)


def rank_in_search(page: Path, name: str) -> None:
    """Leave a page that is not in the navigation out of the search, or give it its boost."""
    is_listed = f": {name}\n" in (ROOT / "mkdocs.yml").read_text()
    rule = f"boost: {BOOSTS.get(name, 1)}" if is_listed else "exclude: true"
    page.write_text(f"---\nsearch:\n  {rule}\n---\n{page.read_text()}")


def find_broken_lists(directory: Path) -> list[str]:
    """Return the paragraphs of built pages that contain list items as running text.

    Markdown needs a blank line between a paragraph, or a code block, and a list.
    """
    found = []
    for page in sorted(directory.rglob("*.html")):
        for paragraph in PARAGRAPH.findall(page.read_text()):
            if ITEM.search(paragraph):
                text = " ".join(re.sub("<.*?>", "", paragraph).split())
                found.append(f"{page.relative_to(directory)}: {text[:80]}")
    return found


def find_images_without_text(directory: Path) -> list[str]:
    """Return the images of built pages that have no alternative text."""
    return [
        f"{page.relative_to(directory)}: {image[:80]}"
        for page in sorted(directory.rglob("*.html"))
        for image in IMAGE.findall(page.read_text())
        if not re.search(r'\balt="[^"]+"', image)
    ]


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    words = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(words, text=True).splitlines():
        source = ROOT / name
        if source.is_file() and not name.startswith(("src/", "tests/", ".")):
            target = PAGES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            if source.suffix == ".md":
                rank_in_search(target, name)
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    environment = os.environ | {"HONE_SITE_VERSION": f"Hone {version}, Apache-2.0"}
    if code := subprocess.run([*words, ROOT / "mkdocs.yml"], env=environment).returncode:
        return code
    broken = [f"a list without a blank line before it: {line}" for line in find_broken_lists(HTML)]
    broken += [f"an image without text: {line}" for line in find_images_without_text(HTML)]
    print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
