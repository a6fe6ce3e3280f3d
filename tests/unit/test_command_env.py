"""Agents by command: programs that ask the policy, their limits, what they leave, their rewards."""

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import hone.environments as vf
from hone.environments.attempt import attempt
from hone.environments.command_env import BUBBLEWRAP, bubblewrap_words, run_limited
from hone.records import Completion, Sampling, Turn

EXAMPLE = Path(__file__).parents[2] / "examples" / "coding_agent"
ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def ask(text, **more):
    body = {"model": "policy", "messages": task["messages"] + [{"role": "user", "content": text}], **more}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()
"""


class Client:
    """Answers with texts in turn, as tokens of their characters."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.asked = []

    async def chat(self, prompt, sampling):
        self.asked.append(prompt.messages)
        text = self.texts[min(len(self.asked), len(self.texts)) - 1]
        ids = [ord(c) % 256 for c in text]
        return Turn([1, 2, 3], Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop"), text)


def run(environment, client, index=0, timeout=60.0):
    async def once():
        try:
            example = environment.get_dataset()[index]
            return await attempt(environment, client, example, Sampling(1.0, 32), timeout)
        finally:
            await environment.close()

    return asyncio.run(once())


def make(script, row=None, **others):
    row = {"question": "hello", **(row or {})}
    words = [sys.executable, "-c", ASK + script]
    return vf.CommandEnv(words, contain="none", dataset=[row], **others)


def test_each_answer_is_a_turn_and_the_reward_is_the_command_s():
    environment = make(
        "ask('one'); open('left', 'w').write(json.dumps(ask('two'))); print('bye')",
        {"info": {"files": {"a/b.txt": "given"}}},
        reward_command=["sh", "-c", "test -f left && cat a/b.txt && echo && echo 0.25"],
    )
    client = Client("first", "second")
    rollout = run(environment, client)
    assert rollout.error is None and rollout.reward == 0.25
    assert [turn.text for turn in rollout.turns] == ["first", "second"]
    assert rollout.turns[0].completion.ids == [ord(c) for c in "first"]
    assert [m["content"] for m in rollout.messages] == ["two", "second"]
    assert rollout.metrics["exit_code"] == 0 and rollout.state["output"] == "bye\n"
    assert set(rollout.timings) == {"model", "environment", "scoring"}


def test_rubrics_see_what_the_program_has_left():
    def length(folder, output, exit_code):
        return len((folder / "left").read_text()) + exit_code

    def rewarded(state):
        return length(**{key: state[key] for key in ("folder", "output", "exit_code")})

    environment = make(
        "ask('one'); open('left', 'w').write('abc'); sys.exit(4)",
        rubric=vf.Rubric(funcs=[rewarded]),
    )
    rollout = run(environment, Client("x"))
    assert rollout.reward == 7 and rollout.stop == "exit_4"
    assert not list(Path("/tmp").glob("hone-agent-*/left"))


@pytest.mark.parametrize("stream", [True, False])
def test_programs_may_stream_and_have_tools(stream):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    script = f"print(ask('one', stream={stream}, tools=[{tool!r}])[:5], flush=True)"
    rollout = run(make(script), Client("answer"))
    assert rollout.error is None and rollout.state["output"].startswith("data:" if stream else "{")


@pytest.mark.parametrize(
    "script, stop",
    [
        ("ask('one')\nwhile True: pass", "timeout"),
        ("ask('one')\nimport time; time.sleep(60)", "timeout"),
        ("ask('one')\nwhile True: print('x' * 1000)", "output"),
        ("ask('one'); os.kill(os.getpid(), 9)", "exit_-9"),
    ],
)
def test_limits_end_a_program_and_what_it_has_done_counts(script, stop):
    environment = make(
        script, seconds=3.0, output_bytes=100_000, reward_command=["sh", "-c", "exit 0"]
    )
    start = time.perf_counter()
    rollout = run(environment, Client("a"))
    assert (rollout.stop, rollout.reward, rollout.error) == (stop, 1.0, None)
    assert time.perf_counter() - start < 20


def test_children_end_with_the_program(tmp_path):
    script = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nask('one')"
    )
    assert run(make(script), Client("a")).error is None
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    "words, said",
    [
        (["/no/such/program"], "cannot be started"),
        ([sys.executable, "-c", "print('nothing to do')"], "asked the model nothing"),
        ([sys.executable, "-c", "raise SystemExit('broken')"], "broken"),
    ],
)
def test_a_program_that_asks_nothing_is_a_failed_rollout(words, said):
    environment = vf.CommandEnv(words, contain="none", dataset=[{"question": "q"}])
    rollout = run(environment, Client("a"))
    assert rollout.error is not None and said in rollout.error


def test_an_error_of_the_model_is_the_rollout_s():
    class Broken(Client):
        async def chat(self, prompt, sampling):
            raise ValueError("no such tool")

    rollout = run(make("ask('one')"), Broken("a"))
    assert rollout.error is not None and "no such tool" in rollout.error


