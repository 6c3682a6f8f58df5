"""Instructions of the decode megakernel: frozen records, and the integer tables the kernel loads.

An instruction is one stage of one layer on a range of SMs. SM ``s`` of it takes the row groups
``g0 + (s - sm0) * n .. g0 + (s - sm0 + 1) * n`` with ``n = (g1 - g0) / (sm1 - sm0)``, a whole number;
a *dynamic* instruction instead splits the groups of the expert slots in use (a run-time number) evenly.
Each SM runs the instructions that contain it in the order of the list. A stage starts on an SM when
each of its waits ``(counter, target)`` has been reached, and every SM adds one to ``signal`` when done.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np


class Op(enum.IntEnum):
    """Kinds of stages; DESIGN.md has the mathematics of each."""

    EMBED = 0
    MIX = 1
    KDA_IN = 2
    KDA_DECAY = 3
    KDA_STEP = 4
    KDA_OUT = 5
    MLA_IN = 6
    MLA_QUERY = 7
    MLA_ROW = 8
    MLA_ABSORB = 9
    MLA_ATTEND = 10
    MLA_VALUE = 11
    MLA_OUT = 12
    ROUTER = 13
    ROUTE = 14
    LATENT_DOWN = 15
    EXCHANGE = 16
    GATE_UP = 17
    SHARED_DOWN = 18
    EXPERT_IN = 19
    EXPERT_OUT = 20
    COMBINE = 21
    LATENT_UP = 22
    DENSE_DOWN = 23
    LM_HEAD = 24
    FINISH = 25
    RESIDUAL = 26


class Exchange(enum.IntEnum):
    """What the ranks of a model exchange, in the order of a layer; EXCHANGE has it as its column chunk.

    EMBEDDING: rows of an embedding cut by vocabulary. ATTENTION, FFN: sums of [B, D] partial results.
    LATENT: every rank's latent rows, gathered. ROUTED: sum of [B, L] weighted results of the experts.
    """

    EMBEDDING = 0
    ATTENTION = 1
    LATENT = 2
    ROUTED = 3
    FFN = 4


@dataclasses.dataclass(frozen=True, order=True)
class Access:
    """Units ``lo .. hi`` of one lifetime (``version``) of a buffer.

    ``local``: each SM touches only units that it wrote itself, so its own order suffices.
    """

    buffer: str
    version: int
    lo: int
    hi: int
    local: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class Wait:
    """Block until ``counter`` has reached ``target`` arrivals in this step."""

    counter: int
    target: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One stage of one layer on SMs ``sm0 .. sm1``; groups ``g0 .. g1``, column chunks ``c0 .. c1``."""

    op: Op
    layer: int
    sm0: int
    sm1: int
    g0: int
    g1: int
    c0: int
    c1: int
    dynamic: bool
    waits: tuple[Wait, ...]
    signal: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]

    def piece(self, sm: int, slots: int = 0, most_slots: int = 1) -> tuple[int, int]:
        """Groups of this instruction that SM ``sm`` takes.

        Args:
            slots: expert slots in use, for a dynamic instruction.
            most_slots: slots that ``g1`` stands for.
        """
        if not self.sm0 <= sm < self.sm1:
            raise ValueError(f"sm: expected {self.sm0}..{self.sm1 - 1}, got {sm}")
        at, count = sm - self.sm0, self.sm1 - self.sm0
        if self.dynamic:
            total = (self.g1 - self.g0) // most_slots * slots
            return self.g0 + at * total // count, self.g0 + (at + 1) * total // count
        per = (self.g1 - self.g0) // count
        return self.g0 + at * per, self.g0 + (at + 1) * per


MAX_WAITS = 4
_FIELDS = ("op", "layer", "sm0", "sm1", "g0", "g1", "c0", "c1", "dynamic", "signal")
RECORD = 32
"""int32 words of an instruction in the kernel's table: the fields, number of waits, wait pairs, zeros,
and last (STACK) the place of its matrix, experts or state among the layers that have one of its kind."""
STACK = RECORD - 1


