"""`hone convert`: files of prime-rl in several generations, made anew after its published examples."""

import json
import random
import shlex
import subprocess
import sys
import tomllib

import pytest

from hone.config import prime_rl_keys
from hone.config.base import ConfigError, load_config
from hone.config.convert import (
    EXIT_LOST,
    add_defaults,
    convert_evaluation,
    convert_file,
    find_command,
    main,
)
from hone.config.rl_config import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from hone.config.sft_config import SFTConfig

MODEL = "examples/reverse_text_tiny/model"
SOURCE = """
[[orchestrator.train.source]]
name = "words"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[orchestrator.train.source.env.agent]
harness = { id = "null" }
runtime = { type = "subprocess" }
"""
# name: (file, command, keys of the result, keys that are lost)
FILES = {
    "three files of 2025: trainer": (
        'max_steps = 20\nmodel.name = "m"\noptim.lr = 3e-6',
        "trainer",
        {"max_steps": 20, "model.name": "m", "optim.lr": 3e-6},
        [],
    ),
    "three files of 2025: orchestrator": (
        "batch_size = 128\nmicro_batch_size = 16\nrollouts_per_example = 16\nseq_len = 128\n"
        'mask_truncated_completions = false\nsampling.max_tokens = 128\nenvironment.id = "reverse-text"',
        "orchestrator",
        {"truncated": "keep", "env": [{"id": "reverse-text"}], "sampling.max_tokens": 128},
        [],
    ),
    "LoRA of 2025": (
        "[orchestrator]\nbatch_size = 64\nseq_len = 512\nrollouts_per_example = 8\nenv = [{ id = 'reverse-text' }]\n"
        "sampling.max_tokens = 99\n[trainer.model]\nimpl = 'liger_kernel'\nac.freq = 1\n"
        "[trainer.model.experimental.lora]\nrank = 32\nalpha = 64\ntarget_modules = ['q_proj']\n"
        "modules_to_save = ['embed_tokens', 'norm', 'lm_head$']",
        "rl",
        {
            "trainer.lora.rank": 32,
            "trainer.lora.targets": ["q_proj"],
            "trainer.lora.modules_to_save": ["embed_tokens", "norm", "lm_head"],
            "trainer.activation_checkpointing": True,
            "seq_len": 512,
        },
        [],
    ),
    "evaluation and GPUs of early 2026": (
        "seq_len = 512\n[deployment]\nnum_train_gpus = 2\nnum_infer_gpus = 4\n[orchestrator]\nbatch_size = 64\n"
        "rollouts_per_example = 8\noversampling_factor = 2.0\nenv = [{ id = 'math-env', name = 'math' }]\n"
        "[orchestrator.eval]\ninterval = 50\nenv = [{ id = 'aime', rollouts_per_example = 32 }]\n"
        "[inference.model]\nmax_model_len = 512\nenable_auto_tool_choice = true\ntool_call_parser = 'hermes'",
        "rl",
        {
            "inference_gpu_ids": [0, 1, 2, 3],
            "trainer_gpu_ids": [4, 5],
            "orchestrator.eval.rollouts_per_example": 32,
            "orchestrator.eval.max_tokens": 512,
            "orchestrator.sampling.max_tokens": 512,
            "model.tool_calls": "hermes",
            "inference.max_model_len": 512,
        },
        [],
    ),
    "distillation of early 2026": (
        "[orchestrator]\ntraining_mode = 'opd'\nbatch_size = 32\nrollouts_per_example = 8\nrenderer.name = 'qwen3'\n"
        "train.sampling.max_completion_tokens = 12\ntrain.env = [{ id = 'reverse-text' }]\n"
        "teacher.model.name = 't'\nteacher.client.base_url = ['http://localhost:8001/v1']\n"
        "[orchestrator.eval]\nnum_examples = -1\nsampling.max_completion_tokens = 12\nenv = [{ id = 'reverse-text' }]",
        "rl",
        {
            "algorithm": "opd",
            "orchestrator.teacher.model": "t",
            "orchestrator.sampling.max_tokens": 12,
            "orchestrator.eval.max_tokens": 12,
            "orchestrator.eval.num_examples": 1_000_000,
        },
        [],
    ),
    "tasksets of mid-2026": (
        "[orchestrator]\nbatch_size = 32\ngroup_size = 8\nrenderer = { name = 'auto', thinking_retention = 'all' }\n"
        "[[orchestrator.train.env]]\nname = 'g'\ntaskset = { id = 'gsm8k-v1', split = 'train' }\n"
        "harness = { id = 'null', runtime = { type = 'subprocess' } }",
        "rl",
        {
            "orchestrator.rollouts_per_example": 8,
            "orchestrator.env": [
                {"id": "gsm8k-v1", "name": "g", "args": {"taskset": {"split": "train"}}}
            ],
            "trainer.loss.type": "dppo",
        },
        ["orchestrator.renderer.thinking_retention"],
    ),
    "sources of late 2026": (
        "seq_len = 256\nckpt = {}\n[resume]\nstep = 15\n[monitors.wandb]\nproject = 'p'\nname = 'n'\n"
        "[trainer.model]\nlora.rank = 8\ncp = 2\nep = 8\n[orchestrator]\nbatch_size = 64\ngroup_size = 16\n"
        "concurrency.max_inflight = 128\nmodel.lora.name = 'r8'\ntrain.sampling.max_completion_tokens = 64\n"
        f"[inference.vllm]\nenable_lora = true\ngpu_memory_utilization = 0.7\nkv_cache_dtype = 'fp8'\n{SOURCE}",
        "rl",
        {
            "resume": "outputs/checkpoints/step_15",
            "wandb.project": "p",
            "trainer.lora.rank": 8,
            "trainer.context_parallel": 2,
            "trainer.expert_parallel": True,
            "orchestrator.env": [{"id": "reverse-text", "name": "words"}],
            "inference.gpu_memory_utilization": 0.7,
            "inference.vllm_args.kv_cache_dtype": "fp8",
        },
        [],
    ),
    "role, container and settings of a taskset": (
        "[orchestrator]\nbatch_size = 64\ngroup_size = 16\n[[orchestrator.train.source]]\nname = 'wordle'\n"
        "ratio = 2.0\ngroup_size = 8\nselect = { limit = 10, skip = 2 }\n[orchestrator.train.source.env]\n"
        "taskset = { id = 'wordle', task = { tries = 6 } }\n"
        "player = { harness = { id = 'bash' }, runtime = { type = 'docker' } }",
        "rl",
        {
            "orchestrator.env": [
                {
                    "id": "wordle",
                    "args": {
                        "taskset": {"task": {"tries": 6}},
                        "player": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}},
                        "limit": 10,
                    },
                    "ratio": 2.0,
                    "rollouts_per_example": 8,
                }
            ]
        },
        ["orchestrator.train.source[0].select.skip"],
    ),
    "algorithm of one source": (
        "[orchestrator]\nbatch_size = 64\ngroup_size = 16\nalgo.type = 'grpo'\n"
        f"{SOURCE}[[orchestrator.train.source]]\nname = 'taught'\nenv.taskset.id = 'reverse-text'\n"
        "algo = { type = 'opd', teacher = { name = 't', base_url = 'http://localhost:8001/v1' } }",
        "rl",
        {
            "orchestrator.env": [
                {"id": "reverse-text", "name": "words"},
                {"id": "reverse-text", "name": "taught", "algorithm": "opd"},
            ],
            "orchestrator.teacher.base_url": "http://localhost:8001/v1",
        },
        [],
    ),
    "losses, optimizer, schedule": (
        "max_steps = 100\n[trainer.loss]\ntype = 'default'\ndppo_mask_low = 0.1\ndppo_mask_high = 0.2\nadv_tau = 0.5\n"
        "kl_tau = 0.01\n[trainer.optim]\ntype = 'adamw'\nbetas1 = 0.8\n[trainer.scheduler]\ntype = 'linear'\n"
        "warmup_steps = 5\ndecay_steps = 20",
        "rl",
        {
            "trainer.loss": {"type": "dppo", "max_shift": 0.2, "kl_tau": 0.01},
            "trainer.optim.betas": [0.8, 0.999],
            "trainer.scheduler": {"type": "wsd", "warmup_steps": 5, "decay_fraction": 0.2},
        },
        ["trainer.loss.adv_tau", "trainer.loss.dppo_mask_low"],
    ),
    "a loss that is not here, and values that are none": (
        "inference = {}\n[trainer.loss]\ntype = 'ipo'\nipo_threshold = 0.1\n[trainer.optim]\ntype = 'sgd'\nlr = -1.0",
        "rl",
        {},
        [
            "trainer.loss.ipo_threshold",
            "trainer.loss.type",
            "trainer.optim.lr",
            "trainer.optim.type",
        ],
    ),
    "several nodes, Slurm": (
        "toml_files = ['rl.toml']\noutput_dir = 'o'\n[run]\nname = 'mine'\n[slurm]\njob_name = 'a'\n"
        "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2",
        "rl",
        {"output_dir": "o/mine"},
        ["deployment.num_train_nodes", "deployment.type", "slurm.job_name", "toml_files"],
    ),
    "SFT of 2025": (
        "ckpt = {}\nmodel.name = 'm'\n[data]\nname = 'd'\nsplits = ['train']\npack_function = 'stack'\nseq_len = 64\n"
        "loss_mask = { user = true }\nprobabilities = [1.0]",
        "sft",
        {
            "data.split": "train",
            "data.pack": "stack",
            "data.train_on": ["assistant", "user"],
            "data.weights": [1.0],
        },
        [],
    ),
    "SFT of late 2026": (
        "inference = {}\ndeployment = { num_train_gpus = 1, num_infer_gpus = 1 }\nmodel.name = 'm'\ndata.name = 'd'\n"
        "model.ac = {}\noptim = { lr = 2e-5, betas1 = 0.9 }\n[eval]\ninterval = 25\nskip_first_step = true\n"
        "sampling.max_completion_tokens = 9\n[[eval.source]]\nname = 'e'\nenv.taskset.id = 'reverse-text'",
        "sft",
        {
            "activation_checkpointing": True,
            "optim": {"lr": 2e-5, "betas": [0.9, 0.999]},
            "eval.env": [{"id": "reverse-text", "name": "e"}],
            "eval.at_start": False,
            "eval.max_tokens": 9,
        },
        [],
    ),
    "random data": (
        "model = { name = 'm', compile = 'None' }\ndata = { type = 'fake', batch_size = 2, seq_len = 64 }",
        "sft",
        {"data.fake": True, "data.batch_size": 2},
        [],
    ),
    "inference": (
        "model.name = 'm'\nparallel = { tp = 2, dp = 4 }\nserver.port = 9000\nseed = 1",
        "inference",
        {"model.name": "m", "tensor_parallel_size": 2, "server.port": 9000},
        [],
    ),
}
CLASSES = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "trainer": TrainerRunConfig,
    "orchestrator": OrchestratorRunConfig,
}


