"""Secrets of a configuration are written nowhere, and reach the processes that need them."""

import json
import os
import stat

import pytest

from hone.config.base import load_config
from hone.config.help import to_toml
from hone.config.rl_config import RLConfig
from hone.config.secrets import (
    LEFT_OUT,
    collect_secrets,
    redact_secrets,
    restore_secrets,
    secrets_variable,
)
from hone.environments.protocols.isolated import Isolated
from hone.environments.turns import SingleTurnEnv
from hone.run_directory import RunDirectory, rewrite_file

SECRETS = {
    "api_key": "abc",
    "judge_api_key": "x1",
    "openai-api-key": "x2",
    "password": "x3",
    "client_secret": "x4",
    "Authorization": "x5",
    "token": "x6",
    "hf_token": "x7",
    "db": {"passwd": "x8"},
    "list": [{"access_token": "x9"}],
    "url": "http://h?k=sk-abcdefghijklmnop1234",
    "note": "hf_abcdefghijklmnopqrstuvwx",
    "head": ["Bearer abcdefghijkl123"],
}
HARMLESS = {
    "api_key_var": "OPENAI_API_KEY",
    "max_tokens": 5,
    "stop_token_ids": [1],
    "token_ids": [2],
    "password_file": "/x",
    "tokenizer": "t",
    "secret_env": "S",
    "pad_token": "<pad>",
    "task": "sk-1",
    "tokens": 3,
    "api_key": "",
}


def test_whatever_looks_like_a_secret_is_left_out_and_can_be_put_back():
    found = redact_secrets(SECRETS)
    text = json.dumps(found)
    assert not any(f'"x{i}"' in text for i in range(10)) and "abc" not in text
    assert found["url"] == found["note"] == LEFT_OUT and found["head"] == [LEFT_OUT]
    assert redact_secrets(HARMLESS) == {
        key: value for key, value in HARMLESS.items() if key != "api_key"
    }
    assert collect_secrets(HARMLESS) == []
    os.environ |= secrets_variable(SECRETS)
    restore_secrets(found)
    assert found == SECRETS and "HONE_SECRETS" not in os.environ


@pytest.fixture
def config(tmp_path):
    text = """
output_dir = "OUT"
[model]
name = "m"
[[orchestrator.env]]
id = "one"
[[orchestrator.env]]
id = "two"
args = {judge_api_key = "very-private", base_url = "http://x", nested = [{password = "hidden"}]}
"""
    (tmp_path / "a.toml").write_text(text.replace("OUT", str(tmp_path / "out")))
    return load_config(RLConfig, ["@", str(tmp_path / "a.toml")])


def test_a_written_configuration_has_none_and_its_process_has_them(config, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "out", "rl")
    file = run.write_config(to_toml(config))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for text in (file.read_text(), json.dumps(config.to_public_dict())):
        assert "very-private" not in text and "hidden" not in text and "http://x" in text
    for name, value in secrets_variable(config.model_dump(mode="json")).items():
        monkeypatch.setenv(name, value)
    again = load_config(RLConfig, ["@", str(file)])
    assert again.orchestrator.env[1].args == config.orchestrator.env[1].args
    kept = tmp_path / "job.toml"
    rewrite_file(kept, to_toml(config, with_secrets=True), mode=0o600)
    assert (
        load_config(RLConfig, ["@", str(kept)]).orchestrator.env[1].args
        == config.orchestrator.env[1].args
    )


def test_a_worker_s_command_line_has_no_arguments(tmp_path):
    env = SingleTurnEnv(dataset=[{"question": "?", "answer": "a"}])
    isolated = Isolated(env, "some_env", {"judge_api_key": "very-private"}, 1)
    assert "very-private" not in " ".join(isolated.workers[0].command)
    assert "very-private" in isolated.workers[0].environment["HONE_ENV_ARGUMENTS"]
