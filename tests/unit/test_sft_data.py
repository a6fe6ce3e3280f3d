"""SFT data: columns, files, packing into rows, what is left out."""

import json
from itertools import islice
from pathlib import Path

import pytest
from pydantic import ValidationError

from hone.authoring.tiny_model import write_model
from hone.config.sft_config import DataConfig, SFTConfig
from hone.records import Prompt
from hone.text.tokenizer import Tokenizer
from hone.trainer.sft.data import (
    Conversations,
    Renderer,
    StreamedConversations,
    iterate_epoch,
    iterate_steps,
)
from hone.trainer.sft.data_sources import Source, load_rows, to_messages

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(MODEL)


def rows(*lengths):
    """Conversations of these token lengths: three tokens are not text."""
    return [{"prompt": "u", "completion": "a" * (n - 4)} for n in lengths]


def write(path, content):
    path.write_text("\n".join(json.dumps(row) for row in content))
    return str(path)


def test_jsonl_and_parquet_give_the_same_conversations(tmp_path):
    import pyarrow
    import pyarrow.parquet

    data = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {
            "messages": [
                {"role": "user", "content": "a", "name": "x"},
                {"role": "assistant", "content": "b"},
            ]
        },
    ]
    jsonl = load_rows(write(tmp_path / "a.jsonl", data), "train")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "a.parquet")
    parquet = load_rows(str(tmp_path / "a.parquet"), "train")
    assert (
        [to_messages(r) for r in jsonl]
        == [to_messages(r) for r in parquet]
        == [d["messages"] for d in data]
    )


