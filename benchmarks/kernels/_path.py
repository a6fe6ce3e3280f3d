"""Put the directory of the benchmarks' shared modules on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
