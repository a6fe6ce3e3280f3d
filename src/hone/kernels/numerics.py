"""Process-wide setting: may a token's numbers depend on what is computed with it?

    fast     the fastest for the batch size: split inner dimensions, tiles by length, fused draws
    exact    one order everywhere, so that sampler and trainer have the same bits

For GPU kernels. Products whose result fills the chip are torch's, which then sums each number in
one piece, from first to last; smaller ones use a kernel that does the same
(`benchmarks/kernels/order.py`).
"""

PARTS = frozenset(("products", "norms", "attention", "head"))
_kept: frozenset[str] = frozenset()


def use(name: str, but: str = "") -> None:
    """Select numerics. `name`: exact or fast. `but`: a part that stays fast, for tests of its
    detection.
    """
    global _kept
    _kept = PARTS - {but} if name == "exact" else frozenset()


def keeps_order(part: str) -> bool:
    """Return True if that part of a model's computation must use the one order."""
    return part in _kept


def is_exact() -> bool:
    return bool(_kept)
