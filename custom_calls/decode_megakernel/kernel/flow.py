"""Walking the program, hand-offs between SMs, and the ring between the producer and the consumers."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from ..operands import COUNTER_WORDS, FAULT_TIMEOUT
from ..resources import CONSUMER_WARPS, RING_STAGE_BYTES, RING_STAGES
from .context import DEAD_AT, EMPTY_AT, FULL_AT, RUN_AT
from .geometry import WAITS
from .ptx import bulk_copy, from_lane, gmem, load, load_shared, select_int, sleep, store, store_shared

SMALL_TILE = 16_384
"""Up to this many bytes a tile does not count towards the copies in flight."""
SIGNALLER = 32 * (CONSUMER_WARPS - 1)
"""The thread that signals: of another warp than the one that polls, which the release would hold up."""
CHECK_EVERY = 64
"""Polls between two looks at the fault record: another SM may have given up."""


# -- program ------------------------------------------------------------------------------------


def fetch(t, at, end):
    """This lane's word of the record that entry ``at`` of the program names; past the end, of the last.

    An empty program reads an entry that is not its own and is never acted on, so all that matters is that
    it lies in the array."""
    last = end - 1
    index = load(t.program + Int64(cutlass.max(cutlass.min(at, last), 0)) * 4, Int32)
    return load(t.records + Int64(index) * 128 + Int64(t.lane) * 4, Int32)


def counter(t, index):
    """Address of a hand-off counter in this step's bank."""
    return t.bank + Int64(index) * (4 * COUNTER_WORDS)


# -- hand-offs ----------------------------------------------------------------------------------


@cute.jit
def delay(t, salt):
    """A pseudo-random pause, in the test build only."""
    if cutlass.const_expr(t.geo.delays):
        mixed = (t.sm * 7919 + salt * 104729 + t.epoch * 1299709) & 0x7FFFFFFF
        mixed = ((mixed ^ (mixed >> 7)) * 48271) & 0x7FFFFFFF
        sleep((mixed >> 8) & 2047)


@cute.jit
def give_up(t, op, layer, index, target, value):
    """Record the first wait of the step that reached its limit, in the order of FAULT_FIELDS."""
    first = cute.arch.atomic_cas(gmem(t.fault, Int32), cmp=Int32(0), val=Int32(FAULT_TIMEOUT))
    if first == 0:
        for i, field in enumerate((op, layer, t.sm, index, target, value, t.epoch)):
            store(t.fault + Int64(4 * (1 + i)), Int32, field)


@cute.jit
def poll(t, op, layer, index, target, patience=1):
    """Wait until a counter has reached its target, or the step is given up; one lane.

    The limit is ``patience`` times that of the build.

    Once a step is given up no wait blocks any more and no row runs: stages go on over meaningless
    numbers, in bounds, and touch no state, until the kernel ends.
    """
    poll_at(t, op, layer, index, gmem(counter(t, index), Int32), target, "gpu", patience)


@cute.jit
def poll_at(t, op, layer, index, address, target, scope: cutlass.Constexpr, patience=1):
    """As :func:`poll`, for any word that only grows; ``index`` is what the fault record names."""
    value = cute.arch.load(address, Int32, sem="acquire", scope=scope)
    spins = Int32(0)
    dead = load_shared(t.small + DEAD_AT, Int32)
    while (value < target) & (dead == 0):
        sleep(Int32(20))
        value = cute.arch.load(address, Int32, sem="acquire", scope=scope)
        spins += 1
        if spins % CHECK_EVERY == 0:
            dead = cute.arch.load(gmem(t.fault, Int32), Int32, sem="relaxed", scope="gpu")
        if (spins >= t.geo.spins * patience) & (value < target) & (dead == 0):
            give_up(t, op, layer, index, target, value)
            dead = Int32(1)
    if dead != 0:
        store_shared(t.small + DEAD_AT, Int32, Int32(1))
        for b in cutlass.range_constexpr(t.B):
            store_shared(t.small + RUN_AT + 4 * b, Int32, Int32(0))


