"""The context length that vLLM is started with, and the reason shown when it ends."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from hone.inference.samplers.vllm_files import VllmFiles
from hone.inference.samplers.vllm_process import VllmProcess
from hone.models.weight_proof import canary_length

TINY = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"


@pytest.mark.parametrize(
    "said, expected",
    [
        (["loading", "ValueError: no such file", "bye"], "exit code 1: ValueError: no such file"),
        (
            ["ModelError: 1 validation error", "  Value error, no heads", "    See"],
            "exit code 1: ModelError: 1 validation error: Value error, no heads",
        ),
        (
            ["(APIServer pid=7) ModelError: 1 error", "(APIServer pid=7)   Value error, no heads"],
            "exit code 1: ModelError: 1 error: Value error, no heads",
        ),
        (["ValueError: x", "RuntimeError: Engine core initialization failed"], "ValueError: x"),
        (["killed"], "exit code 1: killed"),
    ],
)
def test_a_failure_is_told_with_its_reason(said, expected):
    ended = SimpleNamespace(process=SimpleNamespace(poll=lambda: 1), said=deque(said))
    assert VllmProcess.describe_failure(ended).endswith(expected)


def test_the_canary_has_room(tmp_path):
    files = VllmFiles(TINY, tmp_path, "float32", is_on_cpu=True)
    needed = canary_length(files.spec) + 1
    assert [files.choose_context_length(n) for n in (None, 8, needed, 99)] == [
        None,
        needed,
        needed,
        99,
    ]
