"""The producer warp: streams everything the stages of this SM will read, in the order they read it.

It walks the same program as the consumers, ahead of them through stages and layers. Weights, states
and old cache rows were there when the step began, so it waits for nothing but room in the ring, except
for the choice of experts. While it waits for room it asks for the next tiles in L2.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from ..instructions import Op
from ..resources import RING_STAGES
from ..shapes import ROW_GROUP, SPLIT, groups_of
from . import geometry as g
from .context import COUNT_AT, DEAD_AT, EMPTY_AT, FREE_AT, ROUTED_AT, Fixed, Part, Record
from .flow import copy, fetch, issue, open_tile, poll
from .ptx import is_over, load, load_shared, prefetch, select_int, store_shared

PRODUCER_PATIENCE = 2
"""Times a consumer's limit that the producer waits for ROUTE."""
AHEAD, PACE = 6, 10
"""Tiles that it may ask for in L2 beyond the ring, and the bytes of them a cycle."""


@cute.jit
def produce(t):
    """Stream this SM's whole program."""
    at, end = t.first, t.last
    k = Int32(0)
    word = fetch(t, at, end)
    while at < end:
        following = fetch(t, at + 1, end)
        record = Record(word, at)
        op = record[0]
        if record[g.MATRIX] >= 0:
            k = matrix(t, record, k)
        if cutlass.const_expr(t.p.config.num_kda_layers > 0):
            if op == int(Op.KDA_STEP):
                k = kda_state(t, record, k)
        if cutlass.const_expr(t.p.config.num_mla_layers > 0):
            if op == int(Op.MLA_ATTEND):
                k = cache(t, record, k)
        if cutlass.const_expr(t.p.config.num_moe_layers > 0):
            if op == int(Op.EXPERT_IN):
                routed(t, record)
                k = expert_in(t, record, k)
            if op == int(Op.EXPERT_OUT):
                k = expert_out(t, record, k)
        at += 1
        word = following
    return k


@cute.jit
def matrix(t, record, k):
    """Tiles of a packed matrix: nested loops over (outer, inner) in the order of the record."""
    part = Part(t, record)
    tile, chunks, order = record[g.TILE_BYTES], record[g.CHUNKS], record[g.ORDER]
    c0, c1, group = record[6], record[7], record[g.TILE_BYTES] * record[g.CHUNKS]
    base = t.pointer(record[g.MATRIX]) + Int64(part.place) * (Int64(record[g.STRIDE]) * 16)
    base = base + Int64(part.g0) * Int64(group)
    outer, inner, outer_step, inner_step = part.n, chunks, group, tile
    if order == g.BY_CHUNK:
        base = base + Int64(c0 * tile)
        outer, inner, outer_step, inner_step = c1 - c0, part.n, tile, group
    piece, whole = record[g.PIECE], part.n * group
    if order == g.BY_PIECE:
        outer, inner, outer_step, tile = (part.n + piece - 1) // piece, Int32(1), piece * group, piece * group
    tiles = Order(base, outer * inner, inner, outer_step, inner_step, tile, whole)
    lead, last = Int32(0), cute.arch.clock()
    for n in cutlass.range(tiles.total, unroll=1):
        source, count = tiles.tile(n)
        lead, last = run_ahead(t, k, tiles, n, lead, last)
        open_tile(t, k, count)
        copy(t, k, Int32(0), source, count)
        k += 1
    return k


class Order(Fixed):
    """Where the tiles of an instruction's matrix lie, in the order in which they are streamed.

    Attributes:
        base: address of the first; total: tiles; inner: of the inner loop.
        outer_step, inner_step: bytes from an outer, or an inner, place to the next.
        tile_bytes: of one; whole: of the groups of this SM, where the last piece of them may end early.
    """

    def __init__(self, base, total, inner, outer_step, inner_step, tile, whole):
        self.base, self.total, self.inner, self.tile_bytes, self.whole = base, total, inner, tile, whole
        self.outer_step, self.inner_step = outer_step, inner_step

    def tile(self, n):
        """(address, bytes) of tile n."""
        i = n // self.inner
        j = n - i * self.inner
        source = self.base + Int64(i) * Int64(self.outer_step) + Int64(j) * Int64(self.inner_step)
        return source, cutlass.min(self.tile_bytes, self.whole - i * self.outer_step)


