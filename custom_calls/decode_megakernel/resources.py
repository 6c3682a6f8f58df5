"""Shared memory and registers of the kernel, by formula, against what an SM has."""

from __future__ import annotations

from collections.abc import Iterator

from .instructions import MAX_WAITS, RECORD, Instruction, Op
from .layout import matrix_name, tiling
from .schedule import Schedule
from .shapes import Plan, Target

RING_STAGES = 6
"""Stages of the ring that the producer warp fills: 180 KB, five microseconds of one SM's stream."""
RING_STAGE_BYTES = 30_720
"""Bytes of a stage: 8 rows of the widest chunk (1,920 bf16 columns), or of w1 and w3 of an expert."""
CONSUMER_WARPS = 8
GROUP_WARPS = 4
"""Warps that change their registers together."""
THREADS = 32 * (CONSUMER_WARPS + GROUP_WARPS)
"""The consumers, and a group of which one warp is the producer: its registers go to the consumers."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56
"""Registers a thread once the two kinds have parted; both kinds together fit an SM."""
PARTITIONS = 4
"""Schedulers of an SM, with a quarter of its registers each; warps are dealt to them in turn."""
REGISTER_UNIT = 8
"""Registers a thread come in multiples of it."""
REDUCTION_BYTES = 2 * CONSUMER_WARPS * 128 * 4
"""Partial sums of the warps, 16 rows x 8 tokens float32 each, two in turn."""
RECORD_BYTES = 4 * 4 * RECORD
"""Four instruction records read ahead."""
BARRIER_BYTES = 8 * 2 * RING_STAGES + 64
BASE_REGISTERS = 40
"""Addresses, fragments and loop counters of a streaming stage."""
COLUMNS_IN_REGISTERS = 7168
"""Longest input vector that lives in registers whole (8 tokens: columns / 64 registers a lane)."""

GROUPS_IN_A_PASS = 16
"""Row groups whose sums are held at once where the input vector does not fit; K3 has 7 an SM."""


def scratch_bytes(p: Plan, op: Op) -> int:
    """Shared memory a stage needs besides ring, barriers and instruction records."""
    if op == Op.MLA_ATTEND:
        heads = p.mla_heads // p.head_groups
        return heads * (2 * (p.C + p.R) + 8)  # absorbed queries, running peak and mass
    if op == Op.KDA_STEP:
        return 4 * (4 * p.K + 2 * p.V + 32) + REDUCTION_BYTES  # q, k, decay, z; v, o
    if op == Op.MIX:
        return 8 * p.B * p.max_sources + 4 * p.B * p.max_sources + REDUCTION_BYTES
    return REDUCTION_BYTES + 4 * p.B * 4


def shared_bytes(p: Plan, op: Op) -> int:
    """Dynamic shared memory while a stage runs."""
    return RING_STAGES * RING_STAGE_BYTES + BARRIER_BYTES + RECORD_BYTES + scratch_bytes(p, op)


def registers(p: Plan, ins: Instruction) -> int:
    """Registers a lane of a consumer warp holds in a stage."""
    name = matrix_name(p, ins.op, ins.layer)
    if ins.op in (Op.EXPERT_IN, Op.EXPERT_OUT):
        columns = p.L if ins.op == Op.EXPERT_IN else p.F
        return BASE_REGISTERS + 24 + -(-columns // 64)
    if name is None:
        return 2 * BASE_REGISTERS
    t = tiling(p, name)
    if t.columns <= COLUMNS_IN_REGISTERS:
        return BASE_REGISTERS + -(-t.columns // 64) + 4
    # Chunk by chunk, with the sums of a pass's groups in registers.
    groups = min((ins.g1 - ins.g0) // (ins.sm1 - ins.sm0), GROUPS_IN_A_PASS)
    return BASE_REGISTERS + -(-t.chunk // 64) + 4 * groups


def most_registers(target: Target) -> int:
    """Registers a thread that a block of THREADS can start with: each scheduler holds 3 of the 12 warps."""
    warps = -(-(THREADS // 32) // PARTITIONS)
    return min(255, target.registers // PARTITIONS // warps // 32 // REGISTER_UNIT * REGISTER_UNIT)


def resource_problems(s: Schedule) -> Iterator[str]:
    """Stages that do not fit an SM of the target."""
    target = s.plan.target
    most = CONSUMER_REGISTERS
    held = 32 * (CONSUMER_WARPS * CONSUMER_REGISTERS + GROUP_WARPS * PRODUCER_REGISTERS)
    if held > min(target.registers, THREADS * most_registers(target)):
        yield f"block: {held} registers, {target.name} has {target.registers}"
    seen: set[Op] = set()
    for at, ins in enumerate(s.instructions):
        if ins.sm1 > ins.sm0 and registers(s.plan, ins) > most:
            yield (
                f"instruction {at} ({ins.op.name}): {registers(s.plan, ins)} registers a lane, "
                f"a consumer has {most}"
            )
        if ins.op not in seen and shared_bytes(s.plan, ins.op) > target.shared_bytes:
            seen.add(ins.op)
            yield (
                f"{ins.op.name}: {shared_bytes(s.plan, ins.op)} bytes of shared memory, "
                f"{target.name} has {target.shared_bytes}"
            )
        name = matrix_name(s.plan, ins.op, ins.layer)
        if name is not None and tiling(s.plan, name).tile_bytes > RING_STAGE_BYTES:
            yield f"instruction {at}: a tile of {name} does not fit a stage of the ring"


__all__ = [
    "CONSUMER_REGISTERS",
    "CONSUMER_WARPS",
    "MAX_WAITS",
    "PRODUCER_REGISTERS",
    "RING_STAGES",
    "RING_STAGE_BYTES",
    "THREADS",
    "most_registers",
    "registers",
    "resource_problems",
    "shared_bytes",
]
