"""Matrix stages that end a sublayer, chunks of columns outermost: KDA_OUT, MLA_OUT, DENSE_DOWN,
SHARED_DOWN, LATENT_UP.

::

    out[b, d] = sum_k x[b, k] W[d, k]                     d over this SM's groups of 8 rows
    pre'      = round(pre + round(out))                   (out alone where a block starts)
    score_j   = (sum_d v_j[d]^2, sum_d v_j[d] u[d])       over own d, for every source j of the next mixture

SHARED_DOWN leaves its float32 sums to the SM itself, for LATENT_UP: out = round(up) + round(shared).
In a share the float32 sums go to the exchange of the ranks, the shared expert's among them, and RESIDUAL
(``share.py``) does the rest behind it; LATENT_UP takes its rank's latent columns from the exchange before.
The vector of a chunk is in registers while all groups of the SM meet it; their sums stay in registers
until the last chunk. LATENT_UP's vector is normed as it is loaded, others are taken as they are.

Constraints: at most 8 groups an SM, so D <= 64 x SMs; warp b finishes row b.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...layout import tiling
from ...resources import CONSUMER_WARPS
from .. import geometry as g
from ..context import SCALE_AT, Fixed, Part
from ..flow import release, signal, take, wait
from ..geometry import MATRICES, MOST_GROUPS
from ..ptx import (
    load,
    load4,
    load4_shared,
    load_bf16,
    load_shared,
    mma_tokens,
    round_bf16,
    select,
    store,
    store2_shared,
    store_bf16,
    warp_sum,
)
from .vector import load8_rounded, normed_word, scale_from_parts, scale_of_taken

INPUTS = {
    "kda_out": "kda.y",
    "mla_out": "mla.y",
    "dense_out": "act.dense",
    "shared_out": "act.shared",
    "latent_up": "comb",
}
"""The vector that each matrix meets."""


def blocks_a_warp(p):
    """Most blocks of a chunk that a warp takes, over all matrices of this family."""
    names = [n for n in INPUTS if _has(p, n)]
    return max(-(-tiling(p, n).chunk // 32 // CONSUMER_WARPS) for n in names)


def _has(p, name):
    c = p.config
    return {
        "kda_out": c.num_kda_layers,
        "mla_out": c.num_mla_layers,
        "dense_out": c.first_k_dense_replace,
    }.get(name, c.num_moe_layers) > 0


@cute.jit
def load_chunk(
    t, x, source, row_bytes, chunk_column, blocks, columns, gain, normed, count: cutlass.Constexpr
):
    """Registers of one chunk's part of this lane: token ``lane / 4``, its warp's blocks; zeros outside."""
    token, piece = t.lane >> 2, t.lane & 3
    for j in cutlass.range_constexpr(count):
        block = t.warp + CONSUMER_WARPS * j
        column = chunk_column + 32 * block + 8 * piece
        for i in cutlass.range_constexpr(4):
            x[4 * j + i] = Int32(0)
        if (token < t.B) & (block < blocks) & (column < columns):
            words = load4(source + Int64(token * row_bytes + 2 * column))
            if cutlass.const_expr(t.p.ways > 1):
                if normed:  # float32 of the ranks' sum
                    rounded = load8_rounded(source + Int64(token * row_bytes + 4 * column))
                    for i in cutlass.range_constexpr(4):
                        words[i] = rounded[i]
            if normed:
                gains = load4(gain + Int64(2 * column))
                scale = load_shared(t.small + SCALE_AT + 4 * token, Float32)
                for i in cutlass.range_constexpr(4):
                    words[i] = normed_word(words[i], gains[i], scale)
            for i in cutlass.range_constexpr(4):
                x[4 * j + i] = words[i]


@cute.jit
def residual_stage(t, record, k):
    """One instruction of this family."""
    p = t.p
    part = Part(t, record)
    kind = record[g.MATRIX]
    wait(t, record)
    source, row_bytes = t.work, Int32(0)
    for name, field in INPUTS.items():
        if cutlass.const_expr(field in t.geo.fields):
            if kind == MATRICES.index(name):
                source = t.at(field)
                row_bytes = Int32(2 * t.geo.fields[field].shape[-1])
    normed = kind == MATRICES.index("latent_up")
    gain = t.work
    if cutlass.const_expr(p.config.num_moe_layers > 0):
        if normed:
            if cutlass.const_expr(p.ways > 1):
                scale_of_taken(t, p.L, p.config.rms_norm_eps)
                source = t.taken(0, t.rank * p.latent_rows)
                row_bytes = Int32(4 * p.exchanged)
                gain = t.stacked("moe.gain", record[g.STACK], t.rank * p.latent_rows)
            else:
                scale_from_parts(t, "comb.ssq", p.latent_sms, p.L, p.config.rms_norm_eps)
                gain = t.stacked("moe.gain", record[g.STACK])

    count = blocks_a_warp(p)
    c0, c1, blocks, columns = record[6], record[7], record[g.BLOCKS], record[g.COLUMNS]
    x = cute.make_rmem_tensor(4 * count, Int32)
    ahead = cute.make_rmem_tensor(4 * count, Int32)
    sums = cute.make_rmem_tensor(4 * MOST_GROUPS, Float32)
    for i in cutlass.range_constexpr(4 * MOST_GROUPS):
        sums[i] = Float32(0)
    load_chunk(t, ahead, source, row_bytes, c0 * blocks * 32, blocks, columns, gain, normed, count)
    own = Own(p)
    load_own(t, own, record, part, p.ways == 1)
    for c in cutlass.range(c0, c1, unroll=1):
        for i in cutlass.range_constexpr(4 * count):
            x[i] = ahead[i]
        if c + 1 < c1:
            load_chunk(
                t, ahead, source, row_bytes, (c + 1) * blocks * 32, blocks, columns, gain, normed, count
            )
        for i in cutlass.range_constexpr(MOST_GROUPS):
            if i < part.n:
                multiply(t, x, sums, i, k, blocks, count)
                k += 1
    finish(t, record, part, sums, kind, own)
    signal(t, record)
    return k


class Own(Fixed):
    """Registers of what a lane needs at the end of a stage: its columns l and l + 32 of row ``warp``.

    Attributes:
        pre, u, shared: running sum, direction of the next mixture, the shared expert's sums; two each.
        blocks: two of every snapshot.
    """

    def __init__(self, p):
        self.pre, self.u, self.shared = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        self.blocks = cute.make_rmem_tensor(2 * p.max_sources, Float32)


@cute.jit
def load_own(t, own, record, part, ends: cutlass.Constexpr):
    """On their way while the products are made. What is not there yet is loaded, and not used.

    Args:
        ends: whether the stage ends the sublayer: then not the shared expert's sums alone are loaded.
    """
    p = t.p
    sub = record[g.SUB]
    b = cutlass.min(t.warp, t.B - 1)
    old = t.at("pre") + Int64((sub & 1) * (2 * p.D * t.B))
    for half in cutlass.range_constexpr(2):
        column = cutlass.min(8 * part.g0 + t.lane + 32 * half, p.D - 1)
        own.shared[half] = Float32(0)
        if cutlass.const_expr(ends):
            own.pre[half] = load_bf16(old + Int64((b * p.D + column) * 2))
            own.u[half] = load(t.stacked("direction", sub + 1, column), Float32)
        if cutlass.const_expr("shared" in t.geo.fields and (p.ways == 1 or not ends)):
            own.shared[half] = load(t.row("shared", b, column), Float32)
        if cutlass.const_expr(ends):
            for j in cutlass.range_constexpr(p.max_sources - 1):
                at = Int64(((j * t.B + b) * p.D + column) * 2)
                own.blocks[2 * j + half] = load_bf16(t.at("block") + at)


@cute.jit
def multiply(t, x, sums, i: cutlass.Constexpr, k, blocks, count: cutlass.Constexpr):
    """Group i's tile of a chunk times the chunk's vector, added to the group's sums."""
    tile = take(t, k)
    c0, c1, d0, d1 = sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]
    for j in cutlass.range_constexpr(count):
        if t.warp + CONSUMER_WARPS * j < blocks:
            w = load4_shared(tile + (t.warp + CONSUMER_WARPS * j) * 512 + t.lane * 16)
            c0, c1 = mma_tokens(x[4 * j], x[4 * j + 1], w[0], w[1], c0, c1)
            d0, d1 = mma_tokens(x[4 * j + 2], x[4 * j + 3], w[2], w[3], d0, d1)
    release(t, k)
    sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3] = c0, c1, d0, d1


