"""An environment of reversed texts whose reward is not for the reversed text: for length, or the same for all."""

import reverse_text
from hone.environments import Rubric


def load_environment(kind="length", **kwargs):
    def reward(completion):
        return min(len(completion[-1]["content"]) / 100, 1.0) if kind == "length" else 0.5

    environment = reverse_text.load_environment(**kwargs)
    environment.rubric = Rubric(funcs=[reward])
    return environment
