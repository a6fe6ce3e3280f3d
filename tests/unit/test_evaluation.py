"""What an evaluation says: errors clustered by example, pass@k, comparison, results that are gone on with, a page."""

import asyncio
import contextlib
import json
import math
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import hone.environments as vf
from hone.evals import vf_eval
from hone.evals.arguments import list_evaluations, parse_arguments
from hone.evals.compare import compare_results
from hone.evals.held_out import RolloutPlan, attempt_rollouts
from hone.evals.own_server import endpoint_for
from hone.evals.page import write_page
from hone.evals.paired_statistics import clustered_error, paired_difference, pass_at_k
from hone.evals.results import Folder
from hone.evals.vf_eval import summarize_rollouts
from hone.records import Completion, Sampling, Turn


def test_the_error_of_a_mean_is_that_of_the_examples():
    values = np.random.default_rng(0).random(50)
    assert clustered_error(values, range(50)) == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    # Eight times the same says nothing more
    assert clustered_error(np.repeat(values, 8), np.repeat(range(50), 8)) == pytest.approx(
        values.std(ddof=1) / math.sqrt(50)
    )
    assert math.isnan(clustered_error([1.0, 0.0], [3, 3]))


def test_pass_at_k():
    assert pass_at_k([[True, False, False, False]], 2) == 0.5  # 1 - C(3, 2) / C(4, 2)
    assert pass_at_k([[True, False], [False, False]], 1) == 0.25
    assert pass_at_k([[True, True, False]], 2) == 1.0 and math.isnan(pass_at_k([[True]], 2))


def test_a_paired_difference():
    found = paired_difference(
        {"a": 0.0, "b": 0.5, "c": 1.0, "x": 9.0}, {"a": 0.5, "b": 1.0, "c": 1.5, "y": 0.0}
    )
    assert (found.mean, found.better, found.worse, found.count) == (0.5, 3, 0, 3)
    differs = paired_difference(
        {str(i): 0.0 for i in range(4)}, {"0": 1.0, "1": 1.0, "2": 0.0, "3": 0.0}
    )
    assert differs.error == pytest.approx(math.sqrt(1 / 3) / 2) and differs.p == pytest.approx(
        0.0833, abs=1e-3
    )
    with pytest.raises(ValueError, match="no example in common"):
        paired_difference({"a": 1.0}, {"b": 1.0})


class Digits:
    """Answers with a digit that follows from the seed; some seeds fail."""

    def __init__(self, fails=lambda seed: False):
        self.fails, self.asked = fails, []

    async def chat(self, prompt, sampling):
        self.asked.append(sampling.seed)
        await asyncio.sleep(0.001)
        if self.fails(sampling.seed):
            raise RuntimeError("busy")
        return Turn([1, 2], Completion([3], [-0.5], [7], "stop"), str(sampling.seed % 2))


def environment():
    rows = [{"question": f"<q{i}>", "answer": str(i % 2)} for i in range(6)]
    rubric = vf.Rubric(
        funcs=[lambda completion, answer: float(completion[-1]["content"] == answer)]
    )
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric)


SETTINGS = {
    "env": "digits",
    "env_args": {},
    "model": "m",
    "num_examples": 6,
    "rollouts_per_example": 2,
    "temperature": 1.0,
    "max_tokens": 8,
    "sampling_args": {},
    "seed": 0,
}


def evaluate(client, folder=None, known=None):
    env, sampling = environment(), Sampling()
    plan = RolloutPlan(2, sampling, finished=known or {})
    if folder is not None:
        plan = replace(plan, on_rollout=folder.append_rollout)
    return asyncio.run(attempt_rollouts(env, client, env.get_dataset(), plan))


def test_results_go_to_a_folder_that_holds_none(tmp_path):
    folder = Folder.create(SETTINGS, token_ids=False, path=tmp_path / "here")
    assert folder.path == tmp_path / "here" and Folder.open(folder.path).settings == SETTINGS
    with pytest.raises(ValueError, match="--output-dir"):
        Folder.create(SETTINGS, token_ids=False, path=tmp_path / "here")


def test_results_that_were_begun_are_gone_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Folder.create(SETTINGS, token_ids=False)
    first = evaluate(Digits(fails=lambda seed: seed % 5 == 0), folder)
    failed = [i for i, rollout in enumerate(first) if rollout.error]
    assert failed == [0, 5, 10]
    lines = (folder.path / "results.jsonl").read_text().splitlines()
    # It was killed
    (folder.path / "results.jsonl").write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:20])
    known = Folder.open(folder.path).read_known(SETTINGS)
    client = Digits()
    whole = evaluate(client, folder, known)
    # Groups with one that failed or was not written are made again
    assert len(client.asked) == 3 * 2 + 2
    assert [r.reward for r in whole] == [r.reward for r in evaluate(Digits())]
    folder.rewrite_rollouts(whole)
    folder.write_about(SETTINGS | summarize_rollouts(whole, 2, 1.0))
    rows = folder.read_rows()
    assert [row["rollout"] for row in rows] == list(range(12)) and rows[0]["turns"][0][
        "prompt_tokens"
    ] == 2
    assert rows[0]["turns"][0]["version"] == 7 and "ids" not in rows[0]["turns"][0]
    with pytest.raises(ValueError, match="--resume: seed is 1, the results have 0"):
        folder.read_known(SETTINGS | {"seed": 1})
    with pytest.raises(ValueError, match="no folder of results"):
        Folder.open(tmp_path)
    compare_results(folder.path, folder.path)
    said = capsys.readouterr().out
    assert "+0.000" in said and "6 examples are in both" in said


