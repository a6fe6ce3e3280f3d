"""Sums of two numbers: one turn, the answer is the number and nothing else.

reward = the answer is the sum
"""

import random

import hone.environments as vf

SYSTEM_PROMPT = "You are a calculator. Answer with the number only."
# Two answers show the form, so that the model answers with a number; which number is left to RL.
SHOTS = [("2 + 3", "5"), ("11 + 8", "19")]


def load_environment(
    largest: int = 20, num_eval_examples: int = 80, seed: int = 0
) -> vf.Environment:
    """largest: of the two numbers, from 1. num_eval_examples: pairs held out for evaluation, none
    of them in training."""
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    random.Random(seed).shuffle(pairs)
    rows = [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs]

    def right(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    return vf.SingleTurnEnv(
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=SYSTEM_PROMPT,
        few_shot=[
            {"role": role, "content": text}
            for shot in SHOTS
            for role, text in zip(("user", "assistant"), shot)
        ],
        rubric=vf.Rubric(funcs=[right]),
    )
