"""Word problems of primary school: one turn, the answer in \\boxed{}, compared mathematically.

Problems are generated from templates (default) or are those of GSM8K from the hub; `problems` says which.
"""

import random
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
NAMES = "Mia Noah Ava Luca Zoe Omar Ines Kofi Anya Theo".split()
THINGS = "apples marbles stickers pencils shells cards buttons coins books stamps".split()


def load_environment(
    problems: str = "generated",
    dataset_name: str = "openai/gsm8k",
    num_train_examples: int = 2000,
    num_eval_examples: int = 256,
    system_prompt: str | None = SYSTEM_PROMPT,
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    problems: "generated" (templates with numbers and names; none is both trained on and held out), or "hub".
    num_train_examples, num_eval_examples: at most so many; -1 takes all that the hub has.
    """
    if problems == "generated":
        count = num_train_examples + num_eval_examples
        rows: dict[str, dict[str, str]] = {}
        rng = random.Random(seed)
        while len(rows) < count:
            row = TEMPLATES[rng.randrange(len(TEMPLATES))](rng)
            rows.setdefault(row["question"], row)
        train, held_out = (
            list(rows.values())[num_eval_examples:],
            list(rows.values())[:num_eval_examples],
        )
    elif problems == "hub":
        train, held_out = (hub_rows(dataset_name, split) for split in ("train", "test"))
        train = train if num_train_examples < 0 else train[:num_train_examples]
        held_out = held_out if num_eval_examples < 0 else held_out[:num_eval_examples]
    else:
        raise ValueError(f"gsm8k: problems must be 'generated' or 'hub', found {problems!r}")
    parser = Boxed(extract_fn=vf.extract_boxed_answer)
    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.MathRubric(parser=parser),
    )


class Boxed(vf.MaybeThinkParser):
    def write(self, answer: str) -> str:
        return f"\\boxed{{{answer}}}"


def gives_away(rng: random.Random) -> dict[str, str]:
    name, thing, n, more = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(10, 90),
        rng.randint(2, 30),
    )
    away = rng.randint(1, 9)
    text = f"{name} has {n} {thing}, finds {more} more and gives {away} to a friend. How many {thing} are left?"
    return {"question": text, "answer": str(n + more - away)}


def boxes(rng: random.Random) -> dict[str, str]:
    name, thing, n, each = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(2, 12),
        rng.randint(3, 20),
    )
    loose = rng.randint(1, 15)
    text = f"{name} fills {n} boxes with {each} {thing} each and keeps {loose} loose. How many {thing} are there?"
    return {"question": text, "answer": str(n * each + loose)}


def price(rng: random.Random) -> dict[str, str]:
    name, thing, n, cost = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(2, 12),
        rng.randint(2, 9),
    )
    paid = n * cost + rng.randint(1, 40)
    text = f"{name} buys {n} {thing} at {cost} dollars each and pays with {paid} dollars. How many dollars come back?"
    return {"question": text, "answer": str(paid - n * cost)}


def shares(rng: random.Random) -> dict[str, str]:
    name, thing, n, each = (
        rng.choice(NAMES),
        rng.choice(THINGS),
        rng.randint(2, 9),
        rng.randint(2, 20),
    )
    eaten = rng.randint(1, 20)
    text = f"{name} loses {eaten} of {n * each + eaten} {thing} and shares the rest among {n} friends. "
    return {"question": text + "How many does each friend get?", "answer": str(each)}


TEMPLATES = (gives_away, boxes, price, shares)


def hub_rows(name: str, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, "main", split=split)
    except (
        Exception
    ) as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"gsm8k: the data set {name} cannot be loaded from the hub ({type(error).__name__}: {error}); "
            'offline, choose problems = "generated"'
        ) from None
    return [
        {"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip()}
        for row in rows
    ]
