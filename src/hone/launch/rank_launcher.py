"""Run the ranks of a command on this node, as torchrun does.

    python -m hone.launch.rank_launcher --ranks N sft @ FILE

On several nodes, run it once on each with `--nodes 2 --node 1 --meet HOST:PORT`, where HOST:PORT is
an address of the first node. Unlike torchrun it forwards SIGUSR1, which asks a run to stop.
"""

import argparse
import os
import signal
import sys
import time

from hone import preemption
from hone.child_process import HONE, Process, end_processes, start_process
from hone.launch.plan import environments_of_ranks


def main(argv: list[str]) -> int:
    """Run the ranks; return 0 if all succeed, else the exit code of one that did not.

    If a rank fails, the others are ended.
    """
    args = parse_arguments(argv)
    words = [*HONE, *args.words]
    ranks: list[Process] = []

    def forward_signal(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    with preemption.hold_signals():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward_signal)
        for given in environments_of_ranks(args.ranks, args.nodes, args.node, args.meet):
            ranks.append(start_process(words, given))
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code not in (None, 0, preemption.EXIT_PREEMPTED)]
        if None not in codes:
            return next((_shell_code(code) for code in codes if code), 0)
        if failed:
            end_processes(*ranks)
            return _shell_code(failed[0] or 1)
        time.sleep(0.1)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hone.launch.rank_launcher", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, help="processes here")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the run (default 1)")
    parser.add_argument(
        "--node",
        type=int,
        default=int(os.environ.get("SLURM_NODEID", 0)),
        help="which of them this is, from 0 (default: as Slurm says)",
    )
    parser.add_argument("--meet", default="", help="HOST:PORT of the first node, with several")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="sft or trainer, and its arguments")
    args = parser.parse_args(argv)
    args.node = args.node if args.nodes > 1 else 0
    if args.nodes > 1 and not args.meet:
        parser.error("--meet HOST:PORT: several nodes need an address of the first")
    return args


def _shell_code(code: int) -> int:
    """Convert a nonzero Popen exit code to the shell's: -N, for signal N, becomes 128 + N."""
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