def test_prompt_and_completion_may_be_text_or_messages():
    text = to_messages({"prompt": "p", "completion": "c"})
    listed = to_messages(
        {
            "prompt": [{"role": "user", "content": "p"}],
            "completion": [{"role": "assistant", "content": "c"}],
        }
    )
    assert (
        text == listed == [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
    )


def test_only_assistant_tokens_are_targets(tokenizer):
    ((ids, mask),) = Conversations([rows(7)], tokenizer, 100)[0]
    assert len(ids) == 7
    assert [tokenizer.token_text(i) for i, m in zip(ids, mask, strict=True) if m] == [
        "a",
        "a",
        "a",
        "<|end|>",
    ]


def test_other_roles_may_be_learnt_too(tokenizer):
    messages = [
        {"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user", "assistant")
    ]
    learnt = {}
    for roles in (["user"], ["system", "assistant"], ["system", "user", "assistant"]):
        ((ids, mask),) = Conversations([[{"messages": messages}]], tokenizer, 100, roles)[0]
        learnt[len(roles)] = "".join(
            tokenizer.token_text(i) for i, m in zip(ids, mask, strict=True) if m
        )
    assert (
        learnt
        == {
            1: "<|user|>u<|user|>u",
            2: "<|system|>sa<|end|>a<|end|>",  # of the assistant's what it wrote, of others all that their message adds
            3: "<|system|>s<|user|>ua<|end|><|user|>ua<|end|>",
        }
    )


def test_rows_are_filled_with_whole_conversations(tokenizer):
    config = DataConfig(name="x", seq_len=20, batch_size=2, shuffle=False)
    data = Conversations([rows(8, 8, 8, 20, 5)], tokenizer, 20)
    packed = [[len(ids) for ids, _ in row] for row in iterate_epoch(data, config, 0, 0)]
    assert packed == [[8, 8], [8], [20], [5]]
    stacked = config.model_copy(update={"pack": "stack"})
    assert [len(row) for row in iterate_epoch(data, stacked, 0, 0)] == [1] * 5
    assert [len(batch) for batch in iterate_steps(data, config, 0, epochs=1)] == [2, 2]


def test_messages_that_are_none_are_named(tokenizer):
    data = Conversations([[{"messages": ["hi"]}]], tokenizer, 20)
    assert data[0] == [] and data.left_out[0].reason == "cannot be rendered"
    assert (
        data.left_out[0].detail
        == "message 0: it is no message (an object with role and content), found 'hi'"
    )


def test_every_epoch_has_every_conversation_in_an_order_of_its_own(tokenizer):
    config = DataConfig(name="x", seq_len=20, batch_size=1, pack="stack")
    data = Conversations([rows(*range(5, 21))], tokenizer, 20)
    orders = [
        [len(row[0][0]) for row in iterate_epoch(data, config, seed, number)]
        for seed, number in ((0, 0), (0, 1), (0, 0), (1, 0))
    ]
    assert orders[0] == orders[2] != orders[1] and orders[0] != orders[3]
    assert all(sorted(order) == list(range(5, 21)) for order in orders)


def test_data_sets_are_mixed_by_their_weights(tokenizer):
    sizes = (range(5, 15), range(15, 19))
    config = DataConfig(name=["x", "y"], weights=[0.5, 2], seq_len=20, pack="stack")
    data = Conversations([rows(*size) for size in sizes], tokenizer, 20)
    orders = [
        [len(row[0][0]) for row in iterate_epoch(data, config, 0, number)] for number in (0, 2)
    ]
    for order in orders:
        assert sorted(n for n in order if n >= 15) == sorted([*sizes[1]] * 2)
        assert len({n for n in order if n < 15}) == len(order) - 8 == 5
    assert {n for n in orders[0] if n < 15} != {n for n in orders[1] if n < 15}  # another half
    nothing = DataConfig(name=["x"], weights=[0.01], seq_len=20)
    with pytest.raises(
        ValueError, match=r"data.weights \[0.01\] of \[10\] rows leave no conversation"
    ):
        next(iterate_steps(Conversations([rows(*sizes[0])], tokenizer, 20), nothing, 0))
    with pytest.raises(ValidationError, match="data.weights has 1 values, data.name 2 data sets"):
        DataConfig(name=["x", "y"], weights=[1])


def test_overlong_conversations_are_dropped_and_counted(tokenizer):
    config = DataConfig(name="x", seq_len=10, shuffle=False)
    data = Conversations(
        [[*rows(10, 11), {"messages": [{"role": "user", "content": "only"}]}]], tokenizer, 10
    )
    assert len(list(iterate_epoch(data, config, 0, 0))) == 1 and data.dropped_count == 2 == len(
        data.left_out
    )
    with pytest.raises(ValueError, match="no conversation fits into data.seq-len 5"):
        next(
            iterate_steps(
                Conversations([rows(9)], tokenizer, 5), config.model_copy(update={"seq_len": 5}), 0
            )
        )


def test_a_stream_has_no_end_follows_from_the_seed_and_mixes_by_weight(tokenizer, tmp_path):
    few, many = (
        write(tmp_path / "few.jsonl", rows(6, 7)),
        write(tmp_path / "many.jsonl", rows(*[20] * 50, 99)),
    )
    config = DataConfig(
        name=[few, many],
        weights=[3, 1],
        seq_len=40,
        max_left_out=0.5,
        streaming=True,
        buffer=10,
        batch_size=4,
        pack="stack",
    )

    def lengths(seed, count=100):
        data = StreamedConversations([Source(name, "train") for name in config.name], tokenizer, 40)
        batches = [
            [len(row[0][0]) for row in batch]
            for batch in islice(iterate_steps(data, config, seed), count)
        ]
        return batches, data

    batches, data = lengths(0)
    flat = [n for batch in batches for n in batch]
    assert batches == lengths(0)[0] != lengths(1)[0] and set(flat) == {6, 7, 20}
    assert 0.65 < sum(n < 20 for n in flat) / len(flat) < 0.85
    assert data.dropped_count > 0 and data.read - data.dropped_count - len(flat) in (0, 1)
    config = config.model_copy(update={"seq_len": 5})
    with pytest.raises(ValueError, match=r"no conversation fits into data.seq-len 5"):
        next(
            iterate_steps(
                StreamedConversations([Source(few, "train")], tokenizer, 5),
                config.model_copy(update={"name": [few], "weights": None}),
                0,
            )
        )
    with pytest.raises(ValidationError, match="data.streaming has no end: give max_steps"):
        SFTConfig(model={"name": "m"}, data=config)
    with pytest.raises(ValueError, match="no file nowhere.jsonl"):
        Source("nowhere.jsonl", "train")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"text": "x", "id": 1}',
            "needs the columns `messages`, or `prompt` and `completion`; it has id, text",
        ),
        ('{"messages": []}\n{"text": "x"}', r"a.jsonl, row 2, needs the columns .*; it has text"),
        ('{"messages": []}\n{"mess', "line 2 is not valid JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ("", "has no rows"),
    ],
)
def test_unusable_files_are_named(tmp_path, content, words):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words):
        load_rows(str(tmp_path / "a.jsonl"), "train")


def test_missing_files_and_unreachable_hubs_are_named(monkeypatch):
    with pytest.raises(ValueError, match="data.name: no file missing.jsonl"):
        load_rows("missing.jsonl", "train")
    with pytest.raises(ValueError, match="val.name: no file missing.jsonl"):
        load_rows("missing.jsonl", "train", "val.name")
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline"))
    )
    with pytest.raises(ValueError, match="cannot be loaded from the hub"):
        load_rows("owner/data", "train")


def test_tools_of_a_conversation_are_told_as_in_training(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "assistant", "content": "one"},
    ]
    write_model(tmp_path, [["a"], ["a"]], has_tools=True)
    tokenizer = Tokenizer(tmp_path)
    render = Renderer(tokenizer, 512, ("assistant",))
    for given in (tools, json.dumps(tools)):
        ((ids, mask),) = render({"messages": messages, "tools": given}).samples
        prompt = tokenizer.prompt_ids(Prompt(messages[:1], tools))
        assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
        learnt = tokenizer.decode(
            [i for i, is_target in zip(ids, mask, strict=True) if is_target], False
        )
        assert (
            learnt
            == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>one<|end|>'
        )
    assert render({"messages": messages}).samples[0][0] != ids