@dataclasses.dataclass(frozen=True)
class Tables:
    """A list of instructions as integers.

    Attributes:
        records: int32 [n, RECORD], what the kernel reads.
        program: int32 [total], indices of each SM's instructions, SM after SM.
        starts: int32 [SMs + 1], where each SM's part of ``program`` begins.
        accesses: int64 [m, 7] of (instruction, 0 read / 1 write, buffer, version, lo, hi, local):
            for validation, the kernel does not need it.
        buffers: names of the buffers, in the numbering of ``accesses``.
    """

    records: np.ndarray
    program: np.ndarray
    starts: np.ndarray
    accesses: np.ndarray
    buffers: tuple[str, ...]


def encode(instructions: tuple[Instruction, ...], sms: int) -> Tables:
    """The integer tables of a list of instructions.

    Raises:
        ValueError: an instruction has more than MAX_WAITS waits, or a number past int32.
    """
    records = np.zeros((len(instructions), RECORD), np.int64)
    names = sorted({a.buffer for i in instructions for a in (*i.reads, *i.writes)})
    number = {name: at for at, name in enumerate(names)}
    places = _stack_places(instructions)
    rows: list[tuple[int, ...]] = []
    programs: list[list[int]] = [[] for _ in range(sms)]
    for at, ins in enumerate(instructions):
        if len(ins.waits) > MAX_WAITS:
            raise ValueError(f"instruction {at}: expected at most {MAX_WAITS} waits, got {len(ins.waits)}")
        waits = [x for w in ins.waits for x in (w.counter, w.target)]
        head = [int(getattr(ins, f)) for f in _FIELDS]
        words = [*head, len(ins.waits), *waits]
        records[at, : len(words)] = words
        records[at, STACK] = places[at]
        for kind, accesses in ((0, ins.reads), (1, ins.writes)):
            rows += [(at, kind, number[a.buffer], a.version, a.lo, a.hi, int(a.local)) for a in accesses]
        for sm in range(ins.sm0, ins.sm1):
            programs[sm].append(at)
    if records.size and (np.abs(records) > np.iinfo(np.int32).max).any():
        raise ValueError("instructions: a field does not fit int32")
    starts = np.cumsum([0, *(len(p) for p in programs)], dtype=np.int32)
    program = np.array([at for p in programs for at in p], np.int32)
    table = np.array(rows, np.int64).reshape(-1, 7)
    return Tables(records.astype(np.int32), program, starts, table, tuple(names))


def _stack_places(instructions: tuple[Instruction, ...]) -> list[int]:
    """Rank of each instruction's layer among those with its operation; dense and shared GATE_UP apart."""
    dense = {ins.layer for ins in instructions if ins.op == Op.DENSE_DOWN}
    kinds = [(ins.op, ins.op == Op.GATE_UP and ins.layer in dense) for ins in instructions]
    layers: dict[tuple[Op, bool], set[int]] = {}
    for kind, ins in zip(kinds, instructions, strict=True):
        layers.setdefault(kind, set()).add(ins.layer)
    rank = {kind: {layer: n for n, layer in enumerate(sorted(of))} for kind, of in layers.items()}
    return [rank[kind][ins.layer] for kind, ins in zip(kinds, instructions, strict=True)]


def decode(tables: Tables) -> tuple[Instruction, ...]:
    """The instructions that :func:`encode` wrote, exactly."""
    reads: list[list[Access]] = [[] for _ in tables.records]
    writes: list[list[Access]] = [[] for _ in tables.records]
    for at, kind, buffer, version, lo, hi, local in tables.accesses.tolist():
        access = Access(tables.buffers[buffer], version, lo, hi, bool(local))
        (writes if kind else reads)[at].append(access)
    out = []
    for at, record in enumerate(tables.records.tolist()):
        f: dict[str, Any] = dict(zip(_FIELDS, record, strict=False))
        count = record[len(_FIELDS)]
        words = record[len(_FIELDS) + 1 : len(_FIELDS) + 1 + 2 * count]
        waits = tuple(Wait(c, t) for c, t in zip(words[::2], words[1::2], strict=True))
        f |= {"op": Op(f["op"]), "dynamic": bool(f["dynamic"])}
        out.append(Instruction(**f, waits=waits, reads=tuple(reads[at]), writes=tuple(writes[at])))
    return tuple(out)


__all__ = [
    "MAX_WAITS",
    "RECORD",
    "STACK",
    "Access",
    "Exchange",
    "Instruction",
    "Op",
    "Tables",
    "Wait",
    "decode",
    "encode",
]
