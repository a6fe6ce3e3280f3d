"""Tool calls: what a template writes is read back, in every format; what is no call stays text."""

import json
import random

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers

from hone.inference.openai.answers import ChatAnswer
from hone.inference.openai.schema import ChatRequest
from hone.records import Completion, Prompt
from hone.text.chat import ChatTemplate
from hone.text.messages import MessageError
from hone.text.structured_outputs import Following, form_of_call
from hone.text.tokenizer import Tokenizer
from hone.text.tool_calls import FORMATS, format_of, parse_tool_calls
from tests.unit.test_messages import draw_text

PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_new": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("add", "look_up", "list-all")
]
JSON = "{{ '{\"name\": ' + (c.function.name | tojson) + ', \"arguments\": ' + (c.function.arguments | tojson) + '}' }}"
XML = """{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}
{{- v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"""
PAIRS = """{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>
{{- v if v is string else v | tojson }}</arg_value>{{ '\\n' }}{% endfor %}"""
NAMED = "{{ c.function.name }}%s{{ c.function.arguments | tojson }}"
# What each family's template writes for the calls of an answer: between them, around all, and what a call is.
WRITTEN = {
    "hermes": ("\n", "", "", "<tool_call>\n" + JSON + "\n</tool_call>"),
    "json": ("", "", "", JSON.replace('"arguments"', '"parameters"')),
    "qwen3_coder": (
        "\n",
        "",
        "",
        "<tool_call>\n<function={{ c.function.name }}>\n" + XML + "</function>\n</tool_call>",
    ),
    "glm": ("\n", "", "", "<tool_call>{{ c.function.name }}\n" + PAIRS + "</tool_call>"),
    "mistral": (", ", "[TOOL_CALLS][", "]", JSON),
    "mistral_args": ("", "", "", "[TOOL_CALLS]" + NAMED % "[ARGS]"),
    "list": (", ", "<TOOLCALL>[", "]</TOOLCALL>", JSON),
    "granite": (", ", "<|tool_call|>[", "]", JSON),
    "function": (
        "",
        "",
        "",
        "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
    ),
    "deepseek": (
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>" + NAMED % "<｜tool▁sep｜>" + "<｜tool▁call▁end｜>",
    ),
    "kimi": (
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>",
    ),
}


