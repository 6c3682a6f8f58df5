"""Every buffer a step touches: its units, their size, and how it may be used."""

from __future__ import annotations

import dataclasses
import enum

from .instructions import Op
from .layout import matrix_name, tiling
from .shapes import Plan, groups_of

ACT, F32, I32 = 2, 4, 4


class Kind(enum.Enum):
    """What a buffer is, hence which rules hold for it."""

    WORK = "workspace: written in the step before it is read"
    STATE = "state: version 0 is there when the step begins, version 1 is written in place"
    INPUT = "input: never written"
    OUTPUT = "output: written exactly once"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A named buffer of ``units`` pieces of ``unit_bytes`` each; an interval is a range of units.

    ``real_bytes`` of an INPUT is what the checkpoint stores, without the padding of its tiles.
    """

    name: str
    kind: Kind
    units: int
    unit_bytes: int
    real_bytes: int = 0


def work_buffers(p: Plan) -> list[Buffer]:
    """Workspace and outputs. A unit of a vector is one column of all rows, of KDA (head, row)."""
    B, c = p.B, p.config

    def work(name: str, units: int, each: int) -> Buffer:
        return Buffer(name, Kind.WORK, units, each)

    out = [
        work("pre.0", p.D, ACT * B),
        work("pre.1", p.D, ACT * B),
        work("h", p.D, ACT * B),
        work("h.ssq", p.column_sms, F32 * B),
        work("score", p.column_sms, 2 * F32 * B * p.max_sources),
    ]
    out += [work(f"block.{j}", p.D, ACT * B) for j in range(p.max_sources - 1)]
    if c.num_kda_layers:
        out += [
            work("kda.proj", p.kda_rows, ACT * B),
            work("kda.z", p.kda_heads * p.K, ACT * B),
            work("kda.y", p.kda_heads * B, ACT * p.V),
        ]
    if c.num_mla_layers:
        out += [
            work("mla.proj", p.mla_rows, ACT * B),
            work("mla.q", p.mla_heads * c.qk_head_dim, ACT * B),
            work("mla.row", B, ACT * (p.C + p.R)),
            work("mla.qt", p.mla_heads * p.C, ACT * B),
            work("mla.part", p.attend_units, F32 * (p.mla_heads // p.head_groups) * (p.C + 2)),
            work("mla.y", p.mla_values, ACT * B),
        ]
    if p.ways > 1:
        out += [work("give", p.exchanged, F32 * B), work("take", p.exchanged, F32 * B)]
    if p.config.num_moe_layers:
        out += [
            work("rlogit", p.E, F32 * B),
            work("route", 1, I32 * (2 * B * p.A + p.slots + 1)),
            work("act.shared", p.shared, ACT * B),
            work("hid", p.slots * groups_of(p.F), ACT * 8 * B),
            work("ey", p.slots * groups_of(p.L), ACT * 8 * B),
            work("shared.0", groups_of(p.D), F32 * 8 * B),
            work("shared.1", groups_of(p.D), F32 * 8 * B),
        ]
        if p.ways == 1:
            out += [
                work("latent", p.L, ACT * B),
                work("comb", p.latent_rows, ACT * B),
                work("comb.ssq", p.latent_sms, F32 * B),
            ]
    if c.first_k_dense_replace:
        out.append(work("act.dense", p.dense, ACT * B))
    out += [
        Buffer("logits", Kind.OUTPUT, p.W, F32 * B),
        work("best", p.head_sms, (F32 + I32) * B),
        Buffer("token", Kind.OUTPUT, B, I32),
    ]
    return out


def state_buffers(p: Plan) -> list[Buffer]:
    """State in place. ``cache.i``: unit b is the row that row b's token appends; older rows are an input."""
    out = []
    for i, kind in enumerate(p.config.layer_types):
        if kind == "kda":
            taps = (p.config.short_conv_kernel_size - 1) * (2 * p.K + p.V)
            out.append(Buffer(f"S.{i}", Kind.STATE, p.kda_heads * p.B, F32 * p.K * p.V))
            out.append(Buffer(f"conv.{i}", Kind.STATE, p.kda_heads * p.B, ACT * taps))
        else:
            out.append(Buffer(f"cache.{i}", Kind.OUTPUT, p.B, ACT * (p.C + p.R)))
            out.append(Buffer(f"old.{i}", Kind.INPUT, p.attend_units, 0))
    out.append(Buffer("lengths", Kind.STATE, p.B, I32))
    out.append(Buffer("status", Kind.STATE, p.B, I32))
    return out


