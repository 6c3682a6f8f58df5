"""Tile sizes of the expert kernels, and the rule that picks them. A leaf: imports nothing of the op."""

from __future__ import annotations

import dataclasses

ROWS = 64
"""Weight rows of a tile: the M of a warpgroup's matrix instruction."""

COLUMNS = 256
"""Weight columns of a tile: 128 packed bytes, eight scales."""

TOKENS = 8
"""Token columns of a tile, the smallest N; batches are padded to it."""

WARPGROUPS = 4
"""Warpgroups of a CTA: enough to decode while others wait for memory or for their products."""

INTERPRETED_WARPGROUPS = 2
"""Warpgroups in the interpreter, where one that waits holds a thread of the host's small pool."""

SCALE_BYTES = range(129)
"""E8M0 bytes the kernels decode exactly: 2**-127 .. 2**1. The bfloat16 factor 2**(byte - 1) ends there."""

SHARED_MEMORY = 230_400
"""Bytes a CTA may plan for."""


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How one launch streams its matrices.

    Attributes:
        matrices: matrices that advance together: 2 for gate and up, 1 for down.
        split: warpgroups that share a matrix, each with its part of the columns.
        tiles: column tiles of a warpgroup per row tile.
        slots: tiles in flight per warpgroup.
    """

    matrices: int
    split: int
    tiles: int
    slots: int

    @property
    def warpgroups(self) -> int:
        return self.matrices * self.split

    @property
    def columns(self) -> int:
        """Weight columns, a multiple of COLUMNS."""
        return self.split * self.tiles * COLUMNS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the plan: code tiles, activations, scales (two buffers), partial sums."""
        codes = self.warpgroups * self.slots * ROWS * COLUMNS // 2
        scales = self.matrices * 2 * ROWS * scale_width(self.columns)
        return codes + TOKENS * self.columns * 2 + scales + self.warpgroups * ROWS * TOKENS * 4


def scale_width(columns: int) -> int:
    """Scale bytes copied per weight row: one per 32 columns, in whole groups of 16."""
    return -(-columns // 32 // 16) * 16


def pick(matrices: int, columns: int, warpgroups: int = WARPGROUPS) -> StreamConfig:
    """All warpgroups where the columns divide among them; as many tiles in flight as fit, four at most.

    Four is what 64 KiB in flight per SM asks for twice over; more in flight only lengthens the
    latency of the other accesses.

    Args:
        matrices: 2 (gate and up) or 1 (down).
        columns: padded weight columns.
        warpgroups: of a CTA, at most.
    """
    tiles = columns // COLUMNS
    split = next(s for s in (4, 2, 1) if tiles % s == 0 and s * matrices <= warpgroups)
    for depth in (4, 3, 2):
        config = StreamConfig(matrices, split, tiles // split, depth)
        if config.shared_bytes <= SHARED_MEMORY:
            return config
    raise NotImplementedError(
        f"experts: {columns} columns need {config.shared_bytes} bytes of shared memory, "
        f"at most {SHARED_MEMORY} are there"
    )
