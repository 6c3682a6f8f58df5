"""What each stage of each layer reads and writes: the one place that ties an operation to its buffers.

A *sublayer* is 2 * layer for attention and 2 * layer + 1 for the feed-forward network; 2 * layers is the
output. It numbers the lifetimes (versions) of the buffers that every sublayer reuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from .buffers import matrix_buffer
from .instructions import Access, Exchange, Op
from .layout import matrix_name, tiling
from .shapes import ROW_GROUP, Plan, groups_of


@dataclasses.dataclass(frozen=True)
class Work:
    """The part of a stage that an instruction covers: groups, column chunks, SMs."""

    op: Op
    layer: int
    g0: int
    g1: int
    c0: int
    c1: int
    sm0: int
    sm1: int


def sublayer(op: Op, layer: int, c0: int = 0) -> int:
    """The sublayer a stage belongs to; MIX and RESIDUAL name their half of the layer by ``c0``."""
    if op in (Op.MIX, Op.RESIDUAL):
        return 2 * layer + c0
    if op == Op.EXCHANGE:
        return 2 * layer + (c0 > Exchange.ATTENTION)
    return 2 * layer + (Op.ROUTER <= op <= Op.DENSE_DOWN)


def exchange_columns(p: Plan, kind: int) -> tuple[int, int]:
    """Columns of ``give`` that an exchange takes from a rank, and of ``take`` that it leaves there."""
    return {
        Exchange.EMBEDDING: (p.D, p.D),
        Exchange.ATTENTION: (p.D, p.D),
        Exchange.LATENT: (p.latent_rows, p.L),
        Exchange.ROUTED: (p.L, p.L),
        Exchange.FFN: (p.D, p.D),
    }[Exchange(kind)]


def exchange_number(kind: int, layer: int) -> int:
    """Place of an exchange among those of a step: the lifetime of ``give`` and ``take`` that it ends and
    begins."""
    return 4 * layer + kind


def stage_groups(p: Plan, op: Op, layer: int, chunk: int = 0) -> int:
    """Row groups (or units) of a whole stage; an EXCHANGE has its kind as ``chunk``."""
    if op == Op.EXCHANGE:
        return groups_of(exchange_columns(p, chunk)[0])
    name = matrix_name(p, op, layer)
    if name is not None:
        return tiling(p, name).groups
    return {
        Op.EMBED: groups_of(p.D),
        Op.MIX: groups_of(p.D),
        Op.KDA_STEP: p.kda_heads * p.B,
        Op.MLA_ROW: p.B,
        Op.MLA_ATTEND: p.attend_units,
        Op.RESIDUAL: groups_of(p.D),
        Op.ROUTE: 1,
        Op.EXPERT_IN: p.slots * groups_of(p.F),
        Op.EXPERT_OUT: p.slots * groups_of(p.L),
        Op.COMBINE: groups_of(p.L),
        Op.FINISH: 1,
    }[op]


def stage_chunks(p: Plan, op: Op, layer: int) -> int:
    """Column chunks of a stage's matrix; 1 where there is none."""
    name = matrix_name(p, op, layer)
    return 1 if name is None else tiling(p, name).chunks


def shared_pieces(p: Plan) -> int:
    """Into how many stages the shared expert's down projection is cut along its columns: 2, or 1."""
    return min(2, tiling(p, "shared_out").chunks)


def next_mix_weights(p: Plan, sub: int) -> str:
    """Buffer of the two vectors that score the sources of the mixture before sublayer ``sub``."""
    if sub == 2 * p.layers:
        return "w.output_attn_res"
    return f"w.{sub // 2}.{'mlp_res' if sub % 2 else 'self_attention_res'}"


def accesses(p: Plan, w: Work) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """(reads, writes) of a piece of work."""
    rule = _RULES[w.op]
    reads, writes = rule(p, w, sublayer(w.op, w.layer, w.c0))
    return tuple(_matrix_reads(p, w) + reads), tuple(writes)


def _matrix_reads(p: Plan, w: Work) -> list[Access]:
    buffer = matrix_buffer(p, w.op, w.layer)
    if buffer is None:
        return []
    groups = stage_groups(p, w.op, w.layer)
    return [Access(buffer, 0, c * groups + w.g0, c * groups + w.g1) for c in range(w.c0, w.c1)]


def _rows(w: Work, most: int, each: int = ROW_GROUP) -> tuple[int, int]:
    return min(w.g0 * each, most), min(w.g1 * each, most)


