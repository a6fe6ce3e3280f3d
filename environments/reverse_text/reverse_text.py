"""Reverse a text character by character: one turn, the answer in `<reversed_text>` tags.

    reward = difflib ratio of the answer to the true reversal      metric exact_match = they are equal

Texts come from the hub (default), are generated, or are read from a local file; `texts` says which.
As a program it writes texts as SFT data: `python -m reverse_text --out sft.jsonl --min-chars 12 --max-chars 20`. With
`--unreversed 0.6` three in five of the answers are the texts as they are: demonstrations that RL can surpass.
"""

import argparse
import json
import random
import zlib
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
HUB_DATASET = "PrimeIntellect/Reverse-Text-RL"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
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
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    texts: "hub" (`dataset_name`, column `prompt`), "generated" (random letters, `min_chars` to `max_chars`
        long), or the path of a file: .jsonl with a `prompt` column, anything else one text a line.
    num_examples, num_eval_examples: how many texts are generated to train and to evaluate on; no text is in both.
    """
    if texts == "hub":
        train, held_out = hub_texts(dataset_name, dataset_split), None
    elif texts == "generated":
        train = generate_texts(num_examples, min_chars, max_chars, seed, held_out=False)
        held_out = generate_texts(num_eval_examples, min_chars, max_chars, seed, held_out=True)
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
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = "".join(rng.choices(LETTERS, k=rng.randint(min_chars, max_chars)))
        if text == text.strip() and (zlib.crc32(text.encode()) % HELD_OUT == 0) == held_out:
            texts[text] = None
    return list(texts)


def file_texts(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(
            f"reverse-text: texts must be 'hub', 'generated' or a file, found {str(path)!r}"
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
            'offline, choose other texts by the argument `texts` of the environment: "generated", or a local file'
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
    texts = generate_texts(
        args.num_examples, args.min_chars, args.max_chars, args.seed, args.held_out
    )
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
