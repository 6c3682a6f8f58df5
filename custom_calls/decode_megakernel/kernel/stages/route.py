"""ROUTE: the experts of every row, their weights, and the distinct ones in ascending order; one SM.

::

    s      = sigmoid(logits[b])                                 float32 [E]
    ids    = the A largest of s + bias, best first              ties go to the lowest id
    w_a    = s[ids_a] / (sum_a s[ids_a] + 1e-20) * scaling      summed in the order of rank
    slots  = sorted set of the ids of rows that run;  slot_of[b, a] = place of ids_a in it

Warp b chooses for row b, E / 32 scores a lane: each round takes the largest key that is left, as an
integer in the order of float32, so that the choice is total whatever the numbers are. A NaN ranks by its
sign like an infinity, and the weights of a row that has one are NaN. Distinct ids are found in a bitmap:
a slot is the number of bits below. Rows that do not run set no bits; their weights are 0, their slots 0.

In a share ids and weights are the whole model's; slots are of the experts that this rank serves, by their
places on it (``moe.place``), and slot_of is -1 for others'.

Writes route.ids, route.slot_of int32 and route.weight float32 [B, A], route.slots int32, route.count[0].

Constraints: A <= 32 and A <= E <= 1024.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from ...resources import CONSUMER_WARPS
from .. import geometry as g
from ..flow import signal, wait
from ..ptx import (
    float_to_bits,
    from_lane,
    load,
    load_shared,
    select,
    select_int,
    sigmoid,
    smem,
    store,
    store_shared,
)

TAKEN = -(2**31)
"""Key of a score that is not, or no longer, a candidate: below all others."""
WORDS = 32
"""Words of the bitmap of experts, one a lane."""


def order_key(x):
    """int32 in the order of float32, above TAKEN."""
    bits = float_to_bits(x)
    return cutlass.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), Int32(TAKEN + 1))


def reduce_pairs(values, combine):
    """All values combined two by two, as a tree."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


@cute.jit
def choose(t, b, place):
    """(expert of rank ``lane``, 1 where the row has a NaN score); ranks past A hold expert 0."""
    p = t.p
    each = -(-p.E // 32)
    keys = cute.make_rmem_tensor(each, Int32)
    lost = Int32(0)
    for j in cutlass.range_constexpr(each):
        expert = t.lane + 32 * j
        within = cutlass.min(expert, Int32(p.E - 1))
        score = sigmoid(load(t.row("rlogit", b, within), Float32))
        key = order_key(score + load(t.stacked("moe.bias", place, within), Float32))
        keys[j] = select_int(expert < p.E, key, Int32(TAKEN))
        lost = lost | select_int((float_to_bits(score) & 0x7FFFFFFF) > 0x7F800000, Int32(1), Int32(0))
    chosen = Int32(0)
    for a in cutlass.range(p.A, unroll=1):
        best = reduce_pairs([keys[j] for j in range(each)], cutlass.max)
        best = cute.arch.warp_redux_sync(best, "max")
        places = [select_int(keys[j] == best, Int32(j), Int32(each)) for j in range(each)]
        expert = t.lane + 32 * reduce_pairs(places, cutlass.min)
        expert = cute.arch.warp_redux_sync(expert, "min")
        chosen = select_int(t.lane == a, expert, chosen)
        mine = select_int((expert & 31) == t.lane, expert >> 5, Int32(-1))
        for j in cutlass.range_constexpr(each):
            keys[j] = select_int(mine == j, Int32(TAKEN), keys[j])
    return chosen, cute.arch.warp_redux_sync(lost, "max")


@cute.jit
def weigh(t, b, chosen, lost, run):
    """Ids and weights of row b, lane a those of rank a."""
    p, c = t.p, t.p.config
    weight = sigmoid(load(t.row("rlogit", b, chosen), Float32))
    if cutlass.const_expr(c.moe_renormalize):
        total = Float32(0)
        for a in cutlass.range_constexpr(p.A):
            total = total + from_lane(weight, a)
        weight = weight / (total + Float32(1e-20))
    weight = weight * Float32(c.routed_scaling_factor)
    weight = select(lost, Float32(float("nan")), weight)
    weight = select(run, weight, Float32(0))
    if t.lane < p.A:
        store(t.row("route.ids", b, t.lane), Int32, chosen)
        store(t.row("route.weight", b, t.lane), Float32, weight)


def bits_below(word, bit):
    """Bits of ``word`` under a position."""
    return cute.arch.popc(word & ((Int32(1) << bit) - 1))


@cute.jit
def number(t, chosen, run):
    """Slots from the bitmap; every warp counts it, and writes its share.

    Args:
        chosen: expert of rank ``lane``, in a share its place on the rank, negative for another rank's.
    """
    p = t.p
    word = load_shared(t.scratch + 4 * t.lane, Int32)
    count = cute.arch.popc(word)
    upto = count
    for distance in (1, 2, 4, 8, 16):
        other = from_lane(upto, cutlass.max(t.lane - distance, Int32(0)))
        upto = upto + select_int(t.lane >= distance, other, Int32(0))
    before = upto - count
    total = from_lane(upto, 31)
    for j in cutlass.range_constexpr(-(-p.held // g.CONSUMERS)):
        index = t.warp + CONSUMER_WARPS * j
        here, base = from_lane(word, index), from_lane(before, index)
        if ((here >> t.lane) & 1) == 1:
            slot = cutlass.min(base + bits_below(here, t.lane), Int32(p.slots - 1))
            store(t.at("route.slots", 4 * slot), Int32, 32 * index + t.lane)
    if cutlass.const_expr(p.ways > 1):
        at = cutlass.max(chosen, Int32(0))
        here, base = from_lane(word, at >> 5), from_lane(before, at >> 5)
        served = (run == 1) & (chosen >= 0)
        slot = select_int(served, base + bits_below(here, at & 31), Int32(-1))
    else:
        here, base = from_lane(word, chosen >> 5), from_lane(before, chosen >> 5)
        slot = select_int(run, base + bits_below(here, chosen & 31), Int32(0))
    if (t.warp < t.B) & (t.lane < p.A):
        store(t.row("route.slot_of", t.warp, t.lane), Int32, slot)
    if t.tid == 0:
        store(t.at("route.count"), Int32, total)


@cute.jit
def route(t, record):
    """The choice of all rows of a layer."""
    place = record[g.STACK]
    wait(t, record)
    if t.tid < WORDS:
        store_shared(t.scratch + 4 * t.tid, Int32, Int32(0))
    t.sync()
    chosen, run = Int32(0), Int32(0)
    if t.warp < t.B:
        run = t.runs(t.warp)
        chosen, lost = choose(t, t.warp, place)
        weigh(t, t.warp, chosen, lost, run)
        counts = (t.lane < t.p.A) & (run == 1)
        if cutlass.const_expr(t.p.ways > 1):
            chosen = load(t.stacked("moe.place", place, t.warp * t.p.E + chosen), Int32)
            counts = counts & (chosen >= 0)
        if counts:
            word = smem(t.scratch + 4 * (chosen >> 5), Int32)
            cute.arch.atomic_or(word, Int32(1) << (chosen & 31))
    t.sync()
    number(t, chosen, run)
    signal(t, record)


__all__ = ["route"]
