"""A share's step in segments: what one launch of the kernel runs between two exchanges of the ranks.

A segment is the run of instructions between two EXCHANGEs of the list. In this form no kernel executes an
EXCHANGE: XLA does it, between two launches. The end of a launch orders everything in it before everything
in the next one, so a wait for a counter of an earlier segment is dropped; it could not be satisfied, as
every launch begins with counters of zero. A whole model (``ways`` 1) is one segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .hazards import hazard_problems
from .instructions import Exchange, Instruction, Op
from .order import Order, simulate
from .schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Segment:
    """Instructions ``first .. last`` of the list, and the exchange that comes before them.

    Attributes:
        kind: of that exchange; None where the step begins without one.
        layer: of that exchange.
        gives: kind of the exchange that comes behind, None at the end of the step.
    """

    kind: Exchange | None
    layer: int
    first: int
    last: int
    gives: Exchange | None


def segments(schedule: Schedule) -> tuple[Segment, ...]:
    """The segments of a schedule, in order; runs without an instruction are none."""
    out: list[Segment] = []
    kind: Exchange | None = None
    layer = first = 0
    for at, ins in enumerate((*schedule.instructions, None)):
        if ins is not None and ins.op != Op.EXCHANGE:
            continue
        gives = None if ins is None else Exchange(ins.c0)
        if at > first:
            out.append(Segment(kind, layer, first, at, gives))
        # An exchange is several instructions, on several SMs.
        kind, layer, first = gives, 0 if ins is None else ins.layer, at + 1
    return tuple(out)


def launched(schedule: Schedule) -> tuple[Instruction, ...]:
    """The list as the launches run it: without waits for earlier segments, exchanges without any."""
    out = list(schedule.instructions)
    for part in segments(schedule):
        own = {ins.signal for ins in schedule.instructions[part.first : part.last]}
        for at in range(part.first, part.last):
            waits = tuple(w for w in out[at].waits if w.counter in own)
            out[at] = dataclasses.replace(out[at], waits=waits)
    for at, ins in enumerate(out):
        if ins.op == Op.EXCHANGE:
            out[at] = dataclasses.replace(ins, waits=())
    return tuple(out)


def segment_problems(schedule: Schedule, instructions: Sequence[Instruction] | None = None) -> Iterator[str]:
    """What is wrong with the segmented form: a launch that never ends, a wait that is neither kept nor
    made needless by a launch before, a read of what a later launch writes.

    Args:
        instructions: the list as launched; default :func:`launched` of the schedule.
    """
    listed = launched(schedule) if instructions is None else tuple(instructions)
    if len(listed) != len(schedule.instructions):
        want = len(schedule.instructions)
        yield f"segments: {len(listed)} instructions are launched, the schedule has {want}"
        return
    parts = segments(schedule)
    part_of = {at: n for n, part in enumerate(parts) for at in range(part.first, part.last)}
    signalled: dict[int, set[int]] = {}
    for at, ins in enumerate(schedule.instructions):
        signalled.setdefault(ins.signal, set()).add(at)
    for at, (ins, kept) in enumerate(zip(schedule.instructions, listed, strict=True)):
        name = f"instruction {at} ({ins.op.name}, layer {ins.layer})"
        if dataclasses.replace(kept, waits=ins.waits) != ins:
            yield f"{name}: is launched as something else than the schedule has"
        if extra := set(kept.waits) - set(ins.waits):
            yield f"{name}: waits for counter {min(extra).counter}, in the schedule it does not"
        for wait in set(ins.waits) - set(kept.waits):
            here = [
                a for a in signalled.get(wait.counter, ()) if part_of.get(a) == part_of.get(at) is not None
            ]
            late = [a for a in signalled.get(wait.counter, ()) if a > at]
            if here or late:
                yield f"{name}: no longer waits for counter {wait.counter}, which no earlier launch completes"
    order, stuck = _order(schedule, listed)
    yield from stuck
    if not order.stuck:
        yield from hazard_problems(listed, schedule.buffers, order)


def _order(schedule: Schedule, listed: Sequence[Instruction]) -> tuple[Order, list[str]]:
    """What is over before what when the segments and the exchanges between them run one after another."""
    sms = schedule.plan.sms
    before = [0] * len(listed)
    stuck: list[tuple[int, int]] = []
    said: list[str] = []
    done = 0
    for at, ins in enumerate(listed):
        if ins.op == Op.EXCHANGE:
            before[at] = done
            # Neighbouring instructions of one exchange are one step of XLA's.
            if at + 1 == len(listed) or listed[at + 1].op != Op.EXCHANGE:
                done = (1 << (at + 1)) - 1
            continue
        if at and listed[at - 1].op != Op.EXCHANGE:
            continue  # its segment is done already
        last = next((a for a in range(at, len(listed)) if listed[a].op == Op.EXCHANGE), len(listed))
        found = simulate(listed[at:last], sms)
        for sm, where in found.stuck:
            stuck.append((sm, at + where))
            said.append(f"SM {sm} waits forever at instruction {at + where} ({listed[at + where].op.name})")
        for a in range(at, last):
            before[a] = done | found.before[a - at] << at
        done = (1 << last) - 1
    return Order(before, stuck), said


__all__ = ["Segment", "launched", "segment_problems", "segments"]
