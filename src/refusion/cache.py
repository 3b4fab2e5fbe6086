"""The key/value cache of one request: preallocated, written by index, truncated by setting a length.

Worked example: 5 columns are kept, a forward brings 4 rows:

    columns   0 1 2 3 4 | 5 6 7 8        `update` writes the rows to 5..8 and returns columns 0..8
    keep 0, 1           -> length 7      nothing moves: they stand where they belong
    keep 2, 3           -> length 7      columns 7, 8 move to 5, 6
    keep nothing        -> length 5

Legend: L layers, G key/value heads, C capacity, E head size. Knows no model: keys come rotated, in any order of
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # columns handed to attention are a multiple of this; see `KeyValueCache.update`


class KeyValueCache:
    """Keys and values [L, 2, G, C, E] of one request; grows when it is full."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.length = 0  # columns that are kept
        self._rows = 0  # columns that the running or last forward wrote after them
        self._data = torch.zeros(layers, 2, heads, aligned(capacity), head_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self._data.shape[3]

    def keep(self, rows: Sequence[int]) -> None:
        """Make these rows of the last forward columns, in this order, and forget the others."""
        assert all(0 <= row < self._rows for row in rows)
        count = len(rows)
        if list(rows) != list(range(count)):
            source = torch.tensor([self.length + row for row in rows], device=self._data.device)
            self._data[:, :, :, self.length : self.length + count] = self._data.index_select(3, source)
        self.length += count
        self._rows = 0

    def truncate(self, length: int) -> None:
        """Forget the columns from `length` on."""
        assert 0 <= length <= self.length
        self.length, self._rows = length, 0

    def reserve(self, rows: int) -> None:
        """Announce a forward of `rows` rows; doubles the capacity if they do not fit."""
        self._rows = rows
        if self.length + rows > self.capacity:
            layers, two, heads, _, size = self._data.shape
            grown = self._data.new_zeros(layers, two, heads, aligned(max(2 * self.capacity, self.length + rows)), size)
            grown[:, :, :, : self.length] = self._data[:, :, :, : self.length]
            self._data = grown

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new rows, [1, G, T, E] each; returns keys and values [1, G, S, E] with S = aligned(length
        + T).

        The columns after length + T are nobody's and must be masked. With the number of columns aligned, a row's
        result is the same bits whatever stands behind it (tests/test_prepack.py).
        """
        end = self.length + k.shape[2]
        assert k.shape[2] == self._rows, "reserve() first"
        self._data[layer, 0, :, self.length : end] = k[0]
        self._data[layer, 1, :, self.length : end] = v[0]
        seen = self._data[layer, :, :, : aligned(end)]
        return seen[0][None], seen[1][None]


def aligned(columns: int) -> int:
    """The next multiple of `ALIGNMENT`.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-columns // ALIGNMENT) * ALIGNMENT
