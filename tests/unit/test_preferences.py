"""Preference pairs: formats of rows, masks, rows of a batch, and the DPO loss against plain torch."""

import copy
import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from hone.config.lora_config import LoRAConfig
from hone.config.sft_config import DataConfig, DPOConfig, SFTConfig
from hone.models.attention_layouts import PackedAttention
from hone.models.loading import load_configured
from hone.models.lora import add_lora, without_lora
from hone.records import Prompt
from hone.text.messages import MessageError
from hone.text.tokenizer import Tokenizer
from hone.trainer.sft.data import Conversations, iterate_steps, split_units
from hone.trainer.sft.data_sources import PREFERENCES, load_rows
from hone.trainer.sft.objectives import (
    PAIR_METRICS,
    Answers,
    DirectPreference,
    pair_losses,
)
from hone.trainer.sft.preferences import PreferenceRenderer, to_pair

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"
ASKED = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "cd"},
]
GOOD, BAD = {"role": "assistant", "content": "dc"}, {"role": "assistant", "content": "cd"}
# The same pair as data sets write it.
FORMATS = {
    "conversations": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "prompt, answers as messages": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "prompt, answers as text": {"prompt": ASKED, "chosen": "dc", "rejected": "cd"},
    "prompt in its column and in the conversations": {
        "prompt": ASKED,
        "chosen": [*ASKED, GOOD],
        "rejected": [*ASKED, BAD],
    },
    "JSON in text": {
        "chosen": json.dumps([*ASKED, GOOD]),
        "rejected": json.dumps([*ASKED, BAD]),
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def model():
    config = SFTConfig(model={"name": str(MODEL), "random_init": True}, data={"fake": True})
    return load_configured(config.model, 0).model


def pair(i):
    prompt = "abcdef"[: i % 5 + 1]
    return {"prompt": prompt, "chosen": prompt[::-1] * 2, "rejected": prompt}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_rows_give_the_same_pair(name, tokenizer):
    rendered = PreferenceRenderer(tokenizer, 512, ("assistant",))(FORMATS[name])
    assert not rendered.reason
    (chosen, chosen_mask), (rejected, rejected_mask) = rendered.samples
    prompt = tokenizer.prompt_ids(Prompt(ASKED, None))
    trained = [
        tokenizer.decode([i for i, is_target in zip(ids, mask, strict=True) if is_target])
        for ids, mask in rendered.samples
    ]
    # The earlier answer `ba` belongs to the prompt, so that it has no loss.
    assert trained == ["dc", "cd"]
    shared = chosen_mask.index(True)
    assert shared == rejected_mask.index(True) and chosen[:shared] == rejected[:shared]
    assert chosen[:shared] == prompt


def test_text_prompts_and_answers_that_look_like_json(tokenizer):
    chosen, rejected, shared = to_pair({"prompt": "[1]", "chosen": "[2, 3]", "rejected": "[{}]"})
    assert shared == 1 and chosen[0] == {"role": "user", "content": "[1]"}
    assert [side[-1]["content"] for side in (chosen, rejected)] == ["[2, 3]", "[{}]"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "a", "rejected": "b"}, "chosen is text and there is no `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
            "chosen: no message of assistant after the shared prompt",
        ),
    ],
)
def test_pairs_that_cannot_be_used_are_named(row, words, tokenizer):
    rendered = PreferenceRenderer(tokenizer, 512, ("assistant",))(row)
    assert not rendered.samples and words in rendered.detail
    if "prompt" not in row:
        with pytest.raises(MessageError):
            to_pair(row)


def test_pairs_and_conversations_are_told_apart_by_their_columns(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(pair(1)))
    assert load_rows(str(file), "train", rows=PREFERENCES) == [pair(1)]
    with pytest.raises(ValueError, match=r"needs the columns .*pairs need the section dpo"):
        load_rows(str(file), "train")
    file.write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(ValueError, match="needs the columns `chosen` and `rejected`, and `prompt`"):
        load_rows(str(file), "train", rows=PREFERENCES)
    with pytest.raises(ValidationError, match="data.fake has no pairs for dpo"):
        SFTConfig(model={"name": "m"}, data={"fake": True}, dpo={})
    with pytest.raises(ValidationError, match="label_smoothing needs dpo.type sigmoid"):
        DPOConfig(type="ipo", label_smoothing=0.1)


