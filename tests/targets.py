"""Compiles what `inference` and `rl` launch before their first step, for a GPU that is not here.

    python -m tests.targets 8.9 [0.6B]

Two layers of the model go through both rehearsals on the CPU, whose tensors say that they are a GPU's; kernels are
compiled and not run, and products come out as zeros. Prints a line of JSON: how many kernels, and what is wrong with
which of them. What the kernels compute is not looked at, nor how fast they would be.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hone.config.rl_config import TrainerConfig
from hone.engine import cache
from hone.engine.engine import Engine
from hone.engine.graphs import Key
from hone.engine.prefill import PrefillChunk
from hone.engine.token_sampler import TokenSampler
from hone.engine.warm_up import compile_kernels, rehearse_snapshots
from hone.kernels import gpu
from hone.models import attention_layouts
from hone.models.families import parse_model_config
from hone.models.hf import model_class
from hone.models.language_model import LanguageModel
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.trainer.rl.trainer import PolicyTrainer

CARDS = {  # by compute capability: one that has it, its multiprocessors, KiB of shared memory that a block can have
    "8.0": ("A100", 108, 163),
    "8.6": ("RTX 3090", 82, 99),
    "8.9": ("RTX 4090", 128, 99),
    "9.0": ("H100", 132, 227),
    "10.0": ("B200", 148, 227),
    "12.0": ("RTX 5090", 170, 99),
}
SHAPES = {  # as Qwen3-0.6B, Llama-3.2-1B and Qwen3-8B: width, inner width, heads, key heads, size of a head
    "0.6B": (1024, 3072, 16, 8, 128),
    "1B": (2048, 8192, 32, 8, 64),
    "8B": (4096, 12288, 32, 8, 128),
}
EXPERTS = "experts"  # a mixture of experts: 64 of 512
HYBRID = "hybrid"  # as Qwen3.5-4B: the gated delta rule, and attention with a gate
GPT_OSS = "gpt-oss"  # as gpt-oss-20b: experts by inputs, with biases and clamped gates; sinks
GEMMA4 = "gemma4"  # as Gemma 4 E2B: heads of 256 and 512, inputs per layer, shared keys
CONFIGS = {
    EXPERTS: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 0,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "num_key_value_heads": 8,
    },
    HYBRID: {
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    GPT_OSS: {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    GEMMA4: {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 4096,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}
# Only their prefill and two decode steps are compiled: their other kernels are other models' too.
REHEARSED_IN_PART = (HYBRID, GEMMA4)
EXPERT_CARDS = ("8.6", "9.0")  # least and most shared memory


class _Driver:
    """What Triton asks about a device in order to compile for it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class _Nothing(TorchDispatchMode):
    """Memory that kernels would fill is zeros, and so are products, which a CPU would take minutes for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm") and "out" in kwargs:
            return kwargs["out"].zero_()
        if name == "_grouped_mm":
            one, two, ends = args[0], args[1], args[2]
            groups = () if two.dim() == 3 else (len(ends),)
            return one.new_zeros(*groups, one.shape[0], two.shape[-1])
        if name in ("mm", "addmm"):
            one, two, *rest = args[name == "addmm" :]
            kind = (
                rest[0]
                if rest and isinstance(rest[0], torch.dtype)
                else kwargs.get("out_dtype", one.dtype)
            )
            return torch.zeros(one.shape[0], two.shape[1], dtype=kind)
        out = func(*args, **kwargs)
        return out.zero_() if name in ("empty", "empty_like", "empty_strided", "new_empty") else out


def pretend(capability: str) -> None:
    """From now on this process believes that it has such a card."""
    major, minor = map(int, capability.split("."))
    _, processors, _ = CARDS[capability]
    driver.set_active(_Driver((major, minor)))  # type: ignore[arg-type]
    # These remember what they have found
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda: (major, minor)),
        mock.patch(
            "torch.cuda.get_device_properties",
            lambda: SimpleNamespace(multi_processor_count=processors),
        ),
    ):
        for asked in (
            gpu.has_dependent_launch,
            gpu.processors,
            gpu.shared_memory,
            gpu._copies_to_shared_memory,
        ):
            asked()
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    cache.PAGE["cpu"] = cache.PAGE["cuda"]
    attention_layouts.flash_varlen = lambda q, *_: 0 * q  # torch's own


def compiled(work: Callable[[], None]) -> tuple[list[Any], set[str]]:
    """The kernels that this launches, and what those say that cannot be compiled."""
    found, failed, run = dict[int, Any](), set[str](), JITFunction.run

    def only_compile(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        try:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            failed.add(f"{function.fn.__name__}: {type(error).__name__}: {str(error)[-300:]}")
            return None
        found[id(kernel)] = kernel
        return kernel

    with mock.patch.object(JITFunction, "run", only_compile):
        work()
    return [*found.values()], failed


def build_model(name: str) -> LanguageModel:
    if name in CONFIGS:
        config = {"vocab_size": 4096, "num_hidden_layers": 2} | CONFIGS[name]
        with torch.device("meta"):
            spec = parse_model_config(config)
            model = model_class(spec)(spec)
        # No memory for weights: nothing is multiplied
        return model.bfloat16().to_empty(device="cpu")
    width, inner, heads, key_heads, size = SHAPES[name]
    numbers = (
        4096,
        width,
        inner,
        2,
        heads,
        key_heads,
        size,
        1e-6,
        make_plain_layers(1e6, size, 2),
        True,
        4096,
        0.02,
        False,
    )
    model = Transformer(ModelSpec(*numbers, qk_norm="head" if size == 128 else None)).bfloat16()
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def rehearsals(name: str) -> None:
    model = build_model(name)
    with _Nothing():
        engine = Engine(model, max_batch_size=256, max_model_len=4096, kv_cache_gib=0.5)
        assert engine.graphs is not None, "not all of a step is done by kernels of the GPU"
        if name in REHEARSED_IN_PART:  # what differs from other models, in prefill and decode steps
            with torch.no_grad():
                engine.prefill.run_chunks([PrefillChunk([0] * 16, [0], 0, 16)], [15])
                rehearse_snapshots(engine)
                for rows, parts in ((128, 0), (1, 8)):
                    way = Key(rows, TokenSampler.PLAIN, False, 0, parts, False)
                    engine.decoder.decode_step(rows, way.kind, False, engine.graphs.rows_by(way))
        else:
            compile_kernels(engine, 256)
        PolicyTrainer(model, TrainerConfig(), 1).compile_kernels()


def main(capability: str, name: str = "0.6B") -> None:
    pretend(capability)
    kernels, wrong = compiled(lambda: rehearsals(name))
    most = CARDS[capability][2] * 2**10
    for kernel in kernels:
        words = f"{kernel.name}: {kernel.metadata.shared} bytes of shared memory, there are {most}"
        wrong |= {words} if kernel.metadata.shared > most else set()
    print(json.dumps({"kernels": len(kernels), "wrong": sorted(wrong)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
