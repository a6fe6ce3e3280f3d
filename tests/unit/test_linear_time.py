"""What reads text of a model or a client takes time in proportion to it, however odd the text is."""

import time
from pathlib import Path

import pytest

from hone.environments.parsers import MaybeThinkParser, ThinkParser, XMLParser, extract_boxed_answer
from hone.inference.samplers.partial_completions import Spelling
from hone.text.chat import ChatTemplate
from hone.text.stop_strings import StopStrings, cut_at_stop, held_back
from hone.text.tokenizer import Tokenizer
from hone.text.tool_calls import FORMATS, parse_tool_calls
from tests.unit.test_text import CHATML

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"
SIZE = 30_000  # characters, and twice as many
ODD = {
    "spaces in a call": lambda n: "<tool_call>" + " " * n,
    "newlines in a call": lambda n: "<tool_call>{" + "\n" * n + "</tool_call>",
    **{
        f"many {unit!r}": lambda n, unit=unit: unit * (n // len(unit))
        for unit in (
            "<tool_call>",
            "</tool_call>",
            "<tool_call>{}",
            "<function=",
            "<function=a>",
            "<parameter=",
            "</parameter>",
            "<parameter=a>",
            "<arg_key>",
            "<arg_value></arg_key>",
            "[TOOL_CALLS]",
            "[TOOL_CALLS]a[ARGS]",
            "[ARGS]{",
            "<|tool_call_begin|>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<think>",
            "</think>",
            "{",
            "}",
            "[",
            '"',
            "\\",
            ";\n",
            "9",
            " ",
            "\n",
            "<answer>",
            "</answer>",
            "<answer> ",
            "\\boxed{",
            "####",
            "é",
            "🙂",
            "<|im_end|>",
        )
    },
    "a call of many spaces": lambda n: "<tool_call>" + " " * n + "{}" + " " * n + "</tool_call>",
    "a block within blocks": lambda n: (
        "<function=a><parameter=b>" * (n // 25) + "</parameter></function>"
    ),
    "deep JSON": lambda n: (
        '<tool_call>{"name": "a", "arguments": ' + '{"a":' * (n // 5) + "</tool_call>"
    ),
}


def readers():
    tokenizer = Tokenizer(MODEL)
    xml = XMLParser(["think", "answer"])
    template = ChatTemplate(CHATML, {})
    found = {
        f"calls {name}": lambda t, one=one: parse_tool_calls(t, one)
        for name, one in FORMATS.items()
    }

    def stream(text):
        spelling = Spelling(tokenizer, True, ["</s>"], ["<tool_call>"])
        ids = tokenizer.encode(text[: len(text) // 8])
        for i in range(0, len(ids), 8):
            spelling.decode_more(ids[i : i + 8])

    def stop(text):
        ends = StopStrings(tokenizer.decode, ["never said"])
        ids, so_far = tokenizer.encode(text[: len(text) // 8]), list[int]()
        for i in range(0, len(ids), 8):
            so_far += ids[i : i + 8]
            ends(so_far)

    return found | {
        "xml": lambda t: (xml.parse(t), xml.parse_answer(t), xml.get_format_reward_func()(t)),
        "boxed": extract_boxed_answer,
        "thinking": lambda t: (ThinkParser().parse(t), MaybeThinkParser().parse(t)),
        "stop strings": lambda t: (
            cut_at_stop(t, ["</s>", "never"]),
            held_back(t, ["</s>", "<tool_call>"]),
        ),
        "a stream": stream,
        "stops of a stream": stop,
        "template": lambda t: template.render_conversation([{"role": "user", "content": t}]),
    }


READERS = readers()


def seconds(read, text):
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        read(text)
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_text_takes_about_twice_the_time(reader):
    for name, make in ODD.items():
        read = READERS[reader]
        once = seconds(read, make(SIZE))
        if once < 0.001:  # nothing to compare; a second would be 1,000 times as much
            once = max(once, 0.0005)
        twice = seconds(read, make(2 * SIZE))
        for _ in range(3):  # another program may have had the core
            if twice <= 2.5 * once + 0.001:
                break
            once, twice = seconds(read, make(SIZE)), seconds(read, make(2 * SIZE))
        assert twice <= 2.5 * once + 0.001, (name, once, twice)
        assert twice < 1.0, (name, twice)
