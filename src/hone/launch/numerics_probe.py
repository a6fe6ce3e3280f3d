"""`hone probe`: compare the logprobs of the same tokens in sampling and in training.

random prompts ─ engine: batches of all sizes, groups, continued prompts ─► tokens, logprobs ─┐
                          the same tokens, packed, through the training model ─► logprobs ──┴─► how many differ
if any differ: some rollouts again, one by one ─► hidden states after each block ─► the first layer that differs
"""

import asyncio
import random
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.clients.http import connect_clients
from hone.config.probe_config import ProbeConfig
from hone.config.sections import ClientConfig
from hone.engine.engine import Engine
from hone.models.language_model import LanguageModel
from hone.models.loading import load_configured
from hone.models.lora import Merged, add_lora, lora_modules
from hone.models.ops import Pending
from hone.records import GenerateRequest, Message, Prompt, Sampling
from hone.trainer.packing import Packed, pack_shared, prompt_of, split_by_prompt

WAVES = (1, 2, 7, 16, 33, 128)  # rollouts sampled at once, cyclically
BUDGETS = (700, 16_384, 3_000)  # tokens per micro-batch, cyclically
CACHE_GIB = 4.0  # of keys and values
LETTERS = string.ascii_letters + string.digits + " .,"
COMPARED_ROLLOUTS = 4  # rollouts compared layer by layer
Waves = list[tuple[list[int], list[int], list[float]]]  # prompt, completion, logprobs


@dataclass(frozen=True)
class Found:
    tokens: int
    differ: int  # tokens whose logprob has other bits
    largest: float  # difference of two logprobs
    mismatch: float  # mean of r - 1 - log r, in nats
    place: str  # the first layer and part where hidden states differ; "" where none does

    def describe_result(self) -> str:
        if not self.differ:
            return f"0 of {self.tokens:,} logprobs differ between sampler and trainer"
        where = f"; hidden states differ from {self.place} on" if self.place else ""
        return (
            f"{self.differ:,} of {self.tokens:,} logprobs differ between sampler and trainer, by up to "
            f"{self.largest:.3g}; mismatch KL {self.mismatch:.2e}{where}"
        )


def main(config: ProbeConfig) -> None:
    """Run the probe. Raises ValueError if `model.numerics` is "exact" and any logprob differs."""
    model = load_configured(config.model, config.seed).model
    if config.lora is not None:
        add_lora(model, config.lora, config.seed)
        for lora in lora_modules(model):  # a fresh adapter adds nothing
            nn.init.normal_(lora.B, std=0.01)
    if config.server is None:
        found = probe_model(
            model,
            config.rollouts,
            config.max_tokens,
            config.temperature,
            config.seed,
            config.lengths,
        )
    else:
        found = compare_logprobs(
            model, asyncio.run(sample_from_server(config, config.server)), config.temperature
        )
    print(
        f"{config.rollouts:,} rollouts, {config.model.numerics} numerics: {found.describe_result()}",
        flush=True,
    )
    if config.model.numerics == "exact" and found.differ:
        raise ValueError(
            "model.numerics is exact, and logprobs differ; please report this with the line above"
        )


def probe_model(
    model: LanguageModel,
    count: int,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    lengths: Sequence[int] = (),
) -> Found:
    """Compare sampling and training logprobs of a model on `count` rollouts of random prompts.

    `lengths`: tokens of the prompts, in turn; none: up to `max_tokens` new ones each.
    """
    sampled = Merged(model).model
    wanted = max(4 * max_tokens, max(lengths, default=0) + max_tokens + 1)
    length = min(wanted, model.spec.max_position_embeddings)
    engine = Engine(
        sampled, max_batch_size=max(WAVES), max_model_len=length, kv_cache_gib=CACHE_GIB
    )
    rollouts = sample_waves(engine, count, max_tokens, temperature, random.Random(seed), lengths)
    return compare_logprobs(model, rollouts, temperature, sampled)


def compare_logprobs(
    model: LanguageModel, rollouts: Waves, temperature: float, sampled: LanguageModel | None = None
) -> Found:
    """Compare the logprobs of sampling with those of training.

    If some differ and the sampling model `sampled` is given, also find the first layer that
    differs.
    """
    ours = torch.tensor([x for _, _, logprobs in rollouts for x in logprobs])
    theirs = torch.cat(trained_logprobs(model, rollouts, temperature))
    change = theirs.double() - ours.double()
    mismatch = float((change.exp() - 1 - change).mean())
    differ = int((theirs != ours).sum())
    shortest = sorted((one for one in rollouts if len(one[1]) > 2), key=lambda one: len(one[0]))
    place = (
        first_layer(model, sampled, shortest[:COMPARED_ROLLOUTS])
        if differ and sampled is not None
        else ""
    )
    return Found(len(ours), differ, float(change.abs().max()), mismatch, place)


