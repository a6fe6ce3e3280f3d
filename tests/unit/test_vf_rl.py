"""The file of verifiers' RLTrainer: every key has its effect on the run of `rl`, or is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.config.base import ConfigError, load_config, section_type
from hone.config.key_names import key_name, use_key_names
from hone.config.lab_config import LabConfig
from hone.config.rl_config import RLConfig
from hone.config.vf_rl_config import (
    PYTHON_KEY_NAMES,
    REASONS,
    VF_RL_KEY_NAMES,
    RLTrainerArgs,
    VfRLConfig,
)
from hone.launch.rl_trainer import Console
from hone.monitors.trainer_lines import loss_line, sample_block, step_line
from hone.run_directory import RunDirectory
from hone.trainer.weight_files import write_state

BASE = """
model = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
[env]
id = "primeintellect/reverse-text"
[inference]
gpus = 1
[inference.args]
enforce_eager = true
[trainer]
gpus = 1
[trainer.args]
run_name = "reverse-text"
micro_batch_size = 16
rollouts_per_example = 16
batch_size = 128
max_steps = 100
max_tokens = 128
max_seq_len = 512
"""
OF_THE_CONSOLE = {"logging_steps", "sample_steps"}
EFFECTS = [  # what is given, and what becomes of it
    ("run_name", "other", "output_dir", Path("outputs/other")),
    ("output_dir", "elsewhere", "output_dir", Path("elsewhere")),
    ("seed", 3, "seed", 3),
    ("use_lora", False, "trainer.lora", None),
    ("lora_rank", 4, "trainer.lora.rank", 4),
    ("lora_alpha", 5, "trainer.lora.alpha", 5.0),
    ("lora_dropout", 0.1, "trainer.lora.dropout", 0.1),
    ("lora_target_modules", ["q_proj"], "trainer.lora.targets", ["q_proj"]),
    ("lora_target_modules", "all-linear", "trainer.lora.targets", None),
    ("lora_modules_to_save", ["norm"], "trainer.lora.modules_to_save", ["norm"]),
    ("lora_use_rslora", True, "trainer.lora.rslora", True),
    ("rollouts_per_example", 8, "orchestrator.rollouts_per_example", 8),
    ("batch_size", 64, "orchestrator.batch_size", 64),
    ("micro_batch_size", 4, "trainer.micro_batch_tokens", 4 * 512),
    ("max_seq_len", 256, "seq_len", 256),
    ("max_prompt_len", 100, "orchestrator.max_prompt_tokens", 100),
    ("max_steps", 7, "max_steps", 7),
    ("max_concurrent", 32, "inference.max_batch_size", 32),
    ("num_batches_ahead", 0, "max_async_level", 0),
    ("learning_rate", 1e-4, "trainer.optim.lr", 1e-4),
    ("lr_scheduler_type", "cosine", "trainer.scheduler.type", "cosine"),
    ("lr_scheduler_type", "linear", "trainer.scheduler.type", "linear"),
    ("warmup_steps", 10, "trainer.scheduler.warmup_steps", 10),
    ("weight_decay", 0.1, "trainer.optim.weight_decay", 0.1),
    ("adam_beta1", 0.8, "trainer.optim.betas", (0.8, 0.999)),
    ("adam_beta2", 0.9, "trainer.optim.betas", (0.9, 0.9)),
    ("max_grad_norm", 0.5, "trainer.optim.max_norm", 0.5),
    ("bf16", False, "model.dtype", "float32"),
    ("gradient_checkpointing", True, "trainer.activation_checkpointing", True),
    ("mask_ratio_low", 0.5, "trainer.loss.mask_ratio_low", 0.5),
    ("mask_ratio_high", 2.0, "trainer.loss.mask_ratio_high", 2.0),
    ("mask_truncated_completions", True, "orchestrator.truncated", "mask"),
    ("zero_truncated_completions", True, "orchestrator.truncated", "zero"),
    ("max_tokens", 64, "orchestrator.sampling.max_tokens", 64),
    ("temperature", 0.8, "orchestrator.sampling.temperature", 0.8),
    ("top_p", 0.9, "orchestrator.sampling.top_p", 0.9),
    ("top_k", 20, "orchestrator.sampling.top_k", 20),
    ("min_p", 0.1, "orchestrator.sampling.min_p", 0.1),
    ("repetition_penalty", 1.1, "orchestrator.sampling.repetition_penalty", 1.1),
    ("presence_penalty", 0.5, "orchestrator.sampling.presence_penalty", 0.5),
    ("frequency_penalty", 0.5, "orchestrator.sampling.frequency_penalty", 0.5),
    ("generation_timeout", 60.0, "orchestrator.rollout_timeout", 60.0),
    ("vllm_server_host", "::1", "inference.server.host", "::1"),
    ("vllm_server_port", 8001, "inference.server.port", 8001),
    ("vllm_server_timeout", 600.0, "orchestrator.client.ready_timeout", 600.0),
    ("save_strategy", "no", "weights.interval", None),
    ("save_steps", 20, "weights.interval", 20),
    ("save_steps", 20, "ckpt.interval", 20),
    ("eval_strategy", "steps", "orchestrator.eval.interval", 50),
    ("report_to", "wandb", "wandb.name", "reverse-text"),
    ("wandb", {"project": "p", "name": "n"}, "wandb.name", "n"),
]


def loaded(tmp_path, *words, text=BASE):
    (tmp_path / "file.toml").write_text(text)
    return load_config(VfRLConfig, ["@", str(tmp_path / "file.toml"), *words])


def value_of(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("key", "value", "path", "expected"), EFFECTS, ids=lambda x: str(x))
def test_a_key_has_its_effect(tmp_path, key, value, path, expected):
    before = loaded(tmp_path).as_rl()
    given = {"eval_steps": 5} if key == "eval_strategy" else {}
    text = BASE + f"{key} = " + json.dumps(value) + "\n"
    if isinstance(value, dict):
        text = (
            BASE
            + f"[trainer.args.{key}]\n"
            + "".join(f"{k} = {json.dumps(v)}\n" for k, v in value.items())
        )
    text = "\n".join(
        line for line in text.splitlines() if not (line in BASE and line.startswith(f"{key} ="))
    )
    after = loaded(tmp_path, text=text).as_rl()
    assert value_of(after, path) == expected
    assert given or before != after or value == "all-linear"  # the default, said


def test_no_key_is_without_an_effect():
    tested = {key for key, *_ in EFFECTS} | OF_THE_CONSOLE | {"eval_steps"}
    assert tested == set(RLTrainerArgs.model_fields)
    assert not tested & set(REASONS)


def test_evaluation_has_its_interval(tmp_path):
    words = ("--trainer.args.eval-strategy", "steps", "--trainer.args.eval-steps", "5")
    evaluation = loaded(tmp_path, *words).as_rl().orchestrator.eval
    assert (evaluation.interval, evaluation.max_tokens, evaluation.env[0].id) == (
        5,
        128,
        "primeintellect/reverse-text",
    )


def test_the_tutorials_blocks_parse(tmp_path):
    """Each stands under [trainer.args] of the file, as the tutorial of verifiers shows them."""
    for block in (
        'learning_rate = 1e-5\nlr_scheduler_type = "cosine"\nwarmup_steps = 10',
        "temperature = 0.8\ntop_p = 0.9\nmax_tokens = 256",
        "use_lora = false\nlearning_rate = 1e-6",
        "micro_batch_size = 8\nbatch_size = 64\nrollouts_per_example = 8",
        'report_to = "wandb"\n[trainer.args.wandb]\nproject = "reverse-text-tutorial"\nname = "my-first-run"',
        "gradient_checkpointing = true\nuse_lora = true\nmax_seq_len = 1024\nmicro_batch_size = 4",
        "rollouts_per_example = 32\nbatch_size = 256\nlearning_rate = 5e-6",
        "vllm_server_port = 8001\nvllm_server_timeout = 600.0",
    ):
        keys = {line.split(" =")[0] for line in block.splitlines()}
        kept = [line for line in BASE.splitlines() if line.split(" =")[0] not in keys]
        assert loaded(tmp_path, text="\n".join([*kept, block])).as_rl()


def test_flags_of_the_server(tmp_path):
    flags = (
        "max_model_len = 1024\nmax_num_seqs = 64\ngpu_memory_utilization = 0.5\nport = 0\n"
        'tool_call_parser = "hermes"'
    )
    text = BASE.replace(
        "enforce_eager = true", f"enforce_eager = true\nenable_auto_tool_choice = true\n{flags}"
    )
    inference = loaded(tmp_path, text=text).as_rl().inference
    assert (inference.enforce_eager, inference.max_model_len, inference.max_batch_size) == (
        True,
        1024,
        64,
    )
    assert (inference.gpu_memory_utilization, inference.server.port) == (0.5, 0)
    assert not inference.needs_vllm  # tools are parsed without a flag
    others = (
        loaded(tmp_path, text=BASE.replace("enforce_eager = true", "max_loras = 2"))
        .as_rl()
        .inference
    )
    assert others.vllm_args == {"max_loras": 2} and others.needs_vllm


def test_who_gets_which_gpu(tmp_path):
    def placed(gpus, *words):
        run = loaded(tmp_path, *words).as_rl(gpus)
        return run.inference_gpu_ids, run.inference_replicas, run.trainer_gpu_ids

    assert placed(0) == placed(1) == ([0], 1, [0])  # in one process
    assert placed(2) == placed(8) == ([0], 1, [1])
    six = ("--inference.gpus", "6", "--trainer.gpus", "2")
    assert placed(8, *six) == ([0, 1, 2, 3, 4, 5], 6, [6, 7])
    assert placed(8, *six, "--inference.args.tensor-parallel-size", "2") == (
        [0, 1, 2, 3, 4, 5],
        3,
        [6, 7],
    )
    assert placed(4, "--deployment", "colocated") == ([0], 1, [0])
    with pytest.raises(
        ConfigError, match=r"inference.gpus 6 and trainer.gpus 2 are 8 GPUs, there are 4"
    ):
        placed(4, *six)
    with pytest.raises(ConfigError, match="not a multiple of the 4 GPUs"):
        placed(8, *six, "--inference.args.tensor-parallel-size", "4")
    with pytest.raises(ConfigError, match="a number of GPUs is wanted, found 'two'"):
        placed(8, "--inference.args.tensor-parallel-size", "two")
    with pytest.raises(ConfigError, match=r"inference\.gpus 0"):
        placed(2, "--inference.gpus", "0")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "micro-batch-size",
            "24",
            "batch_size 128 is not a multiple of micro_batch_size 24 x 1 GPUs = 24; micro",
        ),
        ("batch-size", "100", "batch_size 100 is not a multiple of rollouts_per_example 16"),
        (
            "loss-type",
            "grpo",
            "loss_type = 'grpo' is not possible: the loss is masked importance sampling",
        ),
        ("mask-env-responses", "false", "what the environment says is never trained on"),
        ("lora-rnk", "3", "did you mean trainer.args.lora-rank"),
        ("report-to", "mlflow", "'tensorboard' or 'none'"),
        ("lr-scheduler-type", "cosin", "'cosine'"),
        ("lr-scheduler-type", "constant_with_warmup", "needs warmup_steps"),
        ("max-steps", "0", "greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(tmp_path, key, value, words):
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, f"--trainer.args.{key}", value).as_rl()


def test_keys_that_ask_for_what_is_done_anyway_are_taken(tmp_path):
    before = loaded(tmp_path).as_rl()
    words = ("--trainer.args.mask-env-responses", "true", "--trainer.args.scale-rewards", "none")
    assert loaded(tmp_path, *words, "--trainer.args.fp16", "false").as_rl() == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("use_lora = false\nlora_rank = 4", "lora_rank has no effect with use_lora = false"),
        (
            "mask_truncated_completions = true\nzero_truncated_completions = true",
            "choose one of them",
        ),
        ('report_to = "none"\n[trainer.args.wandb]\nproject = "p"', "wandb has no effect"),
    ],
)
def test_keys_that_exclude_each_other(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, text=BASE + more)


def test_a_misspelt_flag_of_the_server_is_not_sent_to_vllm(tmp_path):
    with pytest.raises(ConfigError, match="no flag 'enforce_eagr'; did you mean enforce_eager"):
        loaded(tmp_path, "--inference.args.enforce-eagr", "true").as_rl()


ROW = {
    "step": 5,
    "loss/mean": 0.01234567,
    "optim/lr": 1e-5,
    "progress/epoch": 0.25,
    "reward/mean": 0.5,
    "entropy/mean": 0.25,
    "importance_ratio/mean": 1.0,
    "optim/grad_norm": 0.5,
    "is_masked/mean": 0.0,
    "batch/effective_batch_size": 16,
}


def test_lines_are_those_of_the_tutorial():
    assert loss_line(ROW) == "{'loss': 0.01235, 'learning_rate': 1e-05, 'epoch': 0.25}"
    assert (
        step_line(ROW, 100) == "Step 5/100: reward=0.5000, entropy=0.2500, importance_ratio=1.0000"
    )
    rollout = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello\x1b[2J"}],
        "completion": [{"role": "assistant", "content": "olleh\nok"}],
        "reward": 1.0,
    }
    assert sample_block(5, rollout).splitlines() == [
        "=== Step 5 Sample ===",
        "Prompt: hello\\x1b[2J",
        "Completion: olleh",
        "ok",
        "Reward: 1",
    ]


def test_a_step_without_signal_says_why():
    idle = ROW | {
        "batch/effective_batch_size": 0,
        "batch/solve_all": 1,
        "progress/failed": 0,
        "is_truncated/mean": 0,
    }
    first, second = step_line(idle, 100).splitlines()
    assert first == "Step 5/100: reward=0.5000" and "every rollout was solved" in second


def test_how_often_the_console_prints(tmp_path, capsys):
    words = (
        "--trainer.args.logging-steps",
        "2",
        "--trainer.args.sample-steps",
        "3",
        "--trainer.args.max-steps",
        "5",
    )
    config = loaded(tmp_path, *words, "--trainer.args.output-dir", str(tmp_path / "run"))
    console = Console(config, config.as_rl(), [])
    for step in range(1, 6):
        place = tmp_path / "run" / "rollouts" / f"step_{step}"
        place.mkdir(parents=True)
        rollout = {
            "prompt": [{"role": "user", "content": "p\u2028\x85"}],
            "completion": [],
            "reward": 0.0,
        }
        (place / "rollouts.jsonl").write_text(json.dumps(rollout, ensure_ascii=False) + "\n")
        assert console.on_step(step, ROW)
    out = capsys.readouterr().out
    assert [step for step in range(1, 6) if f"Step {step}/5" in out] == [2, 4, 5]
    assert [step for step in range(1, 6) if f"=== Step {step} Sample" in out] == [3]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.3] * 20, "higher learning_rate"),
        ([0.01] * 20, "too hard"),
        ([0.6 - 0.02 * i for i in range(20)], "lower learning_rate"),
        ([0.3 + 0.02 * i for i in range(20)], None),
        ([0.95] * 20, None),
    ],
    ids=["flat", "nothing", "falls", "rises", "solved"],
)
def test_a_reward_that_does_not_rise_is_remarked_on(tmp_path, caplog, rewards, words):
    config = loaded(tmp_path, "--trainer.args.sample-steps", "0")
    console = Console(config, config.as_rl(), [])
    for step, reward in enumerate(rewards, 1):
        console.on_step(step, ROW | {"reward/mean": reward})
    assert (words in caplog.text) if words else not caplog.text
    if words:
        assert (
            "hone eval run primeintellect/reverse-text -m PrimeIntellect/Qwen3-0.6B" in caplog.text
        )


def test_unstable_training_is_remarked_on_once(tmp_path, caplog):
    config = loaded(tmp_path, "--trainer.args.sample-steps", "0")
    console = Console(config, config.as_rl(), [])
    for step in (1, 2):
        console.on_step(step, ROW | {"is_masked/mean": 0.75})
    assert (
        caplog.text.count("training is unstable (mismatch KL 0.00, 75 % of the tokens masked)") == 1
    )


def test_transformers_reads_the_state(tmp_path):
    from transformers import TrainerState

    rows = [ROW | {"step": step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_state(tmp_path / "metrics.jsonl", 2, 100, {"loss/mean": 0.5}, tmp_path)
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch) == (2, 100, 0.25)
    assert [(entry["step"], entry["loss"]) for entry in state.log_history] == [
        (1, 0.01234567),
        (2, 0.5),
    ]


def test_a_job_of_hosted_training(tmp_path):
    (tmp_path / "job.toml").write_text(
        'model = "m"\nmax_steps = 9\nbatch_size = 32\nrollouts_per_example = 4\nlearning_rate = 1e-4\n'
        'lora_alpha = 8\n[sampling]\nmax_tokens = 7\n[[env]]\nid = "o/a"\nargs = { x = 1 }\n[[env]]\nid = "b"\n'
        '[buffer]\nonline_difficulty_filtering = true\n[eval]\ninterval = 3\n[[eval.env]]\nid = "b"\n'
        "[checkpoints]\ninterval = 4\n"
    )
    job = load_config(LabConfig, ["@", str(tmp_path / "job.toml"), "--max-steps", "10"])
    run = job.resolve_config()
    assert isinstance(run, RLConfig) and run.output_dir == Path("outputs/a") and run.max_steps == 10
    assert [(env.id, env.args) for env in run.orchestrator.env] == [("o/a", {"x": 1}), ("b", {})]
    assert (run.orchestrator.sampling.max_tokens, run.orchestrator.eval.interval) == (7, 3)
    assert (
        run.orchestrator.buffer.online_difficulty_filtering
        and run.ckpt.interval == run.weights.interval == 4
    )
    assert (run.trainer.lora.alpha, run.trainer.optim.lr, run.orchestrator.batch_size) == (
        8.0,
        1e-4,
        32,
    )
    with pytest.raises(ConfigError, match="did you mean max-steps"):
        load_config(LabConfig, ["@", str(tmp_path / "job.toml"), "--max-step", "10"])


@pytest.mark.parametrize(
    "names, clean, other",
    [
        ({}, "--clean", "--output-dir DIR"),
        (VF_RL_KEY_NAMES, "--clean", "--trainer.args.run-name NAME"),
        (PYTHON_KEY_NAMES, "train(clean=True)", "another run_name"),
    ],
)
def test_messages_name_keys_as_the_command_does(tmp_path, names, clean, other):
    (tmp_path / "rollouts").mkdir()
    with use_key_names(names), pytest.raises(ValueError) as refused:
        RunDirectory(tmp_path, "rl").refuse_earlier(False)
    assert clean in str(refused.value) and other in str(refused.value)


def test_every_key_with_another_name_is_a_key_and_is_looked_up():
    source = "".join(file.read_text() for file in Path(hone.__file__).parent.rglob("*.py"))
    for key, name in VF_RL_KEY_NAMES.items():
        section: Any = RLConfig
        for part in [] if key.startswith("--") else key.split("."):
            section = section_type(section.model_fields[part].annotation) or section
        assert f"key_name('{key}')" in source or key == "trainer.lora"
        assert key_name(key) == key
        with use_key_names(VF_RL_KEY_NAMES):
            assert key_name(key) == name
