"""Sort names alphabetically, then sort further ones in: one to three turns.

    reward = mean over turns of (difflib ratio of the list to the right one) ** 4    metric exact = all lists are right

Names are made of shipped first and last names (default), of two letters, or come from the hub; `names` says which.
"""

import random
from difflib import SequenceMatcher
from itertools import pairwise
from string import ascii_uppercase
from typing import Any

import hone.environments as vf
from hone.environments.parsers import cut_blocks

HUB_DATASET = "kalomaze/alphabetic-arxiv-authors-it1"
FIRST = (
    "Ada Amir Anna Asha Bela Boris Carla Chen Clara Dario Diego Dora Edith Elias Emma Farid Fiona Gita Greta Hana Hugo "
    "Ines Ivan Jana Jonas Kai Karim Lara Leo Lina Luca Mara Marco Mina Nadia Nils Nora Olga Omar Otto Paula Pia Quinn "
    "Rafa Rosa Ruth Samir Selma Sven Tara Theo Tomas Ulla Uma Vera Viktor Wanda Wim Xenia Yara Yusuf Zara Zeno"
).split()
LAST = (
    "Abe Adler Ahmed Bauer Bianchi Brandt Castro Cohen Costa Duarte Dubois Eklund Evans Faber Fischer Fontana Garcia "
    "Gupta Haas Hansen Horvat Ito Ivanov Jansen Jones Kaplan Keller Khan Kowalski Lang Larsen Lopez Maier Mbeki Moreno "
    "Nakano Novak Okafor Olsen Ortiz Park Patel Petrov Quist Rahman Ricci Rossi Sato Silva Singh Tanaka Toth Turner "
    "Ueda Vargas Vogel Wagner Weber Xu Yamada Young Zhang Zimmer"
).split()
ASK = """Sort these names in alphabetical order by {by} name: {names}

Use exactly this format:
<alphabetical_sorted>
{lines}
</alphabetical_sorted>"""
ASK_MORE = """Now sort ALL of these names alphabetically by {by} name: {names}

These are in addition to the prior list. Mark any NEW names (that weren't in the prior list) with \
`// new name!` at the end.

Use exactly this format:
<combined_alphabetical_sorted>
{lines}
</combined_alphabetical_sorted>"""
ASK_AGAIN = ASK_MORE.split("\n\nUse exactly")[0] + " Follow the same format as before."
NEW = " // new name!"


def load_environment(
    max_turns: int = 3,
    min_turns: int = 1,
    min_names_per_turn: int = 1,
    max_names_per_turn: int = 5,
    similarity_power: int = 4,
    power_per_turn: bool = True,
    names: str = "shipped",
    hf_dataset_path: str = HUB_DATASET,
    num_examples: int = 2000,
    num_eval_examples: int = 256,
    demonstrations: str = "sorted",
    seed: int = 1337420,
) -> vf.Environment:
    """The environment.

    names: "shipped" (first and last names), "letters" (of two capitals, as in QB), or "hub" (`hf_dataset_path`).
    demonstrations: what data for SFT shows: "sorted" lists, or "mixed", of which half are in the order given.
    power_per_turn: raise the similarity of each turn to `similarity_power`; else their mean.
    """
    if not 1 <= min_turns <= max_turns or not 1 <= min_names_per_turn <= max_names_per_turn:
        raise ValueError("alphabet-sort: 1 <= min <= max must hold of turns and of names_per_turn")
    if names not in ("shipped", "letters", "hub"):
        raise ValueError(
            f'alphabet-sort: names must be "shipped", "letters" or "hub", found {names!r}'
        )
    if demonstrations not in ("sorted", "mixed"):
        raise ValueError(
            f'alphabet-sort: demonstrations must be "sorted" or "mixed", found {demonstrations!r}'
        )
    turns, per_turn = (min_turns, max_turns), (min_names_per_turn, max_names_per_turn)
    held_out = None
    if names == "hub":
        lists = hub_names(hf_dataset_path)
        train = [
            row(random.Random(f"{seed} {i}"), each, turns, per_turn) for i, each in enumerate(lists)
        ]
    else:
        draws = [random.Random(f"{seed} {i}") for i in range(-num_eval_examples, num_examples)]
        rows = [
            row(rng, drawn_names(rng, names, turns[1] * per_turn[1]), turns, per_turn)
            for rng in draws
        ]
        held_out, train = rows[:num_eval_examples], rows[num_eval_examples:]

    def similarity(completion: Any, state: dict[str, Any]) -> float:
        power = similarity_power if power_per_turn else 1
        truths = state["info"]["ground_truths"]
        said = vf.Parser().get_assistant_messages(completion)
        scores = [
            turn_score(message["content"] or "", truth, i) ** power
            for i, (message, truth) in enumerate(zip(said, truths, strict=False))
        ]
        mean = sum(scores) / len(truths)
        return mean if power_per_turn else mean**similarity_power

    def exact(completion: Any, state: dict[str, Any]) -> float:
        truths = state["info"]["ground_truths"]
        said = [
            message["content"] or "" for message in vf.Parser().get_assistant_messages(completion)
        ]
        right = [
            turn_score(text, truth, i) == 1.0
            for i, (text, truth) in enumerate(zip(said, truths, strict=False))
        ]
        return float(all(right) and len(right) == len(truths))

    rubric = vf.Rubric(funcs=[similarity, exact], weights=[1.0, 0.0])
    return Sorting(
        dataset=[one for one in train if one],
        eval_dataset=held_out and [one for one in held_out if one],
        rubric=rubric,
        max_turns=max_turns,
        demonstrations=demonstrations,
    )


