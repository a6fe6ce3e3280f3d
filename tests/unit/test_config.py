"""Configuration: files, overrides, precedence, and the words for mistakes."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from hone import machine
from hone.config.base import (
    ConfigError,
    Typed,
    find_differences,
    load_config,
    merge_tables,
    section_types,
)
from hone.config.command_table import COMMANDS, import_object
from hone.config.help import help_text, reference_table, to_toml
from hone.config.inference_config import InferenceConfig
from hone.config.rl_config import OrchestratorRunConfig, RLConfig, TrainerRunConfig
from hone.config.sft_config import SFTConfig
from hone.launch.plan import component_configs
from tests.hangs import HANG_SECONDS
from tests.processor_time import HELP_PROCESSOR_SECONDS, read_children_seconds

RL = """
max_steps = 20
[model]
name = "from-file"
[orchestrator]
rollouts_per_example = 8
[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.fixture
def rl_toml(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(RL)
    return str(file)


def test_command_line_wins_over_file_wins_over_defaults(rl_toml):
    config = load_config(
        RLConfig, ["@", rl_toml, "--model.name", "typed", "--trainer.optim.lr=3e-6"]
    )
    assert (config.model.name, config.max_steps, config.orchestrator.batch_size) == (
        "typed",
        20,
        128,
    )
    assert config.trainer.optim.lr == 3e-6
    assert config.orchestrator.prompts_per_step == 16


def test_a_later_file_wins_and_a_file_can_be_given_for_a_component(rl_toml, tmp_path):
    (tmp_path / "more.toml").write_text("max-steps = 7")
    (tmp_path / "trainer.toml").write_text("[optim]\nlr = 0.5")
    config = load_config(
        RLConfig,
        [
            "@",
            rl_toml,
            "@",
            str(tmp_path / "more.toml"),
            "--trainer",
            "@",
            str(tmp_path / "trainer.toml"),
        ],
    )
    assert (
        config.max_steps == 7
        and config.trainer.optim.lr == 0.5
        and config.model.name == "from-file"
    )


def test_booleans_lists_and_none(rl_toml):
    config = load_config(
        RLConfig,
        [
            "@",
            rl_toml,
            "--clean",
            "--orchestrator.no-drop-zero-signal",
            "--trainer.optim.betas",
            "[0.8, 0.9]",
            "--wandb.project",
            "p",
            "--wandb.name",
            "None",
        ],
    )
    assert config.clean and not config.orchestrator.drop_zero_signal
    assert config.trainer.optim.betas == (0.8, 0.9)
    assert config.wandb.project == "p" and config.wandb.name is None
    one = load_config(RLConfig, ["@", rl_toml, "--orchestrator.env", '{"id": "one"}'])
    assert [env.id for env in one.orchestrator.env] == ["one"]
    assert load_config(RLConfig, ["@", rl_toml, "--wandb", "None"]).wandb is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--model.nam", "x"],
            ["model.nam: unknown key", "the command line", "did you mean model.name?"],
        ),
        (["--lr", "1"], ["lr: unknown key", "did you mean trainer.optim.lr?"]),
        (["--context-parallel", "2"], ["did you mean trainer.context-parallel?"]),
        (["--lora.rank", "8"], ["did you mean trainer.lora?"]),
        (["--max-steps", "many"], ["max-steps", "valid integer", "'many'", "the command line"]),
        (
            ["--orchestrator.batch-size", "100"],
            ["batch-size 100 is not a multiple of rollouts-per-example 8"],
        ),
        (
            ["--orchestrator.rollouts-per-example", "1"],
            ["rollouts-per-example", "greater than or equal to 2", "'1'"],
        ),
        (["@", "missing.toml"], ["missing.toml: no such file"]),
        (["stray"], ["'stray' is not understood"]),
        (
            ["--weight-broadcast.type", "nccx"],
            ["weight-broadcast.type: 'nccx' is not one of filesystem, nccl", "nccl?"],
        ),
        (
            ["--weight-broadcast.host", "::1"],
            ["weight-broadcast.host: unknown key", "it is one of type nccl"],
        ),
        (["--trainer.optim.lr", "-1"], ["trainer.optim.lr", "greater than or equal to 0"]),
    ],
)
def test_mistakes_are_named(rl_toml, argv, words):
    with pytest.raises(ConfigError) as error:
        load_config(RLConfig, ["@", rl_toml, *argv])
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_bad_key_in_a_file_names_the_file_and_a_bad_file_its_line(tmp_path, rl_toml):
    bad = tmp_path / "bad.toml"
    bad.write_text("[trainer.optim]\nlearning_rate = 1")
    with pytest.raises(
        ConfigError, match=r"trainer.optim.learning-rate: unknown key \(in .*bad.toml\)"
    ):
        load_config(RLConfig, ["@", rl_toml, "@", str(bad)])
    bad.write_text("a = [1")
    with pytest.raises(ConfigError, match="bad.toml is not valid TOML"):
        load_config(RLConfig, ["@", str(bad)])


