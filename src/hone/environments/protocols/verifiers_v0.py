"""Run environments of the verifiers library in processes of the Python that has it installed.

    rollout ── {"rollout", row, url} ──► verifiers_worker.py ── POST url/… ──► PolicyEndpoint ─► client.chat
            ◄─ {"done", messages, reward, metrics} ──┘                         └ records the turns

Sampled tokens never pass through verifiers: `PolicyEndpoint` records each turn of a rollout with
its tokens.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.environments.environment import ModelClient
from hone.environments.protocols.worker_loop import ARGUMENTS_VARIABLE
from hone.environments.protocols.worker_process import WorkerEnvironment, WorkerProcess
from hone.environments.rubric import Rubric
from hone.records import Example, Message, Rollout, Sampling

if TYPE_CHECKING:
    from hone.environments.protocols.policy_endpoint import RolloutAccess

# Requirements of environments, by the API that they use; v1 starts its harnesses with uv.
V0_REQUIREMENTS = ["verifiers>=0.1.9,<0.4"]
V1_REQUIREMENTS = ["verifiers>=0.4,<0.5", "uv"]
SCRIPT = Path(__file__).with_name("verifiers_worker.py")
LOAD_SECONDS = 300.0  # seconds to import the library and load the data


def isolated_place(name: str) -> Path:
    """Return the path of an environment's own virtual environment, which may not exist."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "hone" / "environments" / name


def python_of(name: str, module_name: str, venv: str | None) -> Path | None:
    """Return the Python interpreter for a verifiers environment, None if it does not use verifiers.

    Raises ValueError if the configured `venv` has no interpreter.
    """
    if venv is not None:
        python = Path(venv) / "bin" / "python"
        if not python.exists():
            raise ValueError(
                f"env.venv {venv}: there is no {python}; make it with `hone env install {name} --isolated`"
            )
        return python
    python = isolated_place(name) / "bin" / "python"
    if python.exists():
        return python
    return Path(sys.executable) if _imports_verifiers(module_name) else None


