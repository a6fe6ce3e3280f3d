"""Guess a hidden number within several turns; each wrong guess is answered "higher" or "lower".

reward = the number is found    metrics: guesses, valid (share of answers that are a number)
"""

import random

import hone.environments as vf

SYSTEM_PROMPT = "You guess a number. Answer with a number only."
# One game shows the form. Its guesses are no good strategy; that is left to RL.
SHOWN = [
    ("From 50 to 70.", "52"),
    ("Higher.", "53"),
    ("Higher.", "67"),
]


def load_environment(
    width: int = 20,
    largest: int = 99,
    max_guesses: int = 5,
    num_examples: int = 2000,
    num_eval_examples: int = 128,
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    width: how many numbers are possible. largest: of them. max_guesses: turns until the game is lost.
    num_examples, num_eval_examples: games (range and number) to train and to evaluate on; none is in both.
    """
    games = [
        (low, number) for low in range(1, largest - width + 2) for number in range(low, low + width)
    ]
    random.Random(seed).shuffle(games)
    rows = [
        {"question": f"From {low} to {low + width - 1}.", "answer": str(number)}
        for low, number in games
    ]
    return Guess(
        dataset=rows[num_eval_examples:][:num_examples],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=SYSTEM_PROMPT,
        few_shot=[
            {"role": role, "content": text}
            for shown in SHOWN
            for role, text in zip(("user", "assistant"), shown)
        ],
        rubric=vf.Rubric(funcs=[found, guesses, valid], weights=[1.0, 0.0, 0.0]),
        max_turns=max_guesses,
    )


class Guess(vf.MultiTurnEnv):
    @vf.stop
    async def is_found(self, state: vf.State) -> bool:
        return bool(state["completion"]) and found(state["completion"], state["answer"]) == 1.0

    async def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
        guess = read_number(messages[-1]["content"])
        hint = (
            "A number only."
            if guess is None
            else "Higher."
            if guess < int(state["answer"])
            else "Lower."
        )
        return [{"role": "user", "content": hint}]


def read_number(text: str) -> int | None:
    text = text.strip().removesuffix(".")
    return int(text) if text.isascii() and text.isdigit() else None


def answers(completion: vf.Messages) -> list[int | None]:
    return [
        read_number(message["content"]) for message in completion if message["role"] == "assistant"
    ]


def found(completion: vf.Messages, answer: str) -> float:
    return float(int(answer) in answers(completion))


def guesses(completion: vf.Messages) -> float:
    return float(len(answers(completion)))


def valid(completion: vf.Messages) -> float:
    numbers = answers(completion)
    return sum(number is not None for number in numbers) / len(numbers)
