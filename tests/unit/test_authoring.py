"""`hone env`: what a new environment has, what a check says, data and tiny models."""

import json
import os
import subprocess
import sys

import pytest

from hone.authoring.env_commands import main
from hone.authoring.tiny_model import common_phrases, write_model
from hone.records import Prompt
from hone.text.tokenizer import Tokenizer


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path


def test_a_new_environment_passes_its_own_test_and_check(place, capsys):
    assert main(["init", "my-letters"]) == 0
    folder = place / "environments" / "my_letters"
    assert {p.name for p in folder.iterdir()} == {
        "README.md",
        "my_letters.py",
        "pyproject.toml",
        "test_my_letters.py",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        capture_output=True,
        text=True,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stdout
    assert main(["check", "my-letters"]) == 0
    said = capsys.readouterr().out
    assert "its own answers have reward 1.000" in said and "0 wrong, 0 to be careful with" in said
    for name, words in (("my-letters", "is there already"), ("My Letters", "no name of a package")):
        with pytest.raises(ValueError, match=words):
            main(["init", name])


BAD = """
import random, time
import hone.environments as vf

def load_environment(kind="slow"):
    def slow(completion):
        time.sleep(0.06)
        return 1.0
    def random_reward(completion):
        return random.random() * 100
    def generous(completion):
        return 1.0
    func = {"slow": slow, "random": random_reward, "generous": generous}[kind]
    rows = [{"question": "the same", "answer": "a"}] * 20
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:5], rubric=vf.Rubric([func]))
"""


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        (
            "slow",
            1,
            [
                "scoring blocks everything else",
                "19 examples to train on repeat",
                "5 of 5 held-out examples",
            ],
        ),
        ("random", None, ["rewards differ the second time", "advantages, and so steps, grow"]),
        ("generous", 1, ["an empty answer has reward 1.000, no less than its own answers"]),
    ],
)
def test_a_check_says_what_will_bite(kind, code, words, place, capsys):
    (place / "environments" / "bad_env").mkdir(parents=True)
    (place / "environments" / "bad_env" / "bad_env.py").write_text(BAD)
    given = main(["check", "bad-env", "-a", json.dumps({"kind": kind}), "-n", "4"])
    assert code in (None, given)  # what is drawn may be anything
    said = capsys.readouterr().out
    for word in words:
        assert word in said


def test_data_and_a_tiny_model_of_an_environment(place, capsys):
    assert main(["data", "wordle", "-o", "out/sft.jsonl", "-n", "30", "-a", '{"words": 30}']) == 0
    rows = [json.loads(line) for line in (place / "out" / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == 30 and rows[0]["messages"][-1]["role"] == "assistant"
    assert main(["model", "wordle", "-o", "out/model", "-a", '{"words": 30}']) == 0
    tokenizer = Tokenizer(place / "out" / "model")
    prompt = tokenizer.prompt_ids(Prompt(rows[0]["messages"][:2]))
    assert len(prompt) < 12  # the rules are a token
    assert tokenizer.decode(prompt, skip_special_tokens=False).count("You are Player 0") == 1


def test_phrases_are_what_conversations_have_in_common():
    words = ("kitten", "apples", "mother", "father", "brother", "winter", "summer")
    texts = [
        [f"Please reverse the word: {word}", f"<answer>{word[::-1]}</answer>"] for word in words
    ]
    texts[3:6] = [[*talk, f"Now say it aloud: {i}"] for i, talk in enumerate(texts[3:6])]
    assert common_phrases(texts) == [
        "Please reverse the word: ",
        "Now say it aloud: ",
        "</answer>",
        "<answer>",
    ]


def test_a_tiny_model_is_read_back(tmp_path):
    write_model(tmp_path, [["a"]] * 3, has_tools=True)
    tokenizer = Tokenizer(tmp_path)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = tokenizer.decode(
        tokenizer.prompt_ids(Prompt(messages, tools)), skip_special_tokens=False
    )
    assert '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|end|>' in text


@pytest.mark.parametrize("what", ["/nowhere/my_env", "./my_env", "my env", "there"])
def test_a_path_without_a_package_is_not_looked_for_in_the_index(what, place):
    (place / "there").mkdir()
    with pytest.raises(
        ValueError, match="no folder with a pyproject.toml, and no name of a package"
    ):
        main(["install", what])
