"""Before anything imports torch: where tests run side by side, a thread that waits sleeps instead of spinning."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
