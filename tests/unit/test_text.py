"""Chat rendering and tokenisation against transformers, on templates of several families."""

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from hone.clients.http import _json_of
from hone.engine.engine import Engine
from hone.inference.engine_service import EngineService
from hone.inference.openai.answers import ChatAnswer, _dump_json
from hone.inference.openai.schema import ChatRequest
from hone.inference.samplers.embedded import EmbeddedSampler
from hone.inference.samplers.partial_completions import join_pieces
from hone.inference.served_model import Served
from hone.models.families import parse_model_config
from hone.models.hf import read_model_config, write_description, write_model
from hone.models.transformer import Transformer
from hone.models.weight_proof import model_checksum
from hone.records import Completion, Prompt
from hone.text.chat import ChatTemplate
from hone.text.structured_outputs import Following, form_of_call
from hone.text.tokenizer import Tokenizer
from hone.text.tool_calls import FORMATS, parse_tool_calls

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}
    {% if loop.first and m['role'] == 'system' %}
<|start|>system|{{ m['content'] | trim }} ({{ strftime_now('%Y') }})<|eot|>
        {% continue %}
    {% endif %}
<|start|>{{ m['role'] }}|{{ m['content'] | trim }}<|eot|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant|{% endif %}"""
TOOLS = """{%- if tools %}{{ '# Tools' }}
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
[{{ m.role }}]{% for call in m.tool_calls %}{{ call.function.arguments | tojson(indent=2) }}{% endfor %}
{%- elif m.role == 'assistant' %}[assistant]{% generation %}{{ m.content }}</s>{% endgeneration %}
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
FORGETFUL = """{% for m in messages %}{% if m.role == 'assistant' %}
{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}</s>{% else %}
<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{% endif %}"""

CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Hé <there>  \n"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]
CALLS = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"b": 2, "a": [2, "é"]}}}],
    },
    {"role": "tool", "content": "4"},
]
TOOL_LIST = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <b>", "parameters": {"type": "object"}},
    }
]


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """A directory with a byte-level tokenizer and the given template."""

    def write(template, merges=()):
        directory = tmp_path_factory.mktemp("tokenizer")
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = [*letters, *map("".join, merges)]
        encoder = Encoder(
            models.BPE(vocab={c: i for i, c in enumerate(vocab)}, merges=list(merges))
        )
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        encoder.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>"])
        encoder.save(str(directory / "tokenizer.json"))
        eos = {"__type": "AddedToken", "content": "</s>", "special": True}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": eos,
        }
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        return directory

    return write


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@pytest.mark.parametrize(
    "messages", [CONVERSATION, CONVERSATION[:2], CALLS], ids=["whole", "open", "calls"]
)
def test_rendering_and_ids_equal_transformers(save, template, messages):
    from transformers import AutoTokenizer

    directory = save(template)
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer(directory)
    if messages is CALLS and template is not TOOLS:  # transformers leaves the calls out
        with pytest.raises(
            ValueError, match="leaves out message 1: it has no place for tool calls"
        ):
            ours.template.render_conversation(messages)
        return
    for tools in (None, TOOL_LIST):
        for prompt in (True, False):
            kwargs = {"tools": tools, "add_generation_prompt": prompt}
            expected = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
            assert ours.template.render_conversation(messages, **kwargs) == expected
        ids = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert ours.prompt_ids(Prompt(messages, tools)) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_loss_mask_marks_what_the_assistant_wrote_and_equals_transformers(save):
    from transformers import AutoTokenizer

    directory = save(TOOLS)  # the one with the generation tag, which tells transformers the same
    ((ids, mask),) = Tokenizer(directory).conversation_ids(CONVERSATION)
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        CONVERSATION, return_assistant_tokens_mask=True, return_dict=True
    )
    assert ids == expected["input_ids"]
    assert mask == [bool(x) for x in expected["assistant_masks"]]