def test_a_cancelled_rollout_leaves_no_program(tmp_path):
    script = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nask('one')\nwhile True: pass"
    rollout = run(make(script, seconds=600.0), Client("a"), timeout=3.0)
    assert rollout.error == "no end within 3 s"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_files_of_the_reward_replace_what_the_program_left():
    script = "ask('one')\nos.symlink('/etc/passwd', 'tests.txt')\nos.mkdir('other')"
    info = {"reward_files": {"tests.txt": "true", "other/a.txt": "b"}}
    command = [
        "sh",
        "-c",
        "test ! -L tests.txt && cat tests.txt && echo && cat other/a.txt && echo && echo 0.5",
    ]
    rollout = run(make(script, {"info": info}, reward_command=command), Client("a"))
    assert rollout.reward == 0.5


@pytest.mark.parametrize(
    "words, said",
    [
        ({"command": "python3 agent.py"}, "a list of words"),
        ({"command": []}, "a list of words"),
        ({"contain": "docker"}, "not one of bubblewrap, none"),
        (
            {"dataset": [{"question": "q", "info": {"files": {"../x": ""}}}]},
            "outside of its folder",
        ),
        ({"dataset": [{"question": "q", "info": {"files": {"/x": ""}}}]}, "outside of its folder"),
    ],
)
def test_mistakes_are_refused(words, said):
    given = {"command": ["true"], "contain": "none", "dataset": [{"question": "q"}], **words}
    with pytest.raises(ValueError, match=said):
        vf.CommandEnv(**given)


def test_without_bubblewrap_a_command_is_refused_unless_allowed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="apt install bubblewrap"):
        vf.CommandEnv(["true"], dataset=[{"question": "q"}])
    vf.CommandEnv(["true"], contain="none", dataset=[{"question": "q"}])
    vf.CommandEnv(["true"], contain=["podman", "run"], dataset=[{"question": "q"}])


def test_a_contained_program_writes_only_in_its_folder(tmp_path):
    """Where bubblewrap is not installed, its words are compared alone."""
    words = bubblewrap_words(tmp_path, [sys.prefix, sys.base_prefix])
    assert words[-6:] == ["--bind", str(tmp_path), str(tmp_path), "--chdir", str(tmp_path), "--"]
    assert words[0] == BUBBLEWRAP and "--bind" not in words[:-6]
    if shutil.which(BUBBLEWRAP) is None:
        return
    (tmp_path.parent / "secret").write_text("x")
    code = (
        "import os\nopen('in', 'w').write('x')\n"
        f"print(os.path.exists({str(tmp_path.parent / 'secret')!r}))\nopen('/usr/x', 'w')"
    )
    ended = asyncio.run(
        run_limited(
            [*words, sys.executable, "-c", code], tmp_path, dict(os.environ), "", 20.0, 10_000
        )
    )
    assert (tmp_path / "in").exists() and ended.code == 1 and "Read-only" in ended.output
    assert ended.output.startswith("False")


def test_words_in_front_contain_a_program(tmp_path):
    script = "print(os.environ['MARK']); ask('one')"
    words = [sys.executable, "-c", ASK + script]
    environment = vf.CommandEnv(
        words, contain=["env", "MARK={folder}"], dataset=[{"question": "q"}]
    )
    assert "hone-agent-" in run(environment, Client("a")).state["output"]


def test_the_example_rewards_a_repair(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    environment = vf.load_environment("coding-agent", num_examples=4, contain="none")
    example = environment.get_dataset()[0]
    import coding_agent

    code = example.info["files"]["calc.py"]
    for name, (right, wrong) in coding_agent.FUNCTIONS.items():
        code = code.replace(
            f"def {name}(x):\n    return {wrong}\n", f"def {name}(x):\n    return {right}\n"
        )
    good = run(environment, Client(f"```python calc.py\n{code}```"))
    assert (good.reward, len(good.turns), good.error) == (1.0, 1, None)
    bad = run(environment, Client("I do not know", "Sorry"))
    assert (bad.reward, len(bad.turns)) == (0.5, 2)
    assert "The tests fail" in json.dumps(bad.messages)
    broken = run(environment, Client("```python calc.py\ndef\n```"))
    assert broken.reward < 0.5


def test_pipes_and_links_of_the_program_do_not_stop_the_reward():
    script = "ask('one')\nos.mkfifo('tests.txt')\nos.symlink('/tmp', 'other')"
    info = {"reward_files": {"tests.txt": "0.75", "other/a.txt": "b"}}
    rollout = run(
        make(script, {"info": info}, reward_command=["sh", "-c", "cat tests.txt"]), Client("a")
    )
    assert (rollout.reward, rollout.error) == (0.75, None)
    assert not Path("/tmp/a.txt").exists()


def test_a_reward_that_is_no_number_fails_the_rollout():
    rollout = run(make("ask('one')", reward_command=["echo", "nan"]), Client("a"))
    assert rollout.error == "the reward is nan"


def test_a_program_cannot_reach_another_rollout():
    """Each rollout has a secret of its own in its address."""

    async def addresses():
        environment = make("ask('one')")
        async with (
            environment.endpoint.open_access(Client("a"), Sampling()) as one,
            environment.endpoint.open_access(Client("a"), Sampling()) as two,
        ):
            found = one.url.rsplit("/", 2)[1], two.url.rsplit("/", 2)[1]
        await environment.close()
        return found

    one, two = asyncio.run(addresses())
    assert one != two and min(len(one), len(two)) > 16
