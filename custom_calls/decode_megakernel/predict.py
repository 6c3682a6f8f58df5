"""Predicted time of a schedule: every SM as a producer with a ring of stages and a consumer behind it.

Per SM and ring stage k of S: the producer loads it after stage k - S was consumed, at the SM's share of
the read rate; the consumer takes it when it is there, the instruction's waits have been reached and the
input vector was fetched. A hand-off costs a fixed time after the last arrival. Not modelled: SMs that
lend each other bandwidth, clock changes, queueing in the memory system.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .instructions import Instruction, Op
from .layout import matrix_name, tiling
from .resources import RING_STAGE_BYTES, RING_STAGES
from .schedule import Schedule
from .shapes import groups_of


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates the prediction uses; FACTS.md says where they come from.

    Attributes:
        dense_rate, expert_rate: bytes per second of the whole card while the matrix instructions of the
            dense and of the MXFP4 stages run (the pure stream is faster).
        handoff: seconds from the last arrival at a counter to the first waiter's next instruction.
        dense_speed, expert_speed: how much faster a consumer could run than its share of the stream.
        vector_rate: bytes per second at which one SM fetches an input vector from the L2 cache.
    """

    dense_rate: float = 4.36e12
    expert_rate: float = 4.05e12
    handoff: float = 1.5e-6
    dense_speed: float = 1.5
    expert_speed: float = 1.2
    vector_rate: float = 38e9


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and when each instruction was over on its last SM."""

    seconds: float
    ends: np.ndarray


_BROADCAST = ("h", "kda.y", "mla.y", "act.dense", "act.shared", "comb", "latent", "take")
"""Vectors that every SM of a stage fetches whole."""


def streamed(s: Schedule, ins: Instruction, distinct: int, length: int) -> float:
    """Bytes one SM streams in an instruction, padding included."""
    p = s.plan
    per = (ins.g1 - ins.g0) / (ins.sm1 - ins.sm0)
    name = matrix_name(p, ins.op, ins.layer)
    if name is not None:
        return per * (ins.c1 - ins.c0) * tiling(p, name).tile_bytes
    if ins.op == Op.KDA_STEP:
        return per * 2 * 4 * p.K * p.V  # read and written
    if ins.op == Op.MLA_ATTEND:
        return p.B * length * 2 * (p.C + p.R) / (ins.sm1 - ins.sm0)
    if ins.op in (Op.EXPERT_IN, Op.EXPERT_OUT):
        rows, columns = (2 * p.F, p.L) if ins.op == Op.EXPERT_IN else (p.L, p.F)
        return distinct * 8 * groups_of(rows) * columns * 17 / 32 / (ins.sm1 - ins.sm0)
    return 0.0


def predict(
    s: Schedule, distinct: int | None = None, length: int = 0, machine: Machine | None = None
) -> Prediction:
    """Predicted seconds of one step.

    Args:
        distinct: experts read per MoE layer; default A * batch, at most E.
        length: cached tokens of every row.
    """
    m = machine or Machine()
    p, buffers = s.plan, s.buffers
    distinct = p.slots if distinct is None else distinct
    loaded = np.zeros(p.sms)  # when the producer's last stage was there
    free = np.zeros((RING_STAGES, p.sms))  # when each stage of the ring was consumed last
    turn = np.zeros(p.sms, int)
    done = np.zeros(p.sms)
    reached = np.zeros(s.counters)
    ends = np.zeros(len(s.instructions))
    for at, ins in enumerate(s.instructions):
        sms = np.arange(ins.sm0, ins.sm1)
        ready = max((reached[w.counter] + m.handoff for w in ins.waits), default=0.0)
        vectors = (a for a in ins.reads if a.buffer in _BROADCAST)
        vector = sum((a.hi - a.lo) * buffers[a.buffer].unit_bytes for a in vectors)
        now = np.maximum(done[sms], ready) + vector / m.vector_rate
        left = streamed(s, ins, distinct, length)
        experts = ins.op in (Op.EXPERT_IN, Op.EXPERT_OUT)
        speed = m.expert_speed if experts else m.dense_speed
        rate = (m.expert_rate if experts else m.dense_rate) / p.sms
        if experts:  # the producer has to know the experts: it waits for ROUTE as well
            route = max(reached[w.counter] for w in ins.waits if w.target == 1)
            loaded[sms] = np.maximum(loaded[sms], route + m.handoff)
        while left > 0:
            size = min(left, RING_STAGE_BYTES)
            left -= size
            slot = turn[sms] % RING_STAGES
            loaded[sms] = np.maximum(loaded[sms], free[slot, sms]) + size / rate
            now = np.maximum(now, loaded[sms]) + size / (speed * rate)
            free[slot, sms] = now
            turn[sms] += 1
        done[sms] = now
        ends[at] = now.max()
        reached[ins.signal] = max(reached[ins.signal], ends[at])
    return Prediction(float(done.max()), ends)


__all__ = ["Machine", "Prediction", "predict", "streamed"]
