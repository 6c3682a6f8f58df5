"""Sizes and addresses fixed at compile time: shared memory, the pointer table, the words of a record.

No cutlass here: the host side, the tests and the kernel agree through this file.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from ..instructions import Instruction, Op
from ..layout import BLOCK_COLUMNS, matrix_name, tiling
from ..operands import (
    DENSE_MATRICES,
    KDA_MATRICES,
    MLA_MATRICES,
    MOE_MATRICES,
    Field,
    layers_with,
    workspace,
)
from ..resources import CONSUMER_WARPS, RING_STAGE_BYTES, RING_STAGES
from ..schedule import Schedule
from ..shapes import ROW_GROUP, SPLIT, Plan, groups_of
from ..stages import sublayer

CONSUMERS = 32 * CONSUMER_WARPS
"""Threads that compute; one more warp streams."""
MATRICES = (*KDA_MATRICES, *MLA_MATRICES, *MOE_MATRICES, *DENSE_MATRICES, "lm_head")
"""Order of the matrices in the pointer table; a record's MATRIX word is an index into it."""
PIECE_TOKENS = 16
"""Cache rows of one copy into the ring."""
STATE_PIECE_BYTES = 16_384
"""A KDA state passes the ring in pieces of this size."""
SCRATCH_BYTES = 36_864
"""Shared memory that stages share beside the ring: input vectors, partial sums, queries."""
SMALL_BYTES = 1024
"""Row data, flags and barriers."""
MOST_GROUPS = 8
"""Row groups of a residual stage that one SM can take: their sums stay in registers."""
MOST_SOURCES = 16
"""Sources of an AttnRes mixture."""

# Words of a record past those that `instructions.encode` writes by name.
WAITS = 10
PER, SUB, SNAPSHOTS, START, MATRIX, TILE_BYTES, CHUNKS, STRIDE, BLOCKS, ORDER, PIECE, COLUMNS, STACK = range(
    19, 32
)
TURN = COLUMNS
"""Of EXPERT_IN in a share: which turn of this launch it is at the barriers of the experts' ids, mod 2."""
BY_GROUP, BY_CHUNK, BY_PIECE = 0, 1, 2
"""ORDER: tiles group after group, chunk after chunk, or several whole groups in one copy."""

_BY_CHUNK = {Op.KDA_OUT, Op.MLA_OUT, Op.SHARED_DOWN, Op.LATENT_UP, Op.DENSE_DOWN}
_BY_PIECE = {Op.KDA_DECAY, Op.MLA_ABSORB, Op.MLA_VALUE}


def kernel_words(p: Plan, ins: Instruction, place: int) -> dict[int, int]:
    """The words of a record that only the kernel reads.

    Args:
        place: of the instruction's matrix, experts or state among the layers that have one of its kind.
    """
    sub = sublayer(ins.op, ins.layer, ins.c0)
    mixes = ins.op == Op.MIX
    words = {
        PER: (ins.g1 - ins.g0) // max(1, ins.sm1 - ins.sm0),
        SUB: sub,
        SNAPSHOTS: p.snapshots(sub) if mixes else p.snapshots(sub + 1),
        START: int(sub % 2 == 0 and ins.layer < p.layers and p.config.starts_block(ins.layer)),
        MATRIX: -1,
        STACK: place,
    }
    name = matrix_name(p, ins.op, ins.layer)
    if name is None:
        return words
    t = tiling(p, name)
    order = BY_CHUNK if ins.op in _BY_CHUNK else BY_PIECE if ins.op in _BY_PIECE else BY_GROUP
    return words | {
        MATRIX: MATRICES.index(name),
        TILE_BYTES: t.tile_bytes,
        CHUNKS: t.chunks,
        STRIDE: t.packed_bytes // 16,
        BLOCKS: t.chunk // BLOCK_COLUMNS,
        ORDER: order,
        PIECE: max(1, RING_STAGE_BYTES // t.group_bytes),
        COLUMNS: t.columns,
    }


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the kernel is specialised to.

    Attributes:
        schedule: the list it runs.
        in_flight: copies a producer may have in flight.
        spins: polls after which a wait gives up.
        delays: insert pseudo-random delays at every wait and signal (a test build).
        all_lanes: every lane arrives on the ring's barriers (racecheck understands no other form).
        trace: entries an SM's program may have in a build that keeps time, or 0.
    """

    schedule: Schedule
    in_flight: int = 2
    spins: int = 1 << 21
    delays: bool = False
    all_lanes: bool = False
    trace: int = 0

    @property
    def plan(self) -> Plan:
        return self.schedule.plan

    @cached_property
    def fields(self) -> dict[str, Field]:
        return workspace(self.plan, self.schedule.counters, self.trace)

    def offset(self, name: str) -> int:
        """Byte offset of a field of the workspace."""
        return self.fields[name].offset

    # -- pointer table: 8 bytes an entry --

    @cached_property
    def present(self) -> tuple[str, ...]:
        """Matrices of the pointer table that the plan has; the table keeps a place for each kind."""
        return tuple(m for m in MATRICES if m == "lm_head" or layers_with(self.plan, m))

    @property
    def expert_entry(self) -> int:
        """First entry of the experts: six a LatentMoE layer, w1, w1_scale, w3, w3_scale, w2, w2_scale."""
        return len(MATRICES)

    @cached_property
    def kda_entry(self) -> int:
        """First entry of the KDA states: S and conv of each KDA layer."""
        return self.expert_entry + 6 * self.plan.config.num_moe_layers

    @cached_property
    def mla_entry(self) -> int:
        """First entry of the latent caches, one an MLA layer."""
        return self.kda_entry + 2 * self.plan.config.num_kda_layers

    @cached_property
    def entries(self) -> int:
        return self.mla_entry + self.plan.config.num_mla_layers

    # -- shared memory, byte offsets from the start of the block's dynamic part --

    @cached_property
    def ring_bytes(self) -> int:
        return RING_STAGES * RING_STAGE_BYTES

    @cached_property
    def scratch_at(self) -> int:
        return self.ring_bytes

    @cached_property
    def small_at(self) -> int:
        return self.scratch_at + SCRATCH_BYTES

    @cached_property
    def table_at(self) -> int:
        return self.small_at + SMALL_BYTES

    @cached_property
    def slots_at(self) -> int:
        return self.table_at + 8 * self.entries

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.slots_at + 4 * (self.plan.slots if self.plan.config.num_moe_layers else 0)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of one row of the latent cache."""
        return 2 * (self.plan.C + self.plan.R)

    @cached_property
    def split_pieces(self) -> int:
        return SPLIT // PIECE_TOKENS


def expert_tile_bytes(p: Plan) -> tuple[int, int]:
    """Bytes in the ring of one group of EXPERT_IN (8 rows of w1 and of w3) and of EXPERT_OUT (of w2)."""
    return 2 * ROW_GROUP * (p.L // 2 + p.L // 32), ROW_GROUP * (p.F // 2 + p.F // 32)


__all__ = [
    "BY_CHUNK",
    "BY_GROUP",
    "BY_PIECE",
    "CONSUMERS",
    "MATRICES",
    "MOST_GROUPS",
    "MOST_SOURCES",
    "PIECE_TOKENS",
    "SCRATCH_BYTES",
    "STATE_PIECE_BYTES",
    "Geometry",
    "expert_tile_bytes",
    "groups_of",
    "kernel_words",
]