def find(values, key):
    for name in key.split("."):
        values = values[name]
    return values


@pytest.mark.parametrize("name", FILES)
def test_files_become_what_hone_reads(name, tmp_path):
    text, command, expected, lost = FILES[name]
    values = tomllib.loads(text)
    assert find_command(values, "file") == command
    conversion = convert_file(values, command)
    for key, value in expected.items():
        assert find(conversion.result, key) == value, key
    assert sorted(one.key for one in conversion.lost) == lost
    assert every_key_is_reported(values, conversion.changes)


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file[1] in CLASSES])
def test_what_is_written_is_read(name, tmp_path, capsys):
    text, command, _, lost = FILES[name]
    file = tmp_path / "old.toml"
    file.write_text(text)
    code = main([str(file), "-o", str(tmp_path / "new")])
    assert code == (EXIT_LOST if lost else 0)
    assert ("LOST" in capsys.readouterr().err) == bool(lost)
    needed = ["--model.name", MODEL] if command != "trainer" else []
    if command == "rl" and "orchestrator" not in tomllib.loads(text):
        needed += ["--orchestrator.env", json.dumps({"id": "reverse-text"})]
    load_config(CLASSES[command], ["@", str(tmp_path / "new" / "old.toml"), *needed])


def every_key_is_reported(values, changes):
    """Every value of a file is named by a change, itself or with all of its section."""
    named = {one.key for one in changes}
    for key in list_leaves(values):
        parts = key.replace("experimental.", "").split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        if not (prefixes & named or any(one.startswith(f"{key}[") for one in named)):
            return False
    return True


