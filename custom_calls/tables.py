"""What a launch of the megakernel needs besides arrays of the model: its schedule as integer tables."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from .decode_megakernel.kernel.tables import kernel_tables, peer_tables, segment_tables
from .decode_megakernel.schedule import Schedule, build
from .decode_megakernel.shapes import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchTables:
    """The schedule of a plan, as the kernel reads it.

    Attributes:
        schedule: the list itself.
        records: int32 [n, 32]; program: int32 [total]; starts: int32 [SMs + 1], of a share
            in segments [segments, SMs + 1].
        counters: hand-off counters, which the workspace holds.
    """

    schedule: Schedule
    records: np.ndarray
    program: np.ndarray
    starts: np.ndarray
    counters: int


@functools.lru_cache(maxsize=16)
def launch_tables(plan: Plan) -> LaunchTables:
    """The tables of a plan: the same numbers in every process."""
    schedule = build(plan)
    if plan.peers:
        tables = peer_tables(schedule)
    else:
        tables = kernel_tables(schedule) if plan.ways == 1 else segment_tables(schedule)
    return LaunchTables(schedule, tables.records, tables.program, tables.starts, schedule.counters)


__all__ = ["LaunchTables", "launch_tables"]
