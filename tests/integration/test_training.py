"""`sft` and `rl` as processes: they learn, repeat to the bit, resume, and never mix with another run."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.kernels import cpu
from hone.launch.plan import free_port
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import load_model
from tests.hangs import HANG_SECONDS

from .conftest import BIN, RL_ENV, ROOT, TINY, command, end, read_rows, start, until


def metrics(out, name="metrics.jsonl"):
    return read_rows(out / name)


def weights(out, step):
    return load_file(out / "weights" / f"step_{step}" / "model.safetensors")


def assert_same_weights(one, two):
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def rewards(out):
    return [row["reward/mean"] for row in metrics(out)]


@pytest.mark.main_path
def test_sft_learns_validates_and_writes_a_directory_that_transformers_reads(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = metrics(trained.parents[1], "metrics_sft.jsonl")
    assert len(rows) == 60 and rows[-1]["loss/mean"] < 0.65 * rows[0]["loss/mean"]
    theirs = AutoModelForCausalLM.from_pretrained(trained)
    ours = load_model(trained)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(trained)("some text")["input_ids"])
    packed = PackedAttention([len(tokens)])
    with torch.no_grad():
        logits = ours.compute_logits(ours(tokens, packed.token_positions(), packed))
        torch.testing.assert_close(logits, theirs(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
    log = (trained.parents[1] / "logs" / "sft.log").read_text()
    assert len(re.findall(r"INFO Step \d+ \| .*Loss: \d+\.\d{4}", log)) == 60


WATCHED = """
import json, runpy, sys, time
import hone.trainer.rl.run_loop as run
from hone.orchestrator.orchestrator import Orchestrator

learning, begun = [], []
learn, adopted = run._launch_step, Orchestrator.on_adopted

def watched(session, trainer, source, sink, batch):
    learning.append(True)
    wanted = len(begun) + source.can_overlap(batch.step)
    values = learn(session, trainer, source, sink, batch)
    # On a busy machine the event loop may come to it late; what was not asked for while learning does not come at all.
    deadline = time.monotonic() + 600
    while len(begun) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    learning.clear()
    return values

def noted(self, version):
    before = len(self.under_way)
    adopted(self, version)
    if len(self.under_way) > before:
        begun.append((version, bool(learning)))

run._launch_step, Orchestrator.on_adopted = watched, noted
file, sys.argv = sys.argv[1], ["hone", *sys.argv[2:]]
try:
    runpy.run_module("hone", run_name="__main__")
finally:
    json.dump(begun, open(file, "w"))
