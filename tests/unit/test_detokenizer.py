"""The text of tokens within a text: echo, names, bytes, offsets, streams, and what the next turn's prompt is."""

import functools
import json
import random

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from hone.inference.openai.answers import ChatAnswer, TextAnswer
from hone.inference.openai.schema import ChatRequest, CompletionRequest
from hone.inference.samplers.partial_completions import join_pieces
from hone.records import Completion, Prompt
from hone.text.stop_strings import StopStrings
from hone.text.tokenizer import Tokenizer

WORDS = [
    "the",
    "answer",
    "is",
    "true",
    "istrue",
    "false",
    "é",
    "日本",
    "🙂",
    "a\nb",
    "x=1;",
    "no",
    "  two",
    "\ttab",
]
LLAMA_2 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}
{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- else %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% endif %}
{%- endfor %}"""
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
KINDS = ("byte level", "llama 2", "metaspace")


def train(kind):
    rng = random.Random(0)
    corpus = [" ".join(rng.choices(WORDS, k=8)) for _ in range(200)] + [
        "[INST] a [/INST] b",
        " assistant\nuser\n",
    ]
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    if kind == "byte level":
        encoder = Encoder(models.BPE())
        encoder.pre_tokenizer, encoder.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        encoder.train_from_iterator(
            corpus, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)
        )
    else:
        encoder = Encoder(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        trained = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<unk>", *(f"<0x{i:02X}>" for i in range(256))],
            limit_alphabet=30,
            show_progress=False,
        )
        if kind == "llama 2":
            encoder.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            parts = [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
            encoder.decoder = decoders.Sequence(parts)
            encoder.train_from_iterator((word for line in corpus for word in line.split()), trained)
        else:
            encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
            metaspace = decoders.Metaspace(prepend_scheme="first")
            encoder.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace])
            encoder.train_from_iterator(corpus, trained)
        state = json.loads(encoder.to_str())
        for token in state["added_tokens"]:
            if token["content"] != "<unk>":  # bytes are tokens of the model, no added ones
                token["content"] = None
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"]]
        encoder = Encoder.from_str(json.dumps(state))
    encoder.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in specials]
    )
    return encoder


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    found = {}
    for kind in KINDS:
        directory = tmp_path_factory.mktemp("tokenizer")
        train(kind).save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
        template = CHATML if kind == "byte level" else LLAMA_2
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        found[kind] = directory
    return found


@pytest.fixture(params=KINDS)
def both(request, directories):
    from transformers import AutoTokenizer

    directory = directories[request.param]
    return Tokenizer(directory), AutoTokenizer.from_pretrained(directory)


def draw_text(rng, most=6):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def completion_of(rng, tokenizer, ids):
    alternatives = [[(i, -1.0) for i in rng.sample(range(tokenizer.vocab_size), 3)] for _ in ids]
    return Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop", alternatives)


def cut_anywhere(rng, completion):
    ends = (
        sorted(rng.sample(range(1, len(completion.ids)), min(3, len(completion.ids) - 1)))
        if completion.ids
        else []
    )
    pieces = [completion.token_range(a, b) for a, b in zip([0, *ends], [*ends, None], strict=True)]
    for piece in pieces[:-1]:
        piece.finish_reason = ""
    return pieces


def test_bytes_of_tokens_joined_are_the_text(both):
    ours, theirs = both
    for seed in range(200):
        rng = random.Random(seed)
        ids = ours.encode(draw_text(rng))
        joined = b"".join(ours.token_texts.token_bytes(ids, follows=False)).decode()
        assert joined == theirs.decode(ids), seed
        place = rng.randrange(len(ids) + 1)
        begun = b"".join(ours.token_texts.token_bytes(ids[:place], follows=False))
        rest = b"".join(ours.token_texts.token_bytes(ids[place:], follows=place > 0))
        assert (begun + rest).decode() == joined, seed


def test_echo_is_the_text_of_prompt_and_completion_with_an_offset_for_each_token(both):
    ours, theirs = both
    for seed in range(200):
        rng = random.Random(seed)
        ids = ours.encode(draw_text(rng, 10))
        place = rng.randrange(1, len(ids)) if len(ids) > 1 else 1
        prompt, done = ids[:place], completion_of(rng, ours, ids[place:])
        request = CompletionRequest.model_validate(
            {"model": "m", "prompt": prompt, "echo": True, "logprobs": 3}
        )
        echoed = [
            Completion(prompt, [None, *[-0.1] * (place - 1)], [0] * place, "", [[] for _ in prompt])
        ]
        choice = TextAnswer(request, [prompt], ours, echoed).build_choice(0, done)
        whole = theirs.decode(ids)
        if not theirs.decode(prompt).endswith("\ufffd"):
            assert choice["text"] == whole, seed
        logprobs = choice["logprobs"]
        for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert name.startswith("bytes:") or whole[offset:].startswith(name), (seed, name)
        for i, tops in enumerate(logprobs["top_logprobs"][place:]):
            assert len(tops) == len({token for token, _ in done.alternatives[i]} | {done.ids[i]}), (
                seed
            )

        request = CompletionRequest.model_validate(
            {"model": "m", "prompt": prompt, "logprobs": 3, "stream": True}
        )
        answer = TextAnswer(request, [prompt], ours)
        spelling, shown, offsets, pieces = answer.start_spelling(0), "", [], cut_anywhere(rng, done)
        for piece in pieces[:-1]:
            chunk = answer.build_delta(0, spelling.decode_more(piece.ids), piece)
            shown, offsets = shown + chunk["text"], offsets + chunk["logprobs"]["text_offset"]
        chunk = answer.build_last_delta(0, spelling, pieces[-1], join_pieces(pieces))
        whole_answer = TextAnswer(request, [prompt], ours).build_choice(0, done)
        assert shown + chunk["text"] == whole_answer["text"], seed
        assert (
            offsets + chunk["logprobs"]["text_offset"] == whole_answer["logprobs"]["text_offset"]
        ), seed


def test_special_tokens_within_an_answer_take_no_space_from_its_text(both):
    ours, theirs = both
    special = ours.encoder.token_to_id("</s>")
    for seed in range(200):
        rng = random.Random(seed)
        ids = ours.encode(draw_text(rng))
        for _ in range(rng.randint(1, 3)):
            ids.insert(rng.randrange(len(ids) + 1), special)
        done = completion_of(rng, ours, ids)
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        request = ChatRequest.model_validate(body)
        answer = ChatAnswer(request, request.build_prompt(), [1], ours)
        whole = answer.build_choice(0, done)["message"]["content"]
        assert whole == theirs.decode(ids, skip_special_tokens=True)
        spelling, shown, pieces = answer.start_spelling(0), "", cut_anywhere(rng, done)
        for piece in pieces[:-1]:
            shown += spelling.decode_more(piece.ids)
        assert whole.startswith(shown) and shown + spelling.finish_text(whole) == whole, (seed, ids)


def test_a_stop_string_may_begin_with_the_first_token(both):
    ours, _ = both
    for seed in range(200):
        rng = random.Random(seed)
        ids = ours.encode("the answer " + draw_text(rng))
        prompt, rest = ids[:2], ids[2:]
        text = ours.decode_after(prompt, rest, False)
        start = rng.randrange(min(4, len(text)))
        string = text[start : start + rng.randint(1, 4)]
        if "\ufffd" in string:
            continue
        first = functools.partial(ours.decode_after, prompt, skip_special_tokens=False)
        ends, kept = StopStrings(ours.decode, [string], first), None
        for count in range(1, len(rest) + 1):
            kept = ends(rest[:count])
            if kept is not None:
                break
        assert kept is not None and string in ours.decode_after(prompt, rest[:kept], False), (
            seed,
            string,
            text,
        )
        assert kept == 1 or string not in ours.decode_after(prompt, rest[: kept - 1], False)


def test_a_chat_s_entries_are_the_bytes_of_its_text_whole_and_in_pieces(both):
    ours, theirs = both
    for seed in range(200):
        rng = random.Random(seed)
        done = completion_of(rng, ours, ours.encode(draw_text(rng)))
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "logprobs": True,
            "top_logprobs": 3,
        }
        request = ChatRequest.model_validate(body)
        answer = ChatAnswer(request, request.build_prompt(), [1], ours)
        choice = answer.build_choice(0, done)
        entries = choice["logprobs"]["content"]
        assert (
            bytes(b for one in entries for b in one["bytes"]).decode()
            == choice["message"]["content"]
        ), seed
        assert choice["message"]["content"] == theirs.decode(done.ids, skip_special_tokens=True)
        answer, streamed = ChatAnswer(request, request.build_prompt(), [1], ours), []
        spelling = answer.start_spelling(0)
        for piece in cut_anywhere(rng, done):
            streamed += answer.build_delta(0, spelling.decode_more(piece.ids), piece)["logprobs"][
                "content"
            ]
        assert streamed == entries, seed


def test_the_next_turn_s_prompt_is_that_of_the_whole_conversation(both):
    ours, theirs = both
    end = "<|im_end|>" if "im_end" in ours.template.sources["default"] else "</s>"
    for seed in range(200):
        rng = random.Random(seed)
        messages, before = [{"role": "user", "content": draw_text(rng).strip()}], None
        for _ in range(3):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            asked = ours.prompt_ids(
                Prompt(messages, None, before, len(messages) - 1 if before else 0)
            )
            assert asked == expected, (
                seed,
                theirs.convert_ids_to_tokens(asked),
                theirs.convert_ids_to_tokens(expected),
            )
            said = draw_text(rng).strip()
            answered = [*messages, {"role": "assistant", "content": said}]
            whole = theirs.apply_chat_template(answered, return_dict=False)
            sampled = whole[len(asked) :]
            sampled = sampled[: sampled.index(theirs.convert_tokens_to_ids(end)) + 1]
            before = asked + sampled
            messages = [*answered, {"role": "user", "content": draw_text(rng).strip()}]


def test_the_end_of_a_turn_is_there_once_whatever_was_sampled_before_it(directories):
    ours = Tokenizer(directories["llama 2"])
    messages = [{"role": "user", "content": "a"}]
    asked, end = ours.prompt_ids(Prompt(messages)), ours.encoder.token_to_id("</s>")
    going_on = [
        *messages,
        {"role": "assistant", "content": "true"},
        {"role": "user", "content": "b"},
    ]
    for sampled in (ours.encode("true"), [*ours.encode("true"), end], [*ours.encode("true "), end]):
        found = ours.prompt_ids(Prompt(going_on, None, asked + sampled, 2))
        assert found[: len(asked + sampled)] == asked + sampled and found.count(end) == 1
        assert ours.decode(found, False).endswith(
            "</s>[INST] b [/INST]"
        ) or "</s> [INST] b" in ours.decode(found, False)
