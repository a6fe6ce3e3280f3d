"""The reverse-text environment with a reward that random weights can raise: the share of digits in the answer."""

import hone.environments as vf
import reverse_text


def load_environment(**arguments: object) -> vf.Environment:
    environment = reverse_text.load_environment(**arguments)

    def digits(completion, **_):
        text = completion[-1]["content"]
        return sum(map(str.isdigit, text)) / max(len(text), 1)

    environment.rubric = vf.Rubric(funcs=[digits], weights=[1.0])
    return environment