"""


def test_the_next_steps_requests_are_made_beside_training_where_nothing_comes_between(
    trained, tmp_path
):
    """Weights are saved after steps 3 and 6, an evaluation is due after 4. A short time limit is not spent waiting."""
    (tmp_path / "watched.py").write_text(WATCHED)
    words = [tmp_path / "watched.py", tmp_path / "begun.json", "rl", "--model.name", trained]
    evaluation = {"interval": 4, "at_start": False, "env": [json.loads(RL_ENV)], "num_examples": 2}
    for timeout, early in ((600, {1, 2, 5}), (5, set())):
        command(
            "python",
            *words,
            "--orchestrator.env",
            RL_ENV,
            "--output-dir",
            tmp_path / str(timeout),
            "--orchestrator.batch-size",
            8,
            "--max-steps",
            6,
            "--seq-len",
            64,
            "--orchestrator.rollouts-per-example",
            4,
            "--orchestrator.sampling.max-tokens",
            8,
            "--weights.interval",
            3,
            "--orchestrator.eval",
            json.dumps(evaluation),
            "--orchestrator.rollout-timeout",
            timeout,
        )
        begun = dict(json.loads((tmp_path / "begun.json").read_text()))
        assert {version for version, is_early in begun.items() if is_early} == early and list(
            begun
        ) == [*range(6)]
    assert_same_weights(weights(tmp_path / "600", 6), weights(tmp_path / "5", 6))


def test_sft_repeats_to_the_bit_with_any_threads_and_does_not_depend_on_micro_batches(tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 60)
    losses = []
    for name, options in (("a", []), ("b", []), ("c", ["--data.micro-batch-size", 1])):
        command(
            "sft",
            "@",
            f"{TINY}/sft.toml",
            "--data.name",
            data,
            "--max-steps",
            3,
            "--output-dir",
            tmp_path / name,
            "--val.name",
            data,
            *options,
            env={"OMP_NUM_THREADS": "1"} if name == "b" and cpu.IS_AVAILABLE else {},
        )
        losses.append([row["loss/mean"] for row in metrics(tmp_path / name, "metrics_sft.jsonl")])
        assert "val/loss" in metrics(tmp_path / name, "metrics_sft.jsonl")[-1]
    assert losses[0] == losses[1] and losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert_same_weights(weights(tmp_path / "a", 3), weights(tmp_path / "b", 3))


def test_rl_repeats_to_the_bit(rl, tmp_path):
    rl(out=tmp_path / "a")
    kernels = rl(out=tmp_path / "b", env={"NUMBA_DEBUG_CACHE": "1"}).stdout
    # A run that compiled kernels itself, where others load them, could differ in last bits.
    assert "data saved" not in kernels and ("data loaded" in kernels) == cpu.IS_AVAILABLE
    rl("--seed", 1, out=tmp_path / "c")
    assert rewards(tmp_path / "a") == rewards(tmp_path / "b") != rewards(tmp_path / "c")
    assert_same_weights(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))


@pytest.mark.main_path
def test_rl_run_directory_log_lines_and_metric_names(rl, tmp_path):
    out = tmp_path / "run"
    console = rl("--weights.interval", 2).stdout
    assert {p.name for p in (out / "weights").iterdir()} == {"step_2", "step_4"}
    assert {p.name for p in (out / "rollouts").iterdir()} == {f"step_{i}" for i in range(1, 5)}
    orchestrator_line = (
        r"INFO Step 4 \| Time: [\d.]+s \| Reward: \d+\.\d{4} \| Throughput: \d+ tokens/s \| "
        r"Seq. Length: [\d.]+ tokens \| Async Level: 0 \| Max. Off-Policy Level: 0"
    )
    trainer_line = (
        r"INFO Step 4 \| Time: [\d.]+s \| Loss: -?\d+\.\d{4} \| Entropy: [\d.]+ \| Mismatch KL: \S+ \| "
        r"Grad. Norm: [\d.]+ \| LR: \S+ \| Throughput: \d+ tokens/s \| MFU: \S+ \| Peak Mem.: [\d.]+ GiB"
    )
    console_line = (
        r"INFO Step 4 \| Time: [\d.]+s \| Reward: \d+\.\d{4} ± \d+\.\d{4} \| Solved: \d+% by all, \d+% by none \| "
        r"Loss: -?\d+\.\d{4} \| Entropy: [\d.]+ \| Mismatch KL: .* \| Grad. Norm: [\d.]+ \| LR: \S+ \| "
        r"Length: \d+ tokens \| .*Throughput: \d+ tokens/s"
    )
    assert re.search(console_line, console) and console.count(" Step 4 |") == 1, console
    assert re.search(orchestrator_line, (out / "logs" / "orchestrator.log").read_text())
    assert re.search(trainer_line, (out / "logs" / "trainer.log").read_text())
    row = metrics(out)[-1]
    names = """progress/step progress/samples progress/tokens reward/mean reward/reverse-text
        metrics/reverse-text/exact_match batch/solve_none batch/solve_all batch/effective_batch_size batch/async_level
        batch/off_policy_level/max seq_len/mean prompt_len/mean completion_len/mean is_truncated/mean time/step
        time/generate time/train perf/throughput perf/peak_memory perf/kv_cache optim/lr optim/grad_norm loss/mean
        entropy/mean entropy/std mismatch_kl/mean mismatch_kl/max is_masked/mean"""
    assert set(names.split()) <= row.keys()
    rollouts = [
        json.loads(line) for line in (out / "rollouts" / "step_3" / "rollouts.jsonl").open()
    ]
    assert len(rollouts) == 32 and {r["turns"][0]["version"] for r in rollouts} == {2}
    for group in range(4):
        assert abs(sum(r["advantage"] for r in rollouts if r["group"] == group)) < 1e-9
    assert "rollouts_per_example = 8" in (out / "configs" / "rl.toml").read_text()


@pytest.mark.main_path
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_sampler_and_trainer_agree_at_learning_rate_zero(rl, trained, tmp_path, temperature):
    rl(
        "--trainer.optim.lr",
        0,
        "--trainer.optim.weight-decay",
        0,
        "--orchestrator.sampling.temperature",
        temperature,
        "--max-steps",
        2,
    )
    for row in metrics(tmp_path / "run"):
        assert row["importance_ratio/min"] >= 1 - 1e-4 and row["importance_ratio/max"] <= 1 + 1e-4
    model = load_model(trained)
    differences, entropies = [], []
    for line in (tmp_path / "run" / "rollouts" / "step_2" / "rollouts.jsonl").open():
        turn = json.loads(line)["turns"][0]
        prompt, ids = turn["prompt_ids"], turn["ids"]
        packed = PackedAttention([len(prompt) + len(ids)])
        with torch.no_grad():
            logits = model.compute_logits(
                model(torch.tensor(prompt + ids), packed.token_positions(), packed)
            )[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1).mean())
        expected = logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        differences.append((torch.tensor(turn["logprobs"]) - expected).abs().max())
    assert max(differences) <= 1e-4
    # Not uniform over 264 tokens (5.6 nats), not constant
    assert 0.1 < torch.stack(entropies).mean() < 4.0
    assert_same_weights(weights(tmp_path / "run", 2), load_file(trained / "model.safetensors"))


@pytest.mark.main_path
def test_a_killed_run_resumes_as_if_nothing_had_happened(rl, trained, tmp_path, started):
    rl("--max-steps", 6, out=tmp_path / "whole")
    out = tmp_path / "killed"
    words = [
        BIN / "rl",
        "--model.name",
        trained,
        "--orchestrator.env",
        RL_ENV,
        "--orchestrator.batch-size",
        "32",
        "--orchestrator.rollouts-per-example",
        "8",
        "--orchestrator.sampling.max-tokens",
        "16",
        "--seq-len",
        "64",
        "--max-steps",
        "500",
        "--trainer.optim.lr",
        "1e-4",
        "--output-dir",
        out,
        "--ckpt.interval",
        "2",
    ]
    process = started(*words)
    until((out / "checkpoints" / "step_2").exists, process, pause=0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = int(max((out / "checkpoints").glob("step_?"), key=lambda p: p.name).name[5:])
    assert step < 6, "killed too late to show anything"
    rl("--max-steps", 6, "--ckpt.interval", 2, "--resume", out=out)
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert rewards(out) == rewards(tmp_path / "whole")
    assert_same_weights(weights(out, 6), weights(tmp_path / "whole", 6))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step_4", "step_6"]


def lines_in(path):
    """0 where there is no such file: one that starts anew removes it."""
    try:
        return path.read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_sft_killed_at_ten_random_moments_ends_as_if_it_had_not_been(tmp_path, started):
    data, rng = tmp_path / "sft.jsonl", random.Random(0)
    command("python", "-m", "reverse_text", "--out", data, "-n", 400)
    words = [
        BIN / "sft",
        "@",
        f"{TINY}/sft.toml",
        "--data.name",
        data,
        "--max-steps",
        "40",
        "--data.batch-size",
        "2",
        "--data.seq-len",
        "128",
        "--ckpt.interval",
        "3",
        "--log-interval",
        "40",
        "--resume",
        "auto",
        "--output-dir",
    ]
    command(*words, tmp_path / "straight")
    out = tmp_path / "killed"
    for moment in sorted(rng.sample(range(1, 39), 10)):
        process, log = started(*words, out), out / "metrics_sft.jsonl"
        until(lambda log=log, n=moment: lines_in(log) >= n, process, pause=0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
    command(*words, out)
    assert [row["step"] for row in metrics(out, "metrics_sft.jsonl")] == list(range(1, 41))
    losses = [
        [row["loss/mean"] for row in metrics(tmp_path / d, "metrics_sft.jsonl")]
        for d in ("straight", "killed")
    ]
    assert losses[0] == losses[1]
    assert_same_weights(weights(out, 40), weights(tmp_path / "straight", 40))


@pytest.mark.parametrize("lora", [[], ["--lora.rank", 4, "--optim.lr", 3e-3]])
def test_preferences_are_learned_in_rows_of_pairs_and_resumed(lora, tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdef", k=6)) for _ in range(96)]
    pairs = [{"prompt": w, "chosen": w[::-1], "rejected": w.upper()} for w in words]
    for name, rows in (("train", pairs[:80]), ("held_out", pairs[80:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["sft", "--model.name", f"{TINY}/model", "--model.random-init", "--dpo.beta", 0.2]
    words += ["--data.name", tmp_path / "train.jsonl", "--val.name", tmp_path / "held_out.jsonl"]
    words += ["--data.seq-len", 128, "--data.batch-size", 4, "--optim.lr", 1e-3, *lora]
    words += ["--ckpt.interval", 6, "--output-dir"]
    command(*words, tmp_path / "whole", "--max-steps", 12)
    command(*words, tmp_path / "parts", "--max-steps", 6)
    command(*words, tmp_path / "parts", "--max-steps", 12, "--resume")
    assert_same_weights(weights(tmp_path / "whole", 12), weights(tmp_path / "parts", 12))
    rows = metrics(tmp_path / "whole", "metrics_sft.jsonl")
    # The model is its own reference at first: the loss is that of a coin toss.
    assert rows[0]["loss/mean"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["loss/mean"] < 0.5 and rows[-1]["rewards/accuracies"] > 0.9
    assert rows[-1]["val/loss"] < 0.6 and rows[-1]["val/rewards/accuracies"] > 0.9
    # The number of rows in a pass does not change what is learned.
    command(*words, tmp_path / "split", "--max-steps", 3, "--data.micro-batch-size", 1)
    split = metrics(tmp_path / "split", "metrics_sft.jsonl")
    for name in ("loss/mean", "rewards/margins", "logps/rejected"):
        assert split[2][name] == pytest.approx(rows[2][name], rel=1e-3)
    # Both answers of a pair are written where its gradient is too large.
    words += [tmp_path / "bad", "--max-steps", 1, "--optim.skip-norm", 1e-6]
    command(*words, "--on-bad-step", "skip")
    worst = json.loads((tmp_path / "bad/bad_steps/step_1.jsonl").read_text().splitlines()[0])
    assert len(worst["ids"]) == len(worst["mask"]) and worst["ids"] != worst["rejected_ids"]


@pytest.mark.parametrize("base_bits", [16, 8])
def test_sft_of_an_adapter_evaluates_goes_on_and_is_exported(base_bits, tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 100)
    words = [
        "sft",
        "@",
        f"{TINY}/sft.toml",
        "--data.name",
        data,
        "--data.streaming",
        "--data.buffer",
        50,
        "--data.batch-size",
        8,
        "--data.seq-len",
        64,
        "--lora.rank",
        4,
        "--lora.base-bits",
        base_bits,
        "--lora.modules-to-save",
        "norm",
        "--optim.type",
        "adamw",
        "--optim.lr",
        1e-2,
        "--eval.env.id",
        "reverse-text",
        "--eval.env.args.texts",
        "generated",
        "--eval.interval",
        2,
        "--eval.num-examples",
        8,
        "--ckpt.interval",
        2,
        "--output-dir",
    ]
    command(*words, tmp_path / "whole", "--max-steps", 4)
    command(*words, tmp_path / "parts", "--max-steps", 2)
    command(*words, tmp_path / "parts", "--max-steps", 4, "--resume")
    assert_same_weights(weights(tmp_path / "whole", 4), weights(tmp_path / "parts", 4))
    # Nothing is left to do
    again = command(*words, tmp_path / "parts", "--max-steps", 4, "--resume", "auto")
    assert "Weights of step 4 in" in again.stdout
    rows = metrics(tmp_path / "whole", "metrics_sft.jsonl")
    assert [row["step"] for row in rows if "eval/reverse-text/reward" in row] == [0, 2, 4]
    assert (
        0 <= rows[0]["eval/reverse-text/reward"] <= 1 and rows[0]["eval/reverse-text/failed"] == 0
    )
    adapter = load_file(
        tmp_path / "whole" / "weights" / "step_4" / "lora_adapters" / "adapter_model.safetensors"
    )
    assert adapter["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].shape[0] == 4
    assert adapter["base_model.model.model.norm.weight"].std() > 0
    command(
        "hone",
        "export",
        "--checkpoint",
        tmp_path / "whole" / "checkpoints_sft" / "step_4",
        "--output-dir",
        tmp_path / "exported",
        "--dtype",
        "float32",
    )
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in weights(tmp_path / "whole", 4).items():
        torch.testing.assert_close(exported[name], tensor)
    size = sum(
        p.stat().st_size
        for p in (tmp_path / "whole" / "checkpoints_sft" / "step_4" / "trainer").iterdir()
    )
    assert size < 1_500_000  # the adapter's state alone: the model's would be 8 MB


def torchrun(*words, ranks=2):
    """Processes on this machine, by the file, as in the seeds."""
    subprocess.run(
        [
            BIN / "torchrun",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(free_port()),
            *map(str, words),
        ],
        cwd=ROOT,
        check=True,
        timeout=HANG_SECONDS,
    )


def ranked(*words, ranks=2):
    """The same without torchrun, which takes longer to start than they do: each is told its number."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    numbered = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    processes = [
        start(BIN / "python", *words, env={k: str(v) for k, v in env.items()}) for env in numbered
    ]
    try:
        assert [process.wait(HANG_SECONDS) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            end(process)


def test_two_ranks_have_the_losses_of_one(tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 200)
    words = [
        "@",
        f"{TINY}/sft.toml",
        "--data.name",
        data,
        "--val.name",
        data,
        "--max-steps",
        4,
        "--data.batch-size",
        16,
        "--data.seq-len",
        64,
        "--data.max-left-out",
        0.5,
        "--ckpt.interval",
        2,
        "--output-dir",
    ]
    command("sft", *words, tmp_path / "one")
    torchrun("--local-ranks-filter", 0, "src/hone/trainer/sft/train.py", *words, tmp_path / "two")
    script = "src/hone/trainer/sft/train.py"
    ranked(script, *words, tmp_path / "parts", "--sharding", "full")
    ranked(script, *words, tmp_path / "tokens", "--context-parallel", 2)
    one, *others = (
        metrics(tmp_path / name, "metrics_sft.jsonl") for name in ("one", "two", "parts", "tokens")
    )
    for name in ("loss/mean", "val/loss", "optim/grad_norm"):
        values = [row[name] for row in one if name in row]
        assert values and all(
            [r[name] for r in other if name in r] == pytest.approx(values, rel=1e-5)
            for other in others
        )
    command(
        "hone",
        "export",
        "--checkpoint",
        tmp_path / "two" / "checkpoints_sft" / "step_4",
        "--output-dir",
        tmp_path / "exported",
        "--dtype",
        "float32",
    )
    assert_same_weights(
        load_file(tmp_path / "exported" / "model.safetensors"), weights(tmp_path / "two", 4)
    )
    refused = command(
        "hone", "export", "--checkpoint", tmp_path, "--output-dir", tmp_path / "more", ok=False
    )
    assert "no checkpoint there" in refused.stderr
    # One rank goes on where two stopped that had parts, three with parts where one stopped.
    more = ["--max-steps", 5, "--resume"]
    command("sft", *words, tmp_path / "parts", *more)
    ranked(
        "src/hone/trainer/sft/train.py",
        *words,
        tmp_path / "one",
        *more,
        "--sharding",
        "full",
        ranks=3,
    )
    one, parts = (metrics(tmp_path / name, "metrics_sft.jsonl") for name in ("one", "parts"))
    assert [row["step"] for row in one] == [row["step"] for row in parts] == [1, 2, 3, 4, 5]
    assert one[-1]["loss/mean"] == pytest.approx(parts[-1]["loss/mean"], rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "family"),
    [("adamw", "qwen3"), ("muon", "qwen3"), ("adamw", "qwen3_5"), ("adamw", "gemma4")],
)
def test_ranks_take_the_rl_step_of_one(optimizer, family, tmp_path):
    """Each with the whole model, or with a part of it; three share the batch so that one has fewer micro-batches."""
    script, options = (
        ROOT / "tests" / "integration" / "rl_step.py",
        [f'optimizer="{optimizer}"', 'loss={"kl_beta":0.1}', 'loss_of={"other":{"type":"ppo"}}'],
    )
    options.append(f'family="{family}"')
    command("python", script, tmp_path / "one.json", *options)
    ranked(script, tmp_path / "two.json", *options)
    ranked(script, tmp_path / "parts.json", *options, 'sharding="full"', ranks=3)
    one, two, parts = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two", "parts")
    )
    assert (one.pop("ranks"), two.pop("ranks"), parts.pop("ranks")) == (1, 2, 3)
    # Newton-Schulz enlarges what is small; 1e-6: logprobs are rounded to 2e-7
    limit = 1e-5 if optimizer == "adamw" else 1e-4
    for name in set(one):
        if not name.startswith(("time/", "perf/")):
            assert two[name] == pytest.approx(one[name], rel=limit, abs=1e-6), name
            assert parts[name] == pytest.approx(one[name], rel=limit, abs=1e-6), name


