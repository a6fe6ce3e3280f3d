"""Wordle: find a hidden word in six guesses; each is answered by G (right letter and place), Y (elsewhere), X (absent).

    reward = 1 + 1 / guesses if found, else 0.2 for each G and 0.1 for each Y of the last guess; + 0.2 x format

Words are Hone's own list, or any given as `words`: fewer or shorter ones make an easier game.
"""

import random
from collections import Counter
from importlib.resources import files
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = """You are a competitive game player. \
Make sure you read the game instructions carefully, and always follow the required format.

In each turn, think step-by-step, then give your guess inside <guess>...</guess> tags."""
RULES = """You are Player 0 in Wordle.
A secret {length}-letter word has been chosen. You have {guesses} attempts to guess it.
For each guess, wrap your word in square brackets (e.g., [{example}]).
Feedback for each letter will be given as follows:
  - G (green): correct letter in the correct position
  - Y (yellow): letter exists in the word but in the wrong position
  - X (wrong): letter is not in the word
Enter your guess to begin."""


def load_environment(
    num_train_examples: int = 2000,
    num_eval_examples: int = 20,
    system_prompt: str = SYSTEM_PROMPT,
    rules: str = RULES,
    words: list[str] | int | None = None,
    max_guesses: int = 6,
    demonstrations: str = "consistent",
    seed: int = 0,
) -> vf.Environment:
    """The environment.

    words: the words of the game, or how many of the shipped list (its first ones); all unless given.
    rules: the text of the first message, with {length}, {guesses} and {example}.
    demonstrations: what data for SFT shows: guesses "consistent" with all feedback, "random" ones, or both, "mixed".
    """
    known = word_list()
    chosen = (
        known
        if words is None
        else known[:words]
        if isinstance(words, int)
        else [word.lower() for word in words]
    )
    if (
        len({len(word) for word in chosen}) != 1
        or len(chosen) < 2
        or not all(word.isalpha() for word in chosen)
    ):
        raise ValueError(f"wordle: words must be at least two of one length, found {chosen[:5]}")
    if demonstrations not in ("consistent", "random", "mixed"):
        raise ValueError(
            f'wordle: demonstrations must be "consistent", "random" or "mixed", found {demonstrations!r}'
        )
    text = rules.format(
        length=len(chosen[0]), guesses=max_guesses, example="apple"[: len(chosen[0])]
    )

    def rows(count: int, name: str) -> list[dict[str, str]]:
        rng = random.Random(f"{seed} {name}")
        order = rng.sample(chosen, len(chosen))
        return [{"question": text, "answer": order[i % len(order)]} for i in range(count)]

    parser = vf.XMLParser(["guess"], answer_field="guess")
    format_reward = parser.get_format_reward_func()
    rubric = vf.Rubric(
        funcs=[correct_answer, partial_answer, length_bonus, format_reward, consistent_guesses],
        weights=[1.0, 1.0, 1.0, 0.2, 0.0],
        parser=parser,
    )
    return Wordle(
        dataset=rows(num_train_examples, "train"),
        eval_dataset=rows(num_eval_examples, "eval"),
        system_prompt=system_prompt,
        parser=parser,
        rubric=rubric,
        max_turns=max_guesses,
        words=chosen,
        demonstrations=demonstrations,
    )


class Wordle(vf.MultiTurnEnv):
    def __init__(self, words: list[str], demonstrations: str, **others: Any) -> None:
        super().__init__(**others)
        self.words, self.demonstrations = words, demonstrations

    async def setup_state(self, state: vf.State) -> vf.State:
        state["guesses"] = []  # (word, marks)
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
        guess, secret = guessed(messages[-1]["content"] or "", self.parser), state["answer"]
        left = self.max_turns - state["turn"]
        if guess is None or len(guess) != len(secret) or not guess.isalpha():
            text = f"Your guess must be a word of {len(secret)} letters in square brackets inside <guess>...</guess>."
            return [{"role": "user", "content": f"{text}\nYou have {left} guesses left."}]
        marked = marks(guess, secret)
        state["guesses"].append((guess, marked))
        if guess == secret:
            state["final_env_response"] = [{"role": "user", "content": "You found the word."}]
            return []
        text = f"{' '.join(guess.upper())}\n{' '.join(marked)}\n\nYou have {left} guesses left."
        return [{"role": "user", "content": text}]

    def demonstrate(self, messages: vf.Messages, example: vf.Example, rng: random.Random) -> str:
        said = [
            guessed(m["content"] or "", self.parser) or ""
            for m in messages
            if m["role"] == "assistant"
        ]
        seen = [(word, marks(word, example.answer)) for word in said]
        fits = [
            word for word in self.words if all(marks(one, word) == marked for one, marked in seen)
        ]
        thinks = (
            rng.random() < {"consistent": 1.0, "random": 0.0, "mixed": 0.5}[self.demonstrations]
        )
        choice = rng.choice(fits if thinks else self.words)
        return f"<guess>[{choice}]</guess>"


def marks(guess: str, secret: str) -> str:
    """G, Y or X for each letter; a letter that occurs more often in the guess than in the secret is X where it does."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    found = []
    for g, s in zip(guess, secret, strict=True):
        if g == s:
            found.append("G")
        elif left[g]:
            left[g] -= 1
            found.append("Y")
        else:
            found.append("X")
    return "".join(found)


def guessed(text: str, parser: vf.Parser) -> str | None:
    written = parser.parse_answer([{"role": "assistant", "content": text}])
    return (
        None
        if written is None
        else written.strip().removeprefix("[").removesuffix("]").strip().lower()
    )


def correct_answer(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Whether the last guess is the word."""
    return float(guessed_last(parser, completion) == answer)


def guessed_last(parser: vf.Parser, completion: vf.Messages) -> str | None:
    said = parser.get_assistant_messages(completion)
    return guessed(said[-1]["content"] or "", parser) if said else None


def partial_answer(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """0.2 for each green and 0.1 for each yellow letter of the last guess, where that is not the word."""
    guess = guessed_last(parser, completion)
    if guess is None or guess == answer or len(guess) != len(answer):
        return 0.0
    marked = marks(guess, answer)
    return 0.2 * marked.count("G") + 0.1 * marked.count("Y")


def length_bonus(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """1 / guesses for a word that was found."""
    return correct_answer(parser, completion, answer) / max(
        1, len(parser.get_assistant_messages(completion))
    )


def consistent_guesses(state: vf.State) -> float:
    """Share of the guesses after the first that all earlier feedback allows."""
    seen = state["guesses"]
    fits = [
        all(marks(one, word) == marked for one, marked in seen[:i])
        for i, (word, _) in enumerate(seen)
        if i
    ]
    return sum(fits) / len(fits) if fits else 1.0


def word_list() -> list[str]:
    return files("wordle").joinpath("words.txt").read_text().split()