def test_loss_mask_ends_with_the_end_of_turn_not_with_the_line_break(save):
    tokenizer = Tokenizer(save(CHATML))
    ((ids, mask),) = tokenizer.conversation_ids(CONVERSATION)
    marked = [tokenizer.token_text(i) for i, m in zip(ids, mask, strict=True) if m]
    assert "".join(marked) == "Hi!<|im_end|>Bye.<|im_end|>"


def test_a_template_that_rewrites_history_gives_a_sample_for_each_way_it_writes(save):
    tokenizer = Tokenizer(save(FORGETFUL))
    thinking = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>b"}]
    (first,) = tokenizer.conversation_ids(thinking)
    both = [*thinking, *CONVERSATION[3:]]

    def learnt(samples):
        return [
            "".join(tokenizer.token_text(i) for i, m in zip(*one, strict=True) if m)
            for one in samples
        ]

    split = tokenizer.conversation_ids(both)
    assert split[0] == first and learnt(split) == ["x</think>b</s>", "Bye.</s>"]
    assert tokenizer.decode(split[1][0], False).startswith("<user>ab</s>")
    assert learnt(tokenizer.conversation_ids(both, last_only=True)) == ["Bye.</s>"]


def test_tokens_of_earlier_turns_stay_as_they_were_sampled(save):
    tokenizer = Tokenizer(save(CHATML, [("a", "b")]))
    asked = [{"role": "user", "content": "ab?"}]
    prompt = tokenizer.prompt_ids(Prompt(asked))
    a, b, both = (tokenizer.encode(text) for text in ("a", "b", "ab"))
    assert len(both) == 1 and both[0] in prompt
    end = tokenizer.encode("<|im_end|>")
    messages = [
        *asked,
        {"role": "assistant", "content": "aab"},
        {"role": "user", "content": "and ab?"},
    ]
    rest = tokenizer.encode("\n<|im_start|>user\nand ab?<|im_end|>\n<|im_start|>assistant\n")
    for sampled in (a + a + b + end, a + both + end):
        before = prompt + sampled
        assert tokenizer.prompt_ids(Prompt(messages, None, before, 2)) == before + rest
    cut_off = prompt + a + a + b
    assert tokenizer.prompt_ids(Prompt(messages, None, cut_off, 2)) == cut_off + end + rest
    fresh = tokenizer.prompt_ids(Prompt(messages))
    assert fresh == prompt + a + both + end + rest
    assert tokenizer.prompt_ids(Prompt(messages, None, [10**6], 2)) == fresh  # of another model
    forgetful = Tokenizer(save(FORGETFUL))
    thought = [
        *asked,
        {"role": "assistant", "content": "x</think>b"},
        {"role": "user", "content": "c"},
    ]
    before = forgetful.prompt_ids(Prompt(asked)) + forgetful.encode("x</think>b</s>")
    assert forgetful.prompt_ids(Prompt(thought, None, before, 2)) == forgetful.prompt_ids(
        Prompt(thought)
    )


