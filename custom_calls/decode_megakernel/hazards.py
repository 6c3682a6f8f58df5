"""Checks of buffers by lifetime and interval: written once before it is read, and nothing unordered."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .buffers import Buffer, Kind
from .instructions import Instruction
from .order import Order


class _Use(NamedTuple):
    lo: int
    hi: int
    at: int
    local: bool


Uses = dict[int, list[_Use]]
"""Uses of a buffer by version."""


def hazard_problems(
    instructions: Sequence[Instruction], buffers: dict[str, Buffer], order: Order
) -> Iterator[str]:
    """Everything wrong with the order of reads and writes."""
    reads: dict[str, Uses] = defaultdict(lambda: defaultdict(list))
    writes: dict[str, Uses] = defaultdict(lambda: defaultdict(list))
    for at, ins in enumerate(instructions):
        for table, accesses in ((reads, ins.reads), (writes, ins.writes)):
            for a in accesses:
                if a.buffer not in buffers:
                    yield f"instruction {at}: no buffer {a.buffer!r}"
                elif not 0 <= a.lo < a.hi <= buffers[a.buffer].units:
                    units = buffers[a.buffer].units
                    yield f"instruction {at}: {a.buffer} {a.lo}..{a.hi} is not within 0..{units}"
                else:
                    table[a.buffer][a.version].append(_Use(a.lo, a.hi, at, a.local))
    for name, buffer in buffers.items():
        yield from _buffer_problems(instructions, buffer, reads[name], writes[name], order)


def _buffer_problems(
    instructions: Sequence[Instruction], buffer: Buffer, reads: Uses, writes: Uses, order: Order
) -> Iterator[str]:
    if buffer.kind is Kind.INPUT:
        if writes:
            yield f"{buffer.name}: an input is written"
        return
    for version, uses in writes.items():
        yield from _written_once(buffer, version, uses)
    if buffer.kind is Kind.STATE:
        yield from _state_problems(buffer, reads, writes, order)
        return
    if buffer.kind is Kind.OUTPUT and sorted(writes) != [0]:
        yield f"{buffer.name}: an output has lifetimes {sorted(writes)}"
    if buffer.kind is Kind.OUTPUT and 0 in writes:
        yield from _covered(buffer, 0, (0, buffer.units), sorted(writes[0]), "the end of the step")
    for version, uses in reads.items():
        yield from _read_after_write(
            instructions, buffer, version, uses, sorted(writes.get(version, ())), order
        )
    versions = sorted(set(reads) | set(writes))
    for old, new in itertools.pairwise(versions):
        yield from _reuse_problems(
            buffer, old, new, (*reads.get(old, ()), *writes.get(old, ())), writes, order
        )


def _written_once(buffer: Buffer, version: int, uses: list[_Use]) -> Iterator[str]:
    ordered = sorted(uses)
    for a, b in itertools.pairwise(ordered):
        if b.lo < a.hi:
            yield f"{buffer.name} v{version}: {b.lo}..{min(a.hi, b.hi)} is written by {a.at} and by {b.at}"


def _covered(
    buffer: Buffer, version: int, interval: tuple[int, int], writers: list[_Use], reader: str
) -> Iterator[str]:
    at, hi = interval
    for w in writers:
        if w.hi <= at:
            continue
        if w.lo > at or at >= hi:
            break
        at = w.hi
    if at < hi:
        yield f"{buffer.name} v{version}: {at}..{hi} is never written, and read by {reader}"


def _read_after_write(
    instructions: Sequence[Instruction],
    buffer: Buffer,
    version: int,
    uses: list[_Use],
    writers: list[_Use],
    order: Order,
) -> Iterator[str]:
    for use in uses:
        yield from _covered(buffer, version, (use.lo, use.hi), writers, str(use.at))
        for w in writers:
            if w.lo < use.hi and use.lo < w.hi and not order.precedes(w.at, use.at):
                if use.local and _same_split(instructions, w.at, use.at):
                    continue
                yield f"{buffer.name} v{version}: {use.at} reads what {w.at} writes without waiting for it"


def _same_split(instructions: Sequence[Instruction], first: int, second: int) -> bool:
    """Whether every SM's piece of ``second`` is its own piece of ``first``, earlier in its program."""
    a, b = instructions[first], instructions[second]
    same = (a.sm0, a.sm1, a.g0, a.g1) == (b.sm0, b.sm1, b.g0, b.g1)
    return same and first < second and not a.dynamic and not b.dynamic


def _reuse_problems(
    buffer: Buffer, old: int, new: int, users: Sequence[_Use], writes: Uses, order: Order
) -> Iterator[str]:
    """Every use of one lifetime must be over before any write of the next one."""
    mask = 0
    for use in users:
        mask |= 1 << use.at
    for w in writes.get(new, ()):
        if left := mask & ~order.before[w.at]:
            early = left.bit_length() - 1
            yield f"{buffer.name}: {w.at} writes v{new} while {early} may still use v{old}"


def _state_problems(buffer: Buffer, reads: Uses, writes: Uses, order: Order) -> Iterator[str]:
    """Version 0 is read before version 1 is written in place, by the same piece or in order."""
    if set(reads) - {0}:
        yield f"{buffer.name}: state is read again after its update, v{max(reads)}"
    if sorted(writes) != [1]:
        yield f"{buffer.name}: state has written lifetimes {sorted(writes)}, expected one"
        return
    yield from _covered(buffer, 1, (0, buffer.units), sorted(writes[1]), "the next step")
    for r in reads.get(0, ()):
        for w in writes[1]:
            if w.lo < r.hi and r.lo < w.hi and not order.precedes(r.at, w.at):
                own = r.at == w.at and (r.lo, r.hi) == (w.lo, w.hi)
                if not own:
                    yield f"{buffer.name}: {w.at} updates {w.lo}..{w.hi} while {r.at} may still read it"


__all__ = ["hazard_problems"]
