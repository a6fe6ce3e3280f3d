"""Two RL steps on a fixed batch, their metrics as JSON: run alone or under torchrun by test_training.py.

usage: rl_step.py OUT [KEY=JSON …] of TrainerConfig, and family="qwen3_5" for layers with the gated delta rule,
"qwen3_moe" for experts, "gemma4" for layers that share keys
"""

import json
import os
import sys
from pathlib import Path

import torch

from hone.config.rl_config import TrainerConfig
from hone.models.families import parse_model_config
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.hf import model_class
from hone.models.spec import ModelSpec, make_plain_layers
from hone.records import Batch, Sample
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import Export

ranks = Ranks.join_ranks(60.0)
given = {key: json.loads(value) for key, value in (word.split("=") for word in sys.argv[2:])}
DELTA = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 40,
    "vocab_size_per_layer_input": 40,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
SIZES = (40, 32, 48, 2, 2, 1, 16, 1e-6, make_plain_layers(100.0, 16, 2), True, 64, 0.3, False)
SPECS = {
    "qwen3": ModelSpec(*SIZES),
    "qwen3_5": parse_model_config(DELTA),
    "gemma4": parse_model_config(GEMMA4),
    "gpt_oss": parse_model_config(GPT_OSS),
    "qwen3_moe": Qwen3Moe(*SIZES, experts=4, experts_per_token=2, normalizes=True),
}
spec = SPECS[given.pop("family", "qwen3")]
model = model_class(spec)(spec)
model.init_weights(torch.Generator().manual_seed(0))
draw = torch.Generator().manual_seed(1)
samples = []
for i in range(15):
    ids = [*range(4 + i // 4), *torch.randint(0, 40, (3 + i % 5,), generator=draw).tolist()]
    n = 4 + i // 4
    logprobs = [0.0] * n + (-3 - torch.rand(len(ids) - n, generator=draw)).tolist()
    env = "other" if i % 7 == 0 else ""
    samples.append(
        Sample(ids, [False] * n + [True] * (len(ids) - n), logprobs, (-1.0) ** i, 1.0, env=env)
    )
# A prompt that is longer than half of a micro-batch: some ranks that divide its tokens have no targets.
ids = [*range(30), 1, 2, 3, 4]
samples.append(
    Sample(ids, [False] * 30 + [True] * 4, [0.0] * 30 + [-3.0] * 4, 1.0, 1.0, env="lone")
)
dtype = getattr(torch, given.pop("dtype", "float32"))
config = {
    "micro_batch_tokens": 40,
    "optim": {"lr": 1e-3, "type": given.pop("optimizer", "adamw")},
    **given,
}
trainer = PolicyTrainer(model.to(dtype), TrainerConfig.model_validate(config), 10, ranks=ranks)
values: dict[str, float] = {"ranks": ranks.count}
for step in (1, 2):
    values |= {
        f"{step}/{name}": value for name, value in trainer.step(Batch(step, samples)).items()
    }
# What the files of all ranks have of the second step's tokens.
own = trainer.trained
sums = [0.0, 0.0] if own is None else [float(len(own.logprobs)), float(own.logprobs.sum())]
count, total = ranks.sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
values |= {"trained/count": count, "trained/logprobs": total}
export = Export(model, ranks, torch.float32)()
if export is not None:
    values |= {f"weights/{name}": float(p.detach().norm()) for name, p in export.named_parameters()}
values = {
    name.split("/", 1)[1] if "time/" in name or "perf/" in name else name: x
    for name, x in values.items()
}
if ranks.is_first:
    Path(sys.argv[1]).write_text(json.dumps(values))
ranks.leave_ranks()
os._exit(0)  # as the commands do: torch's threads may abort a process that ends the long way
