"""What every stage sees: the plan, the SM it runs on, addresses, and the instruction being run."""

from __future__ import annotations

from cutlass import Int32, Int64, cute

from ..shapes import Plan
from . import geometry as g
from .geometry import Geometry
from .ptx import from_lane, load, load_shared, smem

# Offsets inside the small region of shared memory.
FULL_AT, EMPTY_AT, ROUTED_AT, FREE_AT = 0, 64, 128, 136
TOKEN_AT, RUN_AT, SCALE_AT, LENGTH_AT, DEAD_AT, COUNT_AT, REFUSAL_AT = 192, 224, 256, 288, 320, 336, 344
SUMS_AT = 384
"""float32 scratch of 64 numbers for sums that cross warps."""


class Fixed:
    """An object that passes through run-time branches and loops as it is: nothing in it changes there."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class Context(Fixed):
    """Read-only while the kernel runs; built once in the kernel's prologue.

    Attributes:
        p: the plan; geo: its geometry; B: rows.
        sm, tid, warp, lane: of this thread; the producer warp's ``warp`` is CONSUMER_WARPS.
        base: shared-memory address of the ring; ``scratch``, ``small`` of the two other regions.
        work: address of the workspace.
        packed: addresses of the packed operands by name; ``inputs`` of the others.
        take, give, rank: of a share, what the exchange before this launch left, what goes to the one behind
            it, and which of the ranks this is; ``peers``, of one that exchanges itself, the addresses of all
            ranks' mailboxes.
    """

    p: Plan
    geo: Geometry

    def __init__(self, geo: Geometry, **values):
        self.geo, self.p, self.B = geo, geo.plan, geo.plan.B
        for name, value in values.items():
            setattr(self, name, value)

    # -- global memory --

    def at(self, name, offset=0):
        """Address of a field of the workspace, plus a byte offset."""
        return self.work + Int64(self.geo.offset(name)) + Int64(offset)

    def row(self, name, b, column=0):
        """Address of ``[b, column]`` of a bf16 or float32 field ``[B, columns]``."""
        field = self.geo.fields[name]
        size = field.nbytes
        for n in field.shape:
            size //= n
        return self.at(name) + Int64((b * field.shape[-1] + column) * size)

    def embedded(self, b, column):
        """Address of ``[b, column]`` of the rows that the ranks looked up together, float32."""
        return self.take + Int64((b * self.p.exchanged + column) * 4)

    def taken(self, b, column):
        """Address of ``[b, column]`` of what the exchange left, float32."""
        return self.row("take", b, column) if self.p.peers else self.embedded(b, column)

    def given(self, b, column):
        """Address of ``[b, column]`` of what this rank gives, float32."""
        if self.p.peers:
            return self.row("give", b, column)
        return self.give + Int64((b * self.p.exchanged + column) * 4)

    def mailbox(self, rank):
        """Address of a rank's mailbox."""
        words = self.peers + Int64(rank) * 8
        low, high = load(words, Int32), load(words + 4, Int32)
        return (Int64(high) << 32) | (Int64(low) & Int64(0xFFFFFFFF))

    def stacked(self, name, place, index=0):
        """Address of element ``index`` of entry ``place`` of a packed vector operand."""
        address, size, each = self.packed[name]
        return address + Int64(place) * Int64(each * size) + Int64(index) * Int64(size)

    def pointer(self, entry):
        """An address of the pointer table."""
        return load_shared(self.table + entry * 8, Int64)

    # -- shared memory --

    @property
    def scratch(self):
        return self.base + self.geo.scratch_at

    @property
    def small(self):
        return self.base + self.geo.small_at

    @property
    def table(self):
        return self.base + self.geo.table_at

    @property
    def slots(self):
        """Address of the expert ids of the slots in use, int32."""
        return self.base + self.geo.slots_at

    def token(self, b):
        """Token of a row, 0 where it does not run."""
        return load_shared(self.small + TOKEN_AT + b * 4, Int32)

    def runs(self, b):
        """1 where row b runs, 0 where it does not, or the step was given up."""
        return load_shared(self.small + RUN_AT + b * 4, Int32)

    def length(self, b):
        """Tokens row b held when the step began."""
        return load_shared(self.small + LENGTH_AT + b * 4, Int32)

    def refusal(self, b):
        """Status bits of row b: 0, or why its token was refused."""
        return load_shared(self.small + REFUSAL_AT + b * 4, Int32)

    def refused(self, b):
        return self.refusal(b) != 0

    def barrier(self, offset):
        return smem(self.small + offset, Int64)

    def sync(self):
        """Barrier of the consumer warps."""
        cute.arch.barrier(barrier_id=1, number_of_threads=g.CONSUMERS)


class Record(Fixed):
    """The current instruction, one word in each lane of the warp; ``at`` is its place in the program.

    Reading a word is an exchange within the warp: never under a branch that splits it.
    """

    def __init__(self, word, at):
        self.word, self.at = word, at

    def __getitem__(self, index):
        return cute.arch.make_warp_uniform(from_lane(self.word, index))


class Part(Fixed):
    """This SM's part of an instruction: groups ``g0 .. g0 + n``."""

    def __init__(self, t, record):
        self.r = record
        self.n = record[g.PER]
        self.g0 = record[4] + (t.sm - record[2]) * self.n
        self.place = record[g.STACK]
        self.sub = record[g.SUB]


__all__ = [
    "COUNT_AT",
    "DEAD_AT",
    "EMPTY_AT",
    "FREE_AT",
    "FULL_AT",
    "LENGTH_AT",
    "REFUSAL_AT",
    "ROUTED_AT",
    "RUN_AT",
    "SCALE_AT",
    "SUMS_AT",
    "TOKEN_AT",
    "Context",
    "Fixed",
    "Part",
    "Record",
]
