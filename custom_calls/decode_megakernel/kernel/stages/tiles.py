"""Matrix instructions over rows of the latent cache as they lie in the ring, without moving them first.

A piece of the cache is 16 tokens, row-major, one token's [c | r] after another's. Both products of the
attention read it 16 bytes a lane, and choose the order of tokens and columns so that such a load is a
fragment of m16n8k16:

* scores, ``[16 tokens, heads]``: the tokens are the instruction's rows, 32 columns make two
  instructions, and lane ``4 g + q`` has columns ``8 q .. 8 q + 8`` of them, in the queries too;
* context, ``[64 columns, heads]``: the columns are the instruction's rows, four tiles of 16 that share
  lane g's 8 columns ``8 g .. 8 g + 8``: row g of tile j is column 2 j of them, row g + 8 is 2 j + 1.
  The sum runs over tokens; lane ``4 g + q`` has tokens q, q + 4, q + 8, q + 12 of a piece.

Rows of the queries lie 64 bytes past a multiple of 128 apart (no bank conflict). The order of tokens is
that in which rows 32 bytes past a multiple of 128 apart have no conflict either; rows that are a multiple
of 128 apart cost 2 and 4 times the cycles in the two products.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from ..ptx import load4_shared, mma_bf16, permute

LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of ``permute``: the lower, or the upper, bf16 of two words."""


def token_row(lane):
    """Token of a piece that row ``lane / 4`` of the scores' instruction stands for; row + 8 is token + 8."""
    row = lane >> 2
    return (row & 4) | ((row & 1) << 1) | ((row >> 1) & 1)


@cute.jit
def score_block(row_pitch, keys, queries, query_pitch, sums, tiles: cutlass.Constexpr):
    """Add 32 columns' products of 16 tokens and ``8 tiles`` heads to ``sums``, 8 float32 a tile of heads.

    The first four of the 8 are one accumulator of the instruction, the others a second one.

    Args:
        row_pitch: bytes from a token to the next; keys: address of this lane's 8 columns of its token.
        queries: address of the same columns of head ``lane / 4``, ``query_pitch`` bytes a head.
    """
    a, b = load4_shared(keys), load4_shared(keys + 8 * row_pitch)
    for n in cutlass.range_constexpr(tiles):
        x = load4_shared(queries + 8 * n * query_pitch)
        for half in cutlass.range_constexpr(2):
            i, at = 2 * half, 8 * n + 4 * half
            c = [sums[at + e] for e in range(4)]
            c = mma_bf16((a[i], b[i], a[i + 1], b[i + 1]), (x[i], x[i + 1]), c)
            for e in cutlass.range_constexpr(4):
                sums[at + e] = c[e]


@cute.jit
def context_block(row_pitch, values, weights, sums, base: cutlass.Constexpr, tiles: cutlass.Constexpr):
    """Add one piece's tokens to the sums of 64 columns and ``8 tiles`` heads.

    ``sums[base + 4 (tiles j + n) + e]``: columns ``8 g + 2 j`` (e 0, 1) and ``8 g + 2 j + 1`` (e 2, 3),
    head ``8 n + 2 q + (e & 1)`` of lane ``4 g + q``.

    Args:
        values: address of lane g's 8 columns of token q, ``row_pitch`` bytes a token.
        weights: words ``2 n``, ``2 n + 1``: bf16 weights of tokens (q, q + 4) and (q + 8, q + 12) of
            head ``8 n + g``.
    """
    v = [load4_shared(values + 4 * i * row_pitch) for i in range(4)]
    for j in cutlass.range_constexpr(4):
        a = (
            permute(v[0][j], v[1][j], LOW_HALVES),
            permute(v[0][j], v[1][j], HIGH_HALVES),
            permute(v[2][j], v[3][j], LOW_HALVES),
            permute(v[2][j], v[3][j], HIGH_HALVES),
        )
        for n in cutlass.range_constexpr(tiles):
            at = base + 4 * (tiles * j + n)
            c = [sums[at + e] for e in range(4)]
            c = mma_bf16(a, (weights[2 * n], weights[2 * n + 1]), c)
            for e in cutlass.range_constexpr(4):
                sums[at + e] = c[e]


def zeros(count):
    """``count`` float32 registers of 0."""
    out = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        out[i] = Float32(0)
    return out


__all__ = ["context_block", "score_block", "token_row", "zeros"]
