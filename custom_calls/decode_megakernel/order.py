"""Running a schedule's counters without its arithmetic: does it end, and what is over before what begins.

Counters only grow, so if one order of the SMs' progress gets stuck, every order does: one simulation
decides. Knowledge is kept as bit sets of instructions: when an SM passes a wait for *all* arrivals of a
counter, it knows that every instruction that signals it is over on all its SMs, with all they knew.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from .instructions import Instruction

LOOK_BACK = 64


@dataclasses.dataclass(frozen=True)
class Order:
    """What a simulated step shows.

    Attributes:
        before: bit i of ``before[j]``: instruction i is over on all its SMs when j begins on any of its.
        stuck: (SM, instruction) of every SM that waits forever; empty if the step ends.
    """

    before: list[int]
    stuck: list[tuple[int, int]]

    def precedes(self, i: int, j: int) -> bool:
        return bool(self.before[j] >> i & 1)


def programs(instructions: Sequence[Instruction], sms: int) -> list[list[int]]:
    """Indices of each SM's instructions; SMs that do not exist are left out."""
    out: list[list[int]] = [[] for _ in range(sms)]
    for at, ins in enumerate(instructions):
        for sm in range(max(0, ins.sm0), min(ins.sm1, sms)):
            out[sm].append(at)
    return out


def arrivals(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Arrivals that every counter gets in a whole step."""
    total: dict[int, int] = defaultdict(int)
    for ins in instructions:
        total[ins.signal] += ins.sm1 - ins.sm0
    return dict(total)


def _over(instructions: Sequence[Instruction], signalers: Sequence[int], sms: int) -> list[int]:
    """Instructions over on all their SMs once all ``signalers`` have signalled: they, and what precedes
    them in the programs of the SMs that signal. Looks LOOK_BACK instructions back (older ones are known
    from earlier counters)."""
    last = [-1] * sms
    for at in signalers:
        for sm in range(max(0, instructions[at].sm0), min(instructions[at].sm1, sms)):
            last[sm] = max(last[sm], at)
    window = range(max(0, min(signalers) - LOOK_BACK), max(signalers) + 1)
    return [at for at in window if min(last[instructions[at].sm0 : instructions[at].sm1], default=-1) >= at]


def simulate(instructions: Sequence[Instruction], sms: int) -> Order:
    """Run every SM's program against the counters."""
    program = programs(instructions, sms)
    total = arrivals(instructions)
    signalers: dict[int, list[int]] = defaultdict(list)
    for at, ins in enumerate(instructions):
        signalers[ins.signal].append(at)
    value: dict[int, int] = defaultdict(int)
    everything = (1 << len(instructions)) - 1
    before = [everything] * len(instructions)
    known = [0] * sms
    position = [0] * sms
    closure: dict[int, int] = {}
    sleeping: dict[tuple[int, int], list[int]] = defaultdict(list)
    ready = list(range(sms))

    def learn(counter: int) -> int:
        if counter not in closure:
            closure[counter] = 0
            for at in _over(instructions, signalers[counter], sms):
                closure[counter] |= before[at] | 1 << at
        return closure[counter]

    while ready:
        sm = ready.pop()
        while position[sm] < len(program[sm]):
            at = program[sm][position[sm]]
            ins = instructions[at]
            blocked = next((w for w in ins.waits if value[w.counter] < w.target), None)
            if blocked is not None:
                sleeping[blocked.counter, blocked.target].append(sm)
                break
            for wait in ins.waits:
                if value[wait.counter] == total.get(wait.counter, 0):  # all of them: they are over
                    known[sm] |= learn(wait.counter)
            before[at] &= known[sm]
            value[ins.signal] += 1
            position[sm] += 1
            ready += sleeping.pop((ins.signal, value[ins.signal]), ())
    stuck = [(sm, program[sm][at]) for sm, at in enumerate(position) if at < len(program[sm])]
    return Order(before, stuck)


__all__ = ["Order", "arrivals", "programs", "simulate"]
