"""What the narrow and attention stages ask of a plan, and the sizes they share with the host."""

from __future__ import annotations

from ..layout import Tiling, tiling
from ..resources import RING_STAGE_BYTES
from ..shapes import MOST_HEADS, ROW_GROUP, SPLIT, Plan
from .geometry import PIECE_TOKENS, SCRATCH_BYTES

COLUMN_UNIT = 64
"""Columns of the attention's context that a warp takes at a time."""
MOST_LATENT = 1024
"""Largest C: two units of columns a warp, 96 registers of sums."""


def row_pitch(columns: int) -> int:
    """Bytes from one bf16 vector to the next in scratch: 64 past a multiple of 128, so that the 64-byte
    pieces of two neighbouring vectors lie in different banks."""
    return 2 * columns + (-2 * columns + 64) % 128


def groups_of_part(plan: Plan, rows: int) -> int:
    """Most row groups that one SM takes of a stage whose groups are dealt evenly."""
    return -(-(rows // ROW_GROUP) // plan.sms)


def heads_of_part(plan: Plan, rows: int, rows_a_head: int) -> int:
    """Most heads that the row groups of one SM can belong to, wherever they begin."""
    groups, each = groups_of_part(plan, rows), rows_a_head // ROW_GROUP
    return min((each - 1 + groups - 1) // each + 1, rows // rows_a_head)


def value_vectors_bytes(plan: Plan) -> int:
    """Scratch of MLA_VALUE's contexts, bf16 [heads of a part, B, C]."""
    heads = heads_of_part(plan, plan.mla_values, plan.config.v_head_dim)
    return heads * plan.B * row_pitch(tiling(plan, "mla_value_up").chunk)


def value_scratch_bytes(plan: Plan) -> int:
    """The contexts, and the factors of every lane and of the whole, float32 [heads, B, lanes + 1]."""
    heads = heads_of_part(plan, plan.mla_values, plan.config.v_head_dim)
    return value_vectors_bytes(plan) + heads * plan.B * 4 * (plan.lanes + 1)


def absorb_scratch_bytes(plan: Plan) -> int:
    """Scratch of MLA_ABSORB's queries, bf16 [heads of a part, B, nope]."""
    heads = heads_of_part(plan, plan.mla_heads * plan.C, plan.C)
    return heads * plan.B * row_pitch(tiling(plan, "mla_key_up").chunk)


def padded_heads(plan: Plan) -> int:
    """Heads of an attention unit, up to whole matrix instructions of 8."""
    heads = plan.mla_heads // plan.head_groups
    return -(-heads // 8) * 8


WEIGHT_PITCH = 192
"""Bytes from one head's 64 attention weights (bf16) to the next."""
SCORE_PITCH = 80
"""Bytes from one head's 16 partial scores (float32) of a piece to the next."""
SCORE_SKEW = 16
"""Bytes by which each piece's partial scores lie later than those of the piece before."""


def attend_scratch_bytes(plan: Plan) -> int:
    """Scratch of MLA_ATTEND: queries, weights, and a factor of every head."""
    return padded_heads(plan) * (row_pitch(plan.C + plan.R) + WEIGHT_PITCH + 4)


def token_pitch(plan: Plan) -> int:
    """Bytes from one token's cache row to the next in the ring: the producer copies whole pieces."""
    return 2 * (plan.C + plan.R)


def attend_tile_bytes(plan: Plan) -> int:
    """A piece of the cache in the ring, with the partial scores of its tokens behind it."""
    scores = 2 * padded_heads(plan) * SCORE_PITCH + (SPLIT // PIECE_TOKENS - 1) * SCORE_SKEW
    return PIECE_TOKENS * token_pitch(plan) + scores


def _narrow(plan: Plan, name: str, tile: Tiling, rows_a_head: int) -> list[str]:
    out = []
    if tile.columns % 8:
        out.append(f"{name}: {tile.columns} columns, not a multiple of 8")
    if rows_a_head % ROW_GROUP:
        out.append(f"{name}: {rows_a_head} rows a head, not a multiple of {ROW_GROUP}")
    if tile.chunks != 1 or tile.group_bytes > RING_STAGE_BYTES:
        out.append(f"{name}: {tile.columns} columns are not one chunk of a ring stage")
    return out


def _fits(name: str, count: int, most: int = SCRATCH_BYTES) -> list[str]:
    return [f"{name}: {count} bytes of shared memory, there are {most}"] if count > most else []


def _mla(plan: Plan) -> list[str]:
    p, c = plan, plan.config
    out = _narrow(p, "MLA_ABSORB", tiling(p, "mla_key_up"), p.C)
    out += _narrow(p, "MLA_VALUE", tiling(p, "mla_value_up"), c.v_head_dim)
    for name, value, unit in (
        ("kv_lora_rank", p.C, COLUMN_UNIT),
        ("kv_lora_rank + qk_rope_head_dim", p.C + p.R, COLUMN_UNIT),
        ("q_lora_rank", p.Q, 8),
        ("qk_head_dim", c.qk_head_dim, 8),
    ):
        if value % unit:
            out.append(f"{name}: {value}, not a multiple of {unit}")
    if p.C > MOST_LATENT:
        out.append(f"kv_lora_rank: {p.C}, above {MOST_LATENT}")
    if p.mla_heads // p.head_groups > MOST_HEADS:
        out.append(f"attention unit: {p.mla_heads // p.head_groups} heads, above {MOST_HEADS}")
    if out:  # the sizes below divide by what was just refused
        return out
    out += _fits("MLA_ABSORB", absorb_scratch_bytes(p))
    out += _fits("MLA_VALUE", value_scratch_bytes(p))
    out += _fits("MLA_ATTEND", attend_scratch_bytes(p))
    return out + _fits("MLA_ATTEND, a piece of the cache", attend_tile_bytes(p), RING_STAGE_BYTES)


def reasons(plan: Plan) -> list[str]:
    """Why KDA_DECAY and the MLA stages cannot run a plan; empty if they can."""
    out = []
    if plan.config.num_kda_layers:
        out += _narrow(plan, "KDA_DECAY", tiling(plan, "kda_decay"), plan.K)
        out += _fits("KDA_DECAY", plan.B * row_pitch(tiling(plan, "kda_decay").chunk))
    return out + (_mla(plan) if plan.config.num_mla_layers else [])


__all__ = [
    "COLUMN_UNIT",
    "MOST_LATENT",
    "SCORE_PITCH",
    "SCORE_SKEW",
    "WEIGHT_PITCH",
    "absorb_scratch_bytes",
    "attend_scratch_bytes",
    "attend_tile_bytes",
    "groups_of_part",
    "heads_of_part",
    "padded_heads",
    "reasons",
    "row_pitch",
    "token_pitch",
    "value_scratch_bytes",
    "value_vectors_bytes",
]