def _layer_vectors(p: Plan, i: int) -> dict[str, tuple[int, int]]:
    """Small weights of a layer: elements and bytes of one."""
    c, D = p.config, p.D
    out = {"input_layernorm": (D, ACT), "post_attention_layernorm": (D, ACT), "mlp_res": (D, 2 * ACT)}
    if i:
        out["self_attention_res"] = (D, 2 * ACT)
    if c.layer_types[i] == "kda":
        heads = p.kda_heads
        per_head = c.short_conv_kernel_size * (2 * p.K + p.V) + 1 + p.K  # conv taps, A_log, dt_bias
        out |= {"kda_head": (heads, F32 * per_head), "o_norm": (p.V, F32)}
    else:
        out |= {"q_a_layernorm": (p.Q, ACT), "kv_a_layernorm": (p.C, ACT)}
    if c.is_moe(i):
        out |= {"e_score_correction_bias": (p.E, F32), "routed_expert_norm": (p.latent_rows, ACT)}
        if p.ways > 1:
            out["expert_place"] = (p.E, I32 * p.B)
    return out


def layer_matrices(p: Plan, i: int) -> list[str]:
    """Packed matrices of a layer."""
    kda = ("kda_in", "kda_decay", "kda_out")
    mla = ("mla_in", "mla_query", "mla_key_up", "mla_value_up", "mla_out")
    moe = ("router", "latent_down", "shared_in", "shared_out", "latent_up")
    first = kda if p.config.layer_types[i] == "kda" else mla
    return [*first, *(moe if p.config.is_moe(i) else ("dense_in", "dense_out"))]


def weight_buffers(p: Plan) -> list[Buffer]:
    """Weights. A matrix's units are its row groups, an expert matrix's (slot, row group) pairs."""
    out = [Buffer("w.embed", Kind.INPUT, p.B, ACT * p.D, ACT * p.D * p.B)]
    for i in range(p.layers):
        for name in layer_matrices(p, i):
            t = tiling(p, name)
            out.append(Buffer(f"w.{i}.{name}", Kind.INPUT, t.groups * t.chunks, t.tile_bytes, t.real_bytes))
        out += [Buffer(f"w.{i}.{n}", Kind.INPUT, u, b, u * b) for n, (u, b) in _layer_vectors(p, i).items()]
        if p.config.is_moe(i):
            row13, row2 = (p.L // 2 + p.L // 32) * 2, p.F // 2 + p.F // 32
            for name, rows, each in (("w13", p.F, row13), ("w2", p.L, row2)):
                units = p.slots * groups_of(rows)
                out.append(Buffer(f"w.{i}.{name}", Kind.INPUT, units, 8 * each, p.slots * rows * each))
    t = tiling(p, "lm_head")
    out.append(Buffer("w.lm_head", Kind.INPUT, t.groups * t.chunks, t.tile_bytes, t.real_bytes))
    out.append(Buffer("w.norm", Kind.INPUT, p.D, ACT, ACT * p.D))
    out.append(Buffer("w.output_attn_res", Kind.INPUT, p.D, 2 * ACT, 2 * ACT * p.D))
    return out


def buffer_table(p: Plan) -> dict[str, Buffer]:
    """Every buffer of a plan by name."""
    return {b.name: b for b in (*work_buffers(p), *state_buffers(p), *weight_buffers(p))}


def matrix_buffer(p: Plan, op: Op, layer: int) -> str | None:
    """Buffer of the packed matrix that a stage streams."""
    name = matrix_name(p, op, layer)
    if name is None:
        return None
    return "w.lm_head" if name == "lm_head" else f"w.{layer}.{name}"


__all__ = ["Buffer", "Kind", "buffer_table", "layer_matrices", "matrix_buffer"]