@pytest.mark.parametrize("pack", ["cat", "stack"])
def test_the_answers_of_a_pair_share_a_row(pack, tokenizer):
    rows = [pair(i) for i in range(23)]
    data = Conversations([rows], tokenizer, 48, renderer=PreferenceRenderer)
    config = DataConfig(name=["a"], seq_len=48, batch_size=4, pack=pack)
    seen = []
    for batch in islice(iterate_steps(data, config, 0, epochs=1), 30):
        for row in batch:
            assert len(row) % 2 == 0 and sum(len(ids) for ids, _ in row) <= 48
            assert pack == "cat" or len(row) == 2
            seen += [tuple(ids for ids, _ in unit) for unit in split_units(row, 2)]
    expected = [tuple(ids for ids, _ in data[i]) for i in range(len(rows))]
    assert sorted(seen) == sorted(expected)
    # A pair that is too long is left out whole.
    longest = max(sum(map(len, ids)) for ids in expected)
    short = Conversations([rows], tokenizer, longest - 1, renderer=PreferenceRenderer)
    counts = {len(short[i]) for i in range(len(rows))}
    assert counts == {0, 2} and short.dropped_count > 0


def plain_sums(model, ids, mask):
    """Return the log-probability of a sequence's targets by torch's log_softmax, and their number."""
    attention = PackedAttention([len(ids) - 1])
    hidden = model(torch.tensor(ids[:-1]), attention.token_positions(), attention)
    rows = torch.log_softmax(model.compute_logits(hidden), -1)
    found = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return found[torch.tensor(mask[1:])].sum(), sum(mask[1:])


def plain_loss(model, reference, pairs, config):
    """Write the losses of the papers out for one pair at a time."""
    total = 0.0
    for chosen, rejected in pairs:
        (x, n), (y, m) = (plain_sums(model, *side) for side in (chosen, rejected))
        with torch.no_grad():
            (x0, _), (y0, _) = (plain_sums(reference, *side) for side in (chosen, rejected))
        beta = config.beta
        if config.type == "sigmoid":
            inner = beta * ((x - x0) - (y - y0))
            s = config.label_smoothing
            loss = -(1 - s) * torch.sigmoid(inner).log() - s * torch.sigmoid(-inner).log()
        elif config.type == "hinge":
            loss = torch.clamp(1 - beta * ((x - x0) - (y - y0)), min=0)
        else:
            loss = ((x - x0) / n - (y - y0) / m - 1 / (2 * beta)) ** 2
        total = total + loss - config.sft_weight * x / n
    return total


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"beta": 0.5, "label_smoothing": 0.2},
        {"type": "hinge"},
        {"type": "ipo", "beta": 0.2},
        {"sft_weight": 0.7},
    ],
)
@pytest.mark.parametrize("is_adapter", [False, True])
def test_loss_and_gradient_are_those_of_single_sequences(keys, is_adapter, model, tokenizer):
    config = DPOConfig(**keys)
    policy, reference = copy.deepcopy(model), copy.deepcopy(model)
    if is_adapter:
        add_lora(policy, LoRAConfig(rank=4), 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(0.02 * torch.randn_like(p))
    render = PreferenceRenderer(tokenizer, 512, ("assistant",))
    pairs = [render(pair(i)).samples for i in range(5)]
    objective = DirectPreference(config, None if is_adapter else reference)
    conversations = [one for two in pairs for one in two]
    packed = objective.pack_conversations(conversations, torch.device("cpu"))
    # The prompts of pairs are computed once.
    assert len(packed.tokens_T) < sum(len(ids) - 1 for ids, _ in conversations)
    total, metrics = objective.sum_losses(packed, policy)
    expected = plain_loss(policy, reference, pairs, config)
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    trained = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(total, trained)
    wanted = torch.autograd.grad(plain_loss(policy, reference, pairs, config), trained)
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).abs().max() <= 1e-4 * two.abs().max() + 1e-6
    named = dict(zip(PAIR_METRICS, (metrics / len(pairs)).tolist(), strict=True))
    assert named["rewards/margins"] == pytest.approx(
        named["rewards/chosen"] - named["rewards/rejected"], abs=1e-5
    )
    assert objective.count_units(conversations) == len(pairs)
    if is_adapter:
        with without_lora(policy), torch.no_grad():
            assert float(plain_sums(policy, *pairs[0][0])[0]) == pytest.approx(
                float(plain_sums(reference, *pairs[0][0])[0]), abs=1e-4
            )


def test_an_unchanged_model_has_the_loss_of_a_coin_toss():
    zeros = torch.tensor([[-3.0, -5.0], [-1.0, -9.0]])
    answers = Answers(zeros, zeros, torch.ones(2, 2))
    assert pair_losses(answers, DPOConfig()).tolist() == pytest.approx([0.693147] * 2)
    smoothed = pair_losses(answers, DPOConfig(label_smoothing=0.3))
    assert smoothed.tolist() == pytest.approx([0.693147] * 2)
    assert pair_losses(answers, DPOConfig(type="hinge")).tolist() == [1.0, 1.0]
    assert pair_losses(answers, DPOConfig(type="ipo", beta=0.5)).tolist() == [1.0, 1.0]
