"""Hone's training and decoding against transformers' own, on both implementations, on a GPU or a CPU.

    python benchmarks/hf_models.py [--kinds qwen3 gemma3_text olmo2] [--sequences 64] [--rounds 3] [--profile DIR]

Random weights. Training: forward and backward of the same packed sequences; transformers gets them as one row with a
mask of blocks (sdpa), so that both compute the same tokens. Decoding: greedy completions of all sequences at once;
transformers by `generate` with a padded batch. All sides alternate in one process; two rounds, in which kernels are
compiled and CUDA graphs captured, are not counted. A line of JSON a model and implementation. `--profile` writes a
table of the kernels of decoding.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from peer import finish, median, write_profile
from training import QWEN3_06B

CPU = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GPU = {key: QWEN3_06B[key] for key in CPU}
SHAPE = {"max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {"sliding_window": 512}
PROMPT, COMPLETION = 64, 64
UNCOUNTED_ROUNDS = 2
PACKED = {"cpu": 16, "cuda": 64}  # sequences of a training step


def measure(kind: str, sequences: int, rounds: int, save: Path | None) -> Iterator[dict]:
    """Yield the rates of each implementation, and their ratios to transformers'."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hone.engine.engine import Engine
    from hone.models.attention_layouts import PackedAttention
    from hone.models.families import parse_model_config
    from hone.models.hf import load_model
    from hone.models.spec import read_model_config
    from hone.records import GenerateRequest, Sampling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = SHAPE | (GPU if device == "cuda" else CPU) | (WINDOW if "gemma" in kind else {})
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_config
    config = AutoConfig.for_model(kind, **shape)
    theirs = make(config, attn_implementation="sdpa", dtype=dtype).to(device).eval()
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        theirs.save_pretrained(directory)
        for implementation in ("hone", "transformers"):
            described = read_model_config(directory)
            spec = parse_model_config(described, implementation=implementation)
            models[implementation] = load_model(directory, dtype=dtype, device=device, spec=spec)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(PROMPT, 4 * PROMPT, (PACKED[device],), generator=generator).tolist()
    prompts = torch.randint(3, shape["vocab_size"], (sequences, PROMPT), generator=generator)
    tokens = torch.randint(3, shape["vocab_size"], (sum(lengths),), generator=generator).to(device)
    attention = PackedAttention(lengths, device)
    positions = attention.token_positions()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    causal = torch.ones(2 * [len(owner)], device=device).tril().bool()
    mask = ((owner[:, None] == owner[None]) & causal)[None, None]
    mask = {"full_attention": mask, "sliding_attention": mask} if "gemma" in kind else mask

    def train_theirs() -> None:
        keys = {"position_ids": positions[None], "attention_mask": mask, "use_cache": False}
        hidden = theirs.get_decoder()(input_ids=tokens[None], **keys).last_hidden_state
        hidden.float().square().mean().backward()

    batch = prompts.to(device)

    def decode_theirs() -> None:
        keys = {"min_new_tokens": COMPLETION, "max_new_tokens": COMPLETION, "do_sample": False}
        theirs.generate(batch, attention_mask=torch.ones_like(batch), **keys)

    def train(model) -> None:
        model(tokens, positions, attention).float().square().mean().backward()

    sampling = Sampling(0.0, COMPLETION, seed=0)
    requests = [GenerateRequest(ids, sampling, frozenset()) for ids in prompts.tolist()]
    cache = 2.0 if device == "cuda" else 0.5
    functions: dict[str, Callable] = {"train": train_theirs, "decode": decode_theirs}
    for name, model in models.items():
        engine = Engine(model, max_batch_size=sequences, max_model_len=256, kv_cache_gib=cache)
        functions[f"train {name}"] = lambda model=model: train(model)
        functions[f"decode {name}"] = lambda engine=engine: engine.generate(requests)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(UNCOUNTED_ROUNDS + rounds):
        for name, function in functions.items():
            spent = time_call(function, device)
            if number >= UNCOUNTED_ROUNDS:
                times[name].append(spent)
    for name in models if save is not None else ():
        write_profile(functions[f"decode {name}"], save / f"{kind}-{name}.txt")
    middle = {name: median(values) for name, values in times.items()}
    for name in models:
        yield {
            "implementation": name,
            "trained_tokens_per_s": len(tokens) / middle[f"train {name}"],
            "trained_ratio": middle["train"] / middle[f"train {name}"],
            "decoded_tokens_per_s": sequences * COMPLETION / middle[f"decode {name}"],
            "decoded_ratio": middle["decode"] / middle[f"decode {name}"],
        }


def time_call(function: Callable, device: str) -> float:
    """Return the seconds of a call, with all that it starts on a GPU."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["qwen3", "gemma3_text", "olmo2"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    for kind in args.kinds:
        for row in measure(kind, args.sequences, args.rounds, args.profile):
            finish(model=kind, **row)


if __name__ == "__main__":
    main()
