"""Check that a model can be divided among trainer processes as configured. Imports no torch."""

from hone.models.spec import ModelSpec


def check_division(spec: ModelSpec, context: int, has_expert_parallel: bool) -> None:
    """Raise ValueError if the model's tokens or experts cannot be divided.

    Args:
        context: processes that divide the tokens of a sequence.
        has_expert_parallel: True if experts are divided among all processes.
    """
    if context > 1:
        _check_heads(spec, context)
    if has_expert_parallel and not (spec.routed_experts and spec.implementation == "hone"):
        raise ValueError(
            "expert_parallel: this model is not a mixture of experts on Hone's own implementation; "
            "take false"
        )


def _check_heads(spec: ModelSpec, count: int) -> None:
    if spec.implementation != "hone":
        raise ValueError(
            "context_parallel: a model on transformers' modules does not support it; take 1"
        )
    if spec.prepares_heads:
        raise ValueError("context_parallel: Gemma 4 does not support it; take 1")
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    shapes = [spec.delta_shape(i) for i in range(spec.num_hidden_layers)]
    key_heads = {shape.key_heads for shape in shapes if shape is not None}
    of_delta = [("key heads of the delta rule", n) for n in key_heads]
    for name, number in [("query heads", heads), *of_delta]:
        if number % count:
            raise ValueError(
                f"context_parallel {count}: the model's {number} {name} cannot be divided evenly "
                f"among {count} processes"
            )
    if kv_heads % count and count % kv_heads:
        raise ValueError(
            f"context_parallel {count}: the model has {kv_heads} key/value heads; take a divisor or "
            f"a multiple of {kv_heads}"
        )