def _imports_verifiers(module_name: str) -> bool:
    """Return True if the module's source imports verifiers; the module itself is not run."""
    spec = importlib.util.find_spec(module_name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    files = [Path(spec.origin)]
    if spec.submodule_search_locations:
        files += Path(spec.origin).parent.glob("*.py")
    return any(
        "import verifiers" in text or "from verifiers" in text
        for text in (f.read_text() for f in files)
    )


@dataclass
class _Rows:
    """Dataset rows of a verifiers environment, and the Hone examples built from them.

    The rows are kept since the environment may read fields that the examples do not have.
    """

    examples: list[Example] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    prompts: dict[int, list[Message]] = field(default_factory=dict)

    def has_example(self, example: Example) -> bool:
        return self.prompts.get(example.id) == example.prompt


class VerifiersEnv(WorkerEnvironment):
    """Environment of the verifiers library that runs in `workers` processes.

    `env_id` and `arguments` are passed to verifiers' `load_environment`, run by `python`.
    """

    def __init__(
        self, env_id: str, arguments: dict[str, Any], python: Path, workers: int = 1
    ) -> None:
        command = [str(python), str(SCRIPT), env_id.rpartition("/")[2]]
        super().__init__(env_id, command, arguments, workers)
        found = self._load_examples(command, arguments)
        self._has_groups = bool(found.get("groups"))
        kept = [_parse_rows(found.get(key)) for key in ("train", "eval")]
        self._train, self._eval = (None if one is None else one.examples for one in kept)
        self._kept = [one for one in kept if one is not None]
        if not self.get_dataset():
            raise ValueError(f"environment {env_id!r} has no examples")
        # Imported late: a web server that Hone's own environments do not need.
        from hone.environments.protocols.policy_endpoint import PolicyEndpoint

        self.endpoint = PolicyEndpoint()

    def _load_examples(self, command: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*command, "examples"],
                capture_output=True,
                text=True,
                timeout=LOAD_SECONDS,
                check=False,
                env=os.environ | {ARGUMENTS_VARIABLE: json.dumps(arguments)},
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"environment {self.name!r} was not loaded within {LOAD_SECONDS:.0f} s"
            ) from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise ValueError(
                f"environment {self.name!r}: {said[-1] if said else 'it cannot be loaded'}"
            )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    @property
    def has_group_rewards(self) -> bool:
        return self._has_groups

    def demonstrate(self, messages: list[Message], example: Example, rng: random.Random) -> None:
        """Return None: verifiers environments have no demonstrations."""
        return None

    def check(self) -> None:
        return None

    def add_rubric(self, rubric: Rubric) -> None:
        raise ValueError(
            f"{self.name}: rewards of an environment of verifiers are the library's alone"
        )

    def on_reward_error(self, what: str) -> None:
        """Raise ValueError for "fail": verifiers counts a failed function as 0 without a report."""
        if what == "fail":
            raise ValueError(
                f'{self.name}: env.on_reward_error = "fail" is for environments of Hone; verifiers counts 0'
            )

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        worker = self._worker_of(example)
        row = self.kept_row(example)
        asked = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens, "n": 1}
        async with self.endpoint.open_access(client, sampling) as access:
            message = {"row": row, "url": access.url, "model": "policy", "sampling": asked}
            try:
                done = await worker.send_request("rollout", message)
            except RuntimeError:
                if access.failure is None:
                    raise
                raise access.failure from None  # what the library's error comes from
        if access.is_full and not access.turns:
            raise RuntimeError("the prompt leaves no room in the model's context")
        parts = [_build_rollout(example, access, one) for one in done.get("agents", [done])]
        rollout = parts[0] if len(parts) == 1 else Rollout.join_agents(example, parts)
        timings = {
            "model": access.model_seconds,
            "environment": access.seconds - access.model_seconds,
        }
        for one in (rollout, *rollout.parts):
            one.seconds = access.seconds
            one.timings = timings
        return rollout

    def kept_row(self, example: Example) -> dict[str, Any]:
        """Return the library's row of an example."""
        return next(one.rows[example.id] for one in self._kept if one.has_example(example))

    def _worker_of(self, example: Example) -> WorkerProcess:
        """Return the worker for an example's rollout: the least busy one.

        With group scoring, all rollouts of an example use the same worker.
        """
        if self._has_groups:
            return self.workers[example.id % len(self.workers)]
        return self.choose_worker()

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Score a group with verifiers' own group scoring."""
        scored = [rollout for rollout in rollouts if not rollout.error]
        if not scored:
            return
        message = {"kept": [rollout.state["kept"] for rollout in scored]}
        scores = await self._worker_of(scored[0].example).send_request("score", message)
        for rollout, one in zip(scored, scores, strict=True):
            _set_scores(rollout, one)

    async def close(self) -> None:
        await super().close()
        await self.endpoint.close()


def _build_rollout(example: Example, access: "RolloutAccess", done: dict[str, Any]) -> Rollout:
    """Build the rollout of one agent from the worker's result and the turns of its session."""
    turns = access.turns_of(done.get("session"))
    rollout = Rollout(example, turns, done["messages"], stop=done["stop"])
    rollout.agent = done.get("agent", "")
    _set_scores(rollout, done)
    rollout.state = {} if done.get("kept") is None else {"kept": done["kept"]}
    return rollout


def _set_scores(rollout: Rollout, scores: dict[str, Any]) -> None:
    """Set the reward, NaN if the library has none, and the metrics that have a value."""
    rollout.reward = float("nan") if scores["reward"] is None else float(scores["reward"])
    rollout.metrics = {
        name: float(value) for name, value in scores["metrics"].items() if value is not None
    }


def _parse_rows(found: list[dict[str, Any]] | None) -> _Rows | None:
    if found is None:
        return None
    kept = _Rows()
    for i, row in enumerate(found):
        prompt = row.get("prompt") or []
        number = int(row.get("example_id", i))
        row = {**row, "example_id": number}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        info = row.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        task = row.get("task") if isinstance(row.get("task"), str) else ""
        kept.examples.append(
            Example(
                number,
                messages,
                "" if row.get("answer") is None else row["answer"],
                info,
                task or "",
            )
        )
        kept.rows[number], kept.prompts[number] = row, messages
    return kept
