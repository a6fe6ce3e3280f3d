"""Template of a new environment, with alphabetical sorting as the task to replace."""

import keyword
import re
from pathlib import Path

SOURCE = '''"""{title}: the letters of a word in alphabetical order."""

import random
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = "Put the letters of the word in alphabetical order, in <answer> tags."
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def load_environment(
    min_letters: int = 3, max_letters: int = 6, num_examples: int = 2000, num_eval_examples: int = 200, seed: int = 0
) -> vf.Environment:
    rng = random.Random(seed)
    words: dict[str, None] = {{}}  # each once: what is held out is never trained on
    while len(words) < num_examples + num_eval_examples:
        words["".join(rng.choices(LETTERS, k=rng.randint(min_letters, max_letters)))] = None
    # A row: the question, the right answer, and whatever else the rewards need, as "info": {{…}}.
    rows = [{{"question": word, "answer": "".join(sorted(word))}} for word in words]
    parser = vf.XMLParser(["answer"])

    # A reward function asks by name for what it needs: prompt, completion (the messages that followed it), answer,
    # info, state, parser. `parser.parse_answer(completion)` is what stands in the last <answer> tags, or None.
    def letters_in_place(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        given = parser.parse_answer(completion) or ""
        return sum(a == b for a, b in zip(given, answer)) / max(len(given), len(answer))

    def exact(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return float(parser.parse_answer(completion) == answer)

    return vf.SingleTurnEnv(
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric(funcs=[letters_in_place, exact], weights=[1.0, 0.0], parser=parser),  # weight 0: a metric
    )
'''
TEST = '''"""What a right answer and a wrong one are worth."""

import asyncio

from {module} import load_environment

import hone.environments as vf
from hone.environments.attempt import attempt
from hone.records import Completion, Prompt, Sampling, Turn


class Says:
    def __init__(self, text: str) -> None:
        self.text = text

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        return Turn([1], Completion([2], [0.0], [0], "stop"), self.text)


def reward(env: vf.Environment, text: str) -> float:
    return asyncio.run(attempt(env, Says(text), env.get_dataset()[0], Sampling())).reward


def test_rewards() -> None:
    env = load_environment(num_examples=50)
    answer = env.get_dataset()[0].answer
    assert reward(env, f"<answer>{{answer}}</answer>") == 1.0
    assert reward(env, "no idea") == 0.0
    assert 0.0 <= reward(env, f"<answer>{{answer[::-1]}}</answer>") < 1.0


def test_nothing_is_both_trained_on_and_held_out() -> None:
    env = load_environment()
    both = env.get_dataset(), env.get_eval_dataset()
    train, held_out = ({{example.prompt[-1]["content"] for example in rows}} for rows in both)
    assert not train & held_out
'''
PROJECT = """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "{title}."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["hone-rl"]

[tool.hatch.build.targets.wheel]
include = ["{module}.py"]
"""
README = """# {name}

The letters of a word in alphabetical order; one turn, the answer in `<answer>` tags. The reward is the share of letters
in their place; `exact` is a metric.

| argument | default | |
|---|---|---|
| `min_letters`, `max_letters` | 3, 6 | of a word |
| `num_examples`, `num_eval_examples`, `seed` | 2000, 200, 0 | of generated words |

## From data to reward, on a CPU
In Hone's environment (`source .venv/bin/activate`, or with `uv run` before each command):
```bash
hone env install {folder}              # once; changes to the source need no second time
hone env check {name}
python -m pytest {folder}
hone env data {name} -o outputs/{name}/sft.jsonl -n 4000 -a '{{"max_letters": 4}}'
hone env model {name} -o outputs/{name}/model
sft --model.name outputs/{name}/model --model.random-init --data.name outputs/{name}/sft.jsonl --data.batch-size 4 \\
  --data.seq-len 256 --max-steps 150 --log-interval 50 --optim.type muon --optim.lr 4e-3 \\
  --output-dir outputs/{name}/sft
rl --model.name outputs/{name}/sft/weights/step_150 --orchestrator.env.id {name} --orchestrator.batch-size 256 \\
  --orchestrator.rollouts-per-example 8 --orchestrator.sampling.max-tokens 16 --seq-len 64 --max-steps 600 \\
  --trainer.optim.type muon --trainer.optim.lr 1e-3 --trainer.scheduler.type linear \\
  --trainer.scheduler.warmup-steps 10 --log-interval 20 --output-dir outputs/{name}/rl
inference --model.name outputs/{name}/rl/weights/step_600 &
vf-eval {name} -m outputs/{name}/rl/weights/step_600 -b http://localhost:8000/v1 -n 200 -r 1 -t 16
kill %1                                # the server
```
The reward before RL is that of `outputs/{name}/sft/weights/step_150`, by the same last three commands. SFT sees short
words alone (`max_letters` 4), so that RL has something to learn. For a task of your own set `max-tokens` and `-t` to
the tokens of its longest answer (a letter is a token of the tiny model, a tag one), `seq-len` to those of question and
answer together. After a change run `sft` and `rl` with `--clean`, which removes what they wrote before.
"""


def write_environment(name: str, place: Path) -> Path:
    """Write a new environment from the template, below `place`; return its folder.

    Raises ValueError if `name` is no valid module name or the folder exists.
    """
    name = name.rpartition("/")[2]
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise ValueError(
            f"hone env init: {name!r} is no name of a package: letters, digits and dashes, as in my-env"
        )
    folder = place / module
    if folder.exists():
        raise ValueError(
            f"hone env init: {folder} is there already; choose another name, or remove it"
        )
    words = {
        "name": module.replace("_", "-"),
        "module": module,
        "folder": folder,
        "title": module.replace("_", " ").capitalize(),
    }
    folder.mkdir(parents=True)
    for file, text in (
        (f"{module}.py", SOURCE),
        (f"test_{module}.py", TEST),
        ("pyproject.toml", PROJECT),
        ("README.md", README),
    ):
        (folder / file).write_text(text.format(**words))
    return folder