def _normed_input(p: Plan, layer: int, sub: int) -> list[Access]:
    """The mixture, its sums of squares and the gain: what every first stage of a sublayer reads."""
    if sub == 2 * p.layers:
        gain = "w.norm"
    else:
        gain = f"w.{layer}.{'post_attention_layernorm' if sub % 2 else 'input_layernorm'}"
    return [
        Access("h", sub, 0, p.D),
        Access("h.ssq", sub, 0, p.column_sms),
        Access(gain, 0, 0, p.D),
    ]


def _give(p: Plan, w: Work, kind: Exchange, most: int) -> Access:
    """Own columns of what this rank gives to an exchange."""
    return Access("give", exchange_number(kind, w.layer), *_rows(w, most))


def _take(w: Work, kind: Exchange, lo: int, hi: int) -> Access:
    """Columns of what an exchange left."""
    return Access("take", exchange_number(kind, w.layer), lo, hi)


def _sublayer_end(p: Plan, w: Work, sub: int) -> tuple[list[Access], list[Access]]:
    """Of the last matrix of a sublayer: its end, or in a share what goes to the ranks' sum."""
    if p.ways > 1:
        return [], [_give(p, w, Exchange.FFN if sub % 2 else Exchange.ATTENTION, p.D)]
    return _residual(p, w, sub)


def _residual(p: Plan, w: Work, sub: int) -> tuple[list[Access], list[Access]]:
    """The end of a sublayer: add to the running sum, score the next mixture's sources on own columns."""
    lo, hi = _rows(w, p.D)
    starts = sub % 2 == 0 and p.config.starts_block(w.layer)
    reads = [] if starts else [Access(f"pre.{sub % 2}", sub, lo, hi)]
    reads += [Access(f"block.{j}", 0, lo, hi) for j in range(p.snapshots(sub + 1))]
    reads.append(Access(next_mix_weights(p, sub + 1), 0, lo, hi))
    writes = [
        Access(f"pre.{(sub + 1) % 2}", sub + 1, lo, hi),
        Access("score", sub + 1, w.sm0, w.sm1),
    ]
    return reads, writes


_Result = tuple[list[Access], list[Access]]
_Rule = Callable[[Plan, Work, int], _Result]


def _embed(p: Plan, w: Work, sub: int) -> _Result:
    if p.ways > 1:
        lo, hi = _rows(w, p.D)
        return [_take(w, Exchange.EMBEDDING, lo, hi)], [Access("pre.0", 0, lo, hi)]
    return [Access("w.embed", 0, 0, p.B)], [Access("pre.0", 0, *_rows(w, p.D))]


def _mix(p: Plan, w: Work, sub: int) -> _Result:
    lo, hi = _rows(w, p.D)
    count = p.snapshots(sub)
    reads = [Access(f"pre.{sub % 2}", sub, lo, hi)]
    reads += [Access(f"block.{j}", 0, lo, hi) for j in range(count)]
    if sub:
        reads.append(Access("score", sub, 0, p.column_sms))
    writes = [Access("h", sub, lo, hi), Access("h.ssq", sub, w.sm0, w.sm1)]
    if sub % 2 == 0 and w.layer < p.layers and p.config.starts_block(w.layer):
        writes.append(Access(f"block.{count}", 0, lo, hi))
    return reads, writes


def _kda_in(p: Plan, w: Work, sub: int) -> _Result:
    return _normed_input(p, w.layer, sub), [Access("kda.proj", sub, *_rows(w, p.kda_rows))]


def _kda_decay(p: Plan, w: Work, sub: int) -> _Result:
    rows = p.kda_heads * p.K
    return [Access("kda.proj", sub, 0, p.K)], [Access("kda.z", sub, *_rows(w, rows))]


def _kda_step(p: Plan, w: Work, sub: int) -> _Result:
    h0, h1 = w.g0 // p.B, -(-w.g1 // p.B)
    reads = [
        Access("kda.proj", sub, p.K, p.kda_rows),
        Access("kda.z", sub, h0 * p.K, h1 * p.K),
        Access(f"S.{w.layer}", 0, w.g0, w.g1),
        Access(f"conv.{w.layer}", 0, w.g0, w.g1),
        Access(f"w.{w.layer}.kda_head", 0, h0, h1),
        Access(f"w.{w.layer}.o_norm", 0, 0, p.V),
        Access("lengths", 0, 0, p.B),
    ]
    writes = [
        Access("kda.y", sub, w.g0, w.g1),
        Access(f"S.{w.layer}", 1, w.g0, w.g1),
        Access(f"conv.{w.layer}", 1, w.g0, w.g1),
    ]
    return reads, writes


def _mixer_out(buffer: str) -> _Rule:
    def rule(p: Plan, w: Work, sub: int) -> _Result:
        units = p.kda_heads * p.B if buffer == "kda.y" else p.mla_values
        reads, writes = _sublayer_end(p, w, sub)
        return [Access(buffer, sub, 0, units), *reads], writes

    return rule


