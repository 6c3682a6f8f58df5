"""One sublayer of the megakernel against the interpreter, stage by stage, each on the kernel's own inputs.

The workspace that a stopped step leaves is translated into the interpreter's buffers. For every stage of
the sublayer, what it reads is set from the kernel's fields, its instructions are interpreted, and what
they write is compared with the kernel's. So one stage's rounding is not another's error, and every
tolerance is that of a single stage.

Only rows that run are compared, and only what the interpreter wrote (an expert's results for rows that
did not choose it, and sums of attention lanes without a token, are nobody's).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from k3jax.custom_calls.decode_megakernel.instructions import Instruction, Op
from k3jax.custom_calls.decode_megakernel.interpreter.machine import Machine, Piece, Rows, Weights
from k3jax.custom_calls.decode_megakernel.interpreter.memory import Memory
from k3jax.custom_calls.decode_megakernel.interpreter.stages import run_piece
from k3jax.custom_calls.decode_megakernel.schedule import Schedule
from k3jax.custom_calls.decode_megakernel.shapes import ROW_GROUP, Plan
from k3jax.custom_calls.decode_megakernel.stages import sublayer

Fields = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One buffer that a stage wrote: relative RMS error, and the largest error over its value or the RMS."""

    stage: str
    buffer: str
    rms: float
    worst: float


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a step stopped after a sublayer left, in numpy: ``layers`` are the state's.

    ``positions`` are the rows' lengths when the step began, where their cache rows go.
    """

    fields: Fields
    layers: Any
    lengths: np.ndarray
    status: np.ndarray
    logits: np.ndarray
    token: np.ndarray
    positions: np.ndarray


# -- the kernel's fields as the interpreter's buffers ------------------------------------------


def _columns(field: Any, count: int) -> np.ndarray:
    """[B, columns] as [count, B]."""
    return np.asarray(field, np.float32)[:, :count].T


def _units(p: Plan, s: Snapshot, name: str) -> np.ndarray:
    """A buffer of the interpreter, from the kernel's fields."""
    f, B = s.fields, p.B
    stem, _, number = name.partition(".")
    if stem in ("S", "conv", "cache", "pre", "block", "shared") and number.isdigit():
        return _numbered(p, s, stem, int(number))
    widths = {
        "h": p.D, "kda.proj": p.kda_rows, "kda.z": p.kda_heads * p.K, "mla.proj": p.mla_rows,
        "mla.q": p.mla_heads * p.config.qk_head_dim, "mla.qt": p.mla_heads * p.C, "mla.y": p.mla_values,
        "rlogit": p.E, "latent": p.L, "act.shared": p.shared, "act.dense": p.dense, "comb": p.latent_rows,
        "h.ssq": p.column_sms, "comb.ssq": p.latent_sms,
    }  # fmt: skip
    if name in widths:
        return _columns(f[name], widths[name])
    if name == "score":
        return np.asarray(f["score"]).transpose(3, 0, 1, 2)[: p.column_sms]
    if name == "kda.y":
        y = np.asarray(f["kda.y"], np.float32).reshape(B, p.kda_heads, p.V)
        return y.transpose(1, 0, 2).reshape(-1, p.V)
    if name == "mla.row":
        return np.asarray(f["mla.row"], np.float32)
    if name == "mla.part":
        return np.concatenate([f["mla.acc"], f["mla.stat"]], axis=-1)
    if name == "route":
        return _route(p, f)
    if name in ("hid", "ey"):
        width = p.F if name == "hid" else p.L
        x = np.asarray(f[name], np.float32)[:, :, :width].transpose(0, 2, 1)
        return x.reshape(-1, ROW_GROUP, B)
    if name == "best":
        best = np.asarray(f["best"])[: p.head_sms].copy()
        best[..., 1] = best[..., 1].view(np.int32)
        return best
    if name in ("logits", "token", "lengths", "status"):
        return np.asarray(getattr(s, name), np.float64).T
    raise ValueError(f"name: no such buffer {name!r}")


def _numbered(p: Plan, s: Snapshot, stem: str, i: int) -> np.ndarray:
    """``pre.i``, ``block.i``, ``shared.i``, and the state of layer i."""
    f, N, B = s.fields, p.kda_heads, p.B
    if stem in ("pre", "block"):
        return _columns(f[stem][i], p.D)
    if stem == "shared":  # the kernel adds the second piece where the first one lies
        return _columns(f["shared"], p.D).reshape(-1, ROW_GROUP, B)
    if stem == "S":
        return np.asarray(s.layers[i]["S"]).transpose(1, 0, 2, 3).reshape(-1, p.V, p.K)
    if stem == "conv":
        x = np.asarray(s.layers[i]["conv"], np.float32)
        parts = np.split(x, [N * p.K, 2 * N * p.K], axis=-1)
        heads = np.concatenate([part.reshape(*x.shape[:2], N, -1) for part in parts], axis=-1)
        return heads.transpose(2, 0, 1, 3).reshape(N * B, x.shape[1], -1)
    cache = np.asarray(s.layers[i]["cache"])
    rows = [cache[b, min(int(n), cache.shape[1] - 1)] for b, n in enumerate(s.positions)]
    return np.stack(rows).astype(np.float32)


