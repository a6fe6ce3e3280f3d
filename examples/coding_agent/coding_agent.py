"""Small repositories with a bug and tests; an agent (`agent.py`) has the model repair them.

Each repository has a module with two functions, one of them wrong, and a test of each. The reward is
the share of the tests that pass, from 0.5 for the repository as it is.
"""

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
PROMPT = """calc.py has a bug:
```python calc.py
{code}```
Answer with the whole corrected file in a block like this one."""


def make_row(draw):
    """Return a repository with two functions, one of them wrong."""
    names = draw.sample(sorted(FUNCTIONS), 2)
    wrong = draw.choice(names)
    bodies = {name: FUNCTIONS[name][name == wrong] for name in names}
    code = "\n\n".join(f"def {name}(x):\n    return {body}\n" for name, body in bodies.items())
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


def load_environment(num_examples=512, num_eval_examples=64, contain="bubblewrap", seconds=60.0):
    """Make repositories; `contain` and `seconds` are those of CommandEnv."""
    draw = random.Random(0)
    rows = [make_row(draw) for _ in range(num_examples + num_eval_examples)]
    python = sys.executable
    return vf.CommandEnv(
        command=[python, str(HERE / "agent.py")],
        reward_command=[python, str(HERE / "score.py")],
        contain=contain,
        readable=[HERE],
        seconds=seconds,
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
    )
