"""SMs that run their programs against shared counters, in a random order that the counters allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..instructions import Instruction
from ..layout import group_rows, matrix_name, tiling
from ..order import programs
from ..schedule import Schedule
from ..shapes import ROW_GROUP, Plan
from .memory import ForbiddenAccessError, Memory


class DeadlockError(RuntimeError):
    """No SM can go on, and not all have finished."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a step reads and never writes.

    Attributes:
        params: the parameter tree as numpy arrays, for vectors, embedding and experts.
        packed: :func:`..layout.pack_model` of it.
        dtype: the compute dtype.
    """

    params: Mapping[str, Any]
    packed: Mapping[str, Any]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Rows:
    """The batch as the kernel gets it.

    Attributes:
        tokens: int [B], 0 where a row does not run.
        run: bool [B], rows that are active and not refused.
        refused: bool [B], active rows that cannot run.
        bits: int [B], status bits of the refusals.
        old: latent cache [B, S, C + R] of every MLA layer, by layer.
    """

    tokens: np.ndarray
    run: np.ndarray
    refused: np.ndarray
    bits: np.ndarray
    old: Mapping[int, np.ndarray]


class Machine:
    """A schedule being executed.

    Args:
        schedule: of a whole model, or of a rank's share, which runs segment by segment.
        weights, rows: operands; a share's are the rank's own.
        seed: which of the legal orders; None is SM after SM as far as each can go.
        rank: of a share.
    """

    def __init__(
        self, schedule: Schedule, weights: Weights, rows: Rows, seed: int | None = None, rank: int = 0
    ):
        self.schedule, self.weights, self.rows, self.rank = schedule, weights, rows, rank
        self.memory = Memory(schedule)
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.slots: list[int] = []
        """Expert of each slot in use, from the latest ROUTE: its id, in a share its place on the rank."""

    def execute(self, instructions: Sequence[Instruction] | None = None) -> None:
        """Run every SM to the end of its program.

        Args:
            instructions: one launch's part of a share's list (:func:`..segments.launched`); default the
                whole list.

        Raises:
            DeadlockError: names the SMs that wait and for what.
            NotImplementedError: a share's whole list, in which the ranks exchange.
        """
        from .stages import run_piece

        if instructions is None:
            if self.schedule.plan.ways != 1:
                raise NotImplementedError(
                    f"plan.ways: a share of {self.schedule.plan.ways} exchanges with its peers between "
                    "segments; give the instructions of one"
                )
            instructions = self.schedule.instructions
        program = programs(instructions, self.schedule.plan.sms)
        value = [0] * self.schedule.counters
        position = [0] * len(program)
        alive = [sm for sm in range(len(program)) if program[sm]]
        while alive:
            order = alive if self.rng is None else self.rng.permutation(alive).tolist()
            moved = False
            for sm in order:
                steps = len(program[sm]) if self.rng is None else int(self.rng.integers(1, 4))
                for _ in range(steps):
                    if position[sm] == len(program[sm]):
                        break
                    ins = instructions[program[sm][position[sm]]]
                    if any(value[w.counter] < w.target for w in ins.waits):
                        break
                    run_piece(Piece(self, ins, sm))
                    value[ins.signal] += 1
                    position[sm] += 1
                    moved = True
            alive = [sm for sm in alive if position[sm] < len(program[sm])]
            if alive and not moved:
                stuck = [(sm, instructions[program[sm][position[sm]]].op.name) for sm in alive]
                raise DeadlockError(f"SMs wait forever: {stuck[:5]}")


class Piece:
    """One SM's part of an instruction, and its window on memory."""

    def __init__(self, machine: Machine, ins: Instruction, sm: int):
        self.m, self.ins, self.sm = machine, ins, sm
        plan = machine.schedule.plan
        self.g0, self.g1 = ins.piece(sm, len(machine.slots), plan.slots)

    @property
    def plan(self) -> Plan:
        return self.m.schedule.plan

    @property
    def rows(self) -> Rows:
        return self.m.rows

    @property
    def layer(self) -> Mapping[str, Any]:
        """The layer's parameters."""
        return self.m.weights.params["layers"][self.ins.layer]

    def round(self, x: np.ndarray) -> np.ndarray:
        """Float32 rounded to the compute dtype."""
        return x.astype(self.m.weights.dtype).astype(np.float32)

    def columns(self, most: int, each: int = ROW_GROUP) -> tuple[int, int]:
        """Rows or columns of this piece's groups, without padding."""
        return min(self.g0 * each, most), min(self.g1 * each, most)

    def read(self, name: str, lo: int = 0, hi: int | None = None) -> np.ndarray:
        """Units of a buffer that the instruction declares to read."""
        declared = [a for a in self.ins.reads if a.buffer == name]
        hi = len(self.m.memory.values[name]) if hi is None else hi
        return self.m.memory.read(name, self._version(declared, name, lo, hi), lo, hi)

    def read_all(self, name: str) -> np.ndarray:
        """All that the instruction declares to read of a buffer."""
        declared = [a for a in self.ins.reads if a.buffer == name]
        if len(declared) != 1:
            raise ForbiddenAccessError(f"{self.ins.op.name}: {name} is declared {len(declared)} times")
        return self.m.memory.read(name, declared[0].version, declared[0].lo, declared[0].hi)

    def write(self, name: str, lo: int, value: np.ndarray) -> None:
        """Units of a buffer that the instruction declares to write."""
        declared = [a for a in self.ins.writes if a.buffer == name]
        version = self._version(declared, name, lo, lo + len(value))
        self.m.memory.write(name, version, lo, np.asarray(value))

    def declares_write(self, name: str) -> bool:
        return any(a.buffer == name for a in self.ins.writes)

    def declares_read(self, name: str) -> bool:
        return any(a.buffer == name for a in self.ins.reads)

    def _version(self, declared: list[Any], name: str, lo: int, hi: int) -> int:
        for a in declared:
            if a.lo <= lo and hi <= a.hi:
                return a.version
        raise ForbiddenAccessError(
            f"{self.ins.op.name}, layer {self.ins.layer}: {name} {lo}..{hi} is not declared"
        )

    def weight(self) -> np.ndarray:
        """float32 rows of this piece's groups [8 (g1 - g0), columns of its chunks, padded]."""
        name = matrix_name(self.plan, self.ins.op, self.ins.layer)
        if name is None:
            raise ForbiddenAccessError(f"{self.ins.op.name} streams no matrix")
        packed = self.m.weights.packed
        matrix = packed["lm_head"] if name == "lm_head" else packed["layers"][self.ins.layer][name]
        return group_rows(matrix, self.g0, self.g1, self.ins.c0, self.ins.c1).astype(np.float32)

    def product(self, x: np.ndarray) -> np.ndarray:
        """float32 x W^T of this piece's rows and chunks [B, 8 (g1 - g0)], from x [B, columns]."""
        w = self.weight()
        name = matrix_name(self.plan, self.ins.op, self.ins.layer)
        chunk = tiling(self.plan, name or "").chunk
        part = x[:, self.ins.c0 * chunk : self.ins.c1 * chunk]
        return np.pad(part, ((0, 0), (0, w.shape[1] - part.shape[1]))) @ w.T


__all__ = ["DeadlockError", "ForbiddenAccessError", "Machine", "Piece", "Rows", "Weights"]
