"""EMBED, MIX and FINISH: the ends of a step, and the AttnRes mixture that opens every sublayer.

::

    EMBED   pre[b] = embed[token[b]]
    MIX     p = softmax_j( dot_j rsqrt(ssq_j / D + eps) ),   h = round(sum_j p_j v_j),   ssq[sm] = sum h^2
    FINISH  token = argmax of the SMs' best, the lowest id on ties; lengths += run; status |= refusal

v_j are the block snapshots and the running sum, dot and ssq the sums that the stage before left per SM,
added here in SM order. Where a block starts, MIX also copies the running sum to the new snapshot. The
first sublayer has one source and no scores. Warp b takes row b.

Constraints: at most 16 sources.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .. import geometry as g
from ..context import LENGTH_AT, Part
from ..flow import signal, wait
from ..geometry import MOST_SOURCES
from ..ptx import (
    bits_to_float,
    exp,
    high,
    load,
    load4,
    load_shared,
    low,
    pack_bf16,
    reciprocal,
    rsqrt,
    select,
    select_int,
    store,
    store4,
    store_shared,
    warp_max,
    warp_sum,
)
from .exchange import count_launch
from .vector import load8_rounded


@cute.jit
def embed(t, record):
    """Copy each row's embedding, this SM's columns."""
    part = Part(t, record)
    wait(t, record)
    for i in cutlass.range(t.tid, t.B * part.n, g.CONSUMERS, unroll=1):
        b = i // part.n
        column = 8 * (part.g0 + i - b * part.n)
        if cutlass.const_expr(t.p.ways > 1):  # looked up in the vocabulary of all ranks
            store4(t.row("pre", b, column), load8_rounded(t.embedded(b, column)))
        else:
            source = t.embed + (Int64(t.token(b)) * t.p.D + Int64(column)) * 2
            store4(t.row("pre", b, column), load4(source))
    signal(t, record)


def weight_at(t, b, j):
    """Shared-memory address of the mixing weight of source j in row b."""
    return t.scratch + (b * MOST_SOURCES + j) * 4


@cute.jit
def score_source(t, b, j):
    """Score of one source of one row from the SMs' partial sums, summed by the whole warp."""
    p = t.p
    address = t.at("score") + Int64(((b * p.max_sources + j) * 2 * p.sms) * 4)
    square, product = Float32(0), Float32(0)
    for i in cutlass.range_constexpr((p.column_sms + 31) // 32):
        at = t.lane + 32 * i
        if at < p.column_sms:
            square = square + load(address + Int64(4 * at), Float32)
            product = product + load(address + Int64(4 * (p.sms + at)), Float32)
    square, product = warp_sum(square), warp_sum(product)
    return product * rsqrt(square * Float32(1.0 / p.D) + Float32(p.config.rms_norm_eps))


@cute.jit
def mix(t, record):
    """The mixture on this SM's columns: warp b row b, a lane two columns of a group, 8 groups at a time."""
    p = t.p
    part = Part(t, record)
    count, sub, starts = record[g.SNAPSHOTS], record[g.SUB], record[g.START]
    wait(t, record)
    own = cute.make_rmem_tensor(p.max_sources, Int32)  # running sum first, then the snapshots
    load_columns(t, own, part, sub, Int32(0))
    if sub > 0:
        pairs = t.B * (count + 1)
        for i in cutlass.range(t.warp, pairs, g.CONSUMERS // 32, unroll=1):
            b = i // (count + 1)
            j = i - b * (count + 1)
            score = score_source(t, b, j)
            if t.lane == 0:
                store_shared(weight_at(t, b, j), Float32, score)
        t.sync()
    if t.warp < t.B:
        if sub > 0:
            soften(t, count)
            cute.arch.sync_warp()
        total = Float32(0)
        for i in cutlass.range(0, part.n, 8, unroll=1):
            if i > 0:
                load_columns(t, own, part, sub, i)
            total = total + mix_columns(t, own, part, i, count, sub, starts)
        total = warp_sum(total)
        if t.lane == 0:
            store(t.row("h.ssq", t.warp, t.sm), Float32, total)
    signal(t, record)


@cute.jit
def load_columns(t, own, part, sub, i):
    """Two columns of every source; what is not there yet is loaded, and not used."""
    p = t.p
    b = cutlass.min(t.warp, t.B - 1)
    group = cutlass.min(part.g0 + i + (t.lane >> 2), part.g0 + part.n - 1)
    at = Int64((b * p.D + 8 * group + 2 * (t.lane & 3)) * 2)
    own[0] = load(t.at("pre") + Int64((sub & 1) * (2 * p.D * t.B)) + at, Int32)
    for j in cutlass.range_constexpr(p.max_sources - 1):
        own[j + 1] = load(t.at("block") + Int64(j * (2 * p.D * t.B)) + at, Int32)


@cute.jit
def soften(t, count):
    """Softmax of row ``warp``'s scores in place; lane j has source j."""
    score = Float32(-float("inf"))
    if t.lane <= count:
        score = load_shared(weight_at(t, t.warp, t.lane), Float32)
    weight = select(t.lane <= count, exp(score - warp_max(score)), Float32(0))
    weight = weight * reciprocal(warp_sum(weight))
    if t.lane <= count:
        store_shared(weight_at(t, t.warp, t.lane), Float32, weight)


@cute.jit
def mix_columns(t, own, part, i, count, sub, starts):
    """Two columns of row ``warp``; returns the sum of their squares, 0 past the part's groups."""
    p = t.p
    b = t.warp
    group = i + (t.lane >> 2)
    column = 8 * (part.g0 + group) + 2 * (t.lane & 3)
    mixed = own[0]
    if sub > 0:
        a0, a1 = Float32(0), Float32(0)
        for j in cutlass.range_constexpr(p.max_sources - 1):
            if j < count:
                weight = load_shared(weight_at(t, b, j), Float32)
                a0 = a0 + weight * low(own[j + 1])
                a1 = a1 + weight * high(own[j + 1])
        weight = load_shared(weight_at(t, b, count), Float32)
        mixed = pack_bf16(a0 + weight * low(own[0]), a1 + weight * high(own[0]))
    total = Float32(0)
    if group < part.n:
        at = Int64((b * p.D + column) * 2)
        store(t.at("h") + at, Int32, mixed)
        if starts == 1:
            store(t.at("block") + Int64(count) * (2 * p.D * t.B) + at, Int32, own[0])
        total = low(mixed) * low(mixed) + high(mixed) * high(mixed)
    return total


@cute.jit
def finish(t, record):
    """The best token of every row, lengths and status; one warp a row."""
    p = t.p
    wait(t, record)
    if t.warp < t.B:
        b = t.warp
        top, row = Float32(-float("inf")), Int32(0x7FFFFFFF)
        for i in cutlass.range_constexpr((p.head_sms + 31) // 32):
            at = t.lane + 32 * i
            if at < p.head_sms:
                address = t.at("best", (at * t.B + b) * 8)
                value, here = bits_to_float(load(address, Int32)), load(address + 4, Int32)
                better = (value > top) | ((value == top) & (here < row))
                top = select(better, value, top)
                row = select_int(better, here, row)
        for mask in (16, 8, 4, 2, 1):
            value = cute.arch.shuffle_sync_bfly(top, mask)
            here = cute.arch.shuffle_sync_bfly(row, mask)
            better = (value > top) | ((value == top) & (here < row))
            top = select(better, value, top)
            row = select_int(better, here, row)
        if t.lane == 0:
            store(t.token_out + Int64(4 * b), Int32, row)
            run = t.runs(b)
            store(t.lengths + Int64(4 * b), Int32, load_shared(t.small + LENGTH_AT + 4 * b, Int32) + run)
            status = load(t.status + Int64(4 * b), Int32)
            store(t.status + Int64(4 * b), Int32, status | t.refusal(b))
    if cutlass.const_expr(p.peers):
        if t.tid == 0:
            count_launch(t)
    signal(t, record)


__all__ = ["embed", "finish", "mix"]
