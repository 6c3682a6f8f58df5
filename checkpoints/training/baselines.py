"""What the trained checkpoint has to beat: a byte n-gram model and a general-purpose compressor."""

from __future__ import annotations

import lzma

import numpy as np

CONTEXT = 5
"""Bytes of context of the n-gram model; six bytes fit an int64 code."""


def _codes(text: np.ndarray, context: int) -> np.ndarray:
    """int64 codes of every ``context`` bytes and the byte after them."""
    length = max(0, len(text) - context)
    code = np.zeros(length, np.int64)
    for offset in range(context + 1):
        code = code << 8 | text[offset : offset + length]
    return code


def _count(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Count of every wanted key, 0 where it is not among the sorted ``keys``."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64)
    at = np.searchsorted(keys, wanted).clip(0, len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)


def ngram_bits_per_byte(train: bytes, blocks: list[bytes], context: int = CONTEXT) -> float:
    """Bits per byte of ``blocks`` under an interpolated n-gram model with absolute discounting.

    With c the count of a context and byte in ``train``, C and D the context's count and number of
    different next bytes, and d the order's discount ``n1 / (n1 + 2 n2)`` (Ney, Essen and Kneser
    1994; n1, n2 the numbers of sequences seen once and twice; d = 0.5 where none was seen once)::

        p_n(byte) = (max(c - d, 0) + d D p_(n-1)(byte)) / C,        p_(-1) = 1/256

    A context that ``train`` lacks leaves ``p_(n-1)``; a block's first bytes have shorter contexts.

    Args:
        context: bytes of context, 0..6.

    Raises:
        ValueError: context out of range, or nothing to train or score on.
    """
    if not 0 <= context <= 6:
        raise ValueError(f"context: expected 0..6, got {context}")
    if not train or not any(blocks):
        raise ValueError("train, blocks: expected at least a byte in each")
    seen = np.frombuffer(train, np.uint8).astype(np.int64)
    texts = [np.frombuffer(block, np.uint8).astype(np.int64) for block in blocks]
    p = np.full(sum(map(len, texts)), 1 / 256)
    for order in range(context + 1):
        keys, counts = np.unique(_codes(seen, order), return_counts=True)
        once, twice = int(np.sum(counts == 1)), int(np.sum(counts == 2))
        discount = once / (once + 2 * twice) if once else 0.5
        contexts, where = np.unique(keys >> 8, return_inverse=True)
        totals, kinds = np.bincount(where, weights=counts), np.bincount(where)
        # -1 is no code: the first bytes of a block have no context of this length.
        wanted = np.concatenate(
            [np.concatenate([np.full(min(order, len(t)), -1), _codes(t, order)]) for t in texts]
        )
        here = np.where(wanted < 0, -1, wanted >> 8)
        total, kind = _count(contexts, totals, here), _count(contexts, kinds, here)
        mixed = np.maximum(_count(keys, counts, wanted) - discount, 0) + discount * kind * p
        p = np.where(total > 0, mixed / np.maximum(total, 1), p)
    return float(-np.log2(p).mean())


def xz_bits_per_byte(train: bytes, blocks: list[bytes]) -> float:
    """Bits per byte that ``blocks`` add to ``train``: (xz(train + blocks) - xz(train)) / size, ``xz -9e``."""
    held = b"".join(blocks)
    if not held:
        raise ValueError("blocks: expected at least a byte")
    size = lambda text: len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))  # noqa: E731
    return 8 * (size(train + held) - size(train)) / len(held)