def test_missing_required_keys_are_asked_for():
    with pytest.raises(ConfigError) as error:
        load_config(SFTConfig, [])
    assert "model.name must be given" in str(error.value) and "data.name must be given" in str(
        error.value
    )


def test_a_resolved_configuration_reads_back_as_itself(rl_toml, tmp_path):
    config = load_config(
        RLConfig,
        [
            "@",
            rl_toml,
            "--wandb.project",
            "p",
            "--orchestrator.env",
            '{"id": "x", "args": {"a": [1]}}',
        ],
    )
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_config(RLConfig, ["@", str(tmp_path / "resolved.toml")]) == config


@pytest.mark.parametrize("cls", [RLConfig, SFTConfig, InferenceConfig])
def test_every_key_is_documented(cls):
    text = help_text("x", "", cls)
    lines = text.splitlines()
    keys = [
        i
        for i, line in enumerate(lines)
        if line.startswith("  --") and "--dry-run" not in line and "--help" not in line
    ]
    assert len(keys) > 10
    for i in keys:
        assert lines[i + 1].startswith("      "), f"no words for {lines[i]}"


def list_fields(cls):
    """Yield the fields of a configuration, and of its sections, whose values are lists."""
    for name, field in cls.model_fields.items():
        yield from (
            one for section in section_types(field.annotation) for one in list_fields(section)
        )
        if not section_types(field.annotation) and "list[" in str(field.annotation):
            yield name, field


@pytest.mark.parametrize("command", COMMANDS)
def test_a_list_of_values_may_be_given_as_one_value(command):
    for name, field in list_fields(import_object(COMMANDS[command][0])):
        kind = TypeAdapter(Annotated[field.annotation, "a field", *field.metadata])
        tried = []
        for value in (
            "a",
            3,
            0.5,
            "assistant",
            "q_proj",
            "lm_head",
            "solved",
            "http://h:1",
            "wandb",
        ):
            with contextlib.suppress(ValidationError):
                wanted = kind.validate_python([value])
                assert kind.validate_python(value) == wanted, name
                tried.append(value)
        assert tried or "tuple[" in str(field.annotation), f"no value for {name}"


def test_defaults_are_those_of_the_command():
    """A section's own may be set otherwise by the command that has it; a table by names shows where the name goes."""

    def defaults(cls):
        rows = (row.strip("| ").split(" | ") for row in reference_table(cls).splitlines()[2:])
        return {key.strip("`*"): default for key, _, default, *_ in rows}

    assert defaults(SFTConfig)["model.name"] == "required"
    assert defaults(RLConfig)["trainer.optim.lr"] == "auto"
    assert defaults(TrainerRunConfig)["model.name"] == "Qwen/Qwen3-0.6B"
    assert {"loss_of.NAME.type", "ckpt"} <= defaults(TrainerRunConfig).keys()