@pytest.mark.parametrize(
    ("ranks", "family", "options"),
    [
        (4, "qwen3", ["context_parallel=2"]),
        (
            2,
            "qwen3",
            ["context_parallel=2", 'loss={"type":"ppo","ratio_type":"sequence","kl_beta":0.1}'],
        ),
        (2, "qwen3_5", ["context_parallel=2"]),
        (2, "qwen3_moe", ["context_parallel=2"]),
        (2, "qwen3_moe", ["expert_parallel=true", "activation_checkpointing=true"]),
        (2, "gpt_oss", ["expert_parallel=true", "context_parallel=2"]),
        (4, "qwen3_moe", ["expert_parallel=true", "context_parallel=2", 'lora={"rank":4}']),
    ],
)
def test_ranks_divide_tokens_and_experts(ranks, family, options, tmp_path):
    """Several ranks take the step of one; with LoRA, adapters of experts are divided too."""
    script = ROOT / "tests" / "integration" / "rl_step.py"
    divided = [x for x in options if "parallel" in x]
    common = [
        f'family="{family}"',
        'loss={"kl_beta":0.1}',
        *[x for x in options if x not in divided],
    ]
    command("python", script, tmp_path / "one.json", *common)
    one = json.loads((tmp_path / "one.json").read_text())
    ranked(script, tmp_path / "more.json", *common, *divided, ranks=ranks)
    found = json.loads((tmp_path / "more.json").read_text())
    assert found["ranks"] == ranks
    for name in set(one) - {"ranks"}:
        if not name.startswith(("time/", "perf/")):
            assert found[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_ranks_with_parts_train_an_adapter_in_half_precision(tmp_path):
    script, options = (
        ROOT / "tests" / "integration" / "rl_step.py",
        ['dtype="bfloat16"', 'lora={"rank":4}'],
    )
    command("python", script, tmp_path / "one.json", *options)
    ranked(script, tmp_path / "parts.json", *options, 'sharding="full"')
    one, parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "parts"))
    for name in ("1/optim/grad_norm", "2/optim/grad_norm", "2/entropy/mean"):
        assert parts[name] == pytest.approx(one[name], rel=0.05), name


