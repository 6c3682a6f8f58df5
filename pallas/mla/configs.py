"""Tile sizes of the MLA decode kernels, and how a row is split. A leaf: imports nothing of the op."""

from __future__ import annotations

TOKENS = 64
"""Cache rows in shared memory at a time."""

SPLIT = 128
"""Tokens of the smallest work item."""

ITEMS = 64
"""Work items of one row and head group at most; longer rows get longer items."""

HEADS = 64
"""Heads of a group: the M of the score product. Heads are padded to whole groups."""

ROWS = 8
"""Batch rows of the absorbing product: its N."""

HEAD = 128
"""Key (without the shared piece) and value width of a head."""

CHUNK = 64
"""Value columns whose sums are in registers at a time beside the running ones."""

BUFFERS = 2
"""Cache tiles in shared memory."""


def padded_heads(heads: int) -> int:
    return -(-heads // HEADS) * HEADS


def items(capacity: int) -> int:
    """Work items that a row of ``capacity`` tokens can have.

    A row's items depend on its own length alone: ``SPLIT * ceil(length / (SPLIT * ITEMS))`` tokens
    each. Where the capacity allows fewer than ITEMS, that is SPLIT.
    """
    return min(ITEMS, -(-capacity // SPLIT))


def absorb_columns(latent: int) -> int:
    """Latent columns of a CTA of the absorbing product."""
    return 256 if latent % 256 == 0 else 128