@pytest.mark.parametrize("command", ["sft", "rl", "inference"])
def test_help_is_quick_and_imports_no_torch(command):
    code = (
        "import sys; sys.argv = ['x', '--help']; from hone import cli\n"
        f"try: cli.{command}()\nexcept SystemExit as e: code = e.code\n"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    before = read_children_seconds()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0 and "--model.name" in done.stdout
    assert read_children_seconds() - before < HELP_PROCESSOR_SECONDS


def test_the_reference_page_is_current():
    from pathlib import Path

    from hone.config.reference import reference_page

    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference_page(), "run `make docs`"


def test_components_files_say_what_they_share_once_for_all(tmp_path):
    trainer, orchestrator = tmp_path / "train.toml", tmp_path / "orch.toml"
    trainer.write_text('max_steps = 5\nclean = true\n[model]\nname = "m"\n[optim]\nlr = 1e-3\n')
    orchestrator.write_text(
        'max_steps = 5\nseq_len = 64\n[model]\nname = "m"\n[[env]]\nid = "reverse-text"\n'
    )
    argv = ["--trainer", "@", str(trainer), "--orchestrator", "@", str(orchestrator)]
    config = load_config(RLConfig, argv)
    assert (config.model.name, config.max_steps, config.seq_len, config.clean) == ("m", 5, 64, True)
    assert (config.deployment, config.inference, config.trainer.optim.lr) == (
        "processes",
        None,
        1e-3,
    )
    assert load_config(RLConfig, [*argv, "--max-steps", "7", "--model.name", "n"]).max_steps == 7
    orchestrator.write_text('max_steps = 6\n[[env]]\nid = "reverse-text"\n')
    with pytest.raises(
        ConfigError,
        match=r"max_steps: 5 in .*train.toml, 6 in .*orch.toml; .* give it once, --max-steps",
    ):
        load_config(RLConfig, argv)
    assert load_config(RLConfig, [*argv, "--max-steps", "7"]).max_steps == 7


def test_a_server_that_runs_is_used_where_its_address_is_given(rl_toml):
    assert load_config(RLConfig, ["@", rl_toml]).deployment == "auto"
    config = load_config(
        RLConfig, ["@", rl_toml, "--orchestrator.client.base-url", "http://there:8000/v1"]
    )
    assert (config.deployment, config.inference) == ("processes", None)
    assert config.orchestrator.client.base_url == ["http://there:8000/v1"]


def test_secrets_are_not_written_down(rl_toml):
    config = load_config(RLConfig, ["@", rl_toml, "--inference.api-key", "hush"])
    assert config.inference.api_key == "hush" and "hush" not in to_toml(config) + str(
        config.to_public_dict()
    )


@pytest.mark.parametrize(
    "command, file",
    [
        ("trainer", "rl/train.toml"),
        ("orchestrator", "rl/orch.toml"),
        ("inference", "rl/infer.toml"),
        ("sft", "sft/train.toml"),
        ("sft", "sft.toml"),
        ("rl", "rl.toml"),
    ],
)
@pytest.mark.parametrize("example", ["reverse_text", "reverse_text_tiny"])
def test_the_examples_are_valid(command, file, example):
    assert_valid(command, Path(__file__).parents[2] / "examples" / example / file)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_the_example_without_a_hub_is_valid(command):
    assert_valid(
        command, Path(__file__).parents[2] / "examples" / "reverse_text_0.6b" / f"{command}.toml"
    )


def assert_valid(command, path):
    load_config(import_object(COMMANDS[command][0]), ["@", str(path)])


def test_arguments_of_an_environment_have_the_types_that_they_look_like():
    words = "--orchestrator.env.id e --model.name m --orchestrator.env.args".split()
    given = {
        "max-chars": "8",
        "share": "0.5",
        "strict": "true",
        "texts": "generated",
        "code": "007",
        "quoted": '"8"',
    }
    argv = [
        *words[:4],
        *(word for key, value in given.items() for word in (f"{words[4]}.{key}", value)),
    ]
    config = load_config(RLConfig, argv)
    assert config.orchestrator.env[0].args == {
        "max_chars": 8,
        "share": 0.5,
        "strict": True,
        "texts": "generated",
        "code": "007",
        "quoted": "8",
    }
    assert type(config.model.name) in (str, Typed) and config.model.name == "m"


def test_names_of_the_users_own_stay_as_they_are_written(tmp_path):
    """Through the files that processes are started with, too."""
    (tmp_path / "rl.toml").write_text(
        'model.name = "m"\n[[orchestrator.env]]\nid = "reverse-text"\nalgorithm = "gspo"\n'
        'args = {min-chars = 3, mix = {"gsm-8k" = 0.5}}\n'
        '[[orchestrator.env]]\nid = "my-task"\n[trainer.loss-of.my-task]\ntype = "ppo"\nclip-high = 0.3\n'
    )
    config = load_config(
        RLConfig, ["@", str(tmp_path / "rl.toml"), "--trainer.loss-of.my-task.clip-low", "0.1"]
    )
    assert set(config.trainer.loss_of) == {"reverse-text", "my-task"}
    assert (
        config.trainer.loss_of["my-task"].clip_high,
        config.trainer.loss_of["my-task"].clip_low,
    ) == (0.3, 0.1)
    assert config.orchestrator.env[0].args == {"min_chars": 3, "mix": {"gsm-8k": 0.5}}
    trainer = component_configs(config, has_key=False)["trainer"]
    (tmp_path / "trainer.toml").write_text(to_toml(trainer))
    read = load_config(TrainerRunConfig, ["@", str(tmp_path / "trainer.toml")])
    assert (
        read.loss_of == config.trainer.loss_of
        and read.loss_of["reverse-text"].ratio_type == "sequence"
    )
    assert load_config(
        InferenceConfig, ["--model.name", "m", "--adapters.my-lora", "x"]
    ).adapters == {"my-lora": Path("x")}


def test_an_algorithm_in_a_components_file_is_that_of_the_run(tmp_path):
    (tmp_path / "o.toml").write_text('algorithm = "dapo"\nenv = {id = "reverse-text"}\n')
    (tmp_path / "t.toml").write_text("max_steps = 3\n")
    name, files = ["--model.name", "m"], [f"{tmp_path}/o.toml", f"{tmp_path}/t.toml"]
    config = load_config(
        RLConfig, ["--orchestrator", "@", files[0], "--trainer", "@", files[1], *name]
    )
    other = load_config(
        RLConfig, ["--orchestrator.env.id", "reverse-text", "--algorithm", "dapo", *name]
    )
    assert config.algorithm == "dapo" and config.trainer.loss.type == "ppo"
    assert (config.trainer.loss, config.orchestrator.advantage) == (
        other.trainer.loss,
        other.orchestrator.advantage,
    )
    alone = load_config(OrchestratorRunConfig, ["@", files[0], *name])
    assert (alone.advantage, alone.refill) == (other.orchestrator.advantage, True)
    trainer = load_config(
        TrainerRunConfig, ["--algorithm", "dapo", "--loss.clip-low", "0.1", *name]
    )
    assert trainer.loss == other.trainer.loss.model_copy(update={"clip_low": 0.1})


# Of what a run may have otherwise when it goes on
FREE_KEYS = (
    "output_dir layout clean resume fork dashboard wandb tensorboard ckpt log_level log_format "
    "log_interval ranks_timeout max_steps max_seconds bench "
    "weights val eval weight_broadcast deployment inference inference_replicas inference_gpu_ids trainer_gpu_ids "
    "trainer_nodes inference_nodes "
    "offload on_bad_step sharding context_parallel expert_parallel batch_timeout activation_checkpointing "
    "micro_batch_tokens micro_batch_size client "
    "base_url api_key_var ready_timeout workers venv rollout_timeout rollout_retries weights_timeout canary_tolerance "
    "log_samples"
).split()
ENVS = [{"id": "a", "args": {"n": [1, {"x": 2}]}}, {"id": "b", "algorithm": "gspo"}]


@pytest.mark.parametrize(
    "config",
    [
        SFTConfig(
            model={"name": "m"},
            data={"name": ["a", "b"], "weights": [1, 2]},
            val={"name": "v"},
            wandb={},
            ckpt={},
            lora={},
            eval={"env": ENVS[:1]},
        ),
        RLConfig(
            model={"name": "m"},
            orchestrator={"env": ENVS, "eval": {"env": ENVS[:1]}, "teacher": {"model": "t"}},
            trainer={"loss_of": {"b": {"type": "ppo"}}, "lora": {}},
            wandb={},
            ckpt={},
        ),
        TrainerRunConfig(model={"name": "m"}, lora={}, bench={}),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_run_that_goes_on_refuses_every_change_of_what_is_learnt(config):
    """Each leaf of a configuration is free to change, or a change of it is found by its name."""

    def places(value, at=()):
        inner = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        yield from (
            [at]
            if not inner
            else [place for key, one in inner for place in places(one, (*at, key))]
        )

    written, seen = json.dumps(config.to_public_dict()), set()
    assert list(find_differences(json.loads(written), config)) == []
    for place in places(json.loads(written)):
        before = at = json.loads(written)
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = "changed"
        name = ".".join(map(str, place))
        is_free = place[:2] != ("data", "weights") and any(key in FREE_KEYS for key in place)
        found = [key for key, _, _ in find_differences(before, config)]
        assert not found if is_free else len(found) == 1 and name.startswith(found[0]), name
        seen.add(is_free)
    assert seen == {True, False}


def test_a_run_that_goes_on_has_the_same_environments():
    def run(*envs):
        return RLConfig(model={"name": "m"}, orchestrator={"env": list(envs)})

    before = run({"id": "a"}, {"id": "b", "workers": 2}).to_public_dict()
    assert list(find_differences(before, run({"id": "a", "workers": 1}, {"id": "b"}))) == []
    assert [key for key, _, _ in find_differences(before, run({"id": "a"}, {"id": "c"}))] == [
        "orchestrator.env.1.id"
    ]
    assert [key for key, _, _ in find_differences(before, run({"id": "a"}))] == ["orchestrator.env"]
    assert list(find_differences({**before, "gone": 1}, run({"id": "a"}, {"id": "b"}))) == []


def test_a_key_of_a_list_of_environments_is_set_in_each_or_in_the_one_that_is_named(tmp_path):
    (tmp_path / "rl.toml").write_text(
        'model.name = "m"\n[[orchestrator.env]]\nid = "reverse-text"\nargs = {max_chars = 4, seed = 1}\n'
        '[[orchestrator.env]]\nid = "reverse-text"\nname = "long-ones"\n'
    )
    words = [
        "@",
        str(tmp_path / "rl.toml"),
        "--orchestrator.env.max-tokens",
        "7",
        "--orchestrator.env.args.max-chars",
        "9",
    ]
    one, two = load_config(RLConfig, words).orchestrator.env
    assert (one.id, one.max_tokens, one.args) == ("reverse-text", 7, {"max_chars": 9, "seed": 1})
    assert (two.known_as, two.max_tokens, two.args) == ("long-ones", 7, {"max_chars": 9})
    one, two = load_config(
        RLConfig, [*words, "--orchestrator.env.long-ones.max-tokens", "30"]
    ).orchestrator.env
    assert (one.max_tokens, two.max_tokens, two.known_as) == (7, 30, "long-ones")
    # Nothing to change: it stands there now
    assert merge_tables({"env": []}, {"env": {"id": "a"}}) == {"env": {"id": "a"}}
    (only,) = load_config(
        RLConfig, [*words, "--orchestrator.env", '{"id": "other"}']
    ).orchestrator.env
    assert (only.id, only.max_tokens, only.args) == ("other", None, {})


def test_an_environment_named_like_a_key_leaves_the_key_to_be_set(tmp_path):
    (tmp_path / "rl.toml").write_text(
        'model.name = "m"\n[[orchestrator.env]]\nid = "reverse-text"\nname = "workers"\n'
        '[[orchestrator.env]]\nid = "reverse-text"\nname = "b"\n'
    )
    words = ["@", str(tmp_path / "rl.toml"), "--orchestrator.env.workers", "2"]
    one, two = load_config(RLConfig, words).orchestrator.env
    assert (one.workers, two.workers, one.known_as) == (2, 2, "workers")
    words[2:] = ["--orchestrator.env.workers.workers", "3"]
    one, two = load_config(RLConfig, words).orchestrator.env
    assert (one.workers, two.workers) == (3, 0)


def test_the_address_of_a_server_may_stand_beside_its_section():
    found = InferenceConfig.model_validate(
        {"model": {"name": "m"}, "host": "127.0.0.1", "port": 8001}
    )
    assert (found.server.host, found.server.port) == ("127.0.0.1", 8001)
    same = InferenceConfig.model_validate(
        {"model": {"name": "m"}, "port": 8001, "server": {"port": 8001}}
    )
    assert same.server.port == 8001
    with pytest.raises(ValueError, match=r"port and server\.port are both given, and differ"):
        InferenceConfig.model_validate(
            {"model": {"name": "m"}, "port": 8001, "server": {"port": 8002}}
        )


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--trainer.args.batch-size", "100"], r"\(in the command line and .*a.toml\)"),
        (
            ["--trainer.args.batch-size", "100", "--trainer.args.rollouts-per-example", "8"],
            r"\(in the command line\)",
        ),
        (["--log-level", "debug"], r"\(in .*a.toml\)"),
    ],
)
def test_a_mistake_that_several_keys_make_is_said_to_be_where_they_were_given(
    tmp_path, words, place
):
    from hone.config.vf_rl_config import VfRLConfig

    text = (
        'model = "m"\n[env]\nid = "e"\n[trainer.args]\nbatch_size = 50\nrollouts_per_example = 16\n'
    )
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"is not a multiple of rollouts_per_example .*{place}$"):
        load_config(VfRLConfig, ["@", str(tmp_path / "a.toml"), *words])


