"""A conversation of three turns: in tokens, out tokens, one sequence to train on."""

import json

import pytest

from .conftest import TINY, command, http

SOURCE = """
import hone.environments as vf
from hone.records import Rollout

class Talk(vf.Environment):
    async def rollout(self, client, example, sampling):
        messages, turns = list(example.prompt), []
        for word in ("again", "and again", None):
            turns.append(await client.chat(messages, sampling))
            messages.append({"role": "assistant", "content": turns[-1].text})
            if word:
                messages.append({"role": "user", "content": word})
        return await self.score(Rollout(example, turns, messages[len(example.prompt):]), state={})

def load_environment(forgets=False):
    rows = [{"question": f"abc{i}"} for i in range(40)]
    return Talk(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion, **_: float(len(completion[0]["content"]))]))
"""


KINDS = [
    pytest.param("one process", marks=pytest.mark.main_path),
    "processes",
    pytest.param("workers", marks=pytest.mark.main_path),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_one_sequence_of_the_tokens_that_were_sampled(kind, trained, tmp_path):
    (tmp_path / "talk_env.py").write_text(SOURCE)
    out, env = tmp_path / "run", {"id": "talk-env", "workers": int(kind == "workers")}
    words = (
        ["--deployment", "colocated"]
        if kind == "one process"
        else ["--inference", "@", f"{TINY}/rl/infer.toml"]
    )
    words += [] if kind == "one process" else ["--inference.server.port", 0]
    command(
        "rl",
        "--trainer",
        "@",
        f"{TINY}/rl/train.toml",
        "--orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        *words,
        "--model.name",
        trained,
        "--output-dir",
        out,
        "--max-steps",
        2,
        "--seq-len",
        128,
        "--trainer.optim.lr",
        0,
        "--orchestrator.env",
        json.dumps(env),
        "--orchestrator.batch-size",
        16,
        "--orchestrator.rollouts-per-example",
        4,
        "--orchestrator.sampling.max-tokens",
        8,
        env={"PYTHONPATH": str(tmp_path)},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    rollouts = [
        json.loads(line) for line in (out / "rollouts" / "step_2" / "rollouts.jsonl").open()
    ]
    assert len(rollouts) == 16 and all(len(r["turns"]) == 3 for r in rollouts)
    whole = 0
    # The first special token: text does not show those that are sampled amid
    drawn, sequences, special = (0, 0, 256)
    for r in rollouts:
        one, two, three = r["turns"]
        for earlier, later in ((one, two), (two, three)):
            ids = earlier["prompt_ids"] + earlier["ids"]
            goes_on = later["prompt_ids"][: len(ids)] == ids and len(later["prompt_ids"]) > len(ids)
            assert goes_on or max(earlier["ids"][:-1]) >= special
            whole, sequences = whole + goes_on, sequences + (r["is_used"] and not goes_on)
        drawn += sum(len(t["ids"]) for t in r["turns"]) if r["is_used"] else 0
        sequences += r["is_used"]
    assert (
        rows[1]["tokens/trained"] == drawn > 0
        and rows[1]["batch/effective_batch_size"] == sequences
    )
    assert whole > 16  # of 32
    assert rows[1]["mismatch_kl/max"] < 1e-6  # the trainer sees what the sampler saw


@pytest.mark.main_path
def test_a_server_goes_on_from_the_tokens_of_a_conversation(server, trained):
    messages = [{"role": "user", "content": "abc"}]
    body = {
        "model": str(trained),
        "messages": messages,
        "max_tokens": 6,
        "return_token_ids": True,
        "seed": 1,
    }
    first = http.post(f"{server.url}/chat/completions", json=body).json()
    (choice,) = first["choices"]
    before = first["prompt_token_ids"] + choice["token_ids"]
    messages += [choice["message"], {"role": "user", "content": "more"}]
    again = http.post(
        f"{server.url}/chat/completions", json={**body, "conversation_ids": before}
    ).json()
    assert again["prompt_token_ids"][: len(before)] == before
