"""Reverse a text character by character: one turn, the answer in `<reversed_text>` tags.

    reward = difflib ratio of the answer to the true reversal      metric exact_match = they are equal

Texts come from the hub (default), are random letters ("generated") or English words ("phrases"), or are read from a
local file; `texts` selects one of these.
As a program it writes texts as SFT data: `python -m reverse_text --out sft.jsonl --min-chars 12 --max-chars 20`
(`--phrases`: English words). With `--unreversed 0.6` three in five of the answers are the texts as they are:
demonstrations that RL can surpass.
"""

import argparse
import json
import random
import zlib
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
HUB_DATASET = "PrimeIntellect/Reverse-Text-RL"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
WORDS = Path(__file__).with_name("reverse_text_words.txt")
HELD_OUT = 8  # one text in so many belongs to evaluation, by its checksum


def load_environment(
    texts: str = "hub",
    dataset_name: str = HUB_DATASET,
    dataset_split: str = "train",
    system_prompt: str = SYSTEM_PROMPT,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    min_chars: int = 16,
    max_chars: int = 32,
    min_words: int = 1,
    max_words: int = 3,
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    texts: "hub" (`dataset_name`, column `prompt`), "generated" (random letters, `min_chars` to `max_chars` long),
        "phrases" (`min_words` to `max_words` common English words), or the path of a file: .jsonl with a `prompt`
        column, anything else one text a line.
    num_examples, num_eval_examples: how many texts are made to train and to evaluate on; no text is in both.
    """
    if texts == "hub":
        train, held_out = hub_texts(dataset_name, dataset_split), None
    elif texts == "generated":
        train = generate_texts(num_examples, min_chars, max_chars, seed, held_out=False)
        held_out = generate_texts(num_eval_examples, min_chars, max_chars, seed, held_out=True)
    elif texts == "phrases":
        train = generate_phrases(num_examples, min_words, max_words, seed, held_out=False)
        held_out = generate_phrases(num_eval_examples, min_words, max_words, seed, held_out=True)
    else:
        train, held_out = file_texts(Path(texts)), None

    parser = vf.XMLParser(["reversed_text"], answer_field="reversed_text")

    def lcs_reward(completion: Any, answer: str, parser: vf.XMLParser) -> float:
        return SequenceMatcher(None, parser.parse_answer(completion) or "", answer).ratio()

    def exact_match(completion: Any, answer: str, parser: vf.XMLParser) -> float:
        return float(parser.parse_answer(completion) == answer)

    return vf.SingleTurnEnv(
        dataset=[row(text) for text in train],
        eval_dataset=None if held_out is None else [row(text) for text in held_out],
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.Rubric(funcs=[lcs_reward, exact_match], weights=[1.0, 0.0], parser=parser),
    )


def row(text: str) -> dict[str, str]:
    return {"question": text, "answer": text[::-1]}


def generate_texts(
    count: int, min_chars: int, max_chars: int, seed: int, held_out: bool
) -> list[str]:
    """Distinct random texts without spaces at their ends; whether one is held out follows from the text alone."""
    if not 1 <= min_chars <= max_chars:
        raise ValueError(
            f"min_chars and max_chars must hold 1 <= min <= max, found {min_chars} and {max_chars}"
        )
    if count > 26**max_chars // (2 * HELD_OUT):
        raise ValueError(
            f"there are no {count} distinct texts of up to {max_chars} characters to tell apart"
        )
    rng = random.Random(f"{seed} {held_out}")

    def draw() -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(min_chars, max_chars)))

    return draw_distinct(draw, count, held_out)


def generate_phrases(
    count: int, min_words: int, max_words: int, seed: int, held_out: bool
) -> list[str]:
    """Distinct phrases of common English words; whether one is held out follows from the text alone."""
    words = WORDS.read_text().split()
    if not 1 <= min_words <= max_words:
        raise ValueError(
            f"min_words and max_words must hold 1 <= min <= max, found {min_words} and {max_words}"
        )
    if count > len(words) ** max_words // (2 * HELD_OUT):
        raise ValueError(
            f"there are no {count} distinct phrases of up to {max_words} words to tell apart"
        )
    rng = random.Random(f"{seed} {held_out} phrases")

    def draw() -> str:
        return " ".join(rng.choices(words, k=rng.randint(min_words, max_words)))

    return draw_distinct(draw, count, held_out)


def draw_distinct(draw: Callable[[], str], count: int, held_out: bool) -> list[str]:
    """Draw until there are `count` distinct texts without spaces at their ends, all held out or none."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = draw()
        if text == text.strip() and (zlib.crc32(text.encode()) % HELD_OUT == 0) == held_out:
            texts[text] = None
    return list(texts)


def file_texts(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(
            f"reverse-text: texts must be 'hub', 'generated', 'phrases' or a file, found {str(path)!r}"
        )
    lines = [line for line in path.read_text().splitlines() if line]
    if path.suffix != ".jsonl":
        return lines
    rows = [json.loads(line) for line in lines]
    if rows and "prompt" not in rows[0]:
        raise ValueError(f"{path} has no column 'prompt'; columns: {', '.join(rows[0])}")
    return [row["prompt"] for row in rows]


def hub_texts(name: str, split: str) -> list[str]:
    from datasets import load_dataset

    try:
        return list(load_dataset(name, split=split)["prompt"])
    except (
        Exception
    ) as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"reverse-text: the data set {name} cannot be loaded from the hub ({type(error).__name__}: {error}); "
            'offline, choose other texts by the argument `texts` of the environment: "generated", "phrases" or a file'
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m reverse_text", description="Write generated texts as SFT data."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="JSONL file with a `messages` column"
    )
    parser.add_argument("-n", "--num-examples", type=int, default=1000)
    parser.add_argument("--min-chars", type=int, default=16)
    parser.add_argument("--max-chars", type=int, default=32)
    parser.add_argument("--phrases", action="store_true", help="English words instead of letters")
    parser.add_argument("--min-words", type=int, default=1)
    parser.add_argument("--max-words", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", action="store_true", help="texts that training data never contains"
    )
    parser.add_argument(
        "--unreversed",
        type=float,
        default=0.0,
        help="share of answers that leave the text as it is",
    )
    args = parser.parse_args()
    if not 0 <= args.unreversed <= 1:
        parser.error(f"--unreversed must be from 0 to 1, found {args.unreversed}")
    rng = random.Random(f"{args.seed} unreversed")
    generate, least, most = (
        (generate_phrases, args.min_words, args.max_words)
        if args.phrases
        else (generate_texts, args.min_chars, args.max_chars)
    )
    texts = generate(args.num_examples, least, most, args.seed, args.held_out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as file:
        for text in texts:
            given = text if rng.random() < args.unreversed else text[::-1]
            answer = f"<reversed_text>{given}</reversed_text>"
            messages = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    print(f"{len(texts)} conversations in {args.out}")


if __name__ == "__main__":
    main()
