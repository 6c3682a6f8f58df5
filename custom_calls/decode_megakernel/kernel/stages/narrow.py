"""Matrix stages of few columns, several whole groups of 8 rows a tile: KDA_DECAY, MLA_ABSORB, MLA_VALUE.

::

    KDA_DECAY   z[b, n]         = round( W_fb[n] . f_a[b] )
    MLA_ABSORB  qt[b, head, c]  = round( W_UK[head, :, c] . q_nope[b, head] )
    MLA_VALUE   ctx[b, head]    = round( sum_l e_l acc_l / sum_l e_l mass_l ),   e_l = exp(peak_l - max peak)
                y[b, head, v]   = round( round(W_UV[head, v] . ctx[b, head]) * sigmoid(gate[b, head, v]) )

The vectors that an SM's groups need (one, or one a head: a part may begin and end inside a head) lie in
scratch, bf16 ``[head, B, columns]``. A group belongs to one warp whole, so no sums cross warps; the
groups of a part go round the warps whatever tile they came in.

MLA_VALUE's lanes are those of MLA_ATTEND. A lane l of a row has a split, and with it a sum, exactly if
``64 l <= length``: the first ones, added in their order; sums of the others are never read.

Constraints (``constraints_attention.reasons``): columns a multiple of 8 in one chunk, rows of a head a
multiple of 8, the vectors of a part's heads in scratch.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...instructions import Op
from ...layout import tiling
from ...resources import CONSUMER_WARPS
from ...shapes import ROW_GROUP, SPLIT
from .. import geometry as g
from ..constraints_attention import groups_of_part, row_pitch, value_vectors_bytes
from ..context import Part
from ..flow import release, signal, take, wait
from ..ptx import (
    exp,
    high,
    load,
    load4,
    load4_shared,
    load_shared,
    low,
    maximum,
    mma_tokens,
    pack_bf16,
    reciprocal,
    round_bf16,
    select,
    sigmoid,
    store,
    store2_shared,
    store4_shared,
    store_shared,
    warp_max,
    warp_sum,
)

LANES_AT_ONCE = 8
"""Partial sums of a column that are on their way at a time."""


@cute.jit
def kda_decay(t, record, k):
    """z = W_fb f_a; f_a is the first K columns of the projections."""
    tile = tiling(t.p, "kda_decay")
    part = Part(t, record)
    wait(t, record)
    copy_vectors(t, tile, "kda.proj", 0, 0, Int32(1))
    t.sync()
    k = products(t, record, k, part, tile, 0, Int32(0), finish_decay)
    signal(t, record)
    return k


@cute.jit
def finish_decay(t, b, row, y0, y1, more):
    store(t.row("kda.z", b, row), Int32, pack_bf16(y0, y1))


@cute.jit
def mla_absorb(t, record, k):
    """qt = W_UK^T q, head by head."""
    p = t.p
    tile = tiling(p, "mla_key_up")
    check_part(t, Op.MLA_ABSORB, tile)
    part = Part(t, record)
    first, heads = heads_of(part, p.C)
    wait(t, record)
    width = p.config.qk_head_dim
    copy_vectors(t, tile, "mla.q", first * width, width, heads)
    t.sync()
    k = products(t, record, k, part, tile, p.C, first, finish_absorb)
    signal(t, record)
    return k


@cute.jit
def finish_absorb(t, b, row, y0, y1, more):
    store(t.row("mla.qt", b, row), Int32, pack_bf16(y0, y1))


@cute.jit
def mla_value(t, record, k):
    """Merge the lanes, then y = (W_UV context) gated, head by head."""
    p = t.p
    tile = tiling(p, "mla_value_up")
    check_part(t, Op.MLA_VALUE, tile)
    part = Part(t, record)
    first, heads = heads_of(part, p.config.v_head_dim)
    wait(t, record)
    lane_factors(t, first, heads)
    t.sync()
    merge_lanes(t, tile, first, heads)
    t.sync()
    k = products(t, record, k, part, tile, p.config.v_head_dim, first, finish_value, gate_of)
    signal(t, record)
    return k


@cute.jit
def gate_of(t, b, row):
    """The raw gates of rows ``row`` and ``row + 1``, packed; on their way while the products are made."""
    p = t.p
    return load(t.row("mla.proj", b, p.Q + p.C + p.R + row), Int32)


@cute.jit
def finish_value(t, b, row, y0, y1, gates):
    y0 = round_bf16(y0) * sigmoid(low(gates))
    y1 = round_bf16(y1) * sigmoid(high(gates))
    store(t.row("mla.y", b, row), Int32, pack_bf16(y0, y1))


# -- the vectors of a part --------------------------------------------------------------------


def check_part(t, op, tile):
    """Scratch is cut for an even deal of the groups; a schedule that deals otherwise needs another cut."""
    most = groups_of_part(t.p, tile.rows)
    for ins in t.geo.schedule.instructions:
        groups = (ins.g1 - ins.g0) // max(1, ins.sm1 - ins.sm0)
        if ins.op == op and groups > most:
            raise ValueError(f"schedule: {op.name} gives an SM {groups} groups, expected at most {most}")


def heads_of(part, rows_a_head):
    """(first head of a part's rows, how many heads they belong to)."""
    first = part.g0 * ROW_GROUP // rows_a_head
    return first, ((part.g0 + part.n) * ROW_GROUP - 1) // rows_a_head - first + 1


@cute.jit
def copy_vectors(t, tile: cutlass.Constexpr, field: cutlass.Constexpr, column, step, heads):
    """``[heads, B, tile.columns]`` of a bf16 field to scratch, zeros up to the tile's padded columns.

    Args:
        column: where head 0's vector begins in a row of the field; ``step`` columns from head to head.
    """
    pitch, units = row_pitch(tile.chunk), tile.chunk // 8
    for i in cutlass.range(t.tid, heads * (t.B * units), g.CONSUMERS, unroll=1):
        pair = i // units
        at = 8 * (i - pair * units)
        head = pair // t.B
        words = cute.make_rmem_tensor(4, Int32)
        for j in cutlass.range_constexpr(4):
            words[j] = Int32(0)
        if at < tile.columns:
            source = load4(t.row(field, pair - head * t.B, column + head * step + at))
            for j in cutlass.range_constexpr(4):
                words[j] = source[j]
        store4_shared(t.scratch + pair * pitch + 2 * at, [words[j] for j in range(4)])


def lanes_in_use(t, b):
    """Attention lanes of row b that have a split."""
    return cutlass.min(t.length(b) // SPLIT + 1, Int32(t.p.lanes))


def factor_at(t, pair, lane):
    """Shared-memory address of a lane's factor for one (head, row); lane ``lanes`` is the whole's."""
    return t.scratch + value_vectors_bytes(t.p) + (pair * (t.p.lanes + 1) + lane) * 4


@cute.jit
def lane_factors(t, first, heads):
    """e_l of every lane in use, and 1 / sum_l e_l mass_l, of every (head, row); one warp each."""
    p = t.p
    each = p.mla_heads // p.head_groups
    rounds = (p.lanes + 31) // 32
    for pair in cutlass.range(t.warp, heads * t.B, CONSUMER_WARPS, unroll=1):
        head, b = first + pair // t.B, pair % t.B
        count = lanes_in_use(t, b)
        unit = b * p.lanes * p.head_groups + head // each
        peaks = cute.make_rmem_tensor(rounds, Float32)
        masses = cute.make_rmem_tensor(rounds, Float32)
        top = Float32(-float("inf"))
        for i in cutlass.range_constexpr(rounds):
            lane = t.lane + 32 * i
            peaks[i], masses[i] = Float32(-float("inf")), Float32(0)
            if lane < count:
                place = (unit + lane * p.head_groups) * each + head % each
                address = t.at("mla.stat", 8 * place)
                peaks[i], masses[i] = load(address, Float32), load(address + 4, Float32)
            top = maximum(top, peaks[i])
        top = warp_max(top)
        mass = Float32(0)
        for i in cutlass.range_constexpr(rounds):
            lane = t.lane + 32 * i
            factor = exp(peaks[i] - top)
            mass = mass + masses[i] * factor
            if lane < count:
                store_shared(factor_at(t, pair, lane), Float32, factor)
        mass = warp_sum(mass)
        if t.lane == 0:
            store_shared(factor_at(t, pair, p.lanes), Float32, reciprocal(mass))


@cute.jit
def merge_lanes(t, tile: cutlass.Constexpr, first, heads):
    """ctx of every (head, row) of this part, rounded, to scratch; 4 columns a thread."""
    p = t.p
    pitch, quads = row_pitch(tile.chunk), p.C // 4
    each = p.mla_heads // p.head_groups
    step = p.mla_heads * p.C * 4  # bytes from a lane's sums to the next lane's
    for i in cutlass.range(t.tid, heads * (t.B * quads), g.CONSUMERS, unroll=1):
        pair = i // quads
        column = 4 * (i - pair * quads)
        head, b = first + pair // t.B, pair % t.B
        count = lanes_in_use(t, b)
        unit = b * p.lanes * p.head_groups + head // each
        source = t.at("mla.acc", Int64(unit * each + head % each) * (4 * p.C) + Int64(4 * column))
        sums = cute.make_rmem_tensor(4, Float32)
        for j in cutlass.range_constexpr(4):
            sums[j] = Float32(0)
        for lane0 in cutlass.range(0, count, LANES_AT_ONCE, unroll=1):
            for a in cutlass.range_constexpr(LANES_AT_ONCE):
                lane = cutlass.min(lane0 + a, count - 1)
                v = load4(source + Int64(lane) * step, Float32)
                factor = load_shared(factor_at(t, pair, lane), Float32)
                factor = select(lane0 + a < count, factor, Float32(0))
                for j in cutlass.range_constexpr(4):
                    sums[j] = sums[j] + factor * v[j]
        whole = load_shared(factor_at(t, pair, p.lanes), Float32)
        words = (pack_bf16(sums[0] * whole, sums[1] * whole), pack_bf16(sums[2] * whole, sums[3] * whole))
        store2_shared(t.scratch + pair * pitch + 2 * column, words)


# -- the products -----------------------------------------------------------------------------


@cute.jit
def products(
    t,
    record,
    k,
    part,
    tile: cutlass.Constexpr,
    rows_a_head: cutlass.Constexpr,
    first,
    finish: cutlass.Constexpr,
    ahead: cutlass.Constexpr = None,
):
    """Every group of this part times its head's vectors.

    Lanes of tokens that the batch has not repeat the last token's vector; their sums go nowhere.

    Args:
        rows_a_head: 0 where all rows meet one vector; ``first`` is the head of scratch's first vectors.
        finish: ``(t, b, row, y[row], y[row + 1], word)`` of rows 2 q and 2 q + 1 of a group.
        ahead: ``(t, b, row) -> word``, called before a group's products.
    """
    blocks, group_bytes, pitch = tile.chunk // 32, tile.group_bytes, row_pitch(tile.chunk)
    piece = record[g.PIECE]
    token, q = t.lane >> 2, t.lane & 3
    b = cutlass.min(token, Int32(t.B - 1))
    vector = t.scratch + b * pitch + 16 * q
    done = Int32(0)
    while done < part.n:
        now = cutlass.min(part.n - done, piece)
        address = take(t, k) + 16 * t.lane
        mine = (t.warp - done) & (CONSUMER_WARPS - 1)
        for i in cutlass.range(mine, now, CONSUMER_WARPS, unroll=1):
            row = ROW_GROUP * (part.g0 + done + i) + 2 * q
            word = Int32(0)
            if cutlass.const_expr(ahead is not None):
                word = ahead(t, b, row)
            x = vector
            if cutlass.const_expr(rows_a_head > 0):
                x = vector + (row // rows_a_head - first) * (t.B * pitch)
            w = address + i * group_bytes
            c0, c1, d0, d1 = Float32(0), Float32(0), Float32(0), Float32(0)
            for j in cutlass.range_constexpr(blocks):
                a, v = load4_shared(w + 512 * j), load4_shared(x + 64 * j)
                c0, c1 = mma_tokens(v[0], v[1], a[0], a[1], c0, c1)
                d0, d1 = mma_tokens(v[2], v[3], a[2], a[3], d0, d1)
            if token < t.B:
                finish(t, b, row, c0 + d0, c1 + d1, word)
        release(t, k)
        k += 1
        done += now
    return k


__all__ = ["kda_decay", "mla_absorb", "mla_value"]
