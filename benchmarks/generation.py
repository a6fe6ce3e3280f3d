"""The same generation work for ours and a peer: workloads, and a worker that runs them when told to.

    python generation.py ours|vllm|transformers MODEL_DIR [LENGTH] < commands
    a line in: {"workload": NAME, "logprobs": BOOL, "save": PATH?}      a line out: {"seconds": S, "tokens": N}

Tokens are random, ends of sequences are ignored, and every sequence is as long as its workload says. LENGTH is the most
tokens of a sequence, 2,048 unless given. vLLM makes up weights for a directory that has none.
"""

import gc
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = range(1000, 150_000)


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    outputs: list[int]  # tokens to generate, for each prompt


def workload(name: str, seed: int = 0, vocabulary: range = VOCABULARY) -> Workload:
    """`batch_N`: N prompts of 64, 128 out; `groups`: 8 prompts of 512, 16 samples each, 128 out; `mixed`: 256 of 100 to
    1,024 in and out; `tiny_N`: N prompts of 30, 64 out; `each_N_P_O`: N prompts of P, O out."""
    draw = random.Random(f"{name} {seed}")

    def prompt(length: int) -> list[int]:
        return draw.choices(vocabulary, k=length)

    kind, _, number = name.partition("_")
    if kind == "batch":
        return Workload([prompt(64) for _ in range(int(number))], [128] * int(number))
    if kind == "tiny":
        return Workload([prompt(30) for _ in range(int(number))], [64] * int(number))
    if kind == "each":
        batch, length, output = map(int, number.split("_"))
        return Workload([prompt(length) for _ in range(batch)], [output] * batch)
    if name == "groups":
        return Workload(
            [p for p in (prompt(512) for _ in range(8)) for _ in range(16)], [128] * 128
        )
    if name == "mixed":
        lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
        return Workload([prompt(i) for i, _ in lengths], [o for _, o in lengths])
    raise ValueError(f"no workload {name!r}")


def ours(model_dir: str, length: int):
    import torch

    from hone.engine.engine import Engine
    from hone.models.hf import load_model
    from hone.records import GenerateRequest, Sampling

    on_gpu = torch.cuda.is_available()
    where = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
    has_weights = any(Path(model_dir).glob("*.safetensors"))
    model = load_model(Path(model_dir), random_init=not has_weights, **where)
    limit = min(length, model.spec.max_position_embeddings)
    engine = Engine(
        model, max_batch_size=512, max_model_len=limit, kv_cache_gib=60.0 if on_gpu else 8.0
    )

    def run(work: Workload, logprobs: bool) -> list[tuple[list[int], list[float]]]:
        requests = [
            GenerateRequest(prompt, Sampling(1.0, n, seed=i), frozenset())
            for i, (prompt, n) in enumerate(zip(work.prompts, work.outputs, strict=True))
        ]
        engine.set_version(engine.version + 1)  # nothing is reused from the run before
        return [(done.ids, done.logprobs) for done in engine.generate(requests)]

    return run, engine


def vllm(model_dir: str, length: int):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_dir,
        skip_tokenizer_init=True,
        max_model_len=length,
        gpu_memory_utilization=0.8,
        max_num_seqs=512,
        disable_log_stats=True,
        load_format="auto" if any(Path(model_dir).glob("*.safetensors")) else "dummy",
    )

    def run(work: Workload, logprobs: bool) -> list[tuple[list[int], list[float]]]:
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=n,
                ignore_eos=True,
                logprobs=0 if logprobs else None,
                detokenize=False,
            )
            for n in work.outputs
        ]
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in work.prompts], sampling, use_tqdm=False
        )
        results = [(list(o.outputs[0].token_ids), o.outputs[0].logprobs or []) for o in outputs]
        return [
            (ids, [place[i].logprob for i, place in zip(ids, logprobs)])
            for ids, logprobs in results
        ]

    return run, llm


def transformers(model_dir: str, length: int):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)

    def run(work: Workload, logprobs: bool) -> list[tuple[list[int], list[float]]]:
        ids = torch.tensor(work.prompts)
        n = work.outputs[0]
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=n,
                min_new_tokens=n,
            )
        return [(row, []) for row in out[:, ids.shape[1] :].tolist()]

    return run, model


def main(engine: str, model_dir: str, length: str = "2048") -> None:
    size = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    vocabulary = range(5, 90) if size < 1000 else VOCABULARY[: size - 1000]
    run, _ = {"ours": ours, "vllm": vllm, "transformers": transformers}[engine](
        model_dir, int(length)
    )
    run(Workload([[vocabulary[0]] * 8], [2]), True)
    gc.freeze()  # or now and then the collector spends 0.1 s on all that was imported, in one engine or the other
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        work = workload(command["workload"], command.get("seed", 0), vocabulary)
        start = time.perf_counter()
        done = run(work, command.get("logprobs", True))
        seconds = time.perf_counter() - start
        if "save" in command:
            Path(command["save"]).write_text(
                json.dumps({"prompts": work.prompts, "completions": done})
            )
        print(
            json.dumps({"seconds": seconds, "tokens": sum(len(ids) for ids, _ in done)}), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
