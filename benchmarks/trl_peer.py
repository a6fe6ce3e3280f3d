"""The peer, TRL, as a program of its own environment. Prints seconds a step (and tokens) as JSON.

usage: trl_peer.py grpo MODEL_DIR STEPS                                   for rl_step_cpu.py
       trl_peer.py sft MODEL_DIR DATA.jsonl BATCH STEPS padded|free       for sft_cpu.py
"""

import json
import random
import sys
import tempfile
import time

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

COMMON = {
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "gradient_checkpointing": False,
}


class StepTimer(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


def reward(completions, **_):
    return [len(completion[0]["content"]) % 7 / 7.0 for completion in completions]


def grpo(directory: str, steps: int) -> dict:
    """8 prompts of 14 characters x 16 rollouts of up to 24 new tokens, with TRL's own generation."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=14)) for _ in range(400)]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=128, num_generations=16, max_completion_length=24,
        max_steps=steps, learning_rate=1e-6, temperature=1.0, beta=0.0, **COMMON,
    )  # fmt: skip
    timer = StepTimer()
    GRPOTrainer(model=directory, reward_funcs=reward, args=arguments, train_dataset=data, callbacks=[timer]).train()
    return {"seconds": timer.seconds}


def sft(directory: str, data: str, batch: int, steps: int, variant: str) -> dict:
    """Batches of whole conversations in their order, loss on the answer; "free" flattens a batch without padding."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = load_dataset("json", data_files=data, split="train").select(range(batch * steps))

    def to_ids(row):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        return {"input_ids": ids, "completion_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}

    rows = rows.map(to_ids, remove_columns=rows.column_names)
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=steps, learning_rate=4e-3,
        max_length=None if variant == "free" else 512, completion_only_loss=True,
        padding_free=variant == "free", **COMMON,
    )  # fmt: skip
    timer = StepTimer()
    model = AutoModelForCausalLM.from_pretrained(directory)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[timer])
    # Batches in the order of the data, so that the tokens of each step are known.
    trainer._get_train_sampler = lambda *_, **__: None
    trainer.train()
    lengths = [len(ids) for ids in rows["input_ids"]]
    tokens = [sum(lengths[i * batch : (i + 1) * batch]) for i in range(steps)]
    return {"seconds": timer.seconds, "tokens": tokens}


if __name__ == "__main__":
    kind, directory, *rest = sys.argv[1:]
    if kind == "grpo":
        result = grpo(directory, int(rest[0]))
    else:
        result = sft(directory, rest[0], int(rest[1]), int(rest[2]), rest[3])
    print(json.dumps(result))
