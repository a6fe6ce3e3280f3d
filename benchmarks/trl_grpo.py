"""The peer of rl_step_cpu.py: TRL's GRPOTrainer with its own generation. Prints seconds a step as JSON.

usage: trl_grpo.py MODEL_DIR STEPS
"""

import json
import random
import sys
import tempfile
import time

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


def reward(completions, **_):
    return [len(completion[0]["content"]) % 7 / 7.0 for completion in completions]


def main(model: str, steps: int) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=14)) for _ in range(400)]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=128, num_generations=16, max_completion_length=24,
        max_steps=steps, learning_rate=1e-6, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        gradient_checkpointing=False, temperature=1.0, beta=0.0,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
    timer = StepTimer()
    GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[timer]).train()
    print(json.dumps({"seconds": timer.seconds[2:]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