def _route(p: Plan, f: Fields) -> np.ndarray:
    out = np.zeros((1, p.B, p.A + 1, 2), np.float32)
    out[0, :, : p.A, 0], out[0, :, : p.A, 1] = f["route.ids"], f["route.weight"]
    out[0, :, p.A, 0] = f["route.count"][0]
    return out


_ROW_AXIS = {"score": 1, "best": 1, "hid": 2, "ey": 2, "route": 1, "mla.row": 0, "shared.0": 2, "shared.1": 2}


def _of_running_rows(p: Plan, name: str, units: np.ndarray, lo: int, run: np.ndarray) -> np.ndarray:
    """The units ``lo ..`` of a buffer that belong to rows that run."""
    stem = name.split(".")[0]
    number = np.arange(lo, lo + len(units))
    if stem in ("S", "conv") or name == "kda.y":
        return units[run[number % p.B]]
    if name == "mla.part":
        return units[run[number // (p.head_groups * p.lanes)]]
    if stem == "cache" or name in ("mla.row", "token", "lengths", "status"):
        return units[run[number]]
    return np.compress(run, units, axis=_ROW_AXIS.get(name, 1))


_SUMMED = ("score", "h.ssq", "comb.ssq")
"""One number an SM: compared as sums over the SMs."""
_SQUARED = {"h.ssq": "h", "comb.ssq": "comb"}
"""Sums of squares, and the vector that the same stage rounded and wrote: a stage sums its own roundings."""


# -- interpreting ----------------------------------------------------------------------------------


def _on_one_sm(ins: Instruction) -> Instruction:
    """The same work by the first of its SMs alone: one call instead of 132."""
    return dataclasses.replace(ins, sm1=ins.sm0 + 1)


def _stages(schedule: Schedule, sub: int) -> Iterator[list[Instruction]]:
    """The instructions of every stage of a sublayer, in order."""
    stage: list[Instruction] = []
    for ins in schedule.instructions:
        if sublayer(ins.op, ins.layer, ins.c0) != sub:
            continue
        if stage and (ins.op, ins.layer, ins.c0, ins.signal) != (
            stage[0].op, stage[0].layer, stage[0].c0, stage[0].signal,
        ):  # fmt: skip
            yield stage
            stage = []
        stage.append(ins)
    if stage:
        yield stage


def replay(
    schedule: Schedule, weights: Weights, rows: Rows, sub: int, before: Snapshot, after: Snapshot
) -> list[Difference]:
    """Differences of every buffer that the stages of sublayer ``sub`` write.

    Args:
        rows: the batch as the interpreter takes it.
        before: what the step stopped before this sublayer left (``score``, and the state before the step).
        after: what the step stopped behind it left.
    """
    out = []
    machine = Machine(schedule, weights, rows)
    with np.errstate(all="ignore"):  # rows that do not run hold anything
        for stage in _stages(schedule, sub):
            op = stage[0].op
            if op in (Op.EXPERT_IN, Op.EXPERT_OUT, Op.COMBINE):
                machine.slots = _slots(after.fields)
            for ins in stage:
                _set_reads(machine, schedule.plan, ins, before, after)
                run_piece(Piece(machine, _on_one_sm(ins), ins.sm0))
            out += _compare(machine, schedule.plan, stage, rows.run, after)
    return out


def _slots(fields: Fields) -> list[int]:
    return np.asarray(fields["route.slots"])[: int(fields["route.count"][0])].tolist()


def _set_reads(machine: Machine, p: Plan, ins: Instruction, before: Snapshot, after: Snapshot) -> None:
    """What an instruction reads, from the kernel: state and scores from before, all else from after."""
    memory = machine.memory
    for a in ins.reads:
        if a.buffer.startswith(("w.", "old.")) or (a.buffer == "shared.0" and ins.op == Op.SHARED_DOWN):
            continue
        old = a.buffer in memory.state or (ins.op == Op.MIX and a.buffer == "score")
        memory.values[a.buffer][a.lo : a.hi] = _units(p, before if old else after, a.buffer)[a.lo : a.hi]
        memory.version[a.buffer] = a.version


def _compare(
    machine: Machine, p: Plan, stage: list[Instruction], run: np.ndarray, after: Snapshot
) -> list[Difference]:
    out = []
    for name in dict.fromkeys(a.buffer for ins in stage for a in ins.writes):
        if name == "shared.0" and any(i.op == Op.SHARED_DOWN for i in stage) and _has_two(machine.schedule):
            continue  # overwritten by the second piece's sums
        got, want = [], []
        theirs = _units(p, after, name)
        for ins in stage:
            for a in (a for a in ins.writes if a.buffer == name):
                mine = machine.memory.values[name][a.lo : a.hi]
                other = theirs[a.lo : a.hi]
                if name == "score":  # the sources that the next mixture has
                    sources = p.snapshots(sublayer(ins.op, ins.layer) + 1) + 1
                    mine, other = mine[:, :, :sources], other[:, :, :sources]
                if name in _SUMMED:
                    mine, other = mine[:1], other.sum(axis=0, keepdims=True)
                if name in _SQUARED:
                    own = next(w for w in ins.writes if w.buffer == _SQUARED[name])
                    vector = _units(p, after, own.buffer)[own.lo : own.hi].astype(np.float64)
                    mine = np.sum(vector * vector, axis=0, keepdims=True)
                if name == "best":
                    mine, other = mine[:1], _top(other)
                got.append(_of_running_rows(p, name, other, a.lo, run))
                want.append(_of_running_rows(p, name, mine, a.lo, run))
        out.append(_difference(stage[0].op.name, name, np.concatenate(got), np.concatenate(want)))
    if stage[0].op == Op.ROUTE:
        out.append(_slot_difference(machine, run, after.fields))
    return out


def run_machine(
    schedule: Schedule, weights: Weights, state: Any, rows: Rows, until: int | None = None
) -> tuple[Machine, Any]:
    """An interpreter that ran a step, or its sublayers up to ``until``; and its buffers."""
    kept = tuple(i for i in schedule.instructions if until is None or sublayer(i.op, i.layer, i.c0) <= until)
    machine = Machine(dataclasses.replace(schedule, instructions=kept), weights, rows)
    p, memory = schedule.plan, Memory(schedule)
    machine.memory = memory
    begin = Snapshot(
        {}, state.layers, state.lengths, state.status, state.lengths, state.lengths, state.lengths
    )
    for i, layer in enumerate(state.layers):
        for name in ("S", "conv") if "S" in layer else ():
            memory.load_state(f"{name}.{i}", _numbered(p, begin, name, i))
    memory.load_state("lengths", state.lengths)
    memory.load_state("status", state.status)
    with np.errstate(all="ignore"):  # rows that do not run hold anything
        machine.execute()
    return machine, memory.values


def whole(machine: Machine, run: np.ndarray, after: Snapshot) -> list[Difference]:
    """Differences of every buffer at the end of a step from those of an interpreter that ran it alone."""
    p = machine.schedule.plan
    out = [_slot_difference(machine, run, after.fields)] if p.config.num_moe_layers else []
    two = _has_two(machine.schedule)
    with np.errstate(all="ignore"):
        for name, mine in machine.memory.values.items():
            if name == ("shared.0" if two else "shared.1"):
                continue
            other = _units(p, after, name)
            if name == "score":
                sources = p.snapshots(2 * p.layers) + 1
                mine, other = mine[:, :, :sources], other[:, :, :sources]
            if name == "best":
                mine, other = _top(mine), _top(other)
            out.append(
                _difference("step", name, *(_of_running_rows(p, name, x, 0, run) for x in (other, mine)))
            )
    return out


def _has_two(schedule: Schedule) -> bool:
    return "shared.1" in {a.buffer for ins in schedule.instructions for a in ins.writes}


def _top(best: np.ndarray) -> np.ndarray:
    """The best (logit, id) of several SMs: the first of equal ones."""
    at = best[..., 0].argmax(axis=0)
    return best[at, np.arange(best.shape[1])][None]


def _slot_difference(machine: Machine, run: np.ndarray, fields: Fields) -> Difference:
    """0 if the kernel numbers the chosen experts as the interpreter does, else infinity."""
    same = _slots(fields) == machine.slots
    if same:
        ids, slot_of = np.asarray(fields["route.ids"])[run], np.asarray(fields["route.slot_of"])[run]
        same = bool((np.array(machine.slots, np.int64)[slot_of] == ids).all()) if len(ids) else True
    return Difference("ROUTE", "slots", 0.0 if same else np.inf, 0.0 if same else np.inf)


def _difference(stage: str, name: str, got: np.ndarray, want: np.ndarray) -> Difference:
    there = ~np.isnan(want)
    if name == "mla.part":  # lanes without a token: peak -inf, and no sums
        same = got[..., -1:] == want[..., -1:]
        empty = np.broadcast_to(want[..., -1:] == 0, want.shape)
        if (~same & empty).any():
            return Difference(stage, name, np.inf, np.inf)
        there &= ~empty
    got, want = got[there].astype(np.float64), want[there].astype(np.float64)
    if not want.size:
        return Difference(stage, name, 0.0, 0.0)
    if not np.isfinite(got).all():
        return Difference(stage, name, np.inf, np.inf)
    error, size = np.abs(got - want), np.sqrt(np.mean(want * want))
    if not error.any():
        return Difference(stage, name, 0.0, 0.0)
    if size == 0:
        return Difference(stage, name, np.inf, np.inf)
    return Difference(
        stage,
        name,
        float(np.sqrt(np.mean(error**2)) / size),
        float((error / np.maximum(np.abs(want), size)).max()),
    )


__all__ = ["Difference", "Snapshot", "replay", "run_machine", "whole"]
