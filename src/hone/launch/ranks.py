"""`python -m hone.launch.ranks N sft @ FILE`: N processes of a command here, a rank each, as torchrun starts them.

Unlike torchrun it hands SIGUSR1 on, by which a run is asked to leave.
"""

import os
import signal
import subprocess
import sys
import time

from hone import leaving
from hone.launch.plan import environments_of_ranks

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def main(count: int, words: list[str]) -> int:
    """The first exit code that is not 0, or 0; then the others are ended."""
    own = {"HONE_PARENT_PID": str(os.getpid())}
    ranks = [
        subprocess.Popen([sys.executable, "-m", "hone", *words], env=os.environ | rank | own, start_new_session=True)
        for rank in environments_of_ranks(count)
    ]

    def hand_on(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return next((code if code > 0 else 128 - code for code in codes if code), 0)
        if any(code not in (None, 0, leaving.AGAIN) for code in codes):
            break
        time.sleep(0.1)
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
    for rank in ranks:
        rank.kill()
        rank.wait()
    return next((code if code > 0 else 128 - code for code in codes if code not in (None, 0, leaving.AGAIN)), 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
