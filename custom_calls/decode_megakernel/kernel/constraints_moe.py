"""What the LatentMoE stages ask of a plan. No cutlass here: the host decides with it."""

from __future__ import annotations

from ..resources import RING_STAGE_BYTES
from ..shapes import ROW_GROUP, Plan
from .geometry import expert_tile_bytes

COLUMNS = 64
"""Experts' widths are multiples of it: 8 rows' scales are then copied in whole 16 bytes."""
MOST_EXPERTS = 1024
"""Bits of the bitmap that ROUTE numbers experts with, a word a lane."""


def reasons(plan: Plan) -> list[str]:
    """Why ROUTE, EXPERT_IN, EXPERT_OUT or COMBINE cannot run this plan; empty if they can."""
    p = plan
    if not p.config.num_moe_layers:
        return []
    out = []
    if p.E > MOST_EXPERTS:
        out.append(f"num_experts: the kernel chooses among at most {MOST_EXPERTS}, got {p.E}")
    if p.A > p.E:
        out.append(f"num_experts_per_token: expected at most num_experts {p.E}, got {p.A}")
    for name, size in (("routed_expert_hidden_size", p.L), ("moe_intermediate_size", p.F)):
        if size % COLUMNS:
            out.append(f"{name}: the kernel reads experts in multiples of {COLUMNS} columns, got {size}")
    into, outof = expert_tile_bytes(p)
    if into > RING_STAGE_BYTES:
        out.append(
            f"routed_expert_hidden_size: 8 rows of w1 and w3 ({into} bytes at {p.L} columns) "
            f"exceed a stage of the ring ({RING_STAGE_BYTES})"
        )
    if 2 * outof > RING_STAGE_BYTES:
        out.append(
            f"moe_intermediate_size: 16 rows of w2 ({2 * outof} bytes at {p.F} columns) "
            f"exceed a stage of the ring ({RING_STAGE_BYTES})"
        )
    if p.latent_rows % ROW_GROUP:
        out.append(
            f"routed_expert_hidden_size: a rank's latent columns come in groups of {ROW_GROUP}, "
            f"got {p.latent_rows}"
        )
    return out


__all__ = ["reasons"]
