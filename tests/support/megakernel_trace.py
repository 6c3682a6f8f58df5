"""A recorded step of the megakernel: clocks of the SMs to times on one clock, and the time of every stage.

The table's columns: *gap*, from the end of the SM's instruction before to the first clock of this one (its
code and records are fetched); *wait*, for hand-offs; *work*, the rest, waiting for the ring included. *us* is
the time of all SMs from the end of the instruction before to the end of this one, over the number of SMs:
these sum up to the step. Rates are the schedule's bytes over *us*; since the producers run ahead, a short
stage after a long wait can be faster than the memory.

SMs read one clock per cluster of 16 to 18 SMs. These clocks neither start together nor run at one rate: on
an H200 they wander apart by 2 us within 300. They are aligned by the hand-offs: SMs that were held up by the
same counters go on together, so at each such hand-off a clock is shifted to the median of all, and in between
the shift is interpolated. What is left is printed: whether any SM seems to go on before the arrivals that it
waited for. Durations within an SM need no alignment; the shifts change them by up to 1 %.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.custom_calls.decode_megakernel.instructions import MAX_WAITS, Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import SUB, WAITS
from k3jax.custom_calls.decode_megakernel.predict import streamed
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.tables import launch_tables

SIGNAL = 9
"""Word of a record: the counter that its stage signals, one of its own per stage."""
HELD_UP = 1.0
"""Microseconds of waiting from which on an SM counts as held up; a poll that finds all there takes 0.3."""
APART = 20.0
"""Microseconds between the first clocks of SMs that do not read the same clock."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a launch left.

    Attributes:
        clocks: int32 [SMs, entries, 4], clock before the waits, after them, at the end, and 0; both of the
            first are 0 where a stage went on from the one before without waiting.
        program, starts, records: the tables it ran (``instructions.Tables``).
        bytes: float64 [records], what one SM streams in an instruction, on average.
        about: config, batch, length, distinct (experts a layer), ghz, device, date, versions.
    """

    clocks: np.ndarray
    program: np.ndarray
    starts: np.ndarray
    records: np.ndarray
    bytes: np.ndarray
    about: dict[str, Any]

    def save(self, path: Path) -> None:
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "about"}
        np.savez_compressed(path, about=np.array(json.dumps(self.about)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path) as f:
            arrays = {k.name: f[k.name] for k in dataclasses.fields(cls) if k.name != "about"}
            return cls(**arrays, about=json.loads(str(f["about"])))


def plan_bytes(plan: Plan, distinct: int, length: int) -> np.ndarray:
    """Bytes, padding included, that one SM streams in each instruction of a plan, on average."""
    schedule = launch_tables(plan).schedule
    return np.array([streamed(schedule, ins, distinct, length) for ins in schedule.instructions])


# -- clocks to times ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Times:
    """One row per instruction and SM, microseconds since the first SM began.

    Attributes:
        sm, record: which SM ran which instruction.
        begin: the end of the SM's instruction before; ready, go: before and after the waits; end.
        late: from the last arrival that an SM waited for to its going on; inf where it waited for none. Below
            0 the alignment of the clocks is wrong by as much.
    """

    sm: np.ndarray
    record: np.ndarray
    begin: np.ndarray
    ready: np.ndarray
    go: np.ndarray
    end: np.ndarray
    late: np.ndarray


def times(trace: Trace) -> Times:
    """Decode and align the clocks of a trace.

    Raises:
        ValueError: clocks that do not ascend: not a whole step, or not these tables.
    """
    counts = np.diff(trace.starts)
    sm = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(trace.program)) - np.repeat(trace.starts[:-1], counts)
    raw = trace.clocks[sm, place].astype(np.int64)
    base = trace.clocks[sm, 0, 0].astype(np.int64)
    # 32-bit clocks: differences are right modulo 2**32, a few seconds.
    ticks = ((raw[:, :3] - base[:, None]) % 2**32).astype(float)
    before = np.where(place > 0, np.roll(ticks[:, 2], 1), 0.0)
    went_on = (raw[:, 0] == 0) & (raw[:, 1] == 0) & (place > 0)
    ready, go = (np.where(went_on, before, ticks[:, i]) for i in (0, 1))
    if bad := int(((ready < before) | (go < ready) | (ticks[:, 2] < go)).sum()):
        raise ValueError(f"clocks: {bad} of {len(sm)} do not ascend; expected a trace of these tables")
    scale = 1e-3 / trace.about["ghz"]
    columns = [scale * x for x in (before, ready, go, ticks[:, 2])]
    columns = _aligned(trace, sm, columns)
    start = columns[0].min()
    begin, ready, go, end = (x - start for x in columns)
    return Times(sm, trace.program, begin, ready, go, end, _late(trace, go, end))


def _aligned(trace: Trace, sm: np.ndarray, columns: list[np.ndarray]) -> list[np.ndarray]:
    """Times of SMs since their first clock, on one clock."""
    first = (trace.clocks[:, 0, 0].astype(np.int64) % 2**32) * 1e-3 / trace.about["ghz"]
    clock = clock_numbers(trace)
    earliest = np.array([first[clock == c].min() for c in range(int(clock.max()) + 1)])
    columns = [x + (first - earliest[clock])[sm] for x in columns]
    clock, knots, shifts = _shifts(trace, sm, columns[1], columns[2])
    out = []
    for x in columns:
        moved = x.copy()
        for c, shift in enumerate(shifts):
            mine = clock[sm] == c
            moved[mine] += np.interp(x[mine], knots - shift, shift)
        out.append(moved)
    return out


def clock_numbers(trace: Trace) -> np.ndarray:
    """Number of the clock that each SM reads: those of one cluster of SMs started together."""
    base = trace.clocks[:, 0, 0].astype(np.int64) % 2**32
    order = np.argsort(base)
    apart = np.diff(base[order]) > APART * 1e3 * trace.about["ghz"]
    out = np.empty(len(base), int)
    out[order] = np.concatenate([[0], np.cumsum(apart)])
    return out


def _shifts(
    trace: Trace, sm: np.ndarray, ready: np.ndarray, go: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What to add to each clock's times: (clock of every SM, knots [n], shifts [clocks, n] at the knots).

    A knot is a hand-off for which SMs of most clocks were held up; between knots shifts are interpolated.
    """
    clock = clock_numbers(trace)
    waits = trace.records[trace.program, WAITS : WAITS + 1 + 2 * MAX_WAITS]
    event = np.unique(waits, axis=0, return_inverse=True)[1].reshape(-1)
    held = (go - ready > HELD_UP) & (waits[:, 0] > 0)
    clocks = int(clock.max()) + 1
    seen = np.full((int(event.max()) + 1, clocks), np.nan)
    for e, c in np.unique(np.stack([event[held], clock[sm[held]]], 1), axis=0):
        who = held & (event == e) & (clock[sm] == c)
        if who.sum() >= 3:
            seen[e, c] = np.median(go[who])
    seen = seen[np.isfinite(seen).sum(1) * 2 > clocks]
    if not len(seen):
        raise ValueError("clocks: hand-offs held up too few SMs, so the clocks cannot be aligned")
    seen = seen[np.argsort(np.nanmedian(seen, 1))]
    shifts = np.zeros_like(seen)
    common = np.nanmedian(seen, 1)
    for _ in range(20):
        for c in range(clocks):
            known = np.isfinite(seen[:, c])
            if known.any():
                shifts[:, c] = np.interp(common, common[known], (common - seen[:, c])[known])
        common = np.nanmedian(seen + shifts, 1)
    return clock, common, shifts.T


