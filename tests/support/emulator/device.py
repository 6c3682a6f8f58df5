"""Blocks, warps, barriers and asynchronous copies of the emulated GPU.

A launch runs ``blocks x threads`` emulated threads (:mod:`.fibers`). Copies into shared memory spoil their
destination when they are issued and arrive a while later, so reading early is seen. What the threads of a
warp do together (:meth:`Device.together`) is checked to be the same thing in all lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from .fibers import Event, Scheduler
from .memory import Global, Shared

LANES = 32
SPOILED = 0xFF
"""Bytes of a copy's destination before it arrives: NaN."""


class DivergenceError(RuntimeError):
    """Lanes of a warp came to different exchanges."""


@dataclasses.dataclass
class Warp:
    """32 lanes; ``epoch`` counts its ``sync_warp``."""

    name: str
    epoch: int = 0
    kinds: list[Any] = dataclasses.field(default_factory=lambda: [None] * LANES)
    values: list[Any] = dataclasses.field(default_factory=lambda: [None] * LANES)
    arrived: int = 0
    results: list[Any] = dataclasses.field(default_factory=list)
    event: Event = dataclasses.field(default_factory=lambda: Event(""))


@dataclasses.dataclass
class MBarrier:
    """A barrier in shared memory: a phase ends when all arrivals and all bytes are there."""

    event: Event
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0