def _mla_in(p: Plan, w: Work, sub: int) -> _Result:
    return _normed_input(p, w.layer, sub), [Access("mla.proj", sub, *_rows(w, p.mla_rows))]


def _mla_query(p: Plan, w: Work, sub: int) -> _Result:
    rows = p.mla_heads * p.config.qk_head_dim
    reads = [Access("mla.proj", sub, 0, p.Q), Access(f"w.{w.layer}.q_a_layernorm", 0, 0, p.Q)]
    return reads, [Access("mla.q", sub, *_rows(w, rows))]


def _mla_row(p: Plan, w: Work, sub: int) -> _Result:
    reads = [
        Access("mla.proj", sub, p.Q, p.Q + p.C + p.R),
        Access(f"w.{w.layer}.kv_a_layernorm", 0, 0, p.C),
        Access("lengths", 0, 0, p.B),
    ]
    return reads, [Access("mla.row", sub, w.g0, w.g1), Access(f"cache.{w.layer}", 0, w.g0, w.g1)]


def _mla_absorb(p: Plan, w: Work, sub: int) -> _Result:
    lo, hi = _rows(w, p.mla_heads * p.C)
    h0, h1 = lo // p.C, -(-hi // p.C)
    head = p.config.qk_head_dim
    return [Access("mla.q", sub, h0 * head, h1 * head)], [Access("mla.qt", sub, lo, hi)]


def _mla_attend(p: Plan, w: Work, sub: int) -> _Result:
    reads = [
        Access("mla.q", sub, 0, p.mla_heads * p.config.qk_head_dim),
        Access("mla.qt", sub, 0, p.mla_heads * p.C),
        Access("mla.row", sub, 0, p.B),
        Access(f"old.{w.layer}", 0, w.g0, w.g1),
        Access("lengths", 0, 0, p.B),
    ]
    return reads, [Access("mla.part", sub, w.g0, w.g1)]


def _mla_value(p: Plan, w: Work, sub: int) -> _Result:
    lo, hi = _rows(w, p.mla_values)
    gate = p.Q + p.C + p.R
    reads = [Access("mla.part", sub, 0, p.attend_units), Access("mla.proj", sub, gate + lo, gate + hi)]
    return reads, [Access("mla.y", sub, lo, hi)]


def _router(p: Plan, w: Work, sub: int) -> _Result:
    return _normed_input(p, w.layer, sub), [Access("rlogit", sub, *_rows(w, p.E))]


def _route(p: Plan, w: Work, sub: int) -> _Result:
    reads = [
        Access("rlogit", sub, 0, p.E),
        Access(f"w.{w.layer}.e_score_correction_bias", 0, 0, p.E),
        Access("lengths", 0, 0, p.B),
    ]
    if p.ways > 1:
        reads.append(Access(f"w.{w.layer}.expert_place", 0, 0, p.E))
    return reads, [Access("route", sub, 0, 1)]


def _latent_down(p: Plan, w: Work, sub: int) -> _Result:
    if p.ways > 1:
        return _normed_input(p, w.layer, sub), [_give(p, w, Exchange.LATENT, p.latent_rows)]
    return _normed_input(p, w.layer, sub), [Access("latent", sub, *_rows(w, p.latent_rows))]


def _exchange(p: Plan, w: Work, sub: int) -> _Result:
    number = exchange_number(w.c0, w.layer)
    lo, hi = _rows(w, exchange_columns(p, w.c0)[0])
    if w.c0 == Exchange.EMBEDDING:
        return [Access("w.embed", 0, 0, p.B)], [Access("take", number, lo, hi)]
    # Of latent columns every rank has others: the same ones of each come together.
    blocks = p.ways if w.c0 == Exchange.LATENT else 1
    writes = [Access("take", number, r * p.latent_rows + lo, r * p.latent_rows + hi) for r in range(blocks)]
    return [Access("give", number, lo, hi)], writes


def _residual_stage(p: Plan, w: Work, sub: int) -> _Result:
    reads, writes = _residual(p, w, sub)
    kind = Exchange.FFN if sub % 2 else Exchange.ATTENTION
    return [_take(w, kind, *_rows(w, p.D)), *reads], writes


