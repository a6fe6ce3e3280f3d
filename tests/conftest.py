"""Before anything imports torch: the instruction set that HONE_CPU_ISA asks for; where tests run side by side, a thread
that waits sleeps instead of spinning."""

import os

from hone import machine

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
machine.prepare()
