"""Response <-> slots <-> serial blocks <-> positions: the only slot arithmetic in the package.

Worked example: n=20 tokens, k=8, b=16. Slots hold positions 0..7, 8..15, 16..19 (the last one is short). A block
holds floor(16/8) = 2 slots: block 0 = slots 0, 1 and block 1 = slot 2. All positions are relative to the response.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How a response of `length` tokens is cut: docs/algorithm.md, "Symbols"."""

    length: int  # n
    slot_size: int  # k
    block_size: int  # b

    def __post_init__(self) -> None:
        assert self.length >= 1 and 1 <= self.slot_size <= self.block_size

    @property
    def slots(self) -> int:
        return -(-self.length // self.slot_size)

    @property
    def slots_per_block(self) -> int:
        return self.block_size // self.slot_size

    @property
    def blocks(self) -> int:
        return -(-self.slots // self.slots_per_block)

    def positions(self, slot: int) -> range:
        """Positions of a slot; the last slot may be short."""
        start = slot * self.slot_size
        return range(start, min(start + self.slot_size, self.length))

    def block(self, index: int) -> range:
        """Slots of a serial block; the last block may hold fewer."""
        start = index * self.slots_per_block
        return range(start, min(start + self.slots_per_block, self.slots))

    def slot_of(self, position: int) -> int:
        return position // self.slot_size
