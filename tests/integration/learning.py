"""A short run of `rl` on the tiny recipe, long enough to see whether it learns."""

import json

STEPS = 30
SHORT = '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 2, "max_chars": 4}}'
RECIPE = (
    *("--max-steps", STEPS),
    *("--orchestrator.env", SHORT),
    *("--orchestrator.batch-size", 128),
    *("--orchestrator.sampling.max-tokens", 12),
    *("--trainer.scheduler.type", "constant"),
    *("--trainer.optim.type", "adamw"),
    *("--trainer.optim.lr", 1e-3),
    *("--orchestrator.eval.env", SHORT),
    *("--orchestrator.eval.interval", STEPS),
    *("--orchestrator.eval.max-tokens", 12),
)


def read_rewards(out):
    """Return the rewards on held-out texts, before and after, and all rows of metrics."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    name = "eval/reverse-text/reward"
    return [row[name] for row in rows if name in row], rows


def has_learnt(before, after):
    return after - before > 0.1 * (1 - before)