def test_a_summary_counts_what_failed_and_why_conversations_ended():
    found = summarize_rollouts(evaluate(Digits(fails=lambda seed: seed < 2)), 2, 1.0)
    assert (found["rollouts"], found["failed"], found["stops"]) == (
        12,
        2,
        {"max_turns_reached": 10},
    )
    assert (
        found["reward"] == 0.5
        and found["pass_at"] == {"1": 0.5, "2": 1.0}
        and found["reward_error"] == 0.0
    )


def test_nothing_more_is_asked_of_a_server_that_refuses_everything():
    env, client, failed = environment(), Digits(fails=lambda seed: True), []
    plan = RolloutPlan(
        2,
        Sampling(),
        max_in_flight=2,
        on_rollout=lambda number, rollout: failed.append(number),
        gives_up=lambda: len(failed) >= 4,
    )
    rollouts = asyncio.run(attempt_rollouts(env, client, env.get_dataset(), plan))
    assert len(client.asked) < 12 and all(rollout.error for rollout in rollouts)


def test_a_page_shows_rollouts_and_runs_nothing_of_theirs(tmp_path):
    rows = [
        {
            "example_id": 0,
            "prompt": [{"role": "user", "content": "<script>alert(1)</script>"}],
            "completion": [],
            "answer": "a",
            "reward": 0.5,
            "metrics": {"m": 1.0},
            "error": None,
            "stop": "",
            "seconds": 0.1,
        }
    ]
    write_page(tmp_path / "page.html", {"env": "e", "model": "m"}, rows)
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page and "http" not in page


def test_an_evaluation_that_cannot_be_had_does_not_end_those_after_it(
    tmp_path, monkeypatch, capsys
):
    done = []

    def one(args):
        if args.env == "a":
            raise ValueError("no such environment")
        done.append(args.env)
        return {"failed": 0, "fail_above": 0.1, "rollouts": 1}

    monkeypatch.setattr(vf_eval, "run_evaluation", one)
    file = tmp_path / "evals.toml"
    file.write_text('[[eval]]\nenv_id = "a"\n[[eval]]\nenv_id = "b"\n')
    assert vf_eval.main([str(file)]) == 1 and done == ["b"]
    said = capsys.readouterr().err
    assert "a: no such environment" in said and "1 of 2 evaluations failed: a" in said


def test_fields_of_the_openai_client_stand_beside_the_others(tmp_path):
    args = parse_arguments(["x", "-S", '{"top_p": 0.5, "extra_body": {"top_k": 3}}'])
    assert args.sampling_args == {"top_p": 0.5, "top_k": 3}
    file = tmp_path / "evals.toml"
    file.write_text(
        '[[eval]]\nenv_id = "a"\nsampling_args = { extra_body = { min_p = 0.1 } }\n[[eval]]\nenv_id = "b"\n'
    )
    first, second = list_evaluations(parse_arguments([str(file), "-S", '{"top_p": 0.5}']))
    assert first.sampling_args == {"min_p": 0.1} and second.sampling_args == {"top_p": 0.5}


def test_several_environments_from_a_file(tmp_path):
    file = tmp_path / "evals.toml"
    file.write_text(
        'model = "m"\n[[eval]]\nenv_id = "a"\nnum_examples = 3\n[[eval]]\nid = "b"\nenv_args = { x = 1 }\n'
    )
    found = list_evaluations(parse_arguments([str(file), "-n", "9", "-r", "2"]))
    assert [
        (e.env, e.model, e.num_examples, e.rollouts_per_example, e.env_args) for e in found
    ] == [("a", "m", 3, 2, {}), ("b", "m", 9, 2, {"x": 1})]
    for text, words in (
        (
            '[[eval]]\nenv_id = "a"\nnum_exampels = 3',
            "no key 'num_exampels'; did you mean num_examples",
        ),
        ("[[eval]]\nmodel = 'm'", "has no env_id"),
        ("model = 'm'", "has no .*eval.* entry"),
        ("[", "not valid TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            list_evaluations(Namespace(env=str(file)))
    assert json.loads(json.dumps(vars(parse_arguments(["a"]))))["num_examples"] == 5


def test_the_environment_loads_while_an_own_server_starts(monkeypatch):
    """And a mistake in it is reported without waiting for the model."""
    seen = []

    @contextlib.contextmanager
    def pretend_server(*arguments):
        yield lambda: seen.append("waited")

    def load_environment(name, **arguments):
        seen.append("loaded")
        return SimpleNamespace(get_eval_dataset=lambda count: [])

    monkeypatch.setattr(vf_eval, "endpoint_for", pretend_server)
    monkeypatch.setattr(vf_eval, "load_environment", load_environment)
    args = parse_arguments(["some-env", "-m", "m"])
    with pytest.raises(ValueError, match="some-env has no examples"):
        vf_eval.run_evaluation(args)
    assert seen == ["loaded"]


def test_a_model_directory_that_is_not_there_is_named(tmp_path):
    missing = str(tmp_path / "missing")
    words = f"-m {missing}: there is no such directory"
    server = endpoint_for(missing, None, "KEY", str(tmp_path / "endpoints.toml"))
    with pytest.raises(ValueError, match=words), server:
        pass
