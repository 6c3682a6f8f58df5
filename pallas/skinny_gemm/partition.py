"""Which CTA reads which part of the weights: contiguous, equal ranges of boxes.

A *tile* is the rows that a CTA accumulates together, a *unit* one box of it (rows x columns, one
ring stage). All tiles of all products in order, and within a tile its units in order of columns,
make one line of units; CTA i reads units ``start(i) .. start(i + 1)``. When the sums may be split,
the line is cut at any unit and a tile's partial sums lie in numbered slots, added up in slot order
by the consumer; otherwise it is cut at tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Partition:
    """The line of units.

    Attributes:
        tiles: tiles of each product.
        chunks: units of a tile of each product.
        ctas: CTAs that share the line.
        split: whether a tile may be cut.
    """

    tiles: tuple[int, ...]
    chunks: tuple[int, ...]
    ctas: int
    split: bool

    def __post_init__(self) -> None:
        if not self.split and len(set(self.chunks)) > 1:
            raise ValueError("products: expected one inner width where sums are not split")
        if self.split and self.ctas > self.unit_starts[-1]:
            raise ValueError(
                f"ctas: expected at most {self.unit_starts[-1]}, one a unit, got {self.ctas}: the slot of "
                f"one without a unit, between two that share a tile, would be nobody's to fill"
            )

    @property
    def tile_starts(self) -> tuple[int, ...]:
        """First tile of each product on the line, and the number of tiles."""
        return _running(self.tiles)

    @property
    def unit_starts(self) -> tuple[int, ...]:
        """First unit of each product, and the number of units."""
        return _running(tuple(t * c for t, c in zip(self.tiles, self.chunks, strict=True)))

    def start(self, cta: Any) -> Any:
        """First unit of a CTA; also of a traced one."""
        if self.split:
            return cta * self.unit_starts[-1] // self.ctas
        return cta * self.tile_starts[-1] // self.ctas * self.chunks[0]

    def owner(self, unit: Any) -> Any:
        """The CTA that reads ``unit`` of a split line: the last one that starts at or before it."""
        return ((unit + 1) * self.ctas - 1) // self.unit_starts[-1]

    def slots(self, product: int) -> int:
        """Most CTAs that share a tile of ``product``."""
        if not self.split:
            return 1
        first, chunks = self.unit_starts[product], self.chunks[product]
        starts = range(first, self.unit_starts[product + 1], chunks)
        return max(self.owner(u + chunks - 1) - self.owner(u) + 1 for u in starts)


def partition(tiles: tuple[int, ...], chunks: tuple[int, ...], ctas: int, split: bool) -> Partition:
    """The line over at most ``ctas`` CTAs, each of which has a unit."""
    units = sum(t * c for t, c in zip(tiles, chunks, strict=True))
    return Partition(tiles, chunks, min(ctas, units), split)


def _running(counts: tuple[int, ...]) -> tuple[int, ...]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return tuple(starts)