def test_bench_measures_and_writes_nothing(tmp_path):
    words = [
        "sft",
        "@",
        f"{TINY}/sft.toml",
        "--data.fake",
        "--data.seq-len",
        64,
        "--data.batch-size",
        8,
    ]
    done = command(*words, "--bench", "--output-dir", tmp_path / "out")
    for word in ("tokens/s", "peak memory", "forward", "backward", "optimizer", "data"):
        assert word in done.stdout
    words = [
        "trainer",
        "--model.name",
        f"{TINY}/model",
        "--model.random-init",
        "--bench.sequences",
        8,
    ]
    done = command(
        *words, "--bench.tokens", 32, "--bench.steps", 2, "--output-dir", tmp_path / "out"
    )
    assert "tokens/s" in done.stdout and "forward" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.main_path
def test_an_earlier_run_is_never_mixed_with(rl, tmp_path):
    out = tmp_path / "run"
    rl("--max-steps", 2)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    refused = rl("--max-steps", 1, ok=False)
    for choice in ("--clean", "--resume", "--output-dir"):
        assert choice in refused.stderr
    assert "has no checkpoint" in rl("--resume", ok=False).stderr
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    rl("--max-steps", 1, "--clean")
    assert len(metrics(out)) == 1 and [p.name for p in (out / "weights").iterdir()] == ["step_1"]


