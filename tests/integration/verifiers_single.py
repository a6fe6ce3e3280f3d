import verifiers as vf
from datasets import Dataset


def load_environment(n: int = 20):
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1), "info": {"i": i}} for i in range(n)]
    parser = vf.XMLParser(["answer"], answer_field="answer")

    def right(parser, completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    def length(completion, info, **kwargs):
        return len(completion[-1]["content"]) / 100 + info["i"] * 0

    print("what it prints")
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        system_prompt="Add.",
        parser=parser,
        rubric=vf.Rubric(funcs=[right, length], weights=[1.0, 0.5], parser=parser),
    )
