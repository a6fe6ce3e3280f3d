"""Measure the lag of the event loop, which reveals blocking calls."""

import asyncio
import logging
import time

import numpy as np

MEASURE_SECONDS, ALARM_SECONDS = 0.02, 1.0  # seconds between measurements; a lag that is reported


class Lag:
    """Measurements of the event loop's lag.

    `watch_loop` measures it in a background task; `take_metrics` returns the metrics since the last
    call.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.log = log
        self._seen: list[float] = []
        self._warned = -60.0

    async def watch_loop(self) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(MEASURE_SECONDS)
            now = time.monotonic()
            self._seen.append(now - start - MEASURE_SECONDS)
            if self._seen[-1] > ALARM_SECONDS and now - self._warned > 60.0:
                self._warned = now
                self.log.warning(
                    "The event loop stood still for %.1f s: an environment that blocks? (orchestrator.env.workers)",
                    self._seen[-1],
                )

    def take_metrics(self) -> dict[str, float]:
        seen = np.array(self._seen or [0.0])
        self._seen = []
        return {
            "perf/event_loop_lag/p99": float(np.percentile(seen, 99)),
            "perf/event_loop_lag/max": float(seen.max()),
        }
