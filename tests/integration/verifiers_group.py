import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [{"question": f"q{i}", "answer": "x"} for i in range(20)]

    def letters(completion, **kwargs):
        one = completion[0]
        return min(len((one["content"] if isinstance(one, dict) else one.content) or ""), 10) / 10

    def place(states, **kwargs):
        """Of its length among those of the group, from 0 to 1."""
        lengths = [len(str(state["completion"])) for state in states]
        return [sum(other < one for other in lengths) / max(1, len(lengths) - 1) for one in lengths]

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[letters, place], weights=[0.0, 1.0]),
    )
