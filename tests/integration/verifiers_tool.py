import verifiers as vf
from datasets import Dataset


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return int(a) + int(b)


def load_environment():
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(20)]

    def right(completion, answer, **kwargs):
        last = completion[-1]
        text = last["content"] if isinstance(last, dict) else last.content
        return float(answer in (text or ""))

    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4
    )
