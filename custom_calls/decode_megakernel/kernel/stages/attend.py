"""MLA_ROW and MLA_ATTEND: the token's latent row, and attention over the latent cache.

::

    MLA_ROW      c = round(round(a_c rsqrt(mean a_c^2 + eps)) gain),  row = [c | r]     to cache and mla.row
    MLA_ATTEND   s[h, t] = (qt[h] . c[t] + q_shared[h] . r[t]) qk_head_dim^-1/2          t of a split
                 peak' = max(peak, max_t s),  w = exp(s - peak'),  keep = exp(peak - peak')
                 acc[h] = keep acc[h] + sum_t round(w[h, t]) c[t],   mass[h] = keep mass[h] + sum_t w[h, t]

A unit is (row b, lane, group of heads); its splits of 64 tokens are ``lane, lane + lanes, ..`` up to the
one that the new token, at position ``length``, closes. A split is four pieces of 16 cache rows in the
ring. In the last split the new row is written over the ring's and the rows after it are cleared: what lay
there before may be NaN, and 0 x NaN is not 0. Tokens past the new one get score -inf.

Scores: piece ``warp % 4`` and one half of the columns a warp; the two halves meet behind the piece in the
ring's stage, from where 8 threads a head take the softmax of 64 tokens, 8 each. The weights go to scratch
in the order of ``tiles.context_block``. Context: 64 columns of all heads a warp, sums in registers.
What is written into the ring is fenced against the bulk copies that come after.

A lane with no split leaves peak -inf and mass 0, and no sum. Rows that do not run go the same way over the
cache that they have, but their cache row is not written.

Constraints (``constraints_attention.reasons``): C and C + R multiples of 64, C <= 1024, at most 24 heads
a unit, q_lora_rank and qk_head_dim multiples of 8; queries and weights in scratch, a piece with its partial
scores in a ring stage.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...resources import CONSUMER_WARPS, RING_STAGE_BYTES, RING_STAGES
from ...shapes import SPLIT
from .. import geometry as g
from ..constraints_attention import (
    COLUMN_UNIT,
    SCORE_PITCH,
    SCORE_SKEW,
    WEIGHT_PITCH,
    padded_heads,
    row_pitch,
    token_pitch,
)
from ..context import SCALE_AT, Part
from ..flow import release, signal, take, wait
from ..ptx import (
    exp,
    from_other,
    load2_shared,
    load4,
    load4_shared,
    load_shared,
    maximum,
    pack_bf16,
    select,
    store,
    store4,
    store4_shared,
    store_shared,
)
from .tiles import context_block, score_block, token_row, zeros
from .vector import normed_word, scale_of_rows

PIECES = SPLIT // g.PIECE_TOKENS
MINUS_INFINITY = -float("inf")


# -- the new token's row ------------------------------------------------------------------------


@cute.jit
def mla_row(t, record):
    """[c | r] of the rows of this part: to ``mla.row``, and to the cache of rows that run."""
    p = t.p
    part = Part(t, record)
    wait(t, record)
    scale_of_rows(t, "mla.proj", p.Q, p.C, p.config.latent_norm_eps)
    units = (p.C + p.R) // 8
    gain = t.stacked("mla.kv_gain", part.place)
    cache = t.pointer(t.geo.mla_entry + part.place)
    for i in cutlass.range(t.tid, part.n * units, g.CONSUMERS, unroll=1):
        b = part.g0 + i // units
        column = 8 * (i % units)
        words = load4(t.row("mla.proj", b, p.Q + column))
        if column < p.C:
            gains = load4(gain + Int64(2 * column))
            scale = load_shared(t.small + SCALE_AT + 4 * b, Float32)
            for j in cutlass.range_constexpr(4):
                words[j] = normed_word(words[j], gains[j], scale)
        store4(t.row("mla.row", b, column), [words[j] for j in range(4)])
        if t.runs(b) == 1:
            place = Int64(b) * Int64(t.cache_rows) + Int64(t.length(b))
            store4(cache + place * t.geo.cache_bytes + Int64(2 * column), [words[j] for j in range(4)])
    signal(t, record)


# -- scratch ------------------------------------------------------------------------------------


def query_pitch(t):
    return row_pitch(t.p.C + t.p.R)


def weights_at(t):
    """Shared-memory address of the bf16 weights, ``[heads, 2, 4, 2, 4]``: of a head, by pair of pieces,
    token % 4, piece of the pair, token / 4; WEIGHT_PITCH bytes a head."""
    return t.scratch + padded_heads(t.p) * query_pitch(t)


def keep_at(t):
    """Shared-memory address of every head's ``keep`` of this split, float32."""
    return weights_at(t) + padded_heads(t.p) * WEIGHT_PITCH


def scores_at(t, address, piece):
    """Address of the partial scores of a piece that lies at ``address``, float32 ``[2, heads, 16]``."""
    return address + g.PIECE_TOKENS * token_pitch(t.p) + SCORE_SKEW * piece