def test_sft_and_rl_share_a_directory_as_in_the_examples(rl, trained, tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 60)
    sft = ["sft", "@", f"{TINY}/sft.toml", "--data.name", data, "--output-dir", tmp_path / "run"]
    command(*sft, "--max-steps", 2)
    for length in (4, 40):  # no conversation fits, and some do
        limit = ("--data.seq-len", length, "--data.max-left-out", 0)
        refused = command(*sft, "--max-steps", 2, "--clean", *limit, ok=False)
        assert "data.seq-len" in refused.stderr and "Traceback" not in refused.stderr
    rl("--max-steps", 1)
    assert {p.name for p in (tmp_path / "run" / "weights").iterdir()} == {"step_2", "step_1"}
    refused = rl("--max-steps", 2, "--clean", ok=False)
    assert "step_2 was written by another run" in refused.stderr
    assert (tmp_path / "run" / "weights" / "step_2").exists()


@pytest.mark.main_path
def test_dry_run_prints_and_writes_the_resolved_configuration(rl, tmp_path):
    done = rl("--dry-run")
    assert "max_steps = 4" in done.stdout
    assert [
        p.relative_to(tmp_path / "run") for p in (tmp_path / "run").rglob("*") if p.is_file()
    ] == [Path("configs/rl.toml")]
    assert (tmp_path / "run" / "configs" / "rl.toml").read_text() in done.stdout
    for recipe in ("sft", "rl"):
        words = [
            recipe,
            "@",
            f"examples/reverse_text/{recipe}.toml",
            "--dry-run",
            "--output-dir",
            tmp_path / recipe,
        ]
        assert "Qwen3-0.6B" in command(*words).stdout


def test_wandb_logs_offline_and_is_refused_without_the_extra(rl, tmp_path):
    rl("--wandb.project", "p", "--wandb.name", "n", "--wandb.offline", "--max-steps", 2)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    blocker = tmp_path / "site" / "sitecustomize.py"
    blocker.parent.mkdir()
    blocker.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'wandb' else find(name, *a)\n"
    )
    refused = rl(
        "--wandb.project",
        "p",
        out=tmp_path / "other",
        ok=False,
        env={"PYTHONPATH": str(blocker.parent)},
    )
    assert "hone-rl[wandb]" in refused.stderr and not (tmp_path / "other").exists()