def _late(trace: Trace, go: np.ndarray, end: np.ndarray) -> np.ndarray:
    """As ``Times.late``."""
    records = trace.records[trace.program]
    last = np.full(int(records[:, SIGNAL].max()) + 1, -np.inf)
    np.maximum.at(last, records[:, SIGNAL], end)
    late = np.full(len(go), np.inf)
    for i in range(MAX_WAITS):
        waits = records[:, WAITS] > i
        late[waits] = np.minimum(late[waits], go[waits] - last[records[waits, WAITS + 1 + 2 * i]])
    return late


# -- stages -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage:
    """All SMs' runs of a stage.

    Attributes:
        rows: places in :class:`Times`.
        bytes: streamed by all SMs; micros: share of the step, see the table.
    """

    name: str
    layer: int
    sub: int
    rows: np.ndarray
    bytes: float
    micros: float


def stages(trace: Trace, t: Times) -> list[Stage]:
    """Every stage in the order of the schedule; one that comes twice in a sublayer is numbered."""
    records = trace.records[t.record]
    sms = len(trace.starts) - 1
    firsts = [np.flatnonzero(records[:, SIGNAL] == c) for c in np.unique(records[:, SIGNAL])]
    firsts.sort(key=lambda rows: int(t.record[rows].min()))
    heads = [tuple(records[rows[0], [0, 1, SUB]].tolist()) for rows in firsts]
    out = []
    for at, (rows, (op, layer, sub)) in enumerate(zip(firsts, heads, strict=True)):
        alike = [i for i, head in enumerate(heads) if head == heads[at]]
        name = Op(op).name + (f" {alike.index(at) + 1}/{len(alike)}" if len(alike) > 1 else "")
        micros = float((t.end[rows] - t.begin[rows]).sum()) / sms
        out.append(Stage(name, layer, sub, rows, float(trace.bytes[t.record[rows]].sum()), micros))
    return out


