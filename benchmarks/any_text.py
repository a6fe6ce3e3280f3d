"""The reverse-text environment with a reward that random weights get a signal from, a number made of the text."""

import hone.environments as vf
import reverse_text


def load_environment(**arguments: object) -> vf.Environment:
    environment = reverse_text.load_environment(**arguments)

    def number(completion, **_):
        return sum(map(ord, completion[-1]["content"])) % 97 / 97

    environment.rubric = vf.Rubric(funcs=[number], weights=[1.0])
    return environment
