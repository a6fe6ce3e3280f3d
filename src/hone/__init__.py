"""Hone: post-train language models with reinforcement learning."""

import time

__version__ = "0.1.0"
STARTED = time.perf_counter()  # for "ready after … s", imports included
