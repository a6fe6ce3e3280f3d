"""Families on Hone's own blocks on one GPU: decoding and training against the limits of the hardware.

    python benchmarks/families_gpu.py [--models Gemma-3-1B …] [--batch 32 …] [--tokens 16384] [--profile DIR]

Shapes of published models, random weights, bf16. Decoding: `--batch` sequences, `--prompt` tokens, 128 more; the
time of a step is the difference between completions of 129 tokens and of one, over 128. Its limit is the larger of the
time to read the weights, keys and values once (and to write states, too), and the time of the arithmetic at the rate
of a large product.
Of a mixture of experts, only experts that a token chooses are read; their expected number counts.
`first_tokens_ms` is the time of completions of one token: prefill, mostly.
Training: forward, loss and backward of one micro-batch of `--tokens` tokens in sequences of `--sequence`, every token a
target, without the optimizer; MFU is its FLOPs over that rate. `--profile` writes a table of the kernels of both.
"""

import argparse
import json
import random
from pathlib import Path

from model_shapes import MODELS, measure_bandwidth, step_limits
from peer import finish, median, write_profile
from training import gpu_seconds, matrix_rate

COMPLETION = 128
ROUNDS = 5


def describe(kind: str, layers: int, hidden: int, feed_forward: int, heads: int, keys: int, **more):
    """Return a config.json of a family: number of layers, sizes, query heads, key/value heads."""
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        **more,
    }


GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "vocab_size": 262144}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}


def describe_gemma4(
    layers: int, hidden: int, feed_forward: int, keys: int, every: int, shared: int
):
    """Return a config.json of Gemma 4's E-series; each `every`-th layer has full attention."""
    kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
    return describe(
        "Gemma4",
        layers,
        hidden,
        feed_forward,
        8,
        keys,
        head_dim=256,
        global_head_dim=512,
        vocab_size=262144,
        sliding_window=512,
        layer_types=kinds * (layers // every),
        num_kv_shared_layers=shared,
        final_logit_softcapping=30.0,
    )


FAMILIES = {
    "Qwen3-0.6B": MODELS["Qwen3-0.6B"],
    "Qwen3-1.7B": MODELS["Qwen3-1.7B"],  # for comparison: the blocks of before
    "MoE-2.7B": MODELS["MoE-2.7B"],
    "Qwen3-30B-A3B": MODELS["Qwen3-30B-A3B"],
    "Qwen3.5-0.8B": MODELS["Qwen3.5-0.8B"],
    "Qwen3.5-4B": MODELS["Qwen3.5-4B"],
    "Qwen3.5-35B-A3B": MODELS["Qwen3.5-35B-A3B"],
    "gpt-oss-20B": MODELS["gpt-oss-20B"],
    "Gemma-4-E2B": describe_gemma4(35, 1536, 6144, 1, 5, 20) | {"use_double_wide_mlp": True},
    "Gemma-4-E4B": describe_gemma4(42, 2560, 10240, 2, 6, 18),
    "Gemma-3-1B": describe("Gemma3", 26, 1152, 6912, 4, 1, **GEMMA, sliding_window=512),
    "Gemma-3-4B": describe("Gemma3", 34, 2560, 10240, 8, 4, **GEMMA, sliding_window=1024),
    "Gemma-2-2B": describe("Gemma2", 26, 2304, 9216, 8, 4, **GEMMA, sliding_window=4096),
    "OLMo-2-1B": describe("Olmo2", 16, 2048, 8192, 16, 16, tie_word_embeddings=False),
    "OLMo-3-7B": describe("Olmo3", 32, 4096, 11008, 32, 32, tie_word_embeddings=False),
    "Mistral-7B": describe("Mistral", 32, 4096, 14336, 32, 8, vocab_size=32000, sliding_window=4096)
    | {"tie_word_embeddings": False},
    "Ministral-3-3B": describe("Ministral3", 26, 3072, 9216, 32, 8, vocab_size=131072)
    | {"rope_parameters": YARN},
    "SmolLM3-3B": describe("SmolLM3", 36, 2048, 11008, 16, 4),
    "Granite-3.3-2B": describe("Granite", 40, 2048, 8192, 32, 8, **GRANITE, vocab_size=49159)
    | {"head_dim": 64},
    "Phi-4-mini": describe("Phi3", 32, 3072, 8192, 24, 8, vocab_size=200064)
    | {"rope_parameters": LONG_ROPE | {"partial_rotary_factor": 0.75}}
    | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096},
}


