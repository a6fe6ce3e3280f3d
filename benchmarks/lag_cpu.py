"""How long the orchestrator's event loop keeps things waiting, with 512 rollouts in flight: three processes, two cores.

    python benchmarks/lag_cpu.py [--steps 60]

The worst 99th percentile of a step, over the steps, where the model takes the time and where the environment does.
"""

import argparse
import tempfile
from pathlib import Path

from async_cpu import SLOW, reinforced, warmed_up
from peer import finish, median


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = warmed_up(Path(directory))
        for environment in ("reverse-text", SLOW):
            rows = reinforced(
                model,
                Path(directory) / environment,
                options.steps,
                environment,
                "--max-async-level",
                1,
            )
            # Beside the 32 that a step takes; of 8
            assert max(row["batch/groups_under_way"] for row in rows) == 32
            lags = [row["perf/event_loop_lag/p99"] for row in rows]
            found |= {
                f"{environment}_worst_ms": 1e3 * max(lags),
                f"{environment}_median_ms": 1e3 * median(lags),
            }
    finish(**found)


if __name__ == "__main__":
    main()
