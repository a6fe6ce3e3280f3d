"""What `vf-eval` costs beside the HTTP client: processor time of a rollout, reverse-text, tiny server, 256 at a time.

    python benchmarks/vf_eval_cpu.py MODEL [-n 1000] [--rounds 3]

Processor time of `vf-eval` and of a bare loop of the same requests by the same client (this file, with --bare), each
with n examples and with 50, so that start-up falls out. The mean reward is compared with one computed from the saved
completions by hand.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

from peer import ROOT, median

from hone.clients.http import HttpClient
from hone.environments import load_environment
from hone.records import Prompt, Sampling

sys.path.insert(0, str(ROOT / "examples" / "reverse_text_tiny"))
BIN = Path(sys.executable).parent
ENV = {"texts": "generated", "min_chars": 4, "max_chars": 10, "num_eval_examples": 1000}
AT_ONCE = 256


async def bare(url: str, model: str, count: int) -> None:
    examples = load_environment("reverse-text", **ENV).get_eval_dataset(count)
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        async with slots:
            await client.chat(Prompt(examples[i].prompt), Sampling(1.0, 20, i))

    async with HttpClient(url, model) as client:
        await asyncio.gather(*map(one, range(len(examples))))


def seconds_of(words: list[str], place: str) -> float:
    """Processor time of a command and all that it starts."""
    before = os.times()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=place)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        asyncio.run(bare(args.bare, args.model, args.n))
        return
    from demo import server

    model, costs = str(Path(args.model).resolve()), []
    with server(model) as url, tempfile.TemporaryDirectory() as place:
        for _ in range(args.rounds):
            spent = {}
            for count in (50, args.n):
                spent["vf-eval", count] = seconds_of(
                    [
                        str(BIN / "vf-eval"),
                        "reverse-text",
                        "-m",
                        model,
                        "-b",
                        url,
                        "-n",
                        str(count),
                        "-r",
                        "1",
                        "-c",
                        str(AT_ONCE),
                        "-t",
                        "20",
                        "-s",
                        "-a",
                        json.dumps(ENV),
                    ],
                    place,
                )
                words = [
                    sys.executable,
                    str(Path(__file__).resolve()),
                    model,
                    "--bare",
                    url,
                    "-n",
                    str(count),
                ]
                spent["bare", count] = seconds_of(words, place)
            each = {
                kind: (spent[kind, args.n] - spent[kind, 50]) / (args.n - 50)
                for kind in ("vf-eval", "bare")
            }
            costs.append(1000 * (each["vf-eval"] - each["bare"]))
            print(
                f"vf-eval {1000 * each['vf-eval']:.2f} ms, bare {1000 * each['bare']:.2f} ms a rollout",
                flush=True,
            )
        last = max(Path(place).glob("outputs/evals/*/*"), key=lambda path: path.stat().st_mtime)
        rows = [json.loads(line) for line in (last / "results.jsonl").open()]
        said = json.loads((last / "metadata.json").read_text())["reward"]
    direct = []
    for row in rows:
        text = row["completion"][-1]["content"]
        _, _, rest = text.partition("<reversed_text>")
        answer = rest.partition("</reversed_text>")[0].strip() if "</reversed_text>" in rest else ""
        direct.append(SequenceMatcher(None, answer, row["answer"]).ratio())
    mean = sum(direct) / len(direct)
    print(
        json.dumps(
            {
                "ours_ms": round(median(costs), 3),
                "rollouts": args.n,
                "mean": said,
                "mean_directly": mean,
            }
        )
    )


if __name__ == "__main__":
    main()