def _gate_up(p: Plan, w: Work, sub: int) -> _Result:
    name, width = ("act.shared", p.shared) if p.config.is_moe(w.layer) else ("act.dense", p.dense)
    return _normed_input(p, w.layer, sub), [Access(name, sub, *_rows(w, width, ROW_GROUP // 2))]


def _shared_down(p: Plan, w: Work, sub: int) -> _Result:
    chunk = tiling(p, "shared_out").chunk
    reads = [Access("act.shared", sub, w.c0 * chunk, min(w.c1 * chunk, p.shared))]
    if w.c0 == 0:
        return reads, [Access("shared.0", sub, w.g0, w.g1)]
    reads.append(Access("shared.0", sub, w.g0, w.g1, local=True))
    return reads, [Access("shared.1", sub, w.g0, w.g1)]


def _expert_in(p: Plan, w: Work, sub: int) -> _Result:
    latent = Access("latent", sub, 0, p.L) if p.ways == 1 else _take(w, Exchange.LATENT, 0, p.L)
    reads = [
        Access("route", sub, 0, 1),
        latent,
        Access(f"w.{w.layer}.w13", 0, w.g0, w.g1),
    ]
    return reads, [Access("hid", sub, w.g0, w.g1)]


def _expert_out(p: Plan, w: Work, sub: int) -> _Result:
    reads = [
        Access("route", sub, 0, 1),
        Access("hid", sub, 0, p.slots * groups_of(p.F)),
        Access(f"w.{w.layer}.w2", 0, w.g0, w.g1),
    ]
    return reads, [Access("ey", sub, w.g0, w.g1)]


def _combine(p: Plan, w: Work, sub: int) -> _Result:
    reads = [Access("route", sub, 0, 1), Access("ey", sub, 0, p.slots * groups_of(p.L))]
    if p.ways > 1:
        return reads, [_give(p, w, Exchange.ROUTED, p.L)]
    writes = [Access("comb", sub, *_rows(w, p.latent_rows)), Access("comb.ssq", sub, w.sm0, w.sm1)]
    return reads, writes


def _latent_up(p: Plan, w: Work, sub: int) -> _Result:
    reads, writes = _sublayer_end(p, w, sub)
    if p.ways > 1:  # own latent columns, and the sum of squares of all of them
        combined = [_take(w, Exchange.ROUTED, 0, p.L)]
    else:
        combined = [Access("comb", sub, 0, p.latent_rows), Access("comb.ssq", sub, 0, p.latent_sms)]
    own = [
        *combined,
        Access(f"w.{w.layer}.routed_expert_norm", 0, 0, p.latent_rows),
        Access(f"shared.{shared_pieces(p) - 1}", sub, w.g0, w.g1, local=True),
    ]
    return own + reads, writes


def _dense_down(p: Plan, w: Work, sub: int) -> _Result:
    reads, writes = _sublayer_end(p, w, sub)
    return [Access("act.dense", sub, 0, p.dense), *reads], writes


def _lm_head(p: Plan, w: Work, sub: int) -> _Result:
    writes = [Access("logits", 0, *_rows(w, p.W)), Access("best", 0, w.sm0, w.sm1)]
    return _normed_input(p, w.layer, sub), writes


def _finish(p: Plan, w: Work, sub: int) -> _Result:
    rows = (0, p.B)
    reads = [Access("best", 0, 0, p.head_sms), Access("lengths", 0, *rows), Access("status", 0, *rows)]
    writes = [Access("token", 0, *rows), Access("lengths", 1, *rows), Access("status", 1, *rows)]
    return reads, writes


_RULES: Mapping[Op, _Rule] = {
    Op.EMBED: _embed,
    Op.MIX: _mix,
    Op.KDA_IN: _kda_in,
    Op.KDA_DECAY: _kda_decay,
    Op.KDA_STEP: _kda_step,
    Op.KDA_OUT: _mixer_out("kda.y"),
    Op.MLA_IN: _mla_in,
    Op.MLA_QUERY: _mla_query,
    Op.MLA_ROW: _mla_row,
    Op.MLA_ABSORB: _mla_absorb,
    Op.MLA_ATTEND: _mla_attend,
    Op.MLA_VALUE: _mla_value,
    Op.MLA_OUT: _mixer_out("mla.y"),
    Op.ROUTER: _router,
    Op.ROUTE: _route,
    Op.LATENT_DOWN: _latent_down,
    Op.EXCHANGE: _exchange,
    Op.RESIDUAL: _residual_stage,
    Op.GATE_UP: _gate_up,
    Op.SHARED_DOWN: _shared_down,
    Op.EXPERT_IN: _expert_in,
    Op.EXPERT_OUT: _expert_out,
    Op.COMBINE: _combine,
    Op.LATENT_UP: _latent_up,
    Op.DENSE_DOWN: _dense_down,
    Op.LM_HEAD: _lm_head,
    Op.FINISH: _finish,
}

__all__ = [
    "Work",
    "accesses",
    "exchange_columns",
    "exchange_number",
    "next_mix_weights",
    "shared_pieces",
    "stage_chunks",
    "stage_groups",
    "sublayer",
]
