"""Why the kernel cannot run a plan: everything that its bodies take for granted. No cutlass here."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout import Tiling, tiling
from ..resources import CONSUMER_WARPS, RING_STAGE_BYTES
from ..schedule import Schedule
from ..shapes import ROW_GROUP, Plan, groups_of
from . import constraints_attention, constraints_moe
from .geometry import MOST_GROUPS, MOST_SOURCES, Geometry

KDA_WIDTH = 128
"""Key and value channels of a KDA head."""
MOST_RESIDENT = 112
"""Registers a lane of an input vector that stays in them: 7,168 columns."""
MOST_PEERS = 32
"""Ranks that exchange in the kernel: one thread of a warp waits for each."""
MOST_SMS = 1024
"""Blocks that the int32 arithmetic of the parts of a stage is safe for, by far."""


def resident_registers(columns: int) -> int:
    """Registers a lane of a vector that stays in them: 4 for each block of 32 columns that a warp takes."""
    t = Tiling(1, columns)
    return 4 * t.chunks * -(-(t.chunk // 32) // CONSUMER_WARPS)


def shared_bytes(plan: Plan) -> int:
    """Dynamic shared memory of a block."""
    return Geometry(Schedule(plan, (), 0)).shared_bytes


def _target(p: Plan) -> Iterator[str]:
    if p.sms > MOST_SMS:
        yield f"target: at most {MOST_SMS} SMs, got {p.sms}"
    need = shared_bytes(p)
    if need > p.target.shared_bytes:
        yield f"shared memory: a block takes {need} bytes, {p.target.name} has {p.target.shared_bytes}"


def _peers(p: Plan) -> Iterator[str]:
    if p.peers and p.ways > MOST_PEERS:
        yield f"ways: at most {MOST_PEERS} ranks exchange in the kernel, a lane of a warp each, got {p.ways}"


def _columns(p: Plan) -> Iterator[str]:
    """Vectors are read 8 columns at a time, and some stay in registers."""
    c = p.config
    read = {
        "hidden_size": p.D,
        "the rank's KDA value columns": p.kda_heads * p.V if c.num_kda_layers else 0,
        "the rank's MLA value columns": p.mla_values if c.num_mla_layers else 0,
        "the rank's shared intermediate_size": p.shared if c.num_moe_layers else 0,
        "the rank's intermediate_size": p.dense if c.first_k_dense_replace else 0,
    }
    for name, columns in read.items():
        if columns % ROW_GROUP:
            yield f"{name}: the kernel reads {ROW_GROUP} columns at a time, got {columns}"
    resident = {"hidden_size": p.D} | ({"q_lora_rank": p.Q} if c.num_mla_layers else {})
    for name, columns in resident.items():
        if (count := resident_registers(columns)) > MOST_RESIDENT:
            yield (
                f"{name}: a vector of {columns} columns takes {count} registers a lane, "
                f"the kernel has {MOST_RESIDENT} (7168 columns)"
            )


def _mixtures(p: Plan) -> Iterator[str]:
    groups = -(-groups_of(p.D) // p.sms)
    if groups > MOST_GROUPS:
        yield (
            f"hidden_size: an SM ends a sublayer on at most {MOST_GROUPS * ROW_GROUP} columns, so at most "
            f"{MOST_GROUPS * ROW_GROUP * p.sms} on {p.sms} SMs, got {p.D}"
        )
    if p.max_sources > MOST_SOURCES:
        yield (
            f"attn_res_block_size: a mixture has at most {MOST_SOURCES} sources, {p.layers} layers in blocks "
            f"of {p.config.attn_res_block_size} have {p.max_sources}"
        )


def _kda(p: Plan) -> Iterator[str]:
    if not p.config.num_kda_layers:
        return
    for name, width in (("kda_head_dim", p.K), ("kda_v_head_dim", p.V)):
        if width != KDA_WIDTH:
            yield f"{name}: expected {KDA_WIDTH}, got {width}"


def _tiles(p: Plan) -> Iterator[str]:
    for name in Geometry(Schedule(p, (), 0)).present:
        if (count := tiling(p, name).tile_bytes) > RING_STAGE_BYTES:
            yield f"{name}: a tile has {count} bytes, a stage of the ring {RING_STAGE_BYTES}"


def reasons(plan: Plan) -> tuple[str, ...]:
    """Why the kernel cannot run a plan, each with the name of what is at fault; empty if it can.

    Args:
        plan: configuration, batch, target and share.
    """
    return (
        *_target(plan),
        *_peers(plan),
        *_columns(plan),
        *_mixtures(plan),
        *_kda(plan),
        *_tiles(plan),
        *constraints_attention.reasons(plan),
        *constraints_moe.reasons(plan),
    )


__all__ = ["MOST_RESIDENT", "reasons", "resident_registers", "shared_bytes"]
