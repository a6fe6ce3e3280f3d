"""Small repositories with a bug and tests; an agent (`agent.py`) has the model repair them.

Each repository has a module with two functions, one of them wrong, and a test of each. The reward is
the share of the tests that pass, from 0.5 for the repository as it is. As a program it writes
conversations for a warm-up, whose functions are others:

    python -m coding_agent -n 64 --out sft.jsonl
"""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

import hone.environments as vf

HERE = Path(__file__).parent
# Names of functions of x, what they return, and what the wrong ones return.
FUNCTIONS = {
    "double": ("x * 2", "x + 2"),
    "triple": ("x * 3", "x * 2"),
    "square": ("x * x", "x + x"),
    "negate": ("-x", "x"),
    "increment": ("x + 1", "x - 1"),
    "decrement": ("x - 1", "x + 1"),
    "halve": ("x // 2", "x * 2"),
    "cube": ("x * x * x", "x * x"),
    "is_even": ("x % 2 == 0", "x % 2 == 1"),
    "is_positive": ("x > 0", "x < 0"),
    "add_ten": ("x + 10", "x + 1"),
    "last_digit": ("x % 10", "x // 10"),
}
# Those of the warm-up.
OTHER_FUNCTIONS = {
    "quadruple": ("x * 4", "x + 4"),
    "add_two": ("x + 2", "x - 2"),
    "subtract_five": ("x - 5", "x + 5"),
    "third": ("x // 3", "x * 3"),
    "is_big": ("x > 100", "x < 100"),
    "remainder": ("x % 7", "x // 7"),
}
PROMPT = """calc.py has a bug:
```python calc.py
{code}```
Answer with the whole corrected file in a block like this one."""


def write_code(functions, names, wrong=""):
    """Return a module with these functions, of which `wrong` has its wrong body."""
    bodies = {name: functions[name][name == wrong] for name in names}
    return "\n\n".join(f"def {name}(x):\n    return {body}\n" for name, body in bodies.items())


def list_repositories(functions):
    """Return every (names of the two functions, the wrong one) in a fixed random order."""
    pairs = itertools.permutations(sorted(functions), 2)
    found = [(names, wrong) for names in pairs for wrong in names]
    random.Random(0).shuffle(found)
    return found


def make_row(names, wrong):
    """Return the row of a repository: its files, its tests, and the question."""
    code = write_code(FUNCTIONS, names, wrong)
    tests = "import unittest\n\nimport calc as module\n\n\nclass Tests(unittest.TestCase):\n"
    for name in names:
        right = FUNCTIONS[name][0]
        cases = ", ".join(f"({x}, {eval(right, {'x': x})!r})" for x in (3, 7, 12))
        tests += f"    def test_{name}(self):\n        for x, y in [{cases}]:\n"
        tests += f"            self.assertEqual(module.{name}(x), y)\n\n"
    files = {"calc.py": code, "test_calc.py": tests}
    return {
        "question": PROMPT.format(code=code),
        "info": {"files": files, "reward_files": {"test_calc.py": tests}},
    }


def load_environment(num_examples=200, num_eval_examples=64, contain="bubblewrap", seconds=60.0):
    """Make repositories, none both to train and to evaluate on; see CommandEnv for `contain`."""
    rows = [make_row(*repository) for repository in list_repositories(FUNCTIONS)]
    python = sys.executable
    return vf.CommandEnv(
        command=[python, str(HERE / "agent.py")],
        reward_command=[python, str(HERE / "score.py")],
        contain=contain,
        readable=[HERE],
        seconds=seconds,
        dataset=rows[num_eval_examples:][:num_examples],
        eval_dataset=rows[:num_eval_examples],
    )


def main():
    parser = argparse.ArgumentParser(description="Write conversations for a warm-up.")
    parser.add_argument("-n", "--num-examples", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    repositories = list_repositories(OTHER_FUNCTIONS)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as file:
        for names, wrong in draw.choices(repositories, k=args.num_examples):
            question = PROMPT.format(code=write_code(OTHER_FUNCTIONS, names, wrong))
            answer = f"```python calc.py\n{write_code(OTHER_FUNCTIONS, names)}```"
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
