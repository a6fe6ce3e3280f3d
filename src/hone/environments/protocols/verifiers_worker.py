"""Worker for environments of verifiers' v0 API, run by the library's Python, which need not have
Hone.

    verifiers_worker.py NAME ARGUMENTS examples      writes the examples and exits
    verifiers_worker.py NAME ARGUMENTS               lines of JSON, the protocol of `hone/environments/isolated.py`

Each rollout receives the address of its own OpenAI endpoint.
"""

import asyncio
import importlib.metadata
import json
import os
import queue
import signal
import sys
import threading

LOWEST = (0, 1, 9)
BELOW = (0, 4)
KEPT = 16384  # states kept for incomplete groups


def read_version():
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("verifiers is not installed here: install hone-rl[verifiers]") from None
    parts = tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in found.split(".")[:3]
    )
    if not LOWEST <= parts < BELOW:
        why = (
            "its v0 environments were removed in 0.4"
            if parts >= BELOW
            else "its environments were run differently"
        )
        raise SystemExit(f"verifiers {found} is not supported ({why}); accepted: >=0.1.9,<0.4")
    return parts


def load_environment(name, arguments):
    import verifiers

    found = read_version()
    environment = verifiers.load_environment(name, **arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # loading one installs its own handler
    return environment, found


def has_groups(environment, found):
    """Return True if reward functions compare the rollouts of an example."""
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

    os.environ["HONE_DOOR_KEY"] = "none"
    return ClientConfig(
        api_key_var="HONE_DOOR_KEY", api_base_url=url, timeout=36000.0, max_retries=0
    )


class VerifiersWorker:
    def __init__(self, environment, found, send):
        self.environment = environment
        self.found = found
        self.send = send
        self.running = {}
        self.in_groups = has_groups(environment, found)
        self.kept, self.count = {}, 0  # states of rollouts whose group is incomplete

    def handle_line(self, line):
        message = json.loads(line)
        kind, number = next(iter(message.items()))
        if kind in ("begin", "score"):
            work = self.rollout(message) if kind == "begin" else self.score(message["kept"])
            self.running[number] = asyncio.get_running_loop().create_task(
                self.run_request(number, work)
            )
        elif kind == "ping":
            self.send({"pong": number})
        elif kind == "cancel" and number in self.running:
            self.running[number].cancel()

    async def run_request(self, number, work):
        try:
            self.send({"done": number, "result": await work})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # exit() too: it fails this rollout only
            self.send({"error": number, "words": f"{type(error).__name__}: {error}"})
        finally:
            self.running.pop(number, None)

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
        """Run a rollout that is scored with its group; return it and the number of its state."""
        from verifiers.clients import resolve_client

        state = await self.environment.rollout(given, resolve_client(client), model, sampling)
        self.count += 1
        self.kept[self.count] = state
        while len(self.kept) > KEPT:  # of abandoned groups
            del self.kept[next(iter(self.kept))]
        error = state.get("error")
        known = {key: state.get(key) for key in ("completion", "stop_condition")}
        return known | {"reward": 0.0, "error": error and repr(error)}, self.count

    async def score(self, numbers):
        states = [self.kept.pop(number) for number in numbers]
        rubric = self.environment.rubric
        await rubric.score_group(states)
        for state in states:
            await rubric.cleanup(state)
        return {
            "scores": [
                {"reward": s["reward"], "metrics": to_plain(s.get("metrics") or {})} for s in states
            ]
        }


def main():
    name = sys.argv[1]
    arguments = json.loads(os.environ.pop("HONE_ENV_ARGUMENTS", "{}"))
    # Output of the environment goes to stderr, not between the messages.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = queue.SimpleQueue()
    sending = threading.Lock()

    def send_message(message):
        with sending:
            out.write(json.dumps(message) + "\n")
            out.flush()

    def read_lines():
        for line in sys.stdin:
            if line.startswith('{"alive"'):  # answered even while the environment loads
                send_message({"alive": -1})
            else:
                lines.put(line)
        os._exit(0)  # the parent is gone

    is_asked = sys.argv[2:] != ["examples"]
    if is_asked:
        threading.Thread(target=read_lines, daemon=True).start()
    environment, found = load_environment(name, arguments)
    if not is_asked:
        out.write(json.dumps(list_examples(environment, found)))
        out.flush()
        os._exit(0)

    async def run_worker():
        worker = VerifiersWorker(environment, found, send_message)
        while True:
            worker.handle_line(await asyncio.to_thread(lines.get))

    asyncio.run(run_worker())


if __name__ == "__main__":
    main()
