"""Run a recipe of Tinker's cookbook on data made here, where it would load data from the hub.

    python local_data_recipe.py sl_loop log_path=… (the arguments of the recipe)

Only what cannot be reached is replaced: `datasets.load_dataset`, and the table that names a renderer
for each published model.
"""

import os
import random
import runpy
import string
import sys

import datasets
from tinker_cookbook import model_info

QUESTIONS = [f"How many of {i}?" for i in range(128)]


ANSWERS = os.environ.get("LOCAL_ANSWERS", "12")


def make_conversation(draw: random.Random) -> dict:
    """Return questions of any length, each answered with one of ANSWERS in a box."""
    messages = []
    for _ in range(draw.randint(1, 3)):
        question = "".join(draw.choices(string.printable, k=draw.randint(10, 300)))
        answer = f"\\boxed{{{draw.choice(ANSWERS)}}}"
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return {"messages": messages}


def make_rows(name: str) -> list[dict]:
    """Return rows with the columns of a data set on the hub."""
    if name == "HuggingFaceH4/no_robots":
        draw = random.Random(0)
        return [make_conversation(draw) for _ in range(640)]
    if name == "openai/gsm8k":
        return [{"question": question, "answer": "so #### 1"} for question in QUESTIONS]
    if name == "Anthropic/hh-rlhf":
        start = "\n\nHuman: {}\n\nAssistant: "
        return [
            {"chosen": start.format(q) + "one", "rejected": start.format(q) + "TWO"}
            for q in QUESTIONS
        ]
    if name == "zwhe99/DeepMath-103K":
        return [{"question": question} for question in QUESTIONS]
    raise AssertionError(f"no local rows for {name}")


def load_dataset(name: str, *names: str, split: str | None = None) -> object:
    rows = datasets.Dataset.from_list(make_rows(name))
    whole = datasets.DatasetDict({"train": rows, "test": rows.select(range(8))})
    return whole if split is None else whole[split]


datasets.load_dataset = load_dataset
model_info.get_recommended_renderer_name = lambda name: "role_colon"
module = f"tinker_cookbook.recipes.{sys.argv.pop(1)}"
runpy.run_module(module, run_name="__main__", alter_sys=True)
