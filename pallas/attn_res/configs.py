"""How a row of the residual kernel is cut: data, no kernel."""

from __future__ import annotations

import dataclasses

COLUMNS = (1024, 512, 256, 128)
"""Columns that a warpgroup holds at a time, best first: 8, 4, 2 or 1 of them per CUDA thread."""

MAX_WARPGROUPS = 7
"""Of a CTA: 7 x 1024 columns are K3's hidden size, and 72 registers are left to a thread."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes: ``columns`` of a chunk, ``chunks`` of a row, ``warpgroups`` with equal shares of them."""

    columns: int
    chunks: int
    warpgroups: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.columns * self.chunks


def choose(width: int) -> Config | None:
    """The config for rows ``width`` wide, None where no chunk divides them."""
    columns = next((c for c in COLUMNS if width % c == 0), None)
    if columns is None:
        return None
    chunks = width // columns
    return Config(columns, chunks, max(w for w in range(1, MAX_WARPGROUPS + 1) if chunks % w == 0))