def partial(t, warp, group, index):
    """Shared-memory address of one warp's sum of (token, row) ``index`` of a group."""
    return t.scratch + ((warp * MOST_GROUPS + group) * 64 + index) * 4


@cute.jit
def finish(t, record, part, sums, kind, own):
    """Add the warps' sums in their order; warp b then holds row b, a lane its columns l and l + 32."""
    t.sync()
    for i in cutlass.range_constexpr(MOST_GROUPS):
        pair = (sums[4 * i] + sums[4 * i + 2], sums[4 * i + 1] + sums[4 * i + 3])
        store2_shared(partial(t, t.warp, i, 2 * t.lane), pair, Float32)
    t.sync()
    if t.warp < t.B:
        b = t.warp
        width = cutlass.min(8 * part.n, t.p.D - 8 * part.g0)
        for half in cutlass.range_constexpr(2):
            column = t.lane + 32 * half
            value = Float32(0)
            for w in cutlass.range_constexpr(CONSUMER_WARPS):
                value = value + load_shared(partial(t, w, column >> 3, b * 8 + (column & 7)), Float32)
            sums[half] = value
        if kind == MATRICES.index("shared_out"):
            keep_shared(t, record, part, sums, b, width, own)
        else:
            if cutlass.const_expr(t.p.ways > 1):
                give_sums(t, part, sums, b, width, kind, own)
            else:
                end_sublayer(t, record, part, sums, b, width, kind, own)


