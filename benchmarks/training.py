"""The same training work for ours and peers: one process a trainer, one line of JSON at its end.

    python training.py rl ours TOKENS           micro-batches of so many
    python training.py groups ours PROMPT COMPLETION SIZE [repeated]
    python training.py sft ours COUNT [lora] [recompute]      so many micro-batches a step
    python training.py rl hf|hf_compiled
    python training.py sft trl ATTENTION STRATEGY      needs trl and liger-kernel; both as they name them

Qwen3-0.6B's shape, random weights, random tokens, bf16 with AdamW. `rl`: a step on 128 sequences with 256 targets each.
`sft`: a step on documents of 512 to 2,048 tokens, 65,536 in all. Every token is a target. `groups`: 128 sequences in
groups of SIZE with a prompt in common, which is computed once, or with `check_repeated_rewards` once a sequence.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
}
SEQUENCES, TARGETS, TOKENS = 128, 256, 65536
WARM_UP, STEPS = 3, 10


def documents(step: int) -> list[list[int]]:
    """Of 512 to 2,048 tokens, the last cut so that they are 65,536 in all."""
    draw, lengths = random.Random(step), []
    while sum(lengths) < TOKENS:
        lengths.append(draw.randint(512, 2048))
    lengths[-1] -= sum(lengths) - TOKENS
    return [draw.choices(range(1000, 150_000), k=n) for n in lengths]


def sequences(step: int) -> list[list[int]]:
    draw = random.Random(step)
    return [draw.choices(range(1000, 150_000), k=TARGETS + 1) for _ in range(SEQUENCES)]


def flops(lengths: list[int], targets: int, shape: dict = QWEN3_06B) -> float:
    """Of a step: products of all tokens, causal attention, the head where there is a target; three times for training.

    What is computed once more is not counted.
    """
    from hone.models.families import parse_model_config

    spec = parse_model_config(shape)
    context = sum(n * n for n in lengths) / (2 * sum(lengths))
    return 3 * spec.flops_per_token(context, head=targets / sum(lengths)) * sum(lengths)


def gpu_seconds(work: Callable[[], object]) -> float:
    """Seconds that the GPU takes for what `work` launches, which has ended then."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def matrix_rate() -> float:
    """FLOP a second of a large product in bf16."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(gpu_seconds(lambda: a @ b) for _ in range(30))


def measure(step, tokens_of, flops_of, laps=None) -> dict:
    """Times steps 1 … 13, whose first ones warm up; then three more with the device waited for at each lap."""
    import torch

    torch.cuda.synchronize()
    start, times, work = time.perf_counter(), [], []
    for i in range(1, WARM_UP + STEPS + 1):
        step(i)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        work.append((tokens_of(i), flops_of(i), times[-1]))
        start = time.perf_counter()
    rates = [tokens / seconds for tokens, _, seconds in work[WARM_UP:]]
    used = [needed / seconds for _, needed, seconds in work[WARM_UP:]]
    result = {
        "tokens_per_second": statistics.median(rates),
        "first_step": times[0],
        "step": statistics.median(times[WARM_UP:]),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "spread": (max(rates) - min(rates)) / max(rates),
        "flops_per_second": statistics.median(used),
    }
    if laps is not None:
        laps.is_on = True
        laps.clear_laps()
        for i in range(3):
            step(WARM_UP + STEPS + 1 + i)
        result["laps"] = {name: seconds / 3 for name, seconds in laps.seconds.items()}
    return result | {"matrix_rate": matrix_rate()}


def our_model(shape: dict = QWEN3_06B):
    import torch

    from hone.models.families import parse_model_config
    from hone.models.transformer import Transformer

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer(parse_model_config(shape))
    torch.set_default_dtype(torch.float32)
    model.init_weights(torch.Generator("cuda").manual_seed(0))
    return model


def our_rl(micro_batch_tokens: int) -> dict:
    return our_steps(
        sequences, TARGETS, micro_batch_tokens, flops([TARGETS] * SEQUENCES, SEQUENCES * TARGETS)
    )


def our_groups(prompt: int, completion: int, size: int, is_repeated: bool) -> dict:
    def groups(step: int) -> list[list[int]]:
        draw = random.Random(step)
        some = lambda n: draw.choices(range(1000, 150_000), k=n)  # noqa: E731
        return [
            shared + some(completion)
            for _ in range(SEQUENCES // size)
            for shared in [some(prompt)] * size
        ]

    whole = flops([prompt + completion - 1] * SEQUENCES, completion * SEQUENCES)
    again = flops([prompt] * (SEQUENCES - SEQUENCES // size), 0)
    return our_steps(
        groups,
        completion,
        32_896,
        whole - (0 if is_repeated else again),
        shares_prompts=not is_repeated,
    )


def our_steps(
    sequences_of,
    targets: int,
    micro_batch_tokens: int,
    flops: float,
    shares_prompts: bool | None = None,
) -> dict:
    """Steps on sequences that end with so many targets each; `flops` that one needs."""
    from hone.config.rl_config import TrainerConfig
    from hone.records import Batch, Sample
    from hone.trainer.rl.trainer import PolicyTrainer

    trainer = PolicyTrainer(our_model(), TrainerConfig(micro_batch_tokens=micro_batch_tokens), 1000)
    if shares_prompts is not None:
        trainer.shares_prompts = shares_prompts
    batches = {}
    for i in range(1, WARM_UP + STEPS + 4):
        draw = random.Random(i)
        rows = [
            Sample(
                x,
                [False] * (len(x) - targets) + [True] * targets,
                [-12.0] * len(x),
                draw.gauss(0, 1),
                1.0,
            )
            for x in sequences_of(i)
        ]
        batches[i] = Batch(i, rows)
    # Of each step: those that predict something
    tokens = sum(len(sample.ids) - 1 for sample in batches[1].samples)
    return measure(
        lambda i: trainer.step(batches[i]), lambda i: tokens, lambda i: flops, trainer.laps
    )


def our_sft(micro_batches: int, **options) -> dict:

    import torch

    from hone.config.sft_config import SFTConfig
    from hone.models.loading import Loaded
    from hone.models.lora import add_lora
    from hone.trainer.optim import Optimizer
    from hone.trainer.sft.objectives import CrossEntropy
    from hone.trainer.sft.train import Trainer

    data = {
        "fake": True,
        "seq_len": TOKENS // micro_batches,
        "batch_size": micro_batches,
        "micro_batch_size": 1,
    }
    config = SFTConfig(model={"name": "random"}, data=data, **options)
    model = our_model()
    if config.lora:
        add_lora(model, config.lora, 0)
    optimizer = Optimizer(model, config.optim)
    loaded = Loaded(model, None, Path(), torch.bfloat16)
    trainer = Trainer(config, loaded, optimizer, CrossEntropy(), Path("bad_steps"))

    def rows(i: int) -> list:
        """Documents dealt to rows in turn; a row's tokens are its inputs, so each has a first token besides."""
        whole = [([1000, *ids], [False] + [True] * len(ids)) for ids in documents(i)]
        return [whole[k::micro_batches] for k in range(micro_batches)]

    steps = {i: rows(i) for i in range(1, WARM_UP + STEPS + 4)}
    work = {i: flops([len(x) for x in documents(i)], TOKENS) for i in steps}
    return measure(
        lambda i: trainer.train_step(i, 1000, iter([steps[i]])),
        lambda i: TOKENS,
        work.__getitem__,
        trainer.laps,
    )