def test_a_file_that_is_not_there_is_compared_with_those_that_are(tmp_path):
    for name in ("wordle.toml", "rl.toml"):
        (tmp_path / name).write_text("")
    for name, hint in (
        ("worlde.toml", "did you mean .*wordle.toml"),
        ("nope.toml", "there are .*rl.toml, .*wordle"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: no such file; {hint}"):
            load_config(RLConfig, ["@", str(tmp_path / name)])


def test_a_home_directory_in_a_file_is_the_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.toml").write_text(
        'output_dir = "~/runs"\n[model]\nname = "~/m"\n[data]\nname = ["~/a.jsonl", "b"]\n'
    )
    config = load_config(
        SFTConfig, ["@", str(tmp_path / "a.toml"), "--resume", "~/runs/checkpoints/step_1"]
    )
    assert config.output_dir == tmp_path / "runs" and config.model.name == f"{tmp_path}/m"
    assert (
        config.data.name == [f"{tmp_path}/a.jsonl", "b"]
        and config.resume == f"{tmp_path}/runs/checkpoints/step_1"
    )


def test_a_user_without_a_home_directory_is_given_one(tmp_path, monkeypatch):
    import pwd
    import tempfile

    def unknown(*_):
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    machine.ensure_home()
    home = Path(os.environ["HOME"])
    assert home.parent == tmp_path and home.stat().st_mode & 0o777 == 0o700
    assert Path.home() == home and os.environ["USER"] == f"uid{os.getuid()}"
