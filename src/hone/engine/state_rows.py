"""How many states the engine keeps for models with the gated delta rule. Imports no torch."""

MOST_SNAPSHOTS = 64  # also limited to two for each decoding sequence


def count_state_rows(sequences: int) -> int:
    """Return the number of rows for `sequences` decoding sequences: theirs, padding, snapshots."""
    return sequences + 1 + min(2 * sequences, MOST_SNAPSHOTS)


def count_sequences(rows: int) -> int:
    """Return the largest number of decoding sequences whose states fit into `rows` rows."""
    return max((rows - 1) // 3, rows - 1 - MOST_SNAPSHOTS)
