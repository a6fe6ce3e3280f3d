"""Three tasks as a newcomer would write them: the letters of a word in order, the sum of two numbers, counting letters.

The environment of `own_tasks_cpu.py`.
"""

import random

import hone.environments as vf

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def question(task: str, rng: random.Random) -> tuple[str, str]:
    if task == "letters":
        word = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        return word, "".join(sorted(word))
    if task == "add":
        one, other = rng.randint(0, 999), rng.randint(0, 999)
        return f"{one}+{other}", str(one + other)
    word, letter = "".join(rng.choices("abcd", k=rng.randint(4, 9))), rng.choice("abcd")
    return f"{letter} in {word}", str(word.count(letter))


def load_environment(
    task: str = "letters", n: int = 6000, num_eval: int = 1000, seed: int = 0
) -> vf.Environment:
    """task: letters, add or count; the reward is the share of characters in their place."""
    rng, rows = random.Random(seed), {}
    while len(rows) < n + num_eval:
        asked, answer = question(task, rng)
        rows[asked] = {"question": asked, "answer": answer}
    parser = vf.XMLParser(["answer"])

    def right(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        given = parser.parse_answer(completion) or ""
        return sum(a == b for a, b in zip(given, answer, strict=False)) / max(
            len(given), len(answer)
        )

    def exact(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return float(parser.parse_answer(completion) == answer)

    made = list(rows.values())
    return vf.SingleTurnEnv(
        dataset=made[num_eval:],
        eval_dataset=made[:num_eval],
        system_prompt="Do it, in <answer> tags.",
        parser=parser,
        rubric=vf.Rubric(funcs=[right, exact], weights=[1.0, 0.0], parser=parser),
    )