def template_of(name):
    between, before, after, call = WRITTEN[name]
    single = (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        if name == "json"
        else ""
    )
    return (
        "{%- for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% if m.tool_calls %}"
        + single
        + "{{ "
        + repr(before)
        + " }}{% for c in m.tool_calls %}{% if not loop.first %}{{ "
        + repr(between)
        + " }}{% endif %}"
        + call
        + "{% endfor %}{{ "
        + repr(after)
        + " }}{% endif %}<|end|>{% endfor %}"
        + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def draw_arguments(rng):
    values = {
        "city": draw_text(rng).replace("<", "("),
        "count": rng.randint(-9, 9),
        "share": rng.choice([0.5, -1e-3]),
        "is_new": rng.random() < 0.5,
        "tags": [draw_text(rng)] * rng.randint(0, 2),
        "more": {"k": [None, draw_text(rng)]},
    }
    return {key: values[key] for key in sorted(rng.sample(sorted(values), rng.randint(0, 6)))}


def call_of(name, arguments):
    return {
        "id": "call00000",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def answer_in(template, calls):
    asked = [{"role": "user", "content": "?"}]
    prompt = template.render_conversation(asked, add_generation_prompt=True)
    whole = template.render_conversation(
        [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    )
    return whole[len(prompt) :].removesuffix("<|end|>")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_that_a_template_writes_are_read_back(name):
    template = ChatTemplate(template_of(name), {})
    assert template.call_format.name == name == format_of(template_of(name)).name
    assert template.most_calls == (1 if name == "json" else None)
    for seed in range(200):
        rng = random.Random(seed)
        calls = [
            (rng.choice(TOOLS)["function"]["name"], draw_arguments(rng))
            for _ in range(1 if name == "json" else rng.randint(1, 3))
        ]
        text = answer_in(template, [call_of(*call) for call in calls])
        thought = rng.choice(["", "<think>\nor " + text + "?\n</think>\n\n"])
        said = "" if name == "json" else rng.choice(["", "I look.\n"])
        rest, found = parse_tool_calls(thought + said + text, template.call_format, 0, TOOLS)
        read = [
            (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found
        ]
        assert read == calls, (seed, text)
        assert rest == (thought + said).strip(), (seed, rest)
        within = "<think>" + text
        assert parse_tool_calls(within, template.call_format, 0, TOOLS) == (within, [])
        assert parse_tool_calls(text, template.call_format, 0, TOOLS, thinks=True) == (text, [])
        assert len(parse_tool_calls(text, template.call_format, 0, TOOLS, most=1)[1]) == 1
        cut = text[: rng.randrange(len(text))]
        rest, found = parse_tool_calls(cut, template.call_format, 0, TOOLS)
        read = [
            (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found
        ]
        assert read == calls[: len(read)] and (found or rest == cut), (seed, cut)


def make_tokenizer(directory, name, tags_are_special=True):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    encoder.pre_tokenizer, encoder.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    encoder.add_special_tokens(["<|end|>", *(FORMATS[name].tags if tags_are_special else ())])
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "chat_template.jinja").write_text(template_of(name))
    return Tokenizer(directory)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_that_has_to_be_made_is_made_in_the_format_of_the_template(tmp_path, name):
    pytest.importorskip("llguidance")
    tokenizer = make_tokenizer(tmp_path, name)
    form = form_of_call(TOOLS, FORMATS[name], tokenizer)
    for seed in range(10):
        rng = random.Random(seed)
        arguments = {
            key: value for key, value in draw_arguments(rng).items() if key not in ("share", "more")
        }
        ordered = {key: arguments[key] for key in PROPERTIES if key in arguments}
        text = answer_in(tokenizer.template, [call_of("look_up", ordered)])
        if name == "mistral":
            text = text.rstrip()
        ids = tokenizer.encode(text)
        follows = Following(form, tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
        for i, token in enumerate(ids):
            assert follows(ids[:i])[token], (text, tokenizer.decode(ids[: i + 1], False))
        end = follows(ids)
        assert end[tokenizer.stop_ids[0]], text
        turn = tokenizer.build_turn(Prompt([], TOOLS), [0], Completion(ids, [], [], "stop"))
        assert json.loads(turn.tool_calls[0]["function"]["arguments"]) == ordered


def test_one_call_is_handed_out_where_the_template_or_the_client_allows_one(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "hermes")
    two = answer_in(tokenizer.template, [call_of("add", {}), call_of("add", {"count": 1})])
    done = Completion(tokenizer.encode(two), [0.0], [0], "stop")
    for asked, count in (
        ({}, 2),
        ({"parallel_tool_calls": True}, 2),
        ({"parallel_tool_calls": False}, 1),
    ):
        request = ChatRequest.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, **asked}
        )
        answer = ChatAnswer(request, request.build_prompt(), [0], tokenizer)
        assert len(answer.build_choice(0, done)["message"]["tool_calls"]) == count
    single = make_tokenizer(tmp_path, "json")
    text = '{"name": "add", "parameters": {}};\n{"name": "add", "parameters": {}}'
    turn = single.build_turn(
        Prompt([], TOOLS), [0], Completion(single.encode(text), [], [], "stop")
    )
    assert len(turn.tool_calls) == 1
    single.template.render_conversation(
        [{"role": "user", "content": "?"}, turn.assistant_message, {"role": "tool", "content": "4"}]
    )


def test_a_template_without_tool_calls_loses_none():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(
        MessageError, match="message 1: it has no place for tool calls of its messages"
    ):
        template.render_conversation(
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "tool_calls": [call_of("add", {})]},
            ]
        )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["94105", "b"]},
        {"$ref": "#/$defs/Code"},
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_what_may_be_text_stays_text(name, schema):
    parameters = {
        "properties": {"code": schema, "count": {"type": "integer"}},
        "$defs": {"Code": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    arguments = {"code": "94105", "count": 7}
    text = answer_in(ChatTemplate(template_of(name), {}), [call_of("add", arguments)])
    _, (found,) = parse_tool_calls(text, FORMATS[name], 0, tools)
    assert json.loads(found["function"]["arguments"]) == arguments


def test_json_that_is_no_call_stays_text_and_tags_of_thoughts_in_arguments_are_arguments():
    city = '{"name": "Paris", "population": 2}'
    assert parse_tool_calls(city, FORMATS["json"]) == (city, [])
    for code in ("<think>", "</think>", "a <think> b </think> c <think>"):
        text = (
            '<tool_call>\n{"name": "f", "arguments": {"code": '
            + json.dumps(code)
            + "}}\n</tool_call>"
        )
        for before in ("", "<think>\nhm\n</think>\n\n"):
            _, (found,) = parse_tool_calls(before + text, FORMATS["hermes"])
            assert json.loads(found["function"]["arguments"]) == {"code": code}