def build_model(config: dict):
    import torch

    from hone.models.families import parse_model_config
    from hone.models.hf import empty_model

    model = empty_model(parse_model_config(config), torch.bfloat16, "cuda")
    model.init_weights(torch.Generator("cuda").manual_seed(0))
    return model


def measure_decoding(model, batch: int, prompt: int, save: Path | None) -> tuple[float, float]:
    """Return the seconds of a decode step, and of completions of one token."""
    from hone.engine.engine import Engine
    from hone.records import GenerateRequest, Sampling

    # Room for the keys and values of all sequences, and pages that are not full
    room = 2 * batch * model.spec.cache_numbers * (prompt + COMPLETION + 128) / 2**30
    engine = Engine(
        model, max_batch_size=batch, max_model_len=prompt + 448, kv_cache_gib=max(1.0, room)
    )
    draw = random.Random(0)

    def generate(count: int) -> float:
        prompts = [draw.choices(range(1000, 30_000), k=prompt) for _ in range(batch)]
        requests = [
            GenerateRequest(ids, Sampling(1.0, count, seed=i, ignore_eos=True), frozenset())
            for i, ids in enumerate(prompts)
        ]
        return gpu_seconds(lambda: engine.generate(requests))

    times = {count: [generate(count) for _ in range(ROUNDS)][2:] for count in (COMPLETION + 1, 1)}
    if save is not None:
        write_profile(lambda: generate(33), save)
    first = median(times[1])
    return (median(times[COMPLETION + 1]) - first) / COMPLETION, first


def measure_training(model, tokens: int, sequence: int, save: Path | None) -> float:
    """Return the seconds of forward, loss and backward of a micro-batch."""
    import torch

    from hone.kernels.head import head_loss
    from hone.models.attention_layouts import PackedAttention

    draw = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(1000, 30_000, (tokens,), generator=draw, device="cuda")
    temperature = torch.ones(tokens, device="cuda")

    def step() -> None:
        attention = PackedAttention([sequence] * (tokens // sequence), "cuda")
        hidden = model(ids, attention.token_positions(), attention)
        loss = head_loss(
            hidden,
            model.head_weight_VD,
            ids,
            temperature,
            lambda part, logprobs, entropies: -logprobs.sum() / tokens,
            cap=model.spec.logit_cap,
        )
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    times = [gpu_seconds(step) for _ in range(ROUNDS)][2:]
    if save is not None:
        write_profile(step, save)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--no-decoding", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    import torch

    rate, flops = measure_bandwidth(), matrix_rate()
    print(json.dumps({"bytes_per_s": rate, "flop_per_s": flops}), flush=True)
    for name in args.models:
        save = {}
        for work in ("decode", "train"):
            save[work] = args.profile and args.profile / f"{name}-{work}.txt"
        model = build_model(FAMILIES[name])
        spec = model.spec
        figures = {}
        for batch in [] if args.no_decoding else args.batch:
            decode, first = measure_decoding(model, batch, args.prompt, save["decode"])
            limit = max(step_limits(spec, batch, args.prompt + COMPLETION / 2, rate, flops))
            end = f"_{batch}" if len(args.batch) > 1 else ""
            figures |= {f"decode_step_ms{end}": 1e3 * decode, f"decode_limit_ms{end}": 1e3 * limit}
            figures[f"decode_share{end}"] = limit / decode
            figures[f"first_tokens_ms{end}"] = 1e3 * first
            print(name, batch, figures, flush=True)
            torch.cuda.empty_cache()
        if not args.no_training:
            train = measure_training(model, args.tokens, args.sequence, save["train"])
            needed = 3 * spec.flops_per_token(args.sequence / 2) * args.tokens
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            figures["trained_tokens_per_s"] = args.tokens / train
            figures["mfu"] = needed / train / flops
        finish(model=name, parameters=spec.parameter_count(), **figures)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
