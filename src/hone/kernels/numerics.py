"""Process-wide choice of numerics: fast, or exact (the same bits in every batch).

    fast     the fastest for the batch size: split inner dimensions, tiles by length, fused draws
    exact    one order of summation everywhere, so that sampler and trainer compute the same bits

This applies to GPU kernels. With exact numerics, torch computes the matrix products whose result
fills the GPU, since it then sums each number in one piece, from first to last. Products with a
smaller result use a kernel that sums in the same order (`benchmarks/kernels/order.py`).
"""

PARTS = frozenset(("products", "norms", "attention", "head"))
_kept: frozenset[str] = frozenset()


def use(name: str, but: str = "") -> None:
    """Select fast or exact numerics for this process.

    Args:
        name: "exact" or "fast".
        but: one of PARTS that stays fast, to test that the difference is detected.
    """
    global _kept
    _kept = PARTS - {but} if name == "exact" else frozenset()


def keeps_order(part: str) -> bool:
    """Return True if the operations `part`, one of PARTS, must sum in the fixed order of exact
    numerics.
    """
    return part in _kept


def is_exact() -> bool:
    return bool(_kept)