def test_stop_ids_come_from_both_files(save):
    directory = save(CHATML)
    encoder = Encoder.from_file(str(directory / "tokenizer.json"))
    end = encoder.token_to_id("<|im_end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    assert Tokenizer(directory).stop_ids == sorted([end, encoder.token_to_id("</s>")])


def test_mistakes_are_named(save, tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ValueError, match="refuses these messages: no system"):
        ChatTemplate("{{ raise_exception('no system') }}", {}).render_conversation([])
    directory = save(None)
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer(directory).prompt_ids(Prompt(CONVERSATION))
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Tokenizer(directory)


def serving(engine, tokenizer):
    return Served(EmbeddedSampler(EngineService(engine)), tokenizer, "base", [Path("/")])


def update(served, directory, version):
    """The state after it has taken a version from files."""
    states = []

    async def program():
        states.append(await served.update_weights(directory, version, None, {"type": "filesystem"}))

    served.sampler.service.run_beside(program())
    return states[0]


def test_a_server_that_joins_later_takes_the_text_of_all_versions(tmp_path):
    """As one that was started again, from a base with another template: version 7 has weights alone."""
    spec = parse_model_config(read_model_config(MODEL))
    model, other = Transformer(spec), Transformer(spec)
    for one, seed in ((model, 0), (other, 1)):
        one.init_weights(torch.Generator().manual_seed(seed))
    base = write_model(model, MODEL, tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    version = write_model(other, MODEL, tmp_path / "broadcasts" / "step_7", with_text=False)
    write_description(MODEL, tmp_path / "broadcasts" / "text", torch.float32, with_text=True)
    served = serving(Engine(model), Tokenizer(base))
    messages = [{"role": "user", "content": "abc"}]
    assert len(served.tokenizer.prompt_ids(Prompt(messages))) == 3
    assert update(served, version, 7)["checksum"] == model_checksum(other)
    ours = served.tokenizer
    assert ours.prompt_ids(Prompt(messages)) == Tokenizer(MODEL).prompt_ids(Prompt(messages))
    update(served, version, 8)
    assert served.tokenizer is ours  # read once


def test_a_model_of_another_shape_replaces_the_one_before_in_memory(tmp_path):
    spec = parse_model_config(read_model_config(MODEL))
    models = [Transformer(spec), Transformer(replace(spec, num_hidden_layers=1))]
    for model in models:
        model.init_weights(torch.Generator().manual_seed(0))
    config = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    directory = write_model(models.pop(), MODEL, tmp_path / "other")
    (directory / "config.json").write_text(json.dumps(config))
    engine = Engine(models.pop())
    engine.itself, before = engine, weakref.ref(engine)  # a cycle, as its graphs and adapters make
    served = serving(engine, Tokenizer(MODEL))
    del engine, model
    gc.freeze()  # as the service does
    update(served, directory, 1)
    assert before() is None and served.sampler.engine.model.spec.num_hidden_layers == 1


ADD = [
    {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
    }
]
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("style", "text", "rest", "calls"),
    [
        (
            "hermes",
            'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            "so",
            [("add", {"a": 1})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            [("f", {}), ("g", {})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "add"</tool_call>',
            '<tool_call>{"name": "add"</tool_call>',
            [],
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>', None, []),
        ("hermes", '{"name": "add", "arguments": {}}', None, []),
        ("json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ("json", "4", None, []),
        ("json", '{"sum": 4}', None, []),
    ],
)
def test_tool_calls_are_read_from_text(style, text, rest, calls):
    content, found = parse_tool_calls(text, FORMATS[style], turn=3)
    assert content == (text if rest is None else rest)
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
    assert [c["id"] for c in found] == [f"call_3_{i}" for i in range(len(calls))]


@pytest.mark.parametrize(
    ("said", "stop"),
    [
        ("plain words, ü and 漢字 and 🦙!", []),
        ('I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', []),
        ("a < b, <tool_cal", []),
        ('<tool_call>{"name": "add"</tool_call>', []),
        ("up to the STOP and not beyond", ["STOP", "TO"]),
        ("nearly STO", ["STOP"]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_pieces_of_an_answer_make_the_whole_one(save, said, stop, size):
    tokenizer = Tokenizer(save(CALLING))
    request = ChatRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=ADD, stop=stop
    )
    ids = tokenizer.encode(said)
    whole = Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")
    answer = ChatAnswer(request, request.build_prompt(), [1], tokenizer)
    expected = answer.build_body([whole])["choices"][0]
    spelling, shown, pieces = answer.start_spelling(0), "", []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        piece = Completion(ids[part], whole.logprobs[part], whole.versions[part], "")
        pieces.append(piece)
        shown += answer.build_delta(0, spelling.decode_more(piece.ids), piece)["delta"]["content"]
        assert "\ufffd" not in shown and "<tool_call>" not in shown and "STOP" not in shown
    end = Completion([], [], [], "stop")
    last = answer.build_last_delta(0, spelling, end, join_pieces([*pieces, end]))
    shown += last["delta"].get("content", "")
    calls = [
        {key: call[key] for key in call if key != "index"}
        for call in last["delta"].get("tool_calls", [])
    ]
    assert shown.strip() == expected["message"]["content"].strip()
    assert (
        calls == expected["message"].get("tool_calls", [])
        and last["finish_reason"] == expected["finish_reason"]
    )


def test_a_conversation_with_calls_goes_on_in_the_tokens_that_were_sampled(save):
    tokenizer = Tokenizer(save(CALLING))
    asked = [{"role": "user", "content": "1 + 2?"}]
    prompt = tokenizer.prompt_ids(Prompt(asked, ADD))
    written = '<tool_call>{"arguments":{"a":1,  "b":2},"name":"add"}</tool_call>'  # not as the template writes it
    sampled = tokenizer.encode(written + "<|im_end|>")
    turn = tokenizer.build_turn(
        Prompt(asked, ADD), prompt, Completion(sampled, [0.0] * len(sampled), [0], "stop"), written
    )
    assert turn.text == "" and turn.tool_calls[0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1, "b": 2}',
    }
    answer = {"role": "tool", "content": "3", "tool_call_id": turn.tool_calls[0]["id"]}
    messages = [*asked, turn.assistant_message, answer]
    ids = tokenizer.prompt_ids(Prompt(messages, ADD, prompt + sampled, 2))
    assert ids == prompt + sampled + tokenizer.encode(
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    body = {"model": "m", "messages": messages, "tools": ADD}
    fresh = tokenizer.prompt_ids(ChatRequest(**body).build_prompt())
    assert fresh != ids and "add" in tokenizer.decode(fresh)  # as the template writes it
    answered = ChatAnswer(ChatRequest(**body), Prompt(messages, ADD), ids, tokenizer).build_body(
        [turn.completion]
    )
    choice = answered["choices"][0]
    assert (
        choice["finish_reason"] == "tool_calls"
        and choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    )
    plain = ChatAnswer(ChatRequest(**body, tool_choice="none"), Prompt(messages), ids, tokenizer)
    plain = plain.build_body([turn.completion])
    assert (
        plain["choices"][0]["finish_reason"] == "stop"
        and "tool_calls" not in plain["choices"][0]["message"]
    )


@pytest.mark.parametrize("is_special", [True, False])
def test_tags_of_tool_calls_may_be_tokens_of_their_own(tmp_path, is_special):
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    encoder = Encoder.from_file(str(tmp_path / "tokenizer.json"))
    tags = [AddedToken(tag, special=is_special) for tag in ("<tool_call>", "</tool_call>")]
    (encoder.add_special_tokens if is_special else encoder.add_tokens)(tags)
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CALLING)
    tokenizer = Tokenizer(tmp_path)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = tokenizer.encode(text) + tokenizer.stop_ids[:1]
    assert len(ids) < len(text)  # the tags are a token each
    turn = tokenizer.build_turn(Prompt([], ADD), [1], Completion(ids, [], [], "stop"))
    assert [call["function"]["name"] for call in turn.tool_calls] == [
        "add"
    ] and "tool_call" not in turn.text
    pytest.importorskip("llguidance")
    follows = Following(
        form_of_call(ADD, FORMATS["hermes"], tokenizer),
        tokenizer,
        tokenizer.vocab_size,
        tokenizer.stop_ids,
    )
    for i in range(len(ids) - 1):
        assert follows(ids[:i])[ids[i]], tokenizer.decode(ids[: i + 1])
    assert follows.is_over(ids[:-1])


def test_answers_are_json_whatever_is_in_them():
    numbers = [-0.1, 1e-30, -1e22, 5e-324, 1 / 3]
    for value in (
        {"said": "NaN, Infinity, \u2028 and \u00e9"},
        {"half": "\ud800"},
        {"numbers": numbers, "none": None},
    ):
        text = _dump_json(value)
        assert (
            json.loads(text) == value
            and _json_of(httpx.Response(200, content=text.encode())) == value
        )
        assert len(text.splitlines()) == 1
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            _dump_json({"logprobs": [bad]})
