"""Two RL steps on a fixed batch, their metrics as JSON: run alone or under torchrun by test_training.py.

usage: rl_step.py OUT [KEY=JSON …] of TrainerConfig
"""

import json
import os
import sys
from pathlib import Path

import torch

from hone.config.rl_config import TrainerConfig
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import Batch, Sample
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import Export

ranks = Ranks.join_ranks(60.0)
model = Transformer(
    ModelSpec(40, 32, 48, 2, 2, 1, 16, 1e-6, make_plain_layers(100.0, 16, 2), True, 64, 0.3, False)
)
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
given = {key: json.loads(value) for key, value in (word.split("=") for word in sys.argv[2:])}
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