@cute.jit
def run_ahead(t, k, tiles, n, lead, last):
    """While tile k, the n th of the matrix, has no stage of the ring, ask for it and the next ones in L2.

    So the memory works on while the consumers wait for a hand-off and the ring is full. It does so at half of
    its rate, since requests on their way make the hand-off itself slow.

    Args:
        lead: tiles from n on that were asked for; last: when that was, or when a tile came from memory.

    Returns:
        (lead, last) of tile n + 1.
    """
    if t.lane == 0:
        barrier, parity = (t.barrier(EMPTY_AT) + k % RING_STAGES).toint(), ((k // RING_STAGES) & 1) ^ 1
        most = cutlass.min(tiles.total - n, Int32(AHEAD))
        free = is_over(barrier, parity)
        while (free == 0) & (lead < most):
            now = cute.arch.clock()
            if now - last >= tiles.tile_bytes // PACE:
                source, count = tiles.tile(n + lead)
                prefetch(source, count)
                lead, last = lead + 1, now
            free = is_over(barrier, parity)
        if lead > 0:
            lead -= 1
        else:
            last = cute.arch.clock()
    return lead, last


@cute.jit
def kda_state(t, record, k):
    """S of every (head, row) unit, in pieces of whole rows of values."""
    part = Part(t, record)
    p = t.p
    unit_bytes = 4 * p.K * p.V
    base = t.pointer(t.geo.kda_entry + 2 * part.place)
    for i in cutlass.range(part.n, unroll=1):
        unit = part.g0 + i
        head, b = unit // t.B, unit % t.B
        source = base + Int64(b * p.kda_heads + head) * unit_bytes
        for j in cutlass.range(unit_bytes // g.STATE_PIECE_BYTES, unroll=1):
            open_tile(t, k, Int32(g.STATE_PIECE_BYTES))
            copy(t, k, Int32(0), source + Int64(j * g.STATE_PIECE_BYTES), Int32(g.STATE_PIECE_BYTES))
            k += 1
    return k


@cute.jit
def cache(t, record, k):
    """Old cache rows of every split of every unit's lane; a piece past the last old row is empty."""
    part = Part(t, record)
    p, width = t.p, t.geo.cache_bytes
    base = t.pointer(t.geo.mla_entry + part.place)
    for i in cutlass.range(part.n, unroll=1):
        rest = (part.g0 + i) // p.head_groups
        b, lane = rest // p.lanes, rest % p.lanes
        length = t.length(b)
        source = base + Int64(b) * (Int64(t.cache_rows) * width)
        split = lane
        while split * SPLIT <= length:
            for j in cutlass.range(t.geo.split_pieces, unroll=1):
                first = split * SPLIT + j * g.PIECE_TOKENS
                rows = cutlass.max(cutlass.min(length - first, Int32(g.PIECE_TOKENS)), Int32(0))
                open_tile(t, k, rows * width)
                if rows > 0:
                    copy(t, k, Int32(0), source + Int64(first) * width, rows * width)
                k += 1
            split += p.lanes
    return k


def turn_of(t, record):
    """Parity of the barriers of the experts' ids: LatentMoE layers before this one in the launch, mod 2."""
    if t.p.ways > 1:
        return record[g.TURN]
    return record[g.STACK] & 1


@cute.jit
def routed(t, record):
    """Wait for ROUTE, and leave the slots in use and their experts to both sides of this SM.

    The ids go through shared memory so that both sides agree even when the step is given up.
    """
    op, layer, index, target = record[0], record[1], record[g.WAITS + 1], record[g.WAITS + 2]
    turn = turn_of(t, record)
    if t.lane == 0:
        # The ids of the layer before may still be in use.
        cute.arch.mbarrier_wait(t.barrier(FREE_AT), turn ^ 1)
        # It began to wait stages ago: what holds the step up is for the consumers to find and record.
        poll(t, op, layer, index, target, PRODUCER_PATIENCE)
    cute.arch.sync_warp()
    dead = load_shared(t.small + DEAD_AT, Int32)
    count = load(t.at("route.count"), Int32)
    count = cutlass.max(cutlass.min(count, Int32(t.p.slots)), Int32(0))
    if dead != 0:
        count = Int32(0)
    i = Int32(t.lane)
    while i < count:
        expert = load(t.at("route.slots") + Int64(i) * 4, Int32)
        store_shared(t.slots + 4 * i, Int32, cutlass.max(cutlass.min(expert, Int32(t.p.held - 1)), Int32(0)))
        i += 32
    if t.lane == 0:
        store_shared(t.small + COUNT_AT, Int32, count)
    cute.arch.sync_warp()
    if t.lane == 0:
        cute.arch.mbarrier_arrive(t.barrier(ROUTED_AT))


def span(t, record, groups):
    """(first, end) of the (slot, group) units of a dynamic instruction that this SM takes."""
    count = load_shared(t.small + COUNT_AT, Int32)
    sms = record[3] - record[2]
    at = t.sm - record[2]
    total = count * groups
    return at * total // sms, (at + 1) * total // sms


@cute.jit
def expert_in(t, record, k):
    """8 rows of w1 and the same of w3, of every (slot, group) unit."""
    p = t.p
    groups, whole = groups_of(p.F), g.expert_tile_bytes(p)[0]
    first, end = span(t, record, groups)
    # A lane a copy: one thread alone issues small copies too slowly.
    part, matrix, scales = t.lane & 1, (t.lane >> 1) & 1, (t.lane & 1) != 0
    source = t.pointer(t.geo.expert_entry + 6 * record[g.STACK] + 2 * matrix + part)
    count = select_int(scales, Int32(ROW_GROUP * p.L // 32), Int32(ROW_GROUP * p.L // 2))
    at = matrix * (whole // 2) + part * (ROW_GROUP * p.L // 2)
    for unit in cutlass.range(first, end, unroll=1):
        slot = unit // groups
        place = Int64(load_shared(t.slots + 4 * slot, Int32)) * groups + Int64(unit - slot * groups)
        open_tile(t, k, Int32(whole))
        if t.lane < 4:
            issue(t, k, at, source + place * Int64(count), count)
        k += 1
    return k


@cute.jit
def expert_out(t, record, k):
    """8 rows of w2 of every (slot, group) unit, two units a tile."""
    p = t.p
    groups, whole = groups_of(p.L), g.expert_tile_bytes(p)[1]
    first, end = span(t, record, groups)
    part, which, scales = t.lane & 1, (t.lane >> 1) & 1, (t.lane & 1) != 0
    source = t.pointer(t.geo.expert_entry + 6 * record[g.STACK] + 4 + part)
    count = select_int(scales, Int32(ROW_GROUP * p.F // 32), Int32(ROW_GROUP * p.F // 2))
    at = which * whole + part * (ROW_GROUP * p.F // 2)
    unit = first
    while unit < end:
        mine = cutlass.min(unit + which, end - 1)
        slot = mine // groups
        place = Int64(load_shared(t.slots + 4 * slot, Int32)) * groups + Int64(mine - slot * groups)
        open_tile(t, k, cutlass.min(end - unit, Int32(2)) * whole)
        if (t.lane < 4) & (unit + which < end):
            issue(t, k, at, source + place * Int64(count), count)
        unit += 2
        k += 1
    return k


__all__ = ["produce", "span", "turn_of"]