VALUES = (
    0,
    1,
    3,
    -1,
    True,
    "a",
    2.5,
    [1],
    ["a"],
    [{"id": "a"}],
    {"a": 1},
    {"type": "grpo"},
    "None",
)


@pytest.mark.parametrize("seed", range(60))
def test_no_known_key_is_dropped_in_silence(seed):
    """Random files of keys of the tables, with values of any type: each key is in the report."""
    draw = random.Random(seed)
    tables = ("RENAMED", "NEEDLESS", "LOST", "CHANGED")
    keys = [
        draw.choice(sorted(getattr(prime_rl_keys, table))) for table in tables for _ in range(5)
    ]
    command = "sft" if seed % 4 == 0 else "rl"
    values: dict = {"data": {"name": "d"}} if command == "sft" else {"orchestrator": {"seq_len": 9}}
    for key in keys:
        if command == "rl" and key.startswith(("data.", "val.")):
            continue
        *path, last = key.split(".")
        table = values
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break
        else:
            table.setdefault(last, draw.choice(VALUES))
    conversion = convert_file(values, command)
    named = {one.key for one in conversion.changes}
    for key in list_leaves(values):
        parts = key.split(".")
        prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
        assert prefixes & named or any(one.startswith(f"{key}[") for one in named), key


def list_leaves(values, path=""):
    if not isinstance(values, dict):
        return [path]
    return [
        leaf for k, v in values.items() for leaf in list_leaves(v, f"{path}.{k}" if path else k)
    ]


