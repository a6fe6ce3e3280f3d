"""Code that a model wrote computes, and reaches nothing: what it tries is contained and said; the next call works."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.environments import sandbox
from hone.environments.sandbox import Limits, Sandbox, Sandboxes
from tests.hangs import HANG_SECONDS


def can_contain():
    words = [
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        "--net",
        "--pid",
        "--fork",
        "--mount",
    ]
    return (
        shutil.which("unshare")
        and not subprocess.run(["unshare", *words, "true"], capture_output=True).returncode
    )


contained = pytest.mark.skipif(not can_contain(), reason="this machine has no namespaces for it")
LIMITS = Limits(seconds=1.0, memory=512 << 20, file=1 << 20)


def run(*codes, limits=LIMITS):
    async def all_of_them():
        made = await Sandbox.start(limits)
        try:
            return [await made.run(code) for code in codes]
        finally:
            await made.close()

    return asyncio.run(all_of_them())


@contained
def test_a_session_keeps_its_names_and_shows_its_last_value():
    said = run(
        "x = 20\nprint('so')\nx + 1",
        "x * 2",
        "x = None",
        "x",
        "1 / 0",
        "def f(:",
        "import math; math.pi",
    )
    assert said[:4] == ["so\n21", "40", "", ""]
    assert said[
        4
    ] == 'Traceback (most recent call last):\n  File "<python>", line 1, in <module>\n' + (
        "ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in said[5] and said[6].startswith("3.14")


@contained
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        (
            "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()",
            "PermissionError",
        ),
        (
            "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
            "can't start new thread",
        ),
        ("import os\nos.memfd_create('m')", "PermissionError"),
        ("import socket\nsocket.socket(40, socket.SOCK_STREAM)", "PermissionError"),
        ("for i in range(150_000): open(f'f{i}', 'w').close()", "No space left"),
        ("import os\nfor i in range(150_000): os.mkdir('d'); os.chdir('d')", "No space left"),
        ("import os\nfds = [os.open('/dev/null', 0) for _ in range(999)]", "Too many open files"),
        ("import os\nos.close(1); os.close(2); os.close(3)\nwhile True: pass", "ended the session"),
        ("b = bytearray(10 * 2**30)", "MemoryError"),
        ("while True: pass", "did not end within 1 s"),
        ("import sys\nfor i in range(1000): sys.stdout.write('a' * 10**6)", "more bytes]"),
        ("open('/etc/passwd').read()", "No such file or directory"),
        ("import os; os.listdir('/var/lib')", "Error"),
        ("open('/usr/bin/mine', 'w')", "Read-only file system"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "Error"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "Network is unreachable"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('none')", ""),
        (
            "import subprocess\np = subprocess.Popen(['sleep', '99'], start_new_session=True)",
            "PermissionError",
        ),
        (
            "with open('f', 'wb') as f:\n for i in range(64): f.write(b'a' * 2**16)",
            "File too large",
        ),
        ("import os; os._exit(3)", "ended the session (exit code 3)"),
        ("import ctypes; ctypes.string_at(0)", "ended the session (SIGSEGV)"),
    ],
)
def test_what_it_tries_is_contained_and_said(code, words):
    said, after = run(
        code,
        "6 * 7",
        limits=Limits(seconds=4.0 if "10**6" in code else 1.0, memory=512 << 20, file=1 << 20),
    )
    assert words in said and after == "42"
    assert len(said) < LIMITS.output + 500


@contained
def test_a_background_thread_computes_only_during_calls():
    count = "import threading, time\nn = 0\ndef f():\n global n\n while True: n += 1; time.sleep(0.001)\n"
    program = [count + "threading.Thread(target=f).start()", "time.sleep(0.2); n > 5", "n", "n"]

    async def call_with_pauses():
        made = await Sandbox.start(LIMITS)
        answers = []
        for code in program:
            answers.append(await made.run(code))
            await asyncio.sleep(0.5)
        await made.close()
        return answers

    began, did_run, before, after = asyncio.run(call_with_pauses())
    # 500 in half a second
    assert began == "" and did_run == "True" and int(after) - int(before) < 200


@contained
def test_a_forged_end_of_a_call_gains_nothing():
    forge = "import os\nos.write(3, b'.' * 5)\nwhile True: print('x' * 1000)"
    start = time.monotonic()
    said = run("y = 1", forge, "y", "6 * 7")
    assert time.monotonic() - start < 4 * LIMITS.seconds + 5
    # The call after the forged one pays
    assert "did not end within 1 s" in said[2] and said[3] == "42"


@contained
def test_a_sandbox_is_cleared_before_another_has_it_and_ends_with_its_owner():
    async def program():
        many = Sandboxes(LIMITS, most=1)
        one = await many.take()
        await one.run("open('mine', 'w').write('x'); y = 1")
        await many.give_back(one)
        again = await many.take()
        assert again is one
        said = await again.run("import os; print(os.listdir('.')); y")
        await many.give_back(again)
        await many.close()
        return said, one.process.pid

    said, pid = asyncio.run(program())
    assert said.startswith("[]") and "NameError" in said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@contained
def test_a_sandbox_ends_when_its_owner_is_killed():
    source = (
        "import asyncio, os\nfrom hone.environments.sandbox import Sandbox\n"
        "async def go():\n s = await Sandbox.start()\n print(s.process.pid, flush=True)\n os.kill(os.getpid(), 9)\n"
        "asyncio.run(go())"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    pid = int(done.stdout)

    async def gone():
        async with asyncio.timeout(30):
            while (
                os.path.exists(f"/proc/{pid}")
                and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
            ):
                await asyncio.sleep(0.02)

    asyncio.run(gone())


def test_a_machine_that_cannot_contain_it_refuses(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="not run here: containing it needs the program unshare"):
        run("1")
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: "/bin/false")
    with pytest.raises(RuntimeError, match="namespaces of Linux .* refuses: no reason given"):
        run("1")


@contained
def test_it_sees_no_key_of_ours_and_leaves_nothing_outside_its_folder(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-ours")
    search = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.getauxval.restype = ctypes.c_ulong\n"
        "end = libc.getauxval(31)\nprint(b'sk-of-ours' in ctypes.string_at(end - 4096, 4096))"
    )
    said = run(
        search,
        "import os; dict(os.environ)",
        "open('/left', 'w')",
        "import os; os.rename('/lib', '/other')",
        "import ctypes; ctypes.CDLL(None, use_errno=True).unshare(0x10020000)",
        "import ctypes\nctypes.CDLL(None).shmget(0, 4096, 0o1600)",
        "x = '\\ud800'",
        "import os; os.kill(os.getpid(), 40)",
        "1",
    )
    assert said[0] == "False" and "sk-of" not in said[1]
    assert "Error" in said[2] and "Error" in said[3]
    assert said[4] == said[5] == "-1" and "ended the session" in said[7] and said[8] == "1"


@contained
def test_an_answer_that_nobody_waited_for_is_never_anothers():
    async def program():
        many = Sandboxes(LIMITS, most=1)
        one = await many.take()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.run("import time; time.sleep(0.5); 'late'"), 0.1)
        await many.give_back(one)
        again = await many.take()
        said = await again.run("'mine'")
        await many.give_back(again)
        await many.close()
        return again is one, said

    assert asyncio.run(program()) == (False, "'mine'")
