import verifiers as vf
from datasets import Dataset


class Talk(vf.MultiTurnEnv):
    async def setup_state(self, state, **kwargs):
        state = await super().setup_state(state, **kwargs) or state
        state["n"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["n"] += 1
        return [{"role": "user", "content": f"go on {state['n']}"}]


def load_environment():
    rows = [{"question": f"q{i}", "answer": "x"} for i in range(20)]

    def count(state, **kwargs):
        return float(state["n"])

    def letters(completion, **kwargs):
        c = completion[0]["content"] if isinstance(completion[0], dict) else completion[0].content
        return min(len(c or ""), 10) / 10

    return Talk(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[count, letters]), max_turns=3
    )