def test_defaults_that_make_another_run_are_written():
    conversion = convert_file(tomllib.loads("orchestrator.batch_size = 4\nseq_len = 77"), "rl")
    assert conversion.result["orchestrator"]["sampling"] == {"max_tokens": 77}
    assert [one.kind for one in conversion.changes].count("added") == 1
    before = dict(conversion.result)
    add_defaults(conversion)
    assert conversion.result == before


@pytest.mark.parametrize(
    "text, lost",
    [
        (
            "trainer.model.lora = { rank = 4, target_modules = ['q_proj', 5] }",
            "trainer.lora.targets",
        ),
        ("trainer.optim = { betas1 = 0.9, betas2 = 'x' }", "trainer.optim.betas"),
        ("trainer_gpu_ids = [0, 'x']", "trainer_gpu_ids"),
        ("[[orchestrator.env]]\nid = 'b'\nratio = 'x'", "orchestrator.env[1].ratio"),
        # A contradiction between keys, of which none is wrong.
        ("orchestrator.rollouts_per_example = 3", "orchestrator"),
    ],
)
def test_a_wrong_value_takes_nothing_else_with_it(text, lost):
    if lost.startswith("orchestrator.env"):
        values = tomllib.loads(f"[[orchestrator.env]]\nid = 'a'\n{text}\n[orchestrator]\n")
    else:
        values = tomllib.loads(f"{text}\n[[orchestrator.env]]\nid = 'a'\n")
    values["orchestrator"] = (
        {"rollouts_per_example": 4} | values["orchestrator"] | {"batch_size": 8}
    )
    values["max_steps"] = 5
    conversion = convert_file(values, "rl")
    assert [one.key for one in conversion.lost] == [lost]
    assert (
        conversion.result["max_steps"] == 5 and conversion.result["orchestrator"]["batch_size"] == 8
    )
    assert conversion.result["orchestrator"]["env"][0] == {"id": "a"}
    assert "rank" in conversion.result["trainer"]["lora"] if "lora" in lost else True


