"""Which tokens of a conversation are trained on, for templates of all kinds."""

import asyncio
import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from hone.config.sft_config import DataConfig
from hone.environments.conversation import Conversation
from hone.orchestrator.group import samples_of
from hone.records import Completion, Example, Prompt, Rollout, Sampling
from hone.text.tokenizer import Tokenizer
from hone.trainer.sft.data import Conversations
from hone.trainer.sft.survey import row_tokens_of_data, survey_data
from tests.unit.test_messages import draw_text

SEEDS = range(200)
APPENDING = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
GENERATION = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}
{%- generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# As Qwen3: the last answer has (empty) thinking, those before the last question lose theirs.
THINKING = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}
{%- if loop.last %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|end|>\\n' }}{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
# As R1-Distill: the prompt opens a thought that a written answer does not have.
OPENED = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] }}
{{- '<|end|>' }}{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""


@pytest.fixture
def make(tmp_path):
    def write(template, name="t", **flags):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        encoder = Encoder(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        encoder.pre_tokenizer, encoder.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        encoder.add_special_tokens(
            [AddedToken("<|end|>", special=True, **flags), "</s>", "<|user|>", "<|assistant|>"]
        )
        encoder.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "chat_template": template,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    return write


def draw_turns(rng):
    turns = []
    for _ in range(rng.randint(1, 4)):
        thought = {"reasoning_content": draw_text(rng)} if rng.random() < 0.5 else {}
        turns += [
            {"role": "user", "content": draw_text(rng)},
            {"role": "assistant", "content": draw_text(rng)} | thought,
        ]
    return turns


def learnt(tokenizer, sample):
    return tokenizer.decode([i for i, is_target in zip(*sample, strict=True) if is_target], False)


def spans_of(mask):
    """The runs of marked tokens, as (start, end)."""
    edges = [
        i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize(
    "flags", [{}, {"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}]
)
def test_every_answer_is_trained_on_whole_and_ends_with_its_mark(make, flags):
    tokenizer = Tokenizer(make(APPENDING, **flags))
    end = tokenizer.encoder.token_to_id("<|end|>")
    for seed in range(60):
        turns = draw_turns(random.Random(seed))
        ((ids, mask),) = tokenizer.conversation_ids(turns)
        answers = [turn["content"] + "<|end|>" for turn in turns[1::2]]
        assert learnt(tokenizer, (ids, mask)) == "".join(answers), seed
        runs = spans_of(mask)
        assert [ids[stop - 1] for _, stop in runs] == [end] * len(answers), seed
        for i, (start, _) in enumerate(runs):
            assert ids[:start] == tokenizer.prompt_ids(Prompt(turns[: 2 * i + 1])), seed


def test_a_template_with_generation_marks_is_masked_as_by_transformers(make):
    from transformers import AutoTokenizer

    directory = make(GENERATION, rstrip=True)
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for seed in SEEDS:
        turns = draw_turns(random.Random(seed))
        ((ids, mask),) = ours.conversation_ids(turns)
        expected = theirs.apply_chat_template(
            turns, return_assistant_tokens_mask=True, return_dict=True
        )
        assert ids == expected["input_ids"] and mask == [
            bool(one) for one in expected["assistant_masks"]
        ], seed


def test_turns_that_the_template_rewrites_are_each_trained_on_once_after_their_own_prompt(make):
    tokenizer = Tokenizer(make(THINKING))
    for seed in SEEDS:
        turns = draw_turns(random.Random(seed))
        samples = tokenizer.conversation_ids(turns)
        assert len(samples) == len(turns) // 2
        for i, (ids, mask) in enumerate(samples):
            ((start, stop),) = spans_of(mask)
            assert ids[:start] == tokenizer.prompt_ids(Prompt(turns[: 2 * i + 1])), seed
            thought = turns[2 * i + 1].get("reasoning_content", "")
            written = f"<think>\n{thought}\n</think>\n\n{turns[2 * i + 1]['content']}<|end|>"
            assert tokenizer.decode(ids[start:stop], False) == written, seed
        assert tokenizer.conversation_ids(turns, last_only=True) == samples[-1:]


def test_a_prompt_that_opens_a_thought_does_not_keep_plain_answers_from_training(make):
    from transformers import AutoTokenizer

    directory = make(OPENED)
    theirs, tokenizer = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    for seed in SEEDS:
        rng = random.Random(seed)
        turns = draw_turns(rng)
        turns[-1]["content"] = (
            rng.choice(["", "hm</think>", "<think>\nhm\n</think>"]) + turns[-1]["content"]
        )
        ((ids, mask),) = tokenizer.conversation_ids(turns)
        assert ids == theirs.apply_chat_template(turns, return_dict=False), seed
        answers = [turn["content"].split("</think>")[-1] + "<|end|>" for turn in turns[1::2]]
        assert learnt(tokenizer, (ids, mask)) == "".join(answers), seed


def rows(count, length=3):
    return [{"prompt": "u", "completion": "a" * length} for _ in range(count)]


def test_what_is_left_out_is_counted_named_and_ends_the_run_only_above_the_share(make):
    tokenizer = Tokenizer(make(APPENDING))
    config = DataConfig(name="x", seq_len=40)
    broken = [{"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}]}]
    silent = [{"messages": [{"role": "user", "content": "only a question"}]}]
    data = Conversations([[*rows(9), *broken, *silent, *rows(2, 99), *rows(9)]], tokenizer, 40)
    said = []
    survey_data(
        data, config, "data.name", lambda line, is_warning=False: said.append((line, is_warning))
    )
    assert said[0] == ("Data (data.name): 22 rows, 18 samples, 432 tokens", False)
    assert said[1][1] and said[1][0].startswith(
        "Data (data.name): 4 of 22 rows left out (18.2 % of the rows, 50.0 %"
    )
    for words in (
        "1 cannot be rendered (row 10: message 0 (user), content: text or a list of text parts is needed, found 5)",
        "1 with no message of data.train-on (row 11)",
        "2 longer than 40 tokens (row 12; row 13)",
    ):
        assert words in said[1][0], said[1][0]
    strict = DataConfig(name="x", seq_len=40, max_left_out=0.1)
    with pytest.raises(
        ValueError, match=r"4 of 22 rows would be left out: .*data.max-left-out allows 0.1"
    ):
        survey_data(data, strict, "data.name", lambda *_, **__: None)


def test_the_length_of_a_row_follows_data_and_model(make):
    tokenizer = Tokenizer(make(APPENDING))
    said = []
    for longest, positions, expected in ((10, 1000, 64), (90, 1000, 128), (400, 200, 200)):
        data = Conversations([[*rows(3), *rows(1, longest)]], tokenizer, positions)
        assert row_tokens_of_data(data, positions, said.append) == expected
    assert said[1] == "data.seq-len is 128: the longest conversation has 99 tokens"


# As Qwen3.5: the prompt opens a thought, or has an empty one; a question drops earlier thoughts, a tool's answer does
# not.
THINKS = """{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}
{%- set thought = m.content.split('</think>')[0] if '</think>' in m.content else '' %}
{%- if loop.index0 > asked.last %}{{ '<think>\\n' + thought.replace('<think>\\n', '') + '</think>\\n\\n' }}{% endif %}
{{- m.content.split('</think>')[-1].lstrip('\\n') + '<|end|>\\n' }}
{%- else %}{{ '<|user|>\\n' + m.role + ' ' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_tokens_trained_on_are_those_sampled_whatever_a_template_drops(make, seed, thinks):
    """Several questions with tool loops between them: every sampled token is trained on, once and in order."""
    tokenizer = Tokenizer(make(THINKS))
    rng = random.Random(seed)

    class Model:
        async def chat(self, prompt, sampling):
            text = draw_text(rng) + "<|end|>"
            text = f"{draw_text(rng)}</think>\n\n{text}" if thinks else text
            ids = tokenizer.encode(text)
            completion = Completion(ids, [-rng.random() for _ in ids], [0] * len(ids), "stop")
            return tokenizer.build_turn(prompt, tokenizer.prompt_ids(prompt), completion)

    async def converse():
        talk = Conversation(Model(), {} if thinks else {"enable_thinking": False})
        messages = []
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": draw_text(rng)})
            for loop in range(rng.randint(1, 3)):
                if loop:
                    messages.append({"role": "tool", "content": draw_text(rng)})
                turn = await talk.chat(messages, Sampling())
                messages.append(turn.assistant_message)
        return [turn for _, turn in talk.turns]

    turns = asyncio.run(converse())
    rollout = Rollout(Example(0, []), turns, [])
    trained, logprobs = [], []
    for sample in samples_of(rollout, 1.0, 1.0, ""):
        mask = np.array(sample.mask)
        trained += np.array(sample.ids)[mask].tolist()
        logprobs += np.array(sample.logprobs)[mask].tolist()
    assert trained == [i for turn in turns for i in turn.completion.ids]
    assert logprobs == [x for turn in turns for x in turn.completion.logprobs]
    # What a turn's tokens are conditioned on is what the model saw.
    prompts = [turn.prompt_ids + turn.completion.ids for turn in turns]
    for sample in samples_of(rollout, 1.0, 1.0, ""):
        assert list(sample.ids) in prompts
