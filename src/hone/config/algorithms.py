"""Named algorithms (grpo, dapo, …): defaults for keys of `rl`. Imports no torch."""

from typing import Any, Literal

from hone.config.base import merge_tables

Algorithm = Literal["grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo", "max_rl", "opd", "sft"]

# Sources and formulas: docs/algorithms.md.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "orchestrator": {"advantage": "std"},
        "trainer": {"loss": {"type": "ppo", "normalize": "sequences"}},
    },
    "dr_grpo": {
        "orchestrator": {"advantage": "mean"},
        "trainer": {"loss": {"type": "ppo", "normalize": "constant"}},
    },
    "rloo": {
        "orchestrator": {"advantage": "rloo"},
        "trainer": {"loss": {"type": "ppo", "normalize": "sequences"}},
    },
    "gspo": {
        "orchestrator": {"advantage": "std"},
        "trainer": {
            "loss": {
                "type": "ppo",
                "ratio_type": "sequence",
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "normalize": "sequences",
            }
        },
    },
    "cispo": {
        "orchestrator": {"advantage": "std"},
        "trainer": {"loss": {"type": "cispo", "ratio_cap": 5.0}},
    },
    "dapo": {
        "orchestrator": {"advantage": "std", "refill": True, "overlong_share": 0.2},
        "trainer": {"loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}},
    },
    "max_rl": {
        "orchestrator": {"advantage": "max_rl"},
        "trainer": {"loss": {"type": "mask"}},
    },
    "opd": {
        "orchestrator": {"drop_zero_signal": False, "teacher_logprobs": True},
        "trainer": {"loss": {"type": "opd"}},
    },
    "sft": {
        "orchestrator": {"drop_zero_signal": False, "sampler": "teacher"},
        "trainer": {"loss": {"type": "sft"}},
    },
}


def with_algorithms(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `rl` merged over the defaults of their `algorithm`.

    If another loss type is given, none of the algorithm's loss keys apply. The `algorithm` of an
    environment sets the loss of that environment (`trainer.loss_of`).
    """
    defaults = _preset_of(values.get("algorithm"))
    given = ((values.get("trainer") or {}).get("loss") or {}).get("type")
    if defaults and given not in (None, defaults["trainer"]["loss"]["type"]):
        defaults = {key: value for key, value in defaults.items() if key != "trainer"}
    envs = (values.get("orchestrator") or {}).get("env")
    losses: dict[str, Any] = {}
    for env in envs if isinstance(envs, list) else [envs]:
        own = _preset_of(env.get("algorithm")) if isinstance(env, dict) else {}
        if own and isinstance(env, dict):
            losses[env.get("name") or env.get("id", "")] = own["trainer"]["loss"]
    if losses:
        defaults = merge_tables(defaults, {"trainer": {"loss_of": losses}})
    return merge_tables(defaults, values)


def as_its_algorithm(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a separate component merged over the defaults of its `algorithm`.

    `section` is "trainer" or "orchestrator".
    """
    whole: dict[str, Any] = with_algorithms({"algorithm": values.get("algorithm"), section: values})
    return whole[section]


def _preset_of(name: Any) -> dict[str, Any]:
    return ALGORITHMS.get(name, {}) if isinstance(name, str) else {}