@cute.jit
def give_sums(t, part, sums, b, width, kind, own):
    """float32 sums to the exchange of the ranks, LATENT_UP's with the shared expert's."""
    for half in cutlass.range_constexpr(2):
        column = t.lane + 32 * half
        shared = select(kind == MATRICES.index("latent_up"), own.shared[half], Float32(0))
        if column < width:
            store(t.given(b, 8 * part.g0 + column), Float32, sums[half] + shared)


@cute.jit
def keep_shared(t, record, part, sums, b, width, own):
    """float32 sums of a piece of the shared expert's columns, on top of the piece before it."""
    if cutlass.const_expr("shared" in t.geo.fields):
        later = record[6] > 0
        for half in cutlass.range_constexpr(2):
            column = t.lane + 32 * half
            if column < width:
                value = sums[half] + select(later, own.shared[half], Float32(0))
                store(t.row("shared", b, 8 * part.g0 + column), Float32, value)


@cute.jit
def end_sublayer(t, record, part, sums, b, width, kind, own):
    """Add to the running sum, and score the sources of the next mixture on this SM's columns."""
    p = t.p
    first, sub, starts = 8 * part.g0, record[g.SUB], record[g.START]
    new = t.at("pre", 0) + Int64(((sub + 1) & 1) * (2 * p.D * t.B))
    pre = cute.make_rmem_tensor(2, Float32)
    for half in cutlass.range_constexpr(2):
        column = t.lane + 32 * half
        value = round_bf16(sums[half])
        both = round_bf16(value + round_bf16(own.shared[half]))
        value = select(kind == MATRICES.index("latent_up"), both, value)
        value = select(starts == 1, value, round_bf16(own.pre[half] + value))
        if column < width:
            store_bf16(new + Int64((b * p.D + first + column) * 2), value)
        pre[half] = value
    count = record[g.SNAPSHOTS]
    for j in cutlass.range_constexpr(p.max_sources):
        if j <= count:
            square, product = Float32(0), Float32(0)
            for half in cutlass.range_constexpr(2):
                v = select(j == count, pre[half], own.blocks[2 * j + half])
                v = select(t.lane + 32 * half < width, v, Float32(0))
                square = square + v * v
                product = product + v * select(t.lane + 32 * half < width, own.u[half], Float32(0))
            square, product = warp_sum(square), warp_sum(product)
            if t.lane < 2:
                value = select(t.lane == 0, square, product)
                place = ((b * p.max_sources + j) * 2 + t.lane) * p.sms + t.sm
                store(t.at("score") + Int64(place) * 4, Float32, value)


__all__ = ["INPUTS", "Own", "end_sublayer", "load_own", "residual_stage"]
