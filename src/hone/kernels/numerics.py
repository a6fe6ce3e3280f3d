"""Whether a token's numbers may depend on what is computed beside it: one setting for a process.

    fast     what is quickest for so many tokens: inner dimensions cut into parts, tiles by length, fused draws
    exact    one order everywhere, so that sampler and trainer have the same bits

For a GPU's kernels. Products whose result fills the chip are torch's, which then adds up each number in one piece, from
the first to the last; smaller ones are made by a kernel that does the same (`benchmarks/order_gpu.py`).
"""

PARTS = frozenset(("products", "norms", "attention", "head"))
_kept: frozenset[str] = frozenset()


def use(name: str, but: str = "") -> None:
    """`name`: exact or fast. `but`: a part that stays fast all the same, for tests of whether that is seen."""
    global _kept
    _kept = PARTS - {but} if name == "exact" else frozenset()


def keeps_order(part: str) -> bool:
    """Whether that part of a model's computation has to be done in the one order."""
    return part in _kept


def is_exact() -> bool:
    return bool(_kept)