def test_an_evaluation_becomes_a_command():
    (words,), changes = convert_evaluation(
        tomllib.loads(
            "model = 'm'\nnum_rollouts = 3\npush = false\nresume = true\nclient.base_url = 'http://localhost:8000/v1'\n"
            "sampling.max_tokens = 99\nselect.limit = 20\n[env]\ntaskset = { id = 'gsm8k', split = 'test' }\n"
            "agent = { harness = { id = 'null' }, runtime = { type = 'subprocess' } }"
        )
    )
    assert words[:2] == ["vf-eval", "gsm8k"]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert flags["-m"] == "m" and flags["-n"] == "20" and flags["-r"] == "3" and flags["-t"] == "99"
    assert json.loads(flags["-a"]) == {"taskset": {"split": "test"}}
    assert [one.key for one in changes if one.kind == "lost"] == ["resume"]


def test_an_evaluation_of_several_sources_becomes_several_commands(tmp_path, capsys):
    file = tmp_path / "eval.toml"
    file.write_text(
        "model = 'm'\nnum_rollouts = 3\nsampling.temperature = 0.5\n"
        "[[source]]\nname = 'long'\nnum_rollouts = 8\nsampling.max_tokens = 9\n"
        "env.taskset = { id = 'aime', year = 2026 }\n"
        "[[source]]\nid = 'gsm8k'\ncolour = 'red'\nselect.limit = 5\n"
    )
    assert main([str(file)]) == EXIT_LOST
    said = capsys.readouterr()
    commands = [shlex.split(line) for line in said.out.splitlines()]
    assert [words[:2] for words in commands] == [["vf-eval", "aime"], ["vf-eval", "gsm8k"]]
    flags = [dict(zip(words[2::2], words[3::2], strict=True)) for words in commands]
    assert flags[0].pop("-a") == '{"taskset": {"year": 2026}}'
    shared = {"-m": "m", "-T": "0.5"}
    assert flags == [shared | {"-r": "8", "-t": "9"}, shared | {"-r": "3", "-n": "5"}]
    assert "source[1].colour" in said.err and said.err.count("LOST") == 1
    assert "source[0].name" in said.err and "source[1].select.limit" in said.err


def test_files_that_are_none(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("a = ")
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("model.name = 'm'")
    for words in ([str(tmp_path / "none.toml")], [str(bad)], [str(unknown)]):
        with pytest.raises(ConfigError, match=words[0].rpartition("/")[2]):
            main(words)
    assert main([str(unknown), "--command", "inference"]) == 0
    assert main([str(unknown.rename(tmp_path / "infer.toml"))]) == 0


@pytest.mark.parametrize(
    "cls, words, new",
    [
        (RLConfig, ["--orchestrator.group-size", "4"], "orchestrator.rollouts-per-example"),
        (RLConfig, ["--deployment.num-train-gpus", "2"], "hone convert"),
        (OrchestratorRunConfig, ["--group-size", "4"], "rollouts-per-example"),
        (TrainerRunConfig, ["--model.lora.rank", "4"], "lora"),
        (SFTConfig, ["--data.pack-function", "cat"], "data.pack"),
    ],
)
def test_commands_name_the_right_key(cls, words, new):
    needed = ["--model.name", MODEL]
    if cls is not TrainerRunConfig and cls is not SFTConfig:
        env = "--env" if cls is OrchestratorRunConfig else "--orchestrator.env"
        needed += [env, '{"id": "reverse-text"}']
    if cls is SFTConfig:
        needed += ["--data.name", "d"]
    with pytest.raises(ConfigError) as error:
        load_config(cls, [*needed, *words])
    assert new in str(error.value)


def test_the_command_reports_and_exits_with_what_was_lost(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(
        f"[slurm]\njob_name = 'a'\n[orchestrator]\nbatch_size = 4\ngroup_size = 2\n{SOURCE}"
    )
    words = [sys.executable, "-m", "hone", "convert", str(file)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == EXIT_LOST and "Traceback" not in done.stderr
    assert "group_size = 2 -> orchestrator.rollouts_per_example" in done.stderr
    assert tomllib.loads(done.stdout)["orchestrator"]["rollouts_per_example"] == 2
