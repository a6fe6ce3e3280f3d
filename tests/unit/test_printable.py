"""Text of models, clients and environments acts on no terminal and forges no line of a log."""

import logging
import random
import re

import pytest
from pydantic import ValidationError

from hone.evals.vf_eval import print_results
from hone.inference.control import LoadAdapter, Update
from hone.monitors.logging_setup import component_log, start_logging
from hone.records import Example, Rollout
from hone.text.printable import ACTING, indent_lines, make_line, make_printable

ATTACKS = [
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x9b2J",
    "a\rb",
    "\x08\x08\x08",
    "\x1bc",
    "\u202egnp.exe",
    "\u2028next",
    "x\n12:00:00 SUCCESS Step 9 | Reward: 1.0",
    "\x00",
    "\x7f",
]
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]")


def test_nothing_that_acts_is_left_and_plain_text_is_as_it_was():
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(
            chr(rng.choice([rng.randrange(0x300), rng.randrange(0x2000, 0x2100)]))
            for _ in range(40)
        )
        assert not CONTROL.search(make_printable(text)) and "\n" not in make_line(text)
        plain = ACTING.sub("", text)
        assert make_printable(plain) == plain
    assert (
        make_printable("\x1b[2J") == "\\x1b[2J" and make_printable("日本 é\t🙂\n") == "日本 é\t🙂\n"
    )
    assert indent_lines("a\nb") == "a\n    b"


def test_a_log_has_one_record_a_line_that_begins_with_a_time(tmp_path, capsys):
    start_logging()
    log = component_log("orchestrator", tmp_path)
    for attack in ATTACKS:
        log.info("Took adapter %s from %s", attack, "/x")
    logging.getLogger("hone.environments").warning("%s", ATTACKS[-3])
    for handler in log.handlers:
        handler.flush()
    for text in (capsys.readouterr().out, (tmp_path / "orchestrator.log").read_text()):
        assert not CONTROL.search(text)
        lines = text.splitlines()
        assert (
            len([line for line in lines if re.match(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d", line)])
            == len(ATTACKS) + 1
        )
        assert all(
            "Took" in line or "WARNING" in line for line in lines if not line.startswith("    ")
        )


def test_completions_are_shown_and_do_nothing(capsys):
    for attack in ATTACKS:
        rollout = Rollout(
            Example(0, [{"role": "user", "content": attack}]),
            [],
            [{"role": "assistant", "content": attack}],
        )
        rollout.error = attack
        settings = {
            "env": attack,
            "model": attack,
            "base_url": "b",
            "num_examples": 1,
            "rollouts_per_example": 1,
            "temperature": 1,
            "max_tokens": 1,
            "reward": None,
            "failed": 1,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "seconds": 1.0,
        }
        print_results(settings, [rollout], verbose=True)
        assert not CONTROL.search(capsys.readouterr().out)


@pytest.mark.parametrize("attack", ATTACKS[:8] + ATTACKS[8:10] + ATTACKS[10:])
def test_names_with_control_characters_are_refused(attack):
    if "\u202e" in attack:
        return
    for make in (
        lambda: LoadAdapter(lora_name=attack, lora_path="/x"),
        lambda: Update(weight_dir="/x", version=1, model_name=attack),
    ):
        with pytest.raises(ValidationError):
            make()
    assert LoadAdapter(lora_name="ünïcode/x:1", lora_path="/x").lora_name == "ünïcode/x:1"