class Sorting(vf.MultiTurnEnv):
    def __init__(self, demonstrations: str, **others: Any) -> None:
        super().__init__(**others)
        self.demonstrations = demonstrations

    @vf.stop
    async def all_asked(self, state: vf.State) -> bool:
        return state["turn"] >= state["info"]["num_turns"]

    async def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
        return [{"role": "user", "content": state["info"]["follow_ups"][state["turn"] - 1]}]

    def demonstrate(self, messages: vf.Messages, example: vf.Example, rng: random.Random) -> str:
        turn = sum(message["role"] == "assistant" for message in messages)
        tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
        lines = example.info["ground_truths"][turn]
        if self.demonstrations == "mixed" and rng.random() < 0.5:
            given = [name for names in example.info["turn_names"][: turn + 1] for name in names]
            lines = sorted(lines, key=lambda line: given.index(line.removesuffix(NEW)))
        return f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"


def parts(name: str) -> tuple[str, str]:
    """First and last name of one written as "AdaAdler"; the last is empty where there is no second capital."""
    at = next((i for i in range(1, len(name)) if name[i].isupper()), len(name))
    return name[:at], name[at:]


def turn_score(text: str, truth: list[str], turn: int) -> float:
    """Similarity of a list to the right one. Of several each must be better than the one before; the last counts."""
    tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
    lists = cut_blocks(text, f"<{tag}>", f"</{tag}>")[1]
    scores = []
    for written in lists:
        lines = "\n".join(line.strip().lower() for line in written.splitlines() if line.strip())
        right = "\n".join(line.strip().lower() for line in truth)
        scores.append(SequenceMatcher(None, lines, right).ratio() if lines else 0.0)
    improves = all(later > earlier for earlier, later in pairwise(scores))
    return scores[-1] if scores and improves else 0.0


def row(
    rng: random.Random, names: list[str], turns: tuple[int, int], per_turn: tuple[int, int]
) -> dict[str, Any] | None:
    """One task; None where there are too few names."""
    count = rng.randint(*turns)
    sizes = [rng.randint(*per_turn) for _ in range(count)]
    if len(names) < sum(sizes):
        return None
    by = rng.choice([0, 1])
    asked, truths, known, follow_ups, given = "", [], [], [], []
    for turn, size in enumerate(sizes):
        new, names = names[:size], names[size:]
        known = known + new
        ordered = sorted(known, key=lambda name: parts(name)[by])
        truths.append([name + (NEW if turn and name in new else "") for name in ordered])
        shown = rng.randint(*per_turn) if not turn else rng.randint(per_turn[0], len(known))
        old = rng.randint(0, shown - 1) if turn else shown
        lines = "\n".join(f"Name{i}{NEW if i > old else ''}" for i in range(1, shown + 1))
        mixed = rng.sample(new, len(new))
        given.append(mixed)
        words = {"by": ("FIRST", "LAST")[by], "names": ", ".join(mixed), "lines": lines}
        text = (ASK, ASK_MORE, ASK_AGAIN)[min(turn, 2)].format(**words)
        asked = asked or text
        if turn:
            follow_ups.append(text)
    info = {
        "follow_ups": follow_ups,
        "ground_truths": truths,
        "turn_names": given,
        "num_turns": count,
        "sort_by_first": not by,
    }
    return {
        "prompt": [{"role": "user", "content": asked}],
        "answer": "\n".join(truths[-1]),
        "info": info,
    }


def drawn_names(rng: random.Random, kind: str, count: int) -> list[str]:
    """Names of which no two have the first or the last part in common."""
    first, last = (FIRST, LAST) if kind == "shipped" else (ascii_uppercase, ascii_uppercase)
    if count > min(len(first), len(last)):
        raise ValueError(
            f"alphabet-sort: there are {min(len(first), len(last))} names, {count} are asked for"
        )
    return [
        "".join(pair)
        for pair in zip(rng.sample(first, count), rng.sample(last, count), strict=True)
    ]


def hub_names(name: str) -> list[list[str]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train")
    except (
        Exception
    ) as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"alphabet-sort: the data set {name} cannot be loaded from the hub ({type(error).__name__}: {error}); "
            'offline, choose names = "shipped"'
        ) from None
    return [list(dict.fromkeys(one.replace(" ", "") for one in entry["names"])) for entry in rows]