@dataclasses.dataclass
class Block:
    """One SM's threads and shared memory."""

    number: int
    shared: Shared
    warps: list[Warp]
    epoch: int = 0
    barriers: dict[int, MBarrier] = dataclasses.field(default_factory=dict)
    arrived: dict[str, int] = dataclasses.field(default_factory=dict)
    events: dict[str, Event] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Thread:
    """Which thread runs."""

    block: Block
    tid: int
    consumers: int

    @property
    def lane(self) -> int:
        return self.tid % LANES

    @property
    def warp(self) -> Warp:
        return self.block.warps[self.tid // LANES]

    @property
    def who(self) -> tuple[int, int, int] | None:
        """For the race check. The producer is ordered with the others by mbarriers, which it does not see."""
        return (self.tid, self.block.epoch, self.warp.epoch) if self.tid < self.consumers else None


class Device:
    """An emulated GPU with one launch on it.

    Args:
        memory: global memory with its arrays.
        blocks, threads: the grid; ``consumers`` threads of a block take part in its barrier of consumers.
        shared_bytes: of a block.
        seed: order of the threads, see :class:`.fibers.Scheduler`.
        stages: (first byte, bytes) of shared memory that a barrier guards, by the barrier's address: once it
            expects a new tile, nothing of the tile before may be used.
        flags: words of shared memory that are not watched for races, see :class:`.memory.Shared`.
        grid: blocks of one grid, if several run at once; default all.
    """

    def __init__(
        self,
        memory: Global,
        blocks: int,
        threads: int,
        consumers: int,
        shared_bytes: int,
        seed: int | None = None,
        stages: Mapping[int, tuple[int, int]] | None = None,
        flags: Collection[int] = (),
        grid: int | None = None,
    ):
        self.memory = memory
        self.scheduler = Scheduler(seed)
        self.blocks = [
            Block(
                b,
                Shared(shared_bytes, flags),
                [Warp(f"block {b}, warp {w}") for w in range(threads // LANES)],
            )
            for b in range(blocks)
        ]
        self.threads, self.consumers, self.shared_bytes = threads, consumers, shared_bytes
        self.grid = blocks if grid is None else grid
        self._copies: list[tuple[Any, ...]] = []
        self._copier = Event("a copy to be issued")
        self._running = blocks * threads
        self._stages = dict(stages or {})
        self.clock = 0
        self.prefetched = 0

    @property
    def me(self) -> Thread:
        return self.scheduler.data

    def run(self, body: Callable[[], None]) -> None:
        """Run ``body`` in every thread of the grid."""

        def counted() -> None:
            with np.errstate(all="ignore"):  # as on a GPU: a NaN is a number like others
                body()
            self._running -= 1
            if not self._running:
                self.scheduler.wake(self._copier)

        threads = [Thread(b, tid, self.consumers) for b in self.blocks for tid in range(self.threads)]
        self.scheduler.run([*((counted, t) for t in threads), (self._copy_engine, None)])

    # -- exchanges ----------------------------------------------------------------------------

    def together(self, kind: Any, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """All lanes of the warp bring a value, and each gets its own of ``combine``'s results."""
        me = self.me
        warp, lane = me.warp, me.lane
        warp.kinds[lane], warp.values[lane] = kind, value
        warp.arrived += 1
        if warp.arrived < LANES:
            warp.event.name = f"{warp.name}: lanes at {kind}"
            event = warp.event
            self.scheduler.wait(event)
            return event.results[lane]  # type: ignore[attr-defined]
        if len(set(warp.kinds)) > 1:
            raise DivergenceError(f"{warp.name}: lanes at {sorted(set(map(str, warp.kinds)))}")
        results = combine(list(warp.values))
        event, warp.event, warp.arrived = warp.event, Event(warp.name), 0
        event.results = results  # type: ignore[attr-defined]
        self.scheduler.wake(event)
        return results[lane]

    def sync_warp(self) -> None:
        warp = self.me.warp

        def count(values: list[Any]) -> list[Any]:
            warp.epoch += 1
            return values

        self.together("sync_warp", None, count)

    def sync_block(self, name: str, threads: int) -> None:
        """Barrier of ``threads`` threads of the block."""
        block = self.me.block
        event = block.events.setdefault(name, Event(f"block {block.number}: barrier {name}"))
        block.arrived[name] = block.arrived.get(name, 0) + 1
        if block.arrived[name] < threads:
            self.scheduler.wait(event)
            return
        block.arrived[name] = 0
        block.epoch += 1
        self.scheduler.wake(event)

    # -- barriers in shared memory --------------------------------------------------------------

    def mbarrier_init(self, address: int, count: int) -> None:
        block = self.me.block
        event = Event(f"block {block.number}: mbarrier at {address}")
        block.barriers[address] = MBarrier(event, int(count), int(count))

    def mbarrier_arrive(self, address: int, bytes_to_come: int | None = None) -> None:
        barrier = self.me.block.barriers[address]
        if address in self._stages and bytes_to_come is not None:
            self._spoil(self.me.block, *self._stages[address])
        barrier.bytes += int(bytes_to_come or 0)
        barrier.pending -= 1
        if barrier.pending < 0:
            raise RuntimeError(f"{barrier.event.name}: more arrivals than its count of {barrier.count}")
        self._phase_over(barrier)

    def mbarrier_wait(self, address: int, parity: int) -> None:
        """Until the phase of this parity is over."""
        barrier = self.me.block.barriers[address]
        while barrier.phase & 1 == int(parity):
            self.scheduler.wait(barrier.event)

    def is_over(self, address: int, parity: int) -> bool:
        """Whether the phase of this parity is over; others have their turns first."""
        self.scheduler.pause()
        return self.me.block.barriers[address].phase & 1 != parity

    def _phase_over(self, barrier: MBarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            self.scheduler.wake(barrier.event)

    # -- asynchronous copies ----------------------------------------------------------------------

    def bulk_copy(self, shared: int, source: int, count: int, barrier: int) -> None:
        if count % 16 or shared % 16 or source % 16 or count <= 0:
            raise RuntimeError(
                f"bulk copy: {count} bytes from {source} to {shared}: expected multiples of 16"
            )
        block = self.me.block
        self.memory.check(source, count)
        block.shared.check(shared, count)
        self._spoil(block, shared, count)
        self._copies.append((block, shared, source, count, barrier))
        self.scheduler.wake(self._copier)

    def prefetch(self, source: int, count: int) -> None:
        """Changes nothing; the range must be there."""
        if count % 16 or source % 16 or count <= 0:
            raise RuntimeError(f"prefetch: {count} bytes from {source}: expected multiples of 16")
        self.memory.check(source, count)
        self.prefetched += 1

    def _spoil(self, block: Block, shared: int, count: int) -> None:
        block.shared.bytes[shared : shared + count] = SPOILED
        block.shared.forget(shared, count)

    def _copy_engine(self) -> None:
        """Lets copies arrive one by one, in the order of issue, when others have had their turns."""
        while self._running or self._copies:
            if not self._copies:
                self.scheduler.wait(self._copier)
                continue
            self.scheduler.pause()
            block, shared, source, count, barrier = self._copies.pop(0)
            block.shared.bytes[shared : shared + count] = self.memory.bytes[source : source + count]
            block.shared.forget(shared, count)
            arrived = block.barriers[barrier]
            arrived.bytes -= count
            self._phase_over(arrived)


def mma(lanes: list[Any], dtype: Any, halves: Callable[..., np.ndarray]) -> list[tuple[np.float32, ...]]:
    """m16n8k16: lane 4 g + q brings four words a, two words b, four sums c, laid out as on a GPU."""
    a = halves([lane[0] for lane in lanes], dtype).reshape(8, 4, 4, 2)  # g, q, register, half
    b = halves([lane[1] for lane in lanes], dtype).reshape(8, 4, 2, 2)
    c = np.array([lane[2] for lane in lanes], np.float32).reshape(8, 4, 2, 2)  # g, q, row half, column
    A, W, C = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    for i in range(4):  # register i: rows + 8 (i & 1), columns + 8 (i >> 1)
        A[8 * (i & 1) : 8 * (i & 1) + 8, 8 * (i >> 1) : 8 * (i >> 1) + 8] = a[:, :, i].reshape(8, 8)
    for i in range(2):
        W[8 * i : 8 * i + 8] = b[:, :, i].reshape(8, 8).T
        C[8 * i : 8 * i + 8] = c[:, :, i].reshape(8, 8)
    with np.errstate(all="ignore"):
        total = A @ W + C
    out = np.stack([total[:8].reshape(8, 4, 2), total[8:].reshape(8, 4, 2)], axis=2).reshape(32, 4)
    return [tuple(row) for row in out]


__all__ = ["LANES", "Device", "DivergenceError", "Thread", "mma"]
