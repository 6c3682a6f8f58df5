"""The consumer warps: every instruction of this SM's program, in order."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..instructions import Op
from .context import Record
from .flow import fetch
from .stages.attend import mla_attend, mla_row
from .stages.combine import combine
from .stages.exchange import exchange
from .stages.experts import expert_in, expert_out
from .stages.kda import kda_step
from .stages.mixture import embed, finish, mix
from .stages.narrow import kda_decay, mla_absorb, mla_value
from .stages.resident import is_normed, mla_query, normed_stages
from .stages.residual import residual_stage
from .stages.route import route
from .stages.share import residual

RESIDUAL = (Op.KDA_OUT, Op.MLA_OUT, Op.SHARED_DOWN, Op.LATENT_UP, Op.DENSE_DOWN)
ALWAYS = {Op.EMBED: embed, Op.MIX: mix, Op.FINISH: finish, **dict.fromkeys(RESIDUAL, residual_stage)}
KDA = {Op.KDA_DECAY: kda_decay, Op.KDA_STEP: kda_step}
MLA = {
    Op.MLA_QUERY: mla_query,
    Op.MLA_ROW: mla_row,
    Op.MLA_ABSORB: mla_absorb,
    Op.MLA_ATTEND: mla_attend,
    Op.MLA_VALUE: mla_value,
}
MOE = {Op.ROUTE: route, Op.EXPERT_IN: expert_in, Op.EXPERT_OUT: expert_out, Op.COMBINE: combine}
WITHOUT_TILES = (embed, mix, finish, mla_row, route, combine, residual, exchange)
"""Stages that take nothing from the ring."""


def stages_of(p):
    """(codes, stage) of every stage of the plan but the normed ones."""
    c = p.config
    table = dict(ALWAYS) | ({Op.RESIDUAL: residual} if p.ways > 1 else {})
    table |= {Op.EXCHANGE: exchange} if p.peers else {}
    table |= KDA if c.num_kda_layers else {}
    table |= MLA if c.num_mla_layers else {}
    table |= MOE if c.num_moe_layers else {}
    out = {}
    for code, stage in table.items():
        out.setdefault(stage, []).append(int(code))
    return tuple((tuple(codes), stage) for stage, codes in out.items())


@cute.jit
def run(t, record, op, k, stages: cutlass.Constexpr):
    """The stage of an operation: nested choices of one number, which the compiler makes one jump."""
    codes, stage = stages[0]
    here = op == codes[0]
    for code in codes[1:]:
        here = here | (op == code)
    if here:
        if cutlass.const_expr(stage in WITHOUT_TILES):
            stage(t, record)
        else:
            k = stage(t, record, k)
    else:
        if cutlass.const_expr(len(stages) > 1):
            k = run(t, record, op, k, stages[1:])
    return k


@cute.jit
def consume(t):
    """Run this SM's whole program."""
    at, end = t.first, t.last
    k = Int32(0)
    word = fetch(t, at, end)
    following = fetch(t, at + 1, end)
    while at < end:
        record = Record(word, at)
        op = record[0]
        if is_normed(op):
            at, word, following, k = normed_stages(t, at, end, word, following, k)
        else:
            k = run(t, record, op, k, stages_of(t.p))
            at += 1
            word = following
            following = fetch(t, at + 1, end)
    return k


__all__ = ["consume"]