def table(trace: Trace, ceiling: float) -> Iterator[str]:
    """Lines of the report."""
    t = times(trace)
    yield from (f"{key}: {value}" for key, value in trace.about.items())
    held = t.late[(t.go - t.ready > HELD_UP) & (t.late < HELD_UP * 20)]
    yield (
        f"{int(clock_numbers(trace).max()) + 1} clocks; once aligned, an SM goes on at most "
        f"{max(0.0, -float(t.late.min())):.2f} us before the last arrival that it waited for"
    )
    yield (
        "hand-off, from the end of the last SM's work to a held-up SM's going on: "
        f"median {np.median(held):.2f} us, 9 of 10 below {np.quantile(held, 0.9):.2f}"
    )
    head = "min/mean/max"
    yield f"{'stage':17s} {'SMs':>3s} {'gap':>5s} {'wait ' + head:>19s} {'work ' + head:>21s}" + (
        f" {'MB':>8s} {'us':>7s} {'TB/s':>5s} {'floor':>6s} {'lost':>6s}"
    )
    every = stages(trace, t)
    for layer in sorted({s.layer for s in every}):
        here = [s for s in every if s.layer == layer]
        yield f"-- layer {layer}: {layer_kind(here)}"
        for s in here:
            gap, wait, work = t.ready - t.begin, t.go - t.ready, t.end - t.go
            parts = [_extent(x[s.rows]) for x in (wait, work)]
            left = f"{s.name:17s} {len(s.rows):3d} {gap[s.rows].mean():5.1f} {parts[0]:>19s} {parts[1]:>21s}"
            yield f"{left} {_figures(s.bytes, s.micros, ceiling)}"
        yield f"{'sum':67s} {_figures(sum(s.bytes for s in here), sum(s.micros for s in here), ceiling)}"
    total, sms = float(t.end.max()), len(trace.starts) - 1
    done = sum(s.micros for s in every)
    yield f"SMs that are done wait for the last one: {total - done:.1f} us; {sms} SMs"
    yield f"{'step':67s} {_figures(sum(s.bytes for s in every), total, ceiling)}"


def _extent(x: np.ndarray) -> str:
    return f"{x.min():5.1f}/{x.mean():6.1f}/{x.max():6.1f}"


def _figures(count: float, micros: float, ceiling: float) -> str:
    """MB, us, TB/s, us at the ceiling, us above it."""
    floor = count / ceiling / 1e6
    return f"{count / 1e6:8.1f} {micros:7.1f} {count / micros / 1e6:5.2f} {floor:6.1f} {micros - floor:6.1f}"


def layer_kind(here: list[Stage]) -> str:
    """What a layer's stages make it."""
    names = {s.name.split()[0] for s in here}
    if not names & {"KDA_IN", "MLA_IN"}:
        return "output"
    attention = "KDA" if "KDA_IN" in names else "MLA"
    return f"{attention} + {'LatentMoE' if 'EXPERT_IN' in names else 'dense FFN'}"


__all__ = ["Stage", "Times", "Trace", "clock_numbers", "layer_kind", "plan_bytes", "stages", "table", "times"]
