"""Sizes of a layer with the gated delta rule (`delta_rule.py`). Imports no torch."""

from dataclasses import dataclass

CHUNK_TOKENS = 64  # that are computed at once on a GPU, and on a CPU in long sequences


@dataclass(frozen=True)
class DeltaShape:
    """Heads of keys and of values, their sizes, and the number of tokens that a convolution sees.

    A key head serves value_heads / key_heads consecutive value heads.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_size + self.outputs

    @property
    def outputs(self) -> int:
        """Return the numbers that the mixer gives per token."""
        return self.value_heads * self.value_size

    @property
    def projection_rows(self) -> tuple[int, int, int, int]:
        """Return the rows of the projection for the convolution, for z, b and a."""
        return self.channels, self.outputs, self.value_heads, self.value_heads

    @property
    def matrix_sizes(self) -> tuple[int, int, int]:
        """Return the sizes of a sequence's matrices: value heads, key size, value size."""
        return self.value_heads, self.key_size, self.value_size

    @property
    def has_gpu_sizes(self) -> bool:
        """Return True if GPU kernels support heads of these sizes: those of published models."""
        return self.key_size == self.value_size == 128 and self.conv_width == 4

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state in one layer, with columns of `itemsize` bytes."""
        columns = (self.conv_width - 1) * self.channels * itemsize
        return columns + 4 * self.value_heads * self.key_size * self.value_size

    def chunk_flops(self, chunk: int = CHUNK_TOKENS) -> float:
        """Return the FLOPs per token of the recurrence in chunks, a multiply-add counting 2."""
        key, value = self.key_size, self.value_size
        return self.value_heads * (chunk * (5 * key + 3 * value) + 6.0 * key * value)
