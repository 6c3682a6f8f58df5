"""Shared memory and registers of the kernel against what an SM of the target has, before it is compiled.

Shared memory is the kernel's own number: ``kernel.geometry.Geometry.shared_bytes``, the very bytes that its
block allocates (that each stage keeps within its part of them: ``kernel.constraints``). Registers can be but
an estimate (:func:`registers`); what the compiler took is in the artifact, see :func:`most_registers`.
"""

from __future__ import annotations

from collections.abc import Iterator

from .instructions import Instruction, Op
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
BASE_REGISTERS = 40
"""Addresses, fragments and loop counters of a streaming stage."""
COLUMNS_IN_REGISTERS = 7168
"""Longest input vector that lives in registers whole (8 tokens: columns / 64 registers a lane)."""

GROUPS_IN_A_PASS = 16
"""Row groups whose sums are held at once where the input vector does not fit; K3 has 7 an SM."""


def registers(p: Plan, ins: Instruction) -> int:
    """An estimate of the registers that a lane of a consumer warp holds in a stage.

    What lives across the streaming loop: the lane's part of the input vector, two bf16 columns a register
    for each of 8 tokens over 8 warps (columns / 64), the sums, and BASE_REGISTERS for all else, which is a
    guess. No count of the compiler's: a consumer that takes more than CONSUMER_REGISTERS spills, which is
    seen in the artifact alone (``about["local_bytes"]``, and the audit of its streaming loops).
    """
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
    """Registers a thread that a block of THREADS can start with: each scheduler holds 3 of the 12 warps.

    The bound of a compiled kernel's ``about["registers"]``: what a thread has until producer and consumers
    part.
    """
    warps = -(-(THREADS // 32) // PARTITIONS)
    return min(255, target.registers // PARTITIONS // warps // 32 // REGISTER_UNIT * REGISTER_UNIT)


def resource_problems(s: Schedule) -> Iterator[str]:
    """What does not fit an SM of the target, each once, however many instructions it holds for."""
    from .kernel.geometry import Geometry  # which has its ring from this file

    target = s.plan.target
    held = 32 * (CONSUMER_WARPS * CONSUMER_REGISTERS + GROUP_WARPS * PRODUCER_REGISTERS)
    if held > min(target.registers, THREADS * most_registers(target)):
        yield f"block: {held} registers, {target.name} has {target.registers}"
    if (need := Geometry(s).shared_bytes) > target.shared_bytes:
        yield f"shared memory: a block takes {need} bytes, {target.name} has {target.shared_bytes}"
    most: dict[Op, int] = {}
    tiles: dict[str, int] = {}
    for ins in s.instructions:
        if ins.sm1 > ins.sm0:
            most[ins.op] = max(most.get(ins.op, 0), registers(s.plan, ins))
        name = matrix_name(s.plan, ins.op, ins.layer)
        if name is not None and name not in tiles:
            tiles[name] = tiling(s.plan, name).tile_bytes
    for op, count in most.items():
        if count > CONSUMER_REGISTERS:
            yield f"{op.name}: {count} registers a lane by estimate, a consumer has {CONSUMER_REGISTERS}"
    for name, count in tiles.items():
        if count > RING_STAGE_BYTES:
            yield f"{name}: a tile has {count} bytes, a stage of the ring {RING_STAGE_BYTES}"


__all__ = [
    "CONSUMER_REGISTERS",
    "CONSUMER_WARPS",
    "PRODUCER_REGISTERS",
    "RING_STAGES",
    "RING_STAGE_BYTES",
    "THREADS",
    "most_registers",
    "registers",
    "resource_problems",
]
