"""Times of the exchanges in the megakernel, from the clocks of a build that keeps time on two or more ranks.

An SM's exchange begins when its own numbers are there (after the waits of its EXCHANGE) and ends when it has
added those of the others: writing, publishing, waiting for the peers' same SM, adding. The ranks' clocks are
not compared. On the rank that comes last the peers' numbers are mostly there already, so its time is what an
exchange costs; the rank that comes first waits for the others besides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3jax.custom_calls.decode_megakernel.instructions import Exchange, Op
from k3jax.custom_calls.decode_megakernel.operands import workspace
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.tables import launch_tables

FIRST, READY, DONE = 0, 1, 2
"""Stamps of an entry: before the waits, after them, at the end."""
KIND = 6
"""Word of a record: an EXCHANGE's kind (the first column chunk of others)."""


def traced_key(plan: Plan, arch: str) -> Any:
    """The build that keeps time: room for the longest program of an SM."""
    from k3jax.custom_calls.artifacts import Key

    entries = int(np.diff(np.atleast_2d(launch_tables(plan).starts)[0]).max())
    return Key(plan, arch, options=(("trace", entries),))


def trace_clocks(plan: Plan, trace: int, kernel: Any) -> np.ndarray:
    """int32 [ranks, SMs, entries, 4], the clocks in ``State.kernel`` of a plan whose ranks share a model."""
    field = workspace(plan, launch_tables(plan).counters, trace)["trace"]
    work = np.asarray(kernel["work"]).reshape(plan.ways, -1)
    words = work[:, field.offset // 4 : (field.offset + field.nbytes) // 4]
    return words.reshape(plan.ways, *field.shape)


def exchange_micros(
    plan: Plan, before: np.ndarray, after: np.ndarray, seconds: float
) -> dict[str, dict[str, float]]:
    """By kind of exchange: how many in a step, and microseconds of one on the rank that comes last and first.

    Of each exchange the median over SMs is taken, then the smallest and the largest of the ranks, then the
    median over the exchanges of a kind.

    Args:
        before, after: :func:`trace_clocks` of two steps.
        seconds: between them, less than a turn of the clocks: it gives their rate.

    Raises:
        ValueError: clocks that stood still, or turned over.
    """
    ticks = (after[:, 0, 0, FIRST].astype(np.int64) - before[:, 0, 0, FIRST]) % 2**32
    hertz = ticks / seconds
    if not ((hertz > 5e8) & (hertz < 4e9)).all():
        raise ValueError(f"clocks: expected 0.5 to 4 GHz, got {(hertz * 1e-9).tolist()}")
    tables = launch_tables(plan)
    starts = np.atleast_2d(tables.starts)[0]
    records = np.asarray(tables.records)
    spans = (after[..., DONE].astype(np.int64) - after[..., READY]) % 2**32
    micros = spans / (hertz[:, None, None] * 1e-6)
    found: dict[int, list[np.ndarray]] = {}
    for sm in range(plan.sms):
        program = np.asarray(tables.program)[starts[sm] : starts[sm + 1]]
        for place in np.flatnonzero(records[program, 0] == Op.EXCHANGE):
            found.setdefault(int(program[place]), []).append(micros[:, sm, place])
    kinds: dict[str, list[np.ndarray]] = {}
    for record, of_sms in found.items():
        kind = Exchange(int(records[record, KIND])).name
        kinds.setdefault(kind, []).append(np.median(np.stack(of_sms), axis=0))
    return {
        kind: {
            "count": float(len(of)),
            "last": float(np.median(np.min(of, axis=1))),
            "first": float(np.median(np.max(of, axis=1))),
        }
        for kind, of in kinds.items()
    }


__all__ = ["exchange_micros", "trace_clocks", "traced_key"]
