"""The consumer warps: every instruction of this SM's program, in order."""
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202 (values of the tracing compiler)

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..instructions import Op
from . import geometry as g
from .context import Record
from .flow import fetch
from .stages.attend import mla_attend, mla_row
from .stages.combine import combine
from .stages.experts import expert_in, expert_out
from .stages.kda import kda_step
from .stages.mixture import embed, finish, mix
from .stages.narrow import kda_decay, mla_absorb, mla_value
from .stages.residual import INPUTS, residual_stage
from .stages.resident import is_normed, mla_query, normed_stages
from .stages.route import route

WITHOUT_TILES = {Op.EMBED: embed, Op.MIX: mix, Op.FINISH: finish}
KDA = {Op.KDA_DECAY: kda_decay, Op.KDA_STEP: kda_step}
MLA = {Op.MLA_QUERY: mla_query, Op.MLA_ABSORB: mla_absorb, Op.MLA_ATTEND: mla_attend, Op.MLA_VALUE: mla_value}
MOE = {Op.EXPERT_IN: expert_in, Op.EXPERT_OUT: expert_out}


@cute.jit
def consume(t):
    """Run this SM's whole program."""
    c = t.p.config
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
            for code, stage in WITHOUT_TILES.items():
                if op == int(code):
                    stage(t, record)
            if is_residual(record):
                k = residual_stage(t, record, k)
            if cutlass.const_expr(c.num_kda_layers > 0):
                for code, stage in KDA.items():
                    if op == int(code):
                        k = stage(t, record, k)
            if cutlass.const_expr(c.num_mla_layers > 0):
                for code, stage in MLA.items():
                    if op == int(code):
                        k = stage(t, record, k)
                if op == int(Op.MLA_ROW):
                    mla_row(t, record)
            if cutlass.const_expr(c.num_moe_layers > 0):
                for code, stage in MOE.items():
                    if op == int(code):
                        k = stage(t, record, k)
                if op == int(Op.ROUTE):
                    route(t, record)
                if op == int(Op.COMBINE):
                    combine(t, record)
            at += 1
            word = following
            following = fetch(t, at + 1, end)
    return k


def is_residual(record):
    """Whether an instruction is one of the chunked matrix stages."""
    kind = record[g.MATRIX]
    same = kind == -2
    for name in INPUTS:
        same = same | (kind == g.MATRICES.index(name))
    return same


__all__ = ["consume"]
