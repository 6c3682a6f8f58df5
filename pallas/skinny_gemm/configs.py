"""Tile sizes of the skinny GEMM, and the rule that picks them: data, no kernel.

A stage of the ring holds ``blocks`` boxes of 64 weight rows x ``columns`` and the matching 8 x
``columns`` box of activations. What is in flight while one stage is consumed is the other stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .._launch import SHARED_MEMORY

ROWS = 64
"""Weight rows of a box: the row operand of a wgmma."""

TOKENS = 8
"""Activation rows of a box: the column operand of a wgmma."""

SWIZZLED_COLUMNS = 64
"""bfloat16 columns of a 128-byte swizzle atom: the unit of ``columns``."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    Attributes:
        blocks: boxes of 64 rows per stage, 1 or 2; a gated pair takes 2, one of each matrix.
        columns: columns of a box, a multiple of 64 up to 256.
        stages: ring slots.
        overlap: start streaming weights before the launch that made the activations has ended
            (programmatic dependent launch).
    """

    blocks: int = 2
    columns: int = 128
    stages: int = 6
    overlap: bool = False

    @property
    def shared_bytes(self) -> int:
        """Bytes of the ring, and of a tile on its way out in bfloat16 and in float32."""
        ring = self.stages * self.columns * (self.blocks * ROWS + TOKENS) * 2
        return ring + self.blocks * ROWS * TOKENS * (2 + 4)


DEFAULT = Config()

VARIANTS = {
    "2x64x128x6": DEFAULT,
    "2x64x256x3": Config(blocks=2, columns=256, stages=3),
    "1x64x256x6": Config(blocks=1, columns=256, stages=6),
    "2x64x64x12": Config(blocks=2, columns=64, stages=12),
    "2x64x128x3-half": Config(blocks=2, columns=128, stages=3),
    "2x64x128x3-overlap": Config(blocks=2, columns=128, stages=3, overlap=True),
}
"""Named candidates for the benchmark. The halves leave room for the next launch's block on the SM."""


def choose(widths: Sequence[int]) -> Config:
    """The config for products over activations ``widths`` wide, before it is fitted to them."""
    return DEFAULT


BEST_BYTES = 2 * ROWS * TOKENS * 4
"""Bytes of the key and the id of the best so far, of every row of a block and token."""


def fit(config: Config, widths: Sequence[int], blocks: int, best: bool = False) -> Config:
    """``config`` with ``blocks``, columns cut to divide every width, and stages to keep the bytes.

    Args:
        widths: inner dimension K of every product, each a multiple of 64.
        best: whether the launch keeps the best of a product.
    """
    room = SHARED_MEMORY - (BEST_BYTES if best else 0)
    columns = config.columns
    while any(width % columns for width in widths):
        columns //= 2
    stages = config.stages * config.columns * config.blocks // (columns * blocks)
    fitted = dataclasses.replace(config, blocks=blocks, columns=columns, stages=max(2, stages))
    while fitted.shared_bytes > room:
        fitted = dataclasses.replace(fitted, stages=fitted.stages - 1)
    return fitted