def sample_waves(
    engine: Engine,
    count: int,
    max_tokens: int,
    temperature: float,
    draw: random.Random,
    lengths: Sequence[int] = (),
) -> Waves:
    """Sample `count` completions in batches of several sizes.

    Prompts are new, repeated (as in a group) or continued, at random by `draw`.
    """
    done: Waves = []
    vocabulary = range(engine.sampler.vocab_size)
    last = list[list[int]]()
    while len(done) < count:
        prompts: list[list[int]] = []
        for _ in range(min(WAVES[len(done) % len(WAVES)], count - len(done))):
            kind = draw.random()
            number = len(done) + len(prompts)
            size = lengths[number % len(lengths)] if lengths else draw.randint(1, max_tokens)
            new = draw.choices(vocabulary, k=size)
            if kind < 0.3 and prompts:
                prompts.append(prompts[-1])
            elif kind < 0.6 and last:
                prompts.append([*draw.choice(last), *new[: max(1, len(new) // 4)]])
            else:
                prompts.append(new)
        room = engine.max_model_len - 2
        prompts = [prompt[-room:] for prompt in prompts]
        requests = [
            GenerateRequest(
                p, Sampling(temperature, draw.randint(1, max_tokens), len(done) + i), frozenset()
            )
            for i, p in enumerate(prompts)
        ]
        completions = engine.generate(requests)
        done += [(p, c.ids, c.logprobs) for p, c in zip(prompts, completions, strict=True)]
        last = [[*p, *c.ids] for p, c in zip(prompts, completions, strict=True)]
    return done


async def sample_from_server(config: ProbeConfig, url: str) -> Waves:
    """Sample from a server in batches of several sizes: new, repeated and continued chats."""
    draw = random.Random(config.seed)
    done = Waves()
    (client,) = connect_clients(ClientConfig(base_url=[url]), config.model.name)
    async with client:
        await client.check_key()
        await client.wait_until_serving()
        chats: list[list[Message]] = []
        while len(done) < config.rollouts:
            before = chats
            chats = []
            for _ in range(min(WAVES[len(done) % len(WAVES)], config.rollouts - len(done))):
                kind = draw.random()
                sizes = config.lengths or [draw.randint(1, config.max_tokens)]
                size = sizes[(len(done) + len(chats)) % len(sizes)]
                text = "".join(draw.choices(LETTERS, k=size))
                if kind < 0.3 and chats:
                    chats.append(chats[-1])
                else:
                    chats.append(
                        [
                            *(draw.choice(before) if kind < 0.5 and before else []),
                            user_message(text),
                        ]
                    )
            turns = await asyncio.gather(
                *(
                    client.chat(
                        Prompt(chat), Sampling(config.temperature, config.max_tokens, len(done) + i)
                    )
                    for i, chat in enumerate(chats)
                )
            )
            done += [
                (turn.prompt_ids, turn.completion.ids, turn.completion.logprobs) for turn in turns
            ]
            chats = [
                [*chat, turn.assistant_message]
                for chat, turn in zip(chats, turns, strict=True)
                if len(chat) < 5
            ]
    return [one for one in done if one[1]]


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def trained_logprobs(model: LanguageModel, rollouts: Waves, temperature: float) -> list[Tensor]:
    """Compute each completion's logprobs as training does, in micro-batches of several sizes."""
    ids = [[*prompt, *own] for prompt, own, _ in rollouts]
    masks = [[False] * len(prompt) + [True] * len(own) for prompt, own, _ in rollouts]
    lengths = [len(x) for x in ids]
    prompts = [prompt_of(*both) for both in zip(ids, masks, strict=True)]
    found = [torch.empty(0)] * len(ids)
    device = model.embed.weight.device
    for k, budget in enumerate(BUDGETS):
        mine = list(range(k, len(ids), len(BUDGETS)))
        parts = split_by_prompt([prompts[i] for i in mine], [lengths[i] for i in mine], budget)
        for members in ([mine[i] for i in part] for part in parts):
            packed = pack_shared([ids[i] for i in members], [masks[i] for i in members], device)
            values = logprobs_of(model, packed, temperature).split(
                [len(rollouts[i][1]) for i in members]
            )
            for i, own in zip(members, values, strict=True):
                found[i] = own
    return found


def logprobs_of(model: LanguageModel, packed: Packed, temperature: float) -> Tensor:
    kept: list[Tensor] = []

    def capture_loss(part: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        kept.append(logprobs.detach().float().cpu())
        return logprobs.sum()

    temperature_N = torch.full(
        (len(packed.targets_N),), temperature, device=packed.targets_N.device
    )
    packed.compute_loss(model, temperature_N, capture_loss)
    return torch.cat(kept)


# ------------------------------------------------------------------------------------------ layer by layer


def first_layer(model: LanguageModel, sampled: LanguageModel, rollouts: Waves) -> str:
    """Return the first layer whose hidden states differ between sampler and trainer, or "".

    Each rollout is decoded alone, and only its decoded tokens are compared. The name includes
    "attention" or "feed-forward" if the sampler returns the results of both parts separately.
    """
    first: tuple[int, str] | None = None
    for prompt, own, _ in rollouts:
        engine = Engine(
            sampled,
            max_batch_size=1,
            max_model_len=len(prompt) + len(own) + 1,
            kv_cache_gib=CACHE_GIB,
        )
        engine.graphs = engine.packed = engine.decoder.packed = None  # layer by layer
        with outputs_of(sampled) as theirs:
            forced = engine.generate(
                [
                    GenerateRequest(
                        prompt,
                        Sampling(1.0, len(own), 0),
                        frozenset(),
                        allows=_allow_only(own, engine),
                    )
                ]
            )
        assert forced[0].ids == own
        packed = pack_shared(
            [[*prompt, *own]],
            [[False] * len(prompt) + [True] * len(own)],
            model.embed.weight.device,
        )
        with outputs_of(model) as ours:
            model(packed.tokens_T, packed.attention.token_positions(), packed.attention)
        for layer, (sampling, training) in enumerate(zip(theirs, ours, strict=True)):
            decoded = sampling[1:]  # the first belongs to the prompt
            is_added = not all(isinstance(pending, Tensor) for _, pending in decoded)
            steps = [_compared_tensors(step, is_added) for step in decoded]
            for part, of_all in _compared_tensors(training[0], is_added).items():
                one = torch.cat([step[part] for step in steps])
                two = of_all[len(prompt) :]
                if not torch.equal(one[: len(two)], two[: len(one)]) and (
                    first is None or (layer, part) < first
                ):
                    first = layer, part
    return "" if first is None else f"layer {first[0]}{first[1]}"


def _compared_tensors(output: tuple[Tensor, Pending], is_added: bool) -> dict[str, Tensor]:
    """Return the tensors of a block's output to compare, by part of the layer.

    These are the residual stream (part "attention") and the update that is not yet added to it
    (part "feed-forward"); or only their sum, if the sampler has added them (`is_added`). With fast
    numerics the sampler and the trainer round differently, so the first layer usually differs.
    """
    stream, pending = output
    if not isinstance(pending, Tensor):
        return {"": _on_host(stream)}
    if pending.dim() == 3:  # partial sums, which the next norm adds
        pending = pending.float().sum(0).to(pending.dtype)
    if is_added:
        return {"": _on_host(stream + pending)}
    return {" (attention)": _on_host(stream), " (feed-forward)": _on_host(pending)}


def _allow_only(own: list[int], engine: Engine) -> Any:
    """Return a token mask function that forces the engine to generate exactly the ids `own`."""

    def allow_ids(ids: list[int]) -> Any:
        row = torch.zeros(engine.sampler.vocab_size, dtype=torch.bool)
        row[own[min(len(ids), len(own) - 1)]] = True
        return row.numpy()

    return allow_ids


def _on_host(x: Tensor) -> Tensor:
    return x.detach().cpu()


@contextmanager
def outputs_of(model: LanguageModel) -> Iterator[list[list[tuple[Tensor, Pending]]]]:
    """Context manager: record each block's output (residual stream, update not yet added to it)."""
    found: list[list[tuple[Tensor, Pending]]] = [[] for _ in model.blocks]

    def record(layer: int, given: Any) -> None:
        if model.spec.implementation != "hone":  # the stream, 1 x T x D, alone or first
            given = (given[0] if isinstance(given, Tensor) else given[0][0], None)
        found[layer].append(given)

    hooks = [
        block.register_forward_hook(lambda _, __, given, i=i: record(i, given))
        for i, block in enumerate(model.blocks)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
