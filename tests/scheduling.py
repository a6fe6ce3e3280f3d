"""How pytest-xdist spreads tests over its workers."""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
# Of a test that takes the fixture `server`, whose server and weights other tests would see changing.
TAKES_SERVER = re.compile(r"^(?:async )?def test_\w+\((?:[^)]*, )?server[,)]", re.MULTILINE)


@functools.cache
def find_group(file):
    """Return the group of a file's tests, which one worker runs; None where each test may run anywhere."""
    text = (ROOT / file).read_text()
    if TAKES_SERVER.search(text):
        return "server"
    return file if 'scope="module"' in text else None


class GroupScheduling(LoadScopeScheduling):
    """Groups first, largest first; then single tests in their order."""

    def _split_scope(self, nodeid):
        return find_group(nodeid.split("::")[0]) or nodeid
