"""EXPERT_IN and EXPERT_OUT: the chosen experts, from their 4-bit weights as the checkpoint has them.

::

    hid[slot, b, f] = SiTU( round(sum_l W1[e, f, l] latent[b, l]), round(sum_l W3[e, f, l] latent[b, l]) )
    ey[slot, b, l]  = round( sum_f W2[e, l, f] hid[slot, b, f] )              e the expert of the slot

for all rows b of the batch; who chose the expert matters to COMBINE alone. Units are (slot, group of 8
rows), this SM's share of them by :func:`~..produce.span`. One matrix instruction takes 16 weight rows, the
8 of two codes arrays: w1 and w3 of a unit, or w2 of two consecutive units (the second may belong to the
next slot), and 8 tokens.

Weights. In a round each warp takes a step of 128 columns; where half of the warps or fewer would have one
in the last round, two warps share a step. Lane ``4 g + q`` takes 16 bytes of weight row g, or 8 of them:
columns ``128 step + 32 q ..``, which have one scale. A code's bits, shifted to the top of an f16 below its
sign, are its value times 2**-14; one f16 product with 2**(scale - 127 + 14) is then exact, so weights enter
exactly.

Tokens. x[b] is multiplied with a power of two that puts the largest magnitude of the warp's columns into
[2**14, 2**15), rounded to f16 (exact for numbers down to 2**-31 of the largest), and the sums are multiplied
back. Of 8 neighbouring columns the pairs are (0, 4) (2, 6) (1, 5) (3, 7), as the codes unpack. A row's
arithmetic involves no other row or slot. The warps' sums are added in their order.

Constraints: L and F multiples of 64; L at most 3,584 and F at most 3,584 (a tile fits a stage of the ring);
scale bytes 105 .. 128, checked when weights are packed.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from ...resources import CONSUMER_WARPS
from ...shapes import groups_of
from .. import geometry as g
from ..context import FREE_AT, ROUTED_AT
from ..flow import release, signal, take, wait
from ..produce import span, turn_of
from ..ptx import (
    bits_to_float,
    choose_bits,
    from_lane,
    from_other,
    high,
    load2_shared,
    load4,
    load4_shared,
    load_shared,
    low,
    mma_f16,
    multiply_f16,
    pack_f16,
    round_bf16,
    select_int,
    store4_shared,
    store_bf16,
)
from .resident import situ
from .vector import load8_rounded

STEP = 128
"""Columns that a warp multiplies at a time: 32 of each of the four lanes of a row."""
PASS = 4
"""Tiles whose partial sums meet at once: 4 x 8 rows x 8 tokens are one pair of sums a thread."""
PAIRS_BYTES = 64 * 8
"""Partial sums of one warp for a tile: (token, row) pairs, of the lower and the upper 8 rows."""
PASS_BYTES = PASS * CONSUMER_WARPS * PAIRS_BYTES
SIGNS, CODES = 0x80808080 - (1 << 32), 0x8E008E00 - (1 << 32)
"""Signs of four codes in bytes that become the upper halves of f16; sign and magnitude of two of them."""


def rounds_of(columns):
    """(first step, whether two warps share a step) of the rounds over a row's steps of 128 columns."""
    full, rest = divmod(-(-columns // STEP), CONSUMER_WARPS)
    rounds = [(CONSUMER_WARPS * i, False) for i in range(full)]
    return [*rounds, (CONSUMER_WARPS * full, 2 * rest <= CONSUMER_WARPS)] if rest else rounds


def registers_of(columns):
    """Registers a lane for its warp's columns of a vector, packed f16."""
    return sum(8 if shared else 16 for _, shared in rounds_of(columns))


def step_of(t, first, shared):
    """(step, which half of its 16-byte pieces) of this warp in a round."""
    if shared:
        return first + (t.warp >> 1), t.warp & 1
    return first + t.warp, Int32(0)


# -- tokens -------------------------------------------------------------------------------------


@cute.jit
def load_tokens(
    t,
    x,
    source,
    row_bytes: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    floats: cutlass.Constexpr = False,
):
    """bf16 rows ``[B, columns]`` at ``source`` to registers as they are, zeros outside.

    Args:
        floats: the rows are float32 of bf16 numbers.
    """
    token, piece = t.lane >> 2, t.lane & 3
    for j, (first, shared) in enumerate(rounds_of(columns)):
        step, half = step_of(t, first, shared)
        block, count = 4 * step + piece, 2 if shared else 4
        for i in cutlass.range_constexpr(4 * count):
            x[16 * j + i] = Int32(0)
        if (token < t.B) & (block < columns // 32):
            for u in cutlass.range_constexpr(count):
                column = 32 * block + 16 * half + 8 * u
                if cutlass.const_expr(floats):
                    words = load8_rounded(source + Int64(token * row_bytes + 4 * column))
                else:
                    words = load4(source + Int64(token * row_bytes + 2 * column))
                for i in cutlass.range_constexpr(4):
                    x[16 * j + 4 * u + i] = words[i]


@cute.jit
def scale_tokens(t, x, undo):
    """bf16 registers to f16 in the order of the codes.

    Args:
        undo: gets the inverse factors of tokens 2 q and 2 q + 1, whose sums this lane will hold.
    """
    count = cute.size(x)
    lower, upper = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(count):
        lower = cutlass.max(lower, x[i] & 0x7FFF)
        upper = cutlass.max(upper, x[i] & 0x7FFF0000)
    peak = cutlass.max(lower, upper >> 16)
    for mask in (1, 2):
        peak = cutlass.max(peak, from_other(peak, mask))
    exponent = cutlass.max(peak >> 7, Int32(15))  # below it the factor would not be a float32
    factor = bits_to_float((Int32(127 + 14 + 127) - exponent) << 23)
    inverse = bits_to_float((exponent - 14) << 23)
    for i in cutlass.range_constexpr(0, count, 4):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        x[i] = pack_f16(low(a) * factor, low(c) * factor)
        x[i + 1] = pack_f16(low(b) * factor, low(d) * factor)
        x[i + 2] = pack_f16(high(a) * factor, high(c) * factor)
        x[i + 3] = pack_f16(high(b) * factor, high(d) * factor)
    first = 8 * (t.lane & 3)
    undo[0] = from_lane(inverse, first)
    undo[1] = from_lane(inverse, first + 4)


# -- weights ------------------------------------------------------------------------------------


def unpack(word, scale):
    """Columns (0, 4) (2, 6) (1, 5) (3, 7) of 8 codes, packed f16, times a packed pair of scales."""
    even = choose_bits(Int32(SIGNS), word << 4, word << 1)
    odd = choose_bits(Int32(SIGNS), word, word >> 3)
    codes = Int32(CODES)
    return [multiply_f16(pair & codes, scale) for half in (even, odd) for pair in (half << 8, half)]


def scale_pair(address):
    """A scale byte s as two f16 of 2**(s - 127 + 14)."""
    return ((Int32(load_shared(address, Uint8)) & 0xFF) - 98) * Int32(0x04000400)


@cute.jit
def multiply_round(t, x, sums, lower, upper, j: cutlass.Constexpr, columns: cutlass.Constexpr):
    """A round's products of both 8 rows, added to four sets of sums."""
    blocks = columns // 32
    first, shared = rounds_of(columns)[j]
    step, half = step_of(t, first, shared)
    row, piece = t.lane >> 2, t.lane & 3
    block = 4 * step + piece
    inside = block < blocks
    if cutlass.const_expr(columns % STEP != 0):
        block = cutlass.min(block, Int32(blocks - 1))
    codes = row * (columns // 2) + 16 * block + 8 * half
    scales = 8 * (columns // 2) + row * blocks + block
    if cutlass.const_expr(shared):
        a, b = load2_shared(lower + codes), load2_shared(upper + codes)
    else:
        a, b = load4_shared(lower + codes), load4_shared(upper + codes)
    a_scale, b_scale = scale_pair(lower + scales), scale_pair(upper + scales)
    if cutlass.const_expr(columns % STEP != 0):
        a_scale = select_int(inside, a_scale, Int32(0))
        b_scale = select_int(inside, b_scale, Int32(0))
    for u in cutlass.range_constexpr(2 if shared else 4):
        w, v = unpack(a[u], a_scale), unpack(b[u], b_scale)
        for pair in cutlass.range_constexpr(2):
            at, of = 16 * j + 4 * u + 2 * pair, 4 * (2 * (u & 1) + pair)
            weights = (w[2 * pair], v[2 * pair], w[2 * pair + 1], v[2 * pair + 1])
            out = mma_f16(weights, (x[at], x[at + 1]), [sums[of + i] for i in range(4)])
            for i in cutlass.range_constexpr(4):
                sums[of + i] = out[i]


@cute.jit
def multiply(t, x, undo, y, lower, upper, columns: cutlass.Constexpr):
    """This warp's sums over its columns: 8 rows at ``lower``, 8 at ``upper`` of shared memory.

    Lane ``4 g + q`` gets in ``y`` (row g of lower, token 2 q), (.., 2 q + 1), and the same of upper.
    """
    sums = cute.make_rmem_tensor(16, Float32)
    for i in cutlass.range_constexpr(16):
        sums[i] = Float32(0)
    steps = -(-columns // STEP)
    for j, (first, shared) in enumerate(rounds_of(columns)):
        if cutlass.const_expr(first + CONSUMER_WARPS // (2 if shared else 1) <= steps):
            multiply_round(t, x, sums, lower, upper, j, columns)
        else:
            if step_of(t, first, shared)[0] < steps:
                multiply_round(t, x, sums, lower, upper, j, columns)
    for i in cutlass.range_constexpr(4):
        y[i] = ((sums[i] + sums[4 + i]) + (sums[8 + i] + sums[12 + i])) * undo[i & 1]


# -- sums of the warps ----------------------------------------------------------------------------


def keep(t, sums, tile, y):
    """This warp's sums of a tile of the pass to shared memory, as (lower, upper) of (row, token)."""
    at = sums + (tile * CONSUMER_WARPS + t.warp) * PAIRS_BYTES + 16 * t.lane
    store4_shared(at, (y[0], y[2], y[1], y[3]), Float32)


def add_warps(t, sums):
    """(lower, upper) sum of (row, token) ``tid % 64`` of tile ``tid / 64`` of the pass."""
    at = sums + (t.tid >> 6) * (CONSUMER_WARPS * PAIRS_BYTES) + 8 * (t.tid & 63)
    lower, upper = Float32(0), Float32(0)
    for w in range(CONSUMER_WARPS):
        pair = load2_shared(at + PAIRS_BYTES * w, Float32)
        lower, upper = lower + pair[0], upper + pair[1]
    return lower, upper


def place(t, name, unit, groups, width):
    """Address in a field ``[slots, B, width]`` of this thread's row and token of a unit."""
    slot = unit // groups
    row, token = (t.tid & 63) >> 3, t.tid & 7
    column = 8 * (unit - slot * groups) + row
    return t.at(name, ((slot * t.B + token) * width + column) * 2)


# -- stages -------------------------------------------------------------------------------------


@cute.jit
def expert_in(t, record, k):
    """hid of this SM's (slot, group) units."""
    p = t.p
    groups, half = groups_of(p.F), g.expert_tile_bytes(p)[0] // 2
    width = t.geo.fields["hid"].shape[-1]
    wait(t, record)
    cute.arch.mbarrier_wait(t.barrier(ROUTED_AT), turn_of(t, record))
    first, end = span(t, record, groups)
    x = cute.make_rmem_tensor(registers_of(p.L), Int32)
    undo = cute.make_rmem_tensor(2, Float32)
    y = cute.make_rmem_tensor(4, Float32)
    if cutlass.const_expr(p.ways > 1):
        load_tokens(t, x, t.taken(0, 0), 4 * p.exchanged, p.L, True)
    else:
        load_tokens(t, x, t.at("latent"), 2 * p.L, p.L)
    scale_tokens(t, x, undo)
    unit, parity = cute.arch.make_warp_uniform(first), Int32(0)
    end = cute.arch.make_warp_uniform(end)
    while unit < end:
        now = cutlass.min(end - unit, Int32(PASS))
        sums = t.scratch + parity * PASS_BYTES
        for i in cutlass.range(now, unroll=1):
            tile = take(t, k)
            multiply(t, x, undo, y, tile, tile + half, p.L)
            release(t, k)
            k += 1
            keep(t, sums, i, y)
        t.sync()
        mine = t.tid >> 6
        if (mine < now) & ((t.tid & 7) < t.B):
            gate, up = add_warps(t, sums)
            value = situ(round_bf16(gate), round_bf16(up), p.config)
            store_bf16(place(t, "hid", unit + mine, groups, width), value)
        parity = parity ^ 1
        unit += PASS
    signal(t, record)
    return k


@cute.jit
def expert_out(t, record, k):
    """ey of this SM's (slot, group) units, two to a tile."""
    p = t.p
    groups, whole = groups_of(p.L), g.expert_tile_bytes(p)[1]
    width = t.geo.fields["hid"].shape[-1]
    count = registers_of(p.F)
    wait(t, record)
    first, end = span(t, record, groups)
    unit, parity = cute.arch.make_warp_uniform(first), Int32(0)
    end = cute.arch.make_warp_uniform(end)
    cute.arch.sync_warp()
    if t.lane == 0:
        cute.arch.mbarrier_arrive(t.barrier(FREE_AT))
    x = cute.make_rmem_tensor(count, Int32)
    undo = cute.make_rmem_tensor(2, Float32)
    y, both = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
    for i in cutlass.range_constexpr(count):
        x[i] = Int32(0)
    held = Int32(-1)
    while unit < end:
        now = cutlass.min((end - unit + 1) >> 1, Int32(PASS))
        sums = t.scratch + parity * PASS_BYTES
        for i in cutlass.range(now, unroll=1):
            lower = unit + 2 * i
            upper = cutlass.min(lower + 1, end - 1)
            slot0, slot1 = lower // groups, upper // groups
            tile = take(t, k)
            for slot in cutlass.range(slot0, slot1 + 1, unroll=1):
                if slot != held:
                    # Full ring stages outlast this read.
                    load_tokens(t, x, t.at("hid", slot * (2 * t.B * width)), 2 * width, p.F)
                    scale_tokens(t, x, undo)
                    held = slot
                multiply(t, x, undo, y, tile, tile + (upper - lower) * whole, p.F)
                if slot == slot0:
                    both[0], both[1] = y[0], y[1]
                both[2], both[3] = y[2], y[3]
            release(t, k)
            k += 1
            keep(t, sums, i, both)
        t.sync()
        mine = t.tid >> 6
        if (mine < now) & ((t.tid & 7) < t.B):
            value, following = add_warps(t, sums)
            at = unit + 2 * mine
            store_bf16(place(t, "ey", at, groups, p.L), value)
            if at + 1 < end:
                store_bf16(place(t, "ey", at + 1, groups, p.L), following)
        parity = parity ^ 1
        unit += 2 * PASS
    signal(t, record)
    return k


__all__ = ["expert_in", "expert_out"]
