"""Products of two numbers with a tool that calculates: a model that cannot multiply learns to ask.

reward = the answer in <answer> tags is right    metrics: calculate_calls, total_tool_calls
"""

import json
import random
from typing import Any

import hone.environments as vf

SYSTEM_PROMPT = "Answer in <answer> tags. You may calculate."
SIGNS = {"*": lambda a, b: a * b, "+": lambda a, b: a + b, "-": lambda a, b: a - b}


def calculate(expression: str) -> str:
    """Calculate an expression of two numbers.

    Args:
        expression: As in 12 * 34.
    """
    left, sign, right = expression.split()
    return str(SIGNS[sign](int(left), int(right)))


def load_environment(
    largest: int = 99,
    num_examples: int = 2000,
    num_eval_examples: int = 200,
    share_of_calls: float = 1.0,
    seed: int = 0,
) -> vf.Environment:
    """largest: of the numbers. share_of_calls: how often demonstrations use the tool; the others guess a number."""
    rng = random.Random(seed)
    every = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
    pairs = rng.sample(every, num_examples + num_eval_examples)
    rows = [{"question": f"{a} * {b}", "answer": str(a * b)} for a, b in pairs]
    parser = vf.XMLParser(["answer"])

    def right(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return float(parser.parse_answer(completion) == answer)

    return Calculator(
        share_of_calls=share_of_calls,
        dataset=rows[num_eval_examples:],
        eval_dataset=rows[:num_eval_examples],
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric(funcs=[right], parser=parser),
        tools=[calculate],
        max_turns=3,
    )


class Calculator(vf.ToolEnv):
    def __init__(self, share_of_calls: float, **others: Any) -> None:
        super().__init__(**others)
        self.share_of_calls = share_of_calls

    def demonstrate(
        self, messages: vf.Messages, example: vf.Example, rng: random.Random
    ) -> vf.Message | str:
        if messages[-1]["role"] == "tool":
            return f"<answer>{messages[-1]['content']}</answer>"
        if rng.random() >= self.share_of_calls:
            return f"<answer>{rng.randint(0, int(example.answer) * 2 + 9)}</answer>"
        arguments = json.dumps({"expression": example.prompt[-1]["content"]})
        call = {"function": {"name": "calculate", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