@cute.jit
def stamp(t, record, which):
    """The SM's clock, in a build that keeps time: 0 before and 1 after the waits, 2 at the end."""
    if cutlass.const_expr(t.geo.trace > 0):
        if t.tid == 0:
            entry = (t.sm * t.geo.trace + record.at - t.first) * 4 + which
            store(t.at("trace") + Int64(entry) * 4, Int32, cute.arch.clock())


@cute.jit
def wait(t, record):
    """Block the consumers until every wait of the instruction has been reached."""
    stamp(t, record, 0)
    if t.warp == 0:
        count, op, layer = record[WAITS], record[0], record[1]
        lane = cutlass.min(t.lane, Int32(3))
        index = from_lane(record.word, WAITS + 1 + 2 * lane)
        target = from_lane(record.word, WAITS + 2 + 2 * lane)
        delay(t, index)
        if t.lane < count:
            poll(t, op, layer, index, target)
        cute.arch.sync_warp()
    t.sync()
    stamp(t, record, 1)


@cute.jit
def signal(t, record):
    """Publish everything the consumers of this SM wrote: one arrival on the instruction's counter."""
    t.sync()
    stamp(t, record, 2)
    index = record[9]
    if t.tid == SIGNALLER:
        delay(t, index + 17)
        cute.arch.red(
            gmem(counter(t, index), Int32), Int32(1), op="add", dtype="s32", sem="release", scope="gpu"
        )


# -- ring ---------------------------------------------------------------------------------------


def stage_address(t, k):
    """Shared-memory address of the ring stage that tile ``k`` passes through."""
    return t.base + (k % RING_STAGES) * RING_STAGE_BYTES


def take(t, k):
    """Wait for tile ``k``; its shared-memory address."""
    cute.arch.mbarrier_wait(t.barrier(FULL_AT) + k % RING_STAGES, (k // RING_STAGES) & 1)
    return stage_address(t, k)


@cute.jit
def release(t, k):
    """This warp has read tile ``k``."""
    if cutlass.const_expr(t.geo.all_lanes):
        cute.arch.mbarrier_arrive(t.barrier(EMPTY_AT) + k % RING_STAGES)
    else:
        cute.arch.sync_warp()
        if t.lane == 0:
            cute.arch.mbarrier_arrive(t.barrier(EMPTY_AT) + k % RING_STAGES)


@cute.jit
def open_tile(t, k, count):
    """Producer: make tile ``k`` expect ``count`` bytes, once its stage is free and few copies run."""
    stage = k % RING_STAGES
    turn = k // RING_STAGES
    if t.lane == 0:
        cute.arch.mbarrier_wait(t.barrier(EMPTY_AT) + stage, (turn & 1) ^ 1)
        # Bytes in flight set the latency of all other traffic, so it takes more of small copies.
        ahead = select_int(count > SMALL_TILE, Int32(t.geo.in_flight), Int32(RING_STAGES - 1))
        if k >= ahead:
            before = k - ahead
            cute.arch.mbarrier_wait(t.barrier(FULL_AT) + before % RING_STAGES, (before // RING_STAGES) & 1)
        cute.arch.mbarrier_arrive_and_expect_tx(t.barrier(FULL_AT) + stage, count)
    cute.arch.sync_warp()


def issue(t, k, offset, source, count):
    """Producer, one lane: ``count`` bytes of global memory to byte ``offset`` of tile ``k``."""
    barrier = (t.barrier(FULL_AT) + k % RING_STAGES).toint()
    bulk_copy(stage_address(t, k) + offset, source, count, barrier, t.policy)


@cute.jit
def copy(t, k, offset, source, count):
    """As :func:`issue`, from the whole warp: one copy."""
    if t.lane == 0:
        issue(t, k, offset, source, count)


__all__ = [
    "CONSUMER_WARPS",
    "copy",
    "counter",
    "fetch",
    "issue",
    "open_tile",
    "poll_at",
    "release",
    "signal",
    "stage_address",
    "take",
    "wait",
]
