"""Write preference pairs of sums: a right and a wrong answer to each question of training.

python pairs.py FILE.jsonl
"""

import json
import random
import sys
from pathlib import Path

from sums import load_environment


def write_pairs(path: str, seed: int = 0) -> None:
    """Write one pair for each training example of the environment; held-out ones have none."""
    draw = random.Random(seed)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for example in load_environment().get_dataset():
            wrong = draw.choice([n for n in range(2, 41) if str(n) != example.answer])
            pair = {"prompt": example.prompt, "chosen": example.answer, "rejected": str(wrong)}
            file.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    write_pairs(sys.argv[1])
