"""The reverse-text environment with a reward that random weights can raise: the share of digits in the answer."""

from pathlib import Path

import hone.environments as vf
import reverse_text


def load_environment(scored_file: str | None = None, **arguments: object) -> vf.Environment:
    """Load the environment; `scored_file` is a file to touch when an answer is scored."""
    environment = reverse_text.load_environment(**arguments)

    def digits(completion, **_):
        if scored_file is not None:
            Path(scored_file).touch()
        text = completion[-1]["content"]
        return sum(map(str.isdigit, text)) / max(len(text), 1)

    environment.rubric = vf.Rubric(funcs=[digits], weights=[1.0])
    return environment
