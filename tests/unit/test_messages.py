"""The same conversation becomes the same tokens, whatever entrance it came through and however it was written."""

import json
import random

import pytest

from hone.environments.environment import Environment
from hone.inference.openai.responses import ResponsesRequest
from hone.inference.openai.schema import ChatRequest
from hone.records import Prompt
from hone.text.chat import ChatTemplate
from hone.text.messages import MessageError, show_message, show_role
from hone.text.tokenizer import Tokenizer
from hone.trainer.sft.data_sources import load_rows, to_messages, to_tools
from tests.unit.test_text import CHATML, TOOLS, save  # noqa: F401

PICKY = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}{% endif %}
{%- if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}({{ m.tool_calls | length }}){% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
FOUR_ROLES = """{%- for m in messages %}{% if m.role == 'system' %}[S]{{ m.content }}{% elif m.role == 'user' %}
[U]{{ m.content }}{% elif m.role == 'assistant' %}[A]{{ m.content }}</s>{% endif %}{% endfor %}
{%- if add_generation_prompt %}[A]{% endif %}"""
LETTERS = "abcé 日\n<>{}"
SEEDS = range(200)


def draw_text(rng, least=1):
    return "".join(rng.choices(LETTERS, k=rng.randint(least, 12))).strip() or "x"


def draw_arguments(rng):
    values = [rng.randint(0, 9), draw_text(rng), [1, "a"], {"k": draw_text(rng)}, True, 1.5]
    return {
        key: rng.choice(values[:2] if key in "ab" else [values["cdef".index(key) + 2]])
        for key in draw_keys(rng)
    }


def draw_keys(rng):
    return sorted(rng.sample("abcdef", rng.randint(1, 4)))


def draw_conversation(rng, calls=True):
    """A conversation as one would write it by hand; arguments of one name have one type, as an Arrow column needs."""
    messages = [{"role": "system", "content": draw_text(rng)}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": draw_text(rng)})
        if calls and rng.random() < 0.6:
            arguments = {key: str(value) for key, value in draw_arguments(rng).items()}
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw_text(rng), "tool_call_id": "call_1"})
        messages.append({"role": "assistant", "content": draw_text(rng)})
    return messages


def disguise(rng, message):
    """Return the same message in another of the forms in which people write it."""
    message = json.loads(json.dumps(message))
    if message["content"] and rng.random() < 0.7:
        text = message["content"]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 3)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        filler = rng.choice([{}, {"image_url": None}, {"annotations": None, "index": None}])
        message["content"] = [{"type": "text", "text": piece, **filler} for piece in pieces]
    elif not message["content"]:
        message["content"] = rng.choice([None, "", []])
    if "tool_calls" not in message and rng.random() < 0.5:
        message["tool_calls"] = rng.choice([None, []])
    for call in message.get("tool_calls") or []:
        if rng.random() < 0.5:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if rng.random() < 0.5:
            call |= {"index": None}
            call["function"] |= {"description": None}
    message |= rng.choice(
        [{}, {"name": None}, {"refusal": None, "audio": None, "function_call": None}]
    )
    if message["role"] == "system" and rng.random() < 0.5:
        message["role"] = "developer"
    return message


@pytest.mark.parametrize("template", [CHATML, PICKY, TOOLS], ids=["chatml", "picky", "tools"])
def test_all_entrances_give_the_tokens_that_transformers_gives_for_the_plain_form(save, template):  # noqa: F811
    from transformers import AutoTokenizer

    directory = save(template)
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for seed in SEEDS:
        rng = random.Random(seed)
        plain = draw_conversation(rng, calls=template is not CHATML)[:-1]
        expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        written = [disguise(rng, message) for message in plain]
        environment = _Env(dataset=[{"prompt": written}])
        (example,) = environment.get_dataset()
        asked = ChatRequest.model_validate({"model": "m", "messages": written}).build_prompt()
        found = [ours.prompt_ids(Prompt(example.prompt)), ours.prompt_ids(asked)]
        if all("tool_calls" not in message for message in plain):
            items = [{"role": m["role"], "content": m["content"]} for m in written]
            request = ResponsesRequest.model_validate({"model": "m", "input": items})
            found.append(ours.prompt_ids(request.as_chat().build_prompt()))
        for ids in found:
            assert ids == expected, (seed, written)
        whole = [*plain, {"role": "assistant", "content": "end"}]
        trained = ours.conversation_ids(
            [*written, {"role": "assistant", "content": [{"type": "text", "text": "end"}]}]
        )
        assert trained[-1][0] == theirs.apply_chat_template(whole, return_dict=False), seed


class _Env(Environment):
    async def rollout(self, client, example, sampling):
        raise NotImplementedError


def test_arrow_columns_add_nothing_to_a_conversation(save, tmp_path):  # noqa: F811
    import datasets
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    directory = save(TOOLS)
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    # An Arrow column's order of keys
    every = {"function": {"name": "add", "arguments": dict.fromkeys("abcdef", "x")}}
    first = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [every]},
    ]
    parameters = {key: {"type": "string"} for key in "abcdef"}
    function = {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": parameters},
    }
    rows = [{"messages": first, "tools": [{"type": "function", "function": function}]}]
    for seed in SEEDS:
        rng = random.Random(seed)
        parameters = {key: {"type": "string"} for key in draw_keys(rng)}
        function = {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": parameters},
        }
        rows.append(
            {
                "messages": draw_conversation(rng),
                "tools": [{"type": "function", "function": function}],
            }
        )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    found = [load_rows(str(tmp_path / name), "train") for name in ("a.jsonl", "a.parquet", "saved")]
    assert "None" in str(pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()[0])
    for row, *read in zip(rows, *found, strict=True):
        expected = theirs.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        for one in read:
            assert ours.template.render_conversation(to_messages(one), **to_tools(one)) == expected


