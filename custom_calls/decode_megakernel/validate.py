"""Proof, without running it, that a schedule computes what it should in every order it may run in.

Checked: every instruction by itself and its declared accesses (:mod:`.structure`); every stage complete,
once; the step ends (:mod:`.order`); every unit of every lifetime of a buffer written once before it is
read, no unordered conflict, state updated in place only where ordered (:mod:`.hazards`); shared memory
and registers (:mod:`.resources`); bytes streamed equal to the model's (:mod:`.traffic`). Of a share, order
and lifetimes in segments too (:mod:`.segments`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from .hazards import hazard_problems
from .order import simulate
from .resources import resource_problems
from .schedule import Schedule
from .segments import segment_problems
from .structure import coverage_problems, instruction_problems
from .traffic import Traffic, traffic, traffic_problems

MOST_PROBLEMS = 50


class ScheduleError(ValueError):
    """A schedule that may compute something else, or nothing; ``problems`` are all that was found."""

    def __init__(self, problems: list[str]):
        more = "" if len(problems) <= 5 else f"; and {len(problems) - 5} more"
        super().__init__("; ".join(problems[:5]) + more)
        self.problems = problems


@dataclasses.dataclass(frozen=True)
class Report:
    """What a valid schedule does.

    Attributes:
        instructions, counters: how many.
        longest: most instructions of one SM.
        fewest_experts, most_experts: bytes streamed with the fewest (A) and the most distinct experts.
    """

    instructions: int
    counters: int
    longest: int
    fewest_experts: Traffic
    most_experts: Traffic


def problems(schedule: Schedule) -> list[str]:
    """Everything that is wrong with a schedule, at most MOST_PROBLEMS of each kind; empty if nothing is."""
    found: list[str] = []

    def take(kind: Iterable[str]) -> None:
        found.extend(itertools.islice(kind, MOST_PROBLEMS))

    take(instruction_problems(schedule))
    if found:  # the other checks take well-formed instructions
        return found
    take(coverage_problems(schedule))
    order = simulate(schedule.instructions, schedule.plan.sms)
    take(
        f"SM {sm} waits forever at instruction {at} ({schedule.instructions[at].op.name})"
        for sm, at in order.stuck
    )
    if not order.stuck:
        take(hazard_problems(schedule.instructions, schedule.buffers, order))
        if schedule.plan.ways > 1:
            take(segment_problems(schedule))
    take(resource_problems(schedule))
    take(traffic_problems(schedule))
    return found


def validate(schedule: Schedule, length: int = 4096) -> Report:
    """The report of a valid schedule.

    Args:
        length: cached tokens of every row, for the report's bytes.

    Raises:
        ScheduleError: it is not valid.
    """
    if found := problems(schedule):
        raise ScheduleError(found)
    p = schedule.plan
    counts = [0] * p.sms
    for ins in schedule.instructions:
        for sm in range(ins.sm0, ins.sm1):
            counts[sm] += 1
    moe = bool(p.config.num_moe_layers)
    return Report(
        len(schedule.instructions),
        schedule.counters,
        max(counts),
        traffic(schedule, length, min(p.A, p.slots) if moe else 0),
        traffic(schedule, length, p.slots if moe else 0),
    )


__all__ = ["MOST_PROBLEMS", "Report", "ScheduleError", "problems", "validate"]
