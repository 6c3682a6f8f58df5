"""Tile sizes of the KDA decode kernel. A leaf: imports nothing of the op."""

from __future__ import annotations

HEAD = 128
"""Key and value width of a head that the kernel is written for."""

TAPS = 4
"""Width of the short convolution."""

OUT_ROWS = 8
"""Rows of the output: the token columns of the product that reads it."""

ROWS = 64
"""Rows of the state that are in registers at a time: the M of the operand layout."""
