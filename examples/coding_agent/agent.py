"""A coding agent: asks the model for a corrected file, runs the tests, and shows it what failed.

It knows OpenAI's chat API and nothing of Hone. Its task is JSON on standard input: {"messages": […]}.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

TURNS = int(os.environ.get("AGENT_TURNS", "2"))
SHOWN = 600  # characters of a failure
BLOCK = re.compile(r"```(?:python)?[ \n]*(?:(\w+\.py) *)?\n?(.*?)```", re.DOTALL)


def ask_model(messages):
    """Return the model's answer to a conversation."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def write_files(text):
    """Write each block of code in an answer to the file that it names, else to the only module."""
    modules = [file.name for file in Path().glob("*.py") if not file.name.startswith("test_")]
    for name, code in BLOCK.findall(text):
        if name or len(modules) == 1:
            Path(name or modules[0]).write_text(code)


def run_tests():
    """Return what the tests say, or "" if all pass."""
    words = [sys.executable, "-m", "unittest"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return "" if done.returncode == 0 else done.stderr


def main():
    messages = json.load(sys.stdin)["messages"]
    for _ in range(TURNS):
        text = ask_model(messages)
        write_files(text)
        failure = run_tests()
        if not failure:
            return
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"The tests fail:\n{failure[-SHOWN:]}"})


main()