def hf_rl(compiled: bool) -> dict:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{k: v for k, v in QWEN3_06B.items() if k not in ("model_type", "architectures")}
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def loss_of(ids: torch.Tensor, advantage: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1], use_cache=False).logits
        logprobs = -torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        return -(torch.exp(logprobs.view_as(old) - old) * advantage[:, None]).mean()

    function = torch.compile(loss_of) if compiled else loss_of

    def step(i: int) -> None:
        ids, advantage = (
            torch.tensor(sequences(i), device="cuda"),
            torch.randn(SEQUENCES, device="cuda"),
        )
        function(ids, advantage, torch.full((SEQUENCES, TARGETS), -12.0, device="cuda")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    tokens = SEQUENCES * TARGETS
    return measure(step, lambda i: tokens, lambda i: flops([TARGETS] * SEQUENCES, tokens))


def trl_sft(attention: str, strategy: str) -> dict:
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    config = Qwen3Config(
        **{k: v for k, v in QWEN3_06B.items() if k not in ("model_type", "architectures")}
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    steps = WARM_UP + STEPS
    rows = [ids for i in range(1, steps + 4) for ids in documents(i)]
    width = 2048
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=TOKENS // width,
        max_steps=steps,
        learning_rate=1e-6,
        bf16=True,
        packing=True,
        packing_strategy=strategy,
        max_length=width,
        use_liger_kernel=True,
        torch_compile=attention != "sdpa_eager",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        optim="adamw_torch_fused",
        dataset_num_proc=None,
    )
    seconds, tokens = [], []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_, **__):
            torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)

    class Counted(SFTTrainer):
        def compute_loss(self, model, inputs, *rest, **named):
            # Padding too, if there is any: to the peer's favour
            tokens.append(inputs["input_ids"].numel())
            return super().compute_loss(model, inputs, *rest, **named)

    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, "<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    data = Dataset.from_dict({"input_ids": rows})
    trainer = Counted(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[Timer()]
    )
    trainer.train()
    rates = [n / t for n, t in zip(tokens[WARM_UP:], seconds[WARM_UP:], strict=True)]
    return {
        "tokens_per_second": statistics.median(rates),
        "first_step": seconds[0],
        "step": statistics.median(seconds[WARM_UP:]),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "spread": (max(rates) - min(rates)) / max(rates),
    }


def main(work: str, trainer: str, *options: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    if work == "groups":
        result = our_groups(*map(int, options[:3]), "repeated" in options)
    elif trainer == "ours":
        more = {"lora": {"rank": 16}} if "lora" in options else {}
        more |= {"activation_checkpointing": True} if "recompute" in options else {}
        result = our_rl(int(options[0])) if work == "rl" else our_sft(int(options[0]), **more)
    elif trainer == "trl":
        result = trl_sft(*options)
    else:
        result = hf_rl(trainer == "hf_compiled")
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