# -- attention ----------------------------------------------------------------------------------


@cute.jit
def mla_attend(t, record, k):
    """Every unit of this part."""
    part = Part(t, record)
    wait(t, record)
    for i in cutlass.range(part.n, unroll=1):
        k = attend_unit(t, part.g0 + i, k)
    signal(t, record)
    return k


@cute.jit
def attend_unit(t, unit, k):
    """All splits of one unit, then its sums, peaks and masses."""
    p = t.p
    rest, group = unit // p.head_groups, unit % p.head_groups
    b, split = rest // p.lanes, rest % p.lanes
    length = t.length(b)
    used = split * SPLIT <= length
    if used:
        load_queries(t, b, group)
    sums = zeros(4 * padded_heads(p) // 8 * 4 * column_units(p))
    peak, mass = Float32(MINUS_INFINITY), Float32(0)
    while split * SPLIT <= length:
        for j in cutlass.range_constexpr(PIECES):
            take(t, k + j)
        last = (split + 1) * SPLIT > length
        if last:
            close_split(t, b, length - split * SPLIT, k)
        if last | (split < p.lanes):  # a unit's first split: its queries
            t.sync()
        scores(t, k)
        cute.arch.fence_proxy("async.shared", space="cta")
        t.sync()
        peak, mass = soften(t, length - split * SPLIT, k, peak, mass)
        t.sync()
        context(t, sums, k)
        k += PIECES
        split += p.lanes
    leave(t, unit, used, sums, peak, mass)
    return k


def column_units(p):
    """Units of 64 columns that a warp takes."""
    return -(-p.C // (COLUMN_UNIT * CONSUMER_WARPS))


@cute.jit
def load_queries(t, b, group):
    """``[heads, C + R]`` of a unit to scratch: absorbed query, then the shared part of the query."""
    p = t.p
    heads, units = p.mla_heads // p.head_groups, (p.C + p.R) // 8
    nope = p.config.qk_nope_head_dim
    for i in cutlass.range(t.tid, heads * units, g.CONSUMERS, unroll=4):
        head = i // units
        column = 8 * (i - head * units)
        whole = group * heads + head
        source = t.row("mla.qt", b, whole * p.C + column)
        if column >= p.C:
            source = t.row("mla.q", b, whole * p.config.qk_head_dim + nope + column - p.C)
        words = load4(source)
        store4_shared(t.scratch + head * query_pitch(t) + 2 * column, [words[j] for j in range(4)])


def piece_at(t, k, piece):
    """Address of a piece of the split whose first tile is ``k``, for a run-time ``piece``."""
    return t.base + ((k + piece) % RING_STAGES) * RING_STAGE_BYTES


@cute.jit
def close_split(t, b, position, k):
    """The new token's row at ``position`` of the last split, and zeros behind it."""
    units = t.geo.cache_bytes // 16
    for i in cutlass.range(t.tid, (SPLIT - position) * units, g.CONSUMERS, unroll=1):
        row = i // units
        at = i - row * units
        words = cute.make_rmem_tensor(4, Int32)
        for j in cutlass.range_constexpr(4):
            words[j] = Int32(0)
        if row == 0:
            new = load4(t.row("mla.row", b, 8 * at))
            for j in cutlass.range_constexpr(4):
                words[j] = new[j]
        row = row + position
        address = piece_at(t, k, row // g.PIECE_TOKENS) + row % g.PIECE_TOKENS * token_pitch(t.p)
        store4_shared(address + 16 * at, [words[j] for j in range(4)])
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def scores(t, k):
    """Products of one piece and half of the columns with all queries, to the ring behind the piece."""
    p = t.p
    tiles, pitch = padded_heads(p) // 8, token_pitch(p)
    piece, half = t.warp % PIECES, t.warp // PIECES
    row, q = token_row(t.lane), t.lane & 3
    address = piece_at(t, k, piece)
    keys = address + row * pitch + 64 * half + 16 * q
    queries = t.scratch + (t.lane >> 2) * query_pitch(t) + 64 * half + 16 * q
    sums = zeros(8 * tiles)
    for block in cutlass.range(t.geo.cache_bytes // 128, unroll=2):
        score_block(pitch, keys + 128 * block, queries + 128 * block, query_pitch(t), sums, tiles)
    out = scores_at(t, address, piece) + (half * padded_heads(p) + 2 * q) * SCORE_PITCH + 4 * row
    for n in cutlass.range_constexpr(tiles):
        for e in cutlass.range_constexpr(4):
            at = out + (8 * n + (e & 1)) * SCORE_PITCH + 32 * (e >> 1)
            store_shared(at, Float32, sums[8 * n + e] + sums[8 * n + 4 + e])


@cute.jit
def soften(t, position, k, peak, mass):
    """Weights of 64 tokens, 8 threads a head; returns the head's new peak and mass, in each of the 8.

    Args:
        position: of the last token, relative to the split.
    """
    p = t.p
    heads = p.mla_heads // p.head_groups
    head, part = t.tid >> 3, t.tid & 7
    there = cutlass.min(head, Int32(heads - 1))
    piece, half = part >> 1, part & 1
    source = scores_at(t, piece_at(t, k, piece), piece) + there * SCORE_PITCH + 32 * half
    other = source + padded_heads(p) * SCORE_PITCH
    s = cute.make_rmem_tensor(8, Float32)
    top = peak
    for i in cutlass.range_constexpr(2):
        a, b = load4_shared(source + 16 * i, Float32), load4_shared(other + 16 * i, Float32)
        for j in cutlass.range_constexpr(4):
            score = (a[j] + b[j]) * Float32(p.config.qk_head_dim**-0.5)
            token = g.PIECE_TOKENS * piece + 8 * half + 4 * i + j
            s[4 * i + j] = select(token <= position, score, Float32(MINUS_INFINITY))
            top = maximum(top, s[4 * i + j])
    for mask in (1, 2, 4):
        top = maximum(top, from_other(top, mask))
    total = Float32(0)
    for i in cutlass.range_constexpr(8):
        s[i] = exp(s[i] - top)
        total = total + s[i]
    for mask in (1, 2, 4):
        total = total + from_other(total, mask)
    keep = exp(peak - top)
    if head < heads:
        at = weights_at(t) + head * WEIGHT_PITCH + (piece >> 1) * 64 + (piece & 1) * 8 + 4 * half
        for q in cutlass.range_constexpr(4):
            store_shared(at + 16 * q, Int32, pack_bf16(s[q], s[q + 4]))
        if part == 0:
            store_shared(keep_at(t) + 4 * head, Float32, keep)
    return top, mass * keep + total


@cute.jit
def context(t, sums, k):
    """Scale the sums by ``keep`` and add a split; releases its tiles one by one."""
    p = t.p
    tiles, units = padded_heads(p) // 8, p.C // COLUMN_UNIT
    row, q = t.lane >> 2, t.lane & 3
    for n in cutlass.range_constexpr(tiles):
        keep = load2_shared(keep_at(t) + 4 * (8 * n + 2 * q), Float32)
        for j in cutlass.range_constexpr(4 * column_units(p)):
            for e in cutlass.range_constexpr(4):
                at = 4 * (tiles * j + n) + e
                sums[at] = sums[at] * keep[e & 1]
    weights = cute.make_rmem_tensor(2 * tiles, Int32)
    for pair in cutlass.range_constexpr(PIECES // 2):
        at = weights_at(t) + row * WEIGHT_PITCH + 64 * pair + 16 * q
        both = [load4_shared(at + 8 * n * WEIGHT_PITCH) for n in range(tiles)]
        for second in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(tiles):
                weights[2 * n], weights[2 * n + 1] = both[n][2 * second], both[n][2 * second + 1]
            piece = 2 * pair + second
            values = piece_at(t, k, piece) + q * token_pitch(p) + 16 * row
            for i in cutlass.range_constexpr(column_units(p)):
                unit = t.warp + CONSUMER_WARPS * i
                if unit < units:
                    at = values + 2 * COLUMN_UNIT * unit
                    context_block(token_pitch(p), at, weights, sums, 16 * tiles * i, tiles)
            release(t, k + piece)


@cute.jit
def leave(t, unit, used, sums, peak, mass):
    """Peaks and masses of a unit's heads, and the sums of a unit that had a split."""
    p = t.p
    heads, tiles = p.mla_heads // p.head_groups, padded_heads(p) // 8
    head = t.tid >> 3
    if (head < heads) & ((t.tid & 7) == 0):
        address = t.at("mla.stat", (unit * heads + head) * 8)
        store(address, Float32, peak)
        store(address + 4, Float32, mass)
    if used:
        for i in cutlass.range_constexpr(column_units(p)):
            column = (t.warp + CONSUMER_WARPS * i) * COLUMN_UNIT + 8 * (t.lane >> 2)
            for n in cutlass.range_constexpr(tiles):
                for odd in cutlass.range_constexpr(2):
                    head = 8 * n + 2 * (t.lane & 3) + odd
                    if (head < heads) & (column < p.C):
                        address = t.at("mla.acc", Int64(unit * heads + head) * (4 * p.C) + Int64(4 * column))
                        for four in cutlass.range_constexpr(2):
                            # columns 8 g + 2 j and + 1, j = 2 four and 2 four + 1
                            at = 16 * tiles * i + 4 * (tiles * 2 * four + n) + odd
                            values = [sums[at], sums[at + 2], sums[at + 4 * tiles], sums[at + 4 * tiles + 2]]
                            store4(address + 16 * four, values, Float32)


__all__ = ["mla_attend", "mla_row"]