def test_nulls_that_a_row_wrote_itself_stay(save, tmp_path):  # noqa: F811
    call = {"function": {"name": "add", "arguments": {"a": None, "b": [None, 1]}}}
    row = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (read,) = load_rows(str(tmp_path / "a.jsonl"), "train")
    template = Tokenizer(save(PICKY)).template
    assert '{"a": null, "b": [null, 1]}' in template.render_conversation(to_messages(read))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, "message 1: role is None"),
        ({"role": "user"}, r"message 1 \(user\) has no content"),
        (
            {"role": "user", "content": 5},
            r"message 1 \(user\), content: text or a list of text parts is needed, found 5",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}],
            },
            r"content\[1\]: messages may contain text parts only \(type text\), found a part of type 'image_url'",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            r"content\[0\]: the text of a part is needed",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            r"tool_calls\[0\]: function with name and arguments",
        ),
        ({"role": "assistant", "tool_calls": "add"}, "tool_calls: a list is needed"),
        ("hello", "message 1: it is no message"),
    ],
)
def test_what_no_template_can_be_given_is_refused_by_its_place(message, words):
    template = ChatTemplate(CHATML, {})
    with pytest.raises(MessageError, match=words):
        template.render_conversation([{"role": "user", "content": "hi"}, message])


def test_a_message_that_the_template_has_no_place_for_is_refused_and_never_lost():
    template = ChatTemplate(FOUR_ROLES, {})
    user, answer = {"role": "user", "content": "5"}, {"role": "assistant", "content": "5"}
    developer = {"role": "developer", "content": "5"}
    assert template.render_conversation([developer, user]) == template.render_conversation(
        [{**developer, "role": "system"}, user]
    )
    assert template.render_conversation([user, answer, user]) == "[U]5[A]5</s>[U]5"
    for role in ("tool", "function", "ipython"):
        with pytest.raises(
            MessageError, match=rf"leaves out message 2: it has no place for role '{role}' there"
        ):
            template.render_conversation([user, answer, {"role": role, "content": "5"}])


def test_a_template_of_text_parts_is_given_parts():
    source = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {})
    assert template.render_conversation([{"role": "user", "content": "hi"}]) == "[user]hi"


def test_arguments_are_json_for_a_template_that_joins_them_to_its_text():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '(' + c.function.arguments + ')' }}{% endfor %}"
    )
    template = ChatTemplate(source + "{{ m.content }}{% endfor %}", {})
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        assert template.render_conversation(messages) == 'x({"a": "é"})'


def test_reasoning_is_known_by_each_of_its_names():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}", {}
    )
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert (
            template.render_conversation([{"role": "assistant", "content": "a", name: "because"}])
            == "because|a"
        )


BESIDE = """{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"content": "LOST", "tool_calls": [{"function": {"name": "f"}}]},
            "no place for content beside tool calls",
        ),
        ({"tool_calls": [{"function": {"name": n}} for n in "fg"]}, "no place for 2 tool calls"),
        (
            {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "function_call is OpenAI's older form",
        ),
    ],
)
def test_no_part_of_a_message_is_lost(message, words):
    template = ChatTemplate(BESIDE, {})
    user = {"role": "user", "content": "?"}
    with pytest.raises(MessageError, match=words):
        template.render_conversation([user, {"role": "assistant", **message}])
    assert template.most_calls == 1
    assert (
        template.render_conversation(
            [user, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
        )
        == "[user]?[assistant]f"
    )


@pytest.mark.parametrize("depth", [100_000])
def test_deep_nesting_is_refused_or_stays_text(tmp_path, depth):
    template = ChatTemplate(PICKY, {})
    call = {"function": {"name": "f", "arguments": "[" * depth}}
    text = template.render_conversation(
        [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    )
    assert "[" * depth in text
    (tmp_path / "a.jsonl").write_text('{"messages": ' + "[" * depth)
    with pytest.raises(ValueError, match="a.jsonl, line 1 is not valid JSON"):
        load_rows(str(tmp_path / "a.jsonl"), "train")


def test_tools_may_be_a_list_of_json_texts():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for given in ([tool], [json.dumps(tool)], json.dumps([tool])):
        assert to_tools({"tools": given}) == {"tools": [tool]}
    with pytest.raises(MessageError, match="tools: a list of tools"):
        to_tools({"tools": [[tool]]})


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "well"}, "well"),
        ({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, '{"name": "f"}'),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "a [image_url]"),
        ({"content": {"x": 1}, "tool_calls": "none"}, '{"x": 1}'),
        ({"content": ["a", 3], "tool_calls": [4]}, "a 3\n4"),
        ({}, ""),
    ],
)
def test_messages_of_any_form_are_shown_to_people(message, text):
    assert show_message(message) == text
    assert show_role({"role": "user", "agent": "first"}) == "user (first)"
