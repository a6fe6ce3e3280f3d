"""Metrics of a server at `GET /metrics`, in Prometheus' text format."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hone.engine.engine import Engine

KINDS = {  # name: (kind, what it is)
    "requests_running": ("gauge", "Completions that are being computed."),
    "requests_waiting": (
        "gauge",
        "Completions that wait for a slot, for pages of the cache, or for their turn.",
    ),
    "requests_total": ("counter", "Completions that have ended."),
    "prompt_tokens_total": ("counter", "Tokens of their prompts."),
    "generated_tokens_total": ("counter", "Tokens that were sampled for them."),
    "cache_used_ratio": ("gauge", "Share of the pages of keys and values that requests hold."),
    "policy_version": ("gauge", "Version of the weights that are served."),
}


def of_engine(engine: "Engine") -> dict[str, float]:
    """Return the engine's metrics. Call it on the compute thread."""
    pages = engine.pool.pages - 1
    return {
        "requests_running": len(engine.running_sequences),
        "requests_waiting": len(engine.admission.waiting),
        "requests_total": engine.completions,
        "prompt_tokens_total": engine.tokens_read,
        "generated_tokens_total": engine.tokens_written,
        "cache_used_ratio": 1 - engine.pool.available_count / pages if pages else 0.0,
        "policy_version": engine.version,
    }


def format_metrics(found: dict[str, float]) -> str:
    lines = []
    for name, (kind, words) in KINDS.items():
        if name not in found:
            continue
        lines += [
            f"# HELP hone_{name} {words}",
            f"# TYPE hone_{name} {kind}",
            f"hone_{name} {found[name]!r}",
        ]
    return "\n".join(lines) + "\n"
