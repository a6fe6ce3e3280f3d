"""Run by a Python that has verifiers: conversations by its client of token ids. `verifiers_tokens.py URL MODEL`"""

import asyncio
import json
import logging
import os
import sys

import verifiers as vf
from library_env import load_environment
from verifiers.types import ClientConfig

url, model = sys.argv[1:]
os.environ["SOME_KEY"] = "none"
warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("verifiers").addHandler(handler)
config = ClientConfig(
    client_type="openai_chat_completions_token", api_base_url=url, api_key_var="SOME_KEY"
)
environment = load_environment()
rows = [dict(row) for row in environment.get_dataset()][:6]


async def one(row):
    sampling = {"max_tokens": 64, "temperature": 1.0}
    done = await environment.run_rollout(row, config, model, sampling, state_columns=["trajectory"])
    tokens = [step["tokens"] for step in done["trajectory"]]
    return [
        {key: turn[key] for key in ("prompt_ids", "completion_ids", "is_truncated")}
        for turn in tokens
    ]


async def all_of_them():
    return await asyncio.gather(*map(one, rows))


done = asyncio.run(all_of_them())
print(json.dumps({"version": vf.__version__, "warnings": warnings, "rollouts": done}))
