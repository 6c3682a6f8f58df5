"""COMBINE: the routed experts' results of every row, weighted, on this SM's latent columns.

::

    comb[b, l]      = round( sum_a w[b, a] ey[slot_of[b, a], b, l] )       in the order of rank a
    comb.ssq[b, sm] = sum over own l of comb[b, l]^2

The sum goes by rank, so neither the other rows' experts nor the numbering of slots enters it. Rows that
do not run get 0. Warp b takes row b, a lane 8 columns.

In a share the sum is over the experts that this rank serves (``slot_of`` -1 for others'), in float32 for
all latent columns, and goes to the exchange of the ranks.

Constraints: latent columns in whole groups of 8.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from ..context import Part
from ..flow import signal, wait
from ..ptx import from_lane, high, load, load4, low, pack_bf16, select, select_int, store, store4, warp_sum


@cute.jit
def combine(t, record):
    """This SM's columns of all rows."""
    part = Part(t, record)
    wait(t, record)
    if t.warp < t.B:
        b, run = t.warp, t.runs(t.warp)
        rank = cutlass.min(t.lane, Int32(t.p.A - 1))
        weight = load(t.row("route.weight", b, rank), Float32)
        slot = load(t.row("route.slot_of", b, rank), Int32)
        mine = slot
        # After a fault the field may hold anything.
        slot = cutlass.max(cutlass.min(slot, Int32(t.p.slots - 1)), Int32(0))
        total = Float32(0)
        for i in cutlass.range(0, part.n, 32, unroll=1):
            group = part.g0 + i + t.lane
            total = total + combine_groups(t, b, run, group, part.g0 + part.n, weight, slot, mine)
        if cutlass.const_expr(t.p.ways == 1):
            total = warp_sum(total)
            if t.lane == 0:
                store(t.row("comb.ssq", b, t.sm), Float32, total)
    signal(t, record)


@cute.jit
def combine_groups(t, b, run, group, end, weight, slot, mine):
    """8 columns a lane of row b, those of ``group`` if below ``end``; returns the sum of their squares.

    Args:
        weight, slot: of rank ``lane``; mine: negative where another rank of a share serves the choice.
    """
    p = t.p
    column = 8 * cutlass.min(group, end - 1)
    sums = cute.make_rmem_tensor(8, Float32)
    for i in cutlass.range_constexpr(8):
        sums[i] = Float32(0)
    for a in cutlass.range_constexpr(p.A):
        w, s = from_lane(weight, a), from_lane(slot, a)
        y = load4(t.at("ey", ((s * t.B + b) * p.L + column) * 2))
        if cutlass.const_expr(p.ways > 1):  # what lies there may be any number
            served = from_lane(mine, a) >= 0
            y = [select_int(served, y[i], Int32(0)) for i in range(4)]
        for i in cutlass.range_constexpr(4):
            sums[2 * i] = sums[2 * i] + w * low(y[i])
            sums[2 * i + 1] = sums[2 * i + 1] + w * high(y[i])
    total = Float32(0)
    if cutlass.const_expr(p.ways > 1):
        values = [select(run == 1, sums[i], Float32(0)) for i in range(8)]
        if group < end:
            store4(t.given(b, column), values[:4], Float32)
            store4(t.given(b, column + 4), values[4:], Float32)
    else:
        words = [select_int(run, pack_bf16(sums[2 * i], sums[2 * i + 1]), Int32(0)) for i in range(4)]
        if group < end:
            store4(t.row("comb", b, column), words)
            for i in cutlass.range_constexpr(4):
                total = total + low(words[i]) * low(words[i]) + high(words[i]) * high(words[i])
    return total


__all__ = ["combine"]
