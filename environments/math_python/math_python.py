"""Mathematical problems with a tool: `python(code)`, a session that keeps its names for a conversation, in a sandbox.

    reward = the answer in \\boxed{} is mathematically the right one    metrics: python_calls, total_tool_calls

Problems are generated arithmetic (default), come from the hub, or are read from a file; `problems` says which.
"""

import json
import random
from pathlib import Path
from typing import Any

import hone.environments as vf
from hone.environments.sandbox import Limits, SandboxError, Sandboxes

INSTRUCTION = (
    "Solve the following math problem. Explain your reasoning and put the final answer in \\boxed{}. "
    "Use Python for all calculations."
)
PACKAGES = "\n\nIn addition to the Python Standard Library, you have access to: numpy sympy scipy."


def load_environment(
    problems: str = "generated",
    dataset_name: str = "PrimeIntellect/INTELLECT-3-RL",
    dataset_subset: str | None = "math",
    dataset_split: str = "train",
    instruction_prompt: str = INSTRUCTION + PACKAGES,
    max_turns: int = 10,
    num_examples: int = 2000,
    num_eval_examples: int = 256,
    operations: int = 3,
    largest: int = 999,
    seed: int = 0,
    seconds: float = 10.0,
    memory_mb: int = 1024,
    max_sessions: int = 32,
) -> vf.Environment:
    """The environment.

    problems: "generated" (up to `operations` operations on numbers up to `largest`), "hub" (`dataset_name` and its
        columns question and answer), or a .jsonl file with these columns.
    seconds, memory_mb: of one call of the tool.  max_sessions: sandboxes at a time.
    """
    held_out = None
    if problems == "generated":
        draws = [random.Random(f"{seed} {i}") for i in range(-num_eval_examples, num_examples)]
        rows = [problem(rng, operations, largest) for rng in draws]
        held_out, rows = rows[:num_eval_examples], rows[num_eval_examples:]
    else:
        rows = (
            hub_rows(dataset_name, dataset_subset, dataset_split)
            if problems == "hub"
            else file_rows(Path(problems))
        )

    def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        start = f"{instruction_prompt}\n\n" if instruction_prompt else ""
        return [{"question": start + row["question"], "answer": str(row["answer"])} for row in rows]

    return MathPython(
        sandboxes=Sandboxes(Limits(seconds=seconds, memory=memory_mb << 20), max_sessions),
        max_turns=max_turns,
        dataset=asked(rows),
        eval_dataset=None if held_out is None else asked(held_out),
        rubric=vf.MathRubric(),
    )


class MathPython(vf.StatefulToolEnv):
    def __init__(self, sandboxes: Sandboxes, **others: Any) -> None:
        super().__init__(stop_errors=[SandboxError], **others)
        self.sandboxes = sandboxes
        self.add_tool(self.python, args_to_skip=["state"])

    async def python(self, code: str, state: vf.State) -> str:
        """Run Python code in a session that keeps its names, and see what it prints and the value of its last line.

        Args:
            code: The code to run.
        """
        if "sandbox" not in state:
            state["sandbox"] = await self.sandboxes.take()
        return await state["sandbox"].run(code)

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: vf.Messages,
        state: vf.State,
        **_: Any,
    ) -> dict[str, Any]:
        return {**tool_args, "state": state}

    @vf.cleanup
    async def end_session(self, state: vf.State) -> None:
        if "sandbox" in state:
            await self.sandboxes.give_back(state.pop("sandbox"))

    @vf.teardown
    async def end_sessions(self) -> None:
        await self.sandboxes.close()

    def demonstrate(
        self, messages: vf.Messages, example: vf.Example, rng: random.Random
    ) -> vf.Message | str:
        """Calculates what is asked by the tool, then says it. For generated problems."""
        if messages[-1]["role"] == "tool":
            return f"\\boxed{{{example.answer}}}"
        expression = messages[-1]["content"].rpartition("Calculate ")[2].rstrip(".")
        arguments = json.dumps({"code": expression})
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "python", "arguments": arguments}}],
        }


def problem(rng: random.Random, operations: int, largest: int) -> dict[str, str]:
    count = rng.randint(1, operations)
    words = [str(rng.randint(0, largest))]
    for _ in range(count):
        words += [rng.choice("+-*"), str(rng.randint(0, largest))]
    expression = " ".join(words)
    # Of our own digits and signs
    return {"question": f"Calculate {expression}.", "answer": str(eval(expression))}


def file_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(
            f"math-python: problems must be 'generated', 'hub' or a .jsonl file, found {str(path)!r}"
        )
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def hub_rows(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(name, subset, split=split)]
    except (
        Exception
    ) as error:  # the library raises a dozen kinds for "not reachable" and "not there"
        raise ValueError(
            f"math-python: the data set {name} cannot be loaded from the hub ({type(error).__name__}: {error}); "
            'offline, choose problems = "generated"'
        ) from None
