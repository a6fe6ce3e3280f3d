"""Worker for environments of the verifiers library; it runs without Hone installed.

It runs those of the v0 API; for verifiers 0.4, which has v1 alone, verifiers_v1_worker.py does.

    verifiers_worker.py NAME examples      writes the examples and exits
    verifiers_worker.py NAME               serves the protocol of `worker_process.py`

It runs with the Python interpreter that has verifiers. Each rollout receives the URL of its own
OpenAI endpoint.
"""

import importlib.metadata
import json
import os
import signal
import sys

# Last: an environment may be named like a file of this directory.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if path != HERE] + [HERE]
from worker_loop import WorkerLoop  # noqa: E402

LOWEST = (0, 1, 9)
WITHOUT_V0 = (0, 4)
BELOW = (0, 5)
MAX_KEPT_STATES = 16384  # states kept for incomplete groups


def read_version():
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("verifiers is not installed here: install hone-rl[verifiers]") from None
    parts = tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in found.split(".")[:3]
    )
    if not LOWEST <= parts < BELOW:
        raise SystemExit(f"verifiers {found} is not supported; accepted: >=0.1.9,<0.5")
    return parts


def load_environment(name, arguments, found):
    import verifiers

    environment = verifiers.load_environment(name, **arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # loading one installs its own handler
    return environment


def has_groups(environment, found):
    """Return True if reward functions compare an example's rollouts; `found`: verifiers version."""
    return found >= (0, 1, 10) and getattr(environment, "requires_group_rollouts", False) is True


def to_plain(value):
    """Convert pydantic objects and numpy numbers to JSON values."""
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump(exclude_none=True))
    if isinstance(value, dict):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def list_rows(data):
    if data is None:
        return None
    return [to_plain(dict(row)) for row in data]


def list_examples(environment, found_version):
    train = getattr(environment, "dataset", None) is not None or hasattr(environment, "get_dataset")
    found = {"groups": has_groups(environment, found_version)}
    for key, get in (("train", "get_dataset"), ("eval", "get_eval_dataset")):
        try:
            found[key] = list_rows(getattr(environment, get)()) if train else None
        except (ValueError, AssertionError):  # it has none of this kind
            found[key] = None
    return found


def client_of(found, url):
    if found < (0, 1, 10):
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None)
    from verifiers.types import ClientConfig

    os.environ["HONE_POLICY_KEY"] = "none"
    return ClientConfig(
        api_key_var="HONE_POLICY_KEY", api_base_url=url, timeout=36000.0, max_retries=0
    )


class VerifiersWorker:
    def __init__(self, environment, found):
        self.environment = environment
        self.found = found
        self.in_groups = has_groups(environment, found)
        self.kept, self.count = {}, 0  # states of rollouts whose group is incomplete

    async def rollout(self, message):
        given = message["row"]
        client = client_of(self.found, message["url"])
        sampling = message["sampling"]
        kept = None
        if self.in_groups:
            done, kept = await self.roll_out_unscored(given, client, message["model"], sampling)
        elif self.found >= (0, 1, 10):
            done = await self.environment.run_rollout(given, client, message["model"], sampling)
        else:
            every = await self.environment.generate(
                [given], client=client, model=message["model"], sampling_args=sampling
            )
            every = to_plain(every)
            done = {
                "completion": every["completion"][0],
                "reward": every["reward"][0],
                "metrics": {key: values[0] for key, values in (every.get("metrics") or {}).items()},
            }
        done = to_plain(dict(done))
        error = done.get("error")
        if error:
            raise RuntimeError(
                error
                if isinstance(error, str)
                else error.get("error_chain_repr") or json.dumps(error)
            )
        completion = done.get("completion") or []
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return {
            "messages": completion,
            "reward": done.get("reward"),
            "metrics": done.get("metrics") or {},
            "stop": done.get("stop_condition") or "",
            "kept": kept,
        }

    async def roll_out_unscored(self, given, client, model, sampling):
        """Run the dataset row `given` unscored; return the rollout and its key in `self.kept`.

        `self.kept` holds the rollout's state until `score` is called for the complete group.
        """
        from verifiers.clients import resolve_client

        state = await self.environment.rollout(given, resolve_client(client), model, sampling)
        self.count += 1
        self.kept[self.count] = state
        while len(self.kept) > MAX_KEPT_STATES:  # of abandoned groups
            del self.kept[next(iter(self.kept))]
        error = state.get("error")
        known = {key: state.get(key) for key in ("completion", "stop_condition")}
        return known | {"reward": 0.0, "error": error and repr(error)}, self.count

    async def score(self, message):
        states = [self.kept.pop(number) for number in message["kept"]]
        rubric = self.environment.rubric
        await rubric.score_group(states)
        for state in states:
            await rubric.cleanup(state)
        return [
            {"reward": s["reward"], "metrics": to_plain(s.get("metrics") or {})} for s in states
        ]


def main():
    loop = WorkerLoop()
    is_serving = sys.argv[2:] != ["examples"]
    if is_serving:
        loop.start_reading()
    found = read_version()
    if found >= WITHOUT_V0:
        import verifiers_v1_worker

        verifiers_v1_worker.serve(loop, sys.argv[1], is_serving)
        return
    environment = load_environment(sys.argv[1], loop.arguments, found)
    if not is_serving:
        loop.send_message(list_examples(environment, found))
        os._exit(0)
    worker = VerifiersWorker(environment, found)
    loop.serve_requests({"rollout": worker.rollout, "score": worker.score})


if __name__ == "__main__":
    main()
