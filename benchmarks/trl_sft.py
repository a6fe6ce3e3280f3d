"""The peer of sft_cpu.py: TRL's SFTTrainer. Prints seconds and tokens of each measured step as JSON.

usage: trl_sft.py MODEL_DIR DATA.jsonl BATCH STEPS VARIANT     VARIANT: padded | free (no padding, flattened batch)
"""

import json
import sys
import tempfile
import time

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARMUP = 3


class StepTimer(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


def main(directory: str, data: str, batch: int, steps: int, variant: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = load_dataset("json", data_files=data, split="train").select(range(batch * steps))

    def to_ids(row):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        return {"input_ids": ids, "completion_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}

    rows = rows.map(to_ids, remove_columns=rows.column_names)
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=steps, learning_rate=4e-3,
        bf16=False, use_cpu=True, report_to="none", save_strategy="no", gradient_checkpointing=False, max_length=512,
        completion_only_loss=True, padding_free=variant == "free", logging_strategy="no",
        dataloader_num_workers=0, train_sampling_strategy="sequential",
    )  # fmt: skip
    timer = StepTimer()
    model = AutoModelForCausalLM.from_pretrained(directory)
    SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[timer]).train()
    lengths = [len(ids) for ids in rows["input_ids"]]
    tokens = [sum(lengths[i * batch : (i + 1) * batch]) for i in range(steps)]
    print(json.dumps({"seconds": timer.seconds[WARMUP:], "tokens": tokens[WARMUP:]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
