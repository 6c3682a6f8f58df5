"""Matrix stages whose input vector stays in registers: every first stage of a sublayer, MLA_QUERY, LM_HEAD.

::

    y[b, n] = sum_k x[b, k] W[n, k]        b < 8, n over this SM's groups of 8 rows

Groups outermost: the tiles of a group (its chunks of columns) arrive one after another, every warp
multiplies its eighth of a chunk's blocks, and the eight partial sums of a group meet in shared memory,
four groups at a time, summed in the order of the warps. Stages that read the same vector run one after
another without loading it again.

What happens to ``y`` is the stage's: rounded (projections, latent), kept in float32 (router, logits), or
gate and up in neighbouring rows through SiTU.

Constraints: columns / 64 registers a lane for the vector (112 at 7168).
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...instructions import Op
from ...layout import Tiling, tiling
from ...resources import CONSUMER_WARPS
from .. import geometry as g
from ..context import Part, Record
from ..flow import fetch, release, signal, take, wait
from ..geometry import MATRICES
from ..ptx import (
    float_to_bits,
    from_other,
    load4_shared,
    load_shared,
    mma_tokens,
    round_bf16,
    select,
    select_int,
    sigmoid,
    store,
    store2_shared,
    store_bf16,
    store_shared,
    tanh,
)
from .vector import load_resident, resident_registers, scale_of_rows

ROUNDED = {"kda_in": "kda.proj", "mla_in": "mla.proj", "latent_down": "latent"}
"""Matrices whose products are rounded and kept, with the field that holds them."""
GATED = {"shared_in": "act.shared", "dense_in": "act.dense"}
"""Matrices of interleaved gate and up rows, with the field of SiTU's results."""
NORMED = (Op.KDA_IN, Op.MLA_IN, Op.ROUTER, Op.LATENT_DOWN, Op.GATE_UP, Op.LM_HEAD)
"""Stages that read the sublayer's normed mixture."""
PASS = 4
"""Groups whose partial sums meet at once: 4 groups x 8 rows x 8 tokens are one number a thread."""
PASS_BYTES = PASS * CONSUMER_WARPS * 64 * 4


def is_normed(op):
    """Whether an instruction reads the sublayer's normed mixture."""
    same = op == int(NORMED[0])
    for other in NORMED[1:]:
        same = same | (op == int(other))
    return same


@cute.jit
def normed_stages(t, at, end, word, following, k):
    """This stage and those behind it that read the same vector; returns (at, word, following, k)."""
    p = t.p
    tile = Tiling(1, p.D)
    record = Record(word, at)
    wait(t, record)
    sub = record[g.SUB]
    x = cute.make_rmem_tensor(resident_registers(tile.chunks, tile.chunk // 32), Int32)
    parts = ("h.ssq", p.column_sms, p.D, p.config.rms_norm_eps)
    load_resident(t, x, t.at("h"), 2 * p.D, t.stacked("gain", sub, 0), tile, parts)
    more = Int32(1)
    while more == 1:
        record = Record(word, at)
        k = products(t, x, record, k, tile.chunks, tile.chunk // 32, finish_normed)
        signal(t, record)
        at += 1
        word = following
        following = fetch(t, at + 1, end)
        record = Record(word, at)
        same = is_normed(record[0]) & (record[g.SUB] == sub) & (at < end)
        more = select_int(same, Int32(1), Int32(0))
    return at, word, following, k


@cute.jit
def mla_query(t, record, k):
    """q = W_qb rms(q_a) with its gain."""
    p = t.p
    tile = tiling(p, "mla_query")
    wait(t, record)
    scale_of_rows(t, "mla.proj", 0, p.Q, p.config.latent_norm_eps)
    x = cute.make_rmem_tensor(resident_registers(tile.chunks, tile.chunk // 32), Int32)
    row_bytes = 2 * t.geo.fields["mla.proj"].shape[-1]
    gain = t.stacked("mla.q_gain", record[g.STACK])
    load_resident(t, x, t.at("mla.proj"), row_bytes, gain, tile, None)
    k = products(t, x, record, k, tile.chunks, tile.chunk // 32, finish_query)
    signal(t, record)
    return k


@cute.jit
def products(
    t, x, record, k, chunks: cutlass.Constexpr, blocks: cutlass.Constexpr, finish: cutlass.Constexpr
):
    """All groups of this SM's part, PASS at a time, each finished by ``finish``."""
    part = Part(t, record)
    mine = -(-blocks // CONSUMER_WARPS)
    even = blocks % CONSUMER_WARPS == 0
    kind = record[g.MATRIX]
    best, where = Float32(-float("inf")), Int32(0)
    parity = Int32(0)
    done = Int32(0)
    while done < part.n:
        now = cutlass.min(part.n - done, Int32(PASS))
        sums = t.scratch + parity * PASS_BYTES
        for i in cutlass.range(now, unroll=1):
            c0, c1, d0, d1 = Float32(0), Float32(0), Float32(0), Float32(0)
            for c in cutlass.range_constexpr(chunks):
                tile = take(t, k)
                for j in cutlass.range_constexpr(mine):
                    at = (c * mine + j) * 4
                    if cutlass.const_expr(even or CONSUMER_WARPS * (j + 1) <= blocks):
                        w = load4_shared(tile + (t.warp + CONSUMER_WARPS * j) * 512 + t.lane * 16)
                        c0, c1 = mma_tokens(x[at], x[at + 1], w[0], w[1], c0, c1)
                        d0, d1 = mma_tokens(x[at + 2], x[at + 3], w[2], w[3], d0, d1)
                    else:
                        if t.warp + CONSUMER_WARPS * j < blocks:
                            w = load4_shared(tile + (t.warp + CONSUMER_WARPS * j) * 512 + t.lane * 16)
                            c0, c1 = mma_tokens(x[at], x[at + 1], w[0], w[1], c0, c1)
                            d0, d1 = mma_tokens(x[at + 2], x[at + 3], w[2], w[3], d0, d1)
                release(t, k)
                k += 1
            mine_at = sums + ((i * CONSUMER_WARPS + t.warp) * 64 + 2 * t.lane) * 4
            store2_shared(mine_at, (c0 + d0, c1 + d1), Float32)
        t.sync()
        slot, e = t.tid >> 6, t.tid & 63
        value = Float32(0)
        for w in cutlass.range_constexpr(CONSUMER_WARPS):
            value = value + load_shared(sums + ((slot * CONSUMER_WARPS + w) * 64 + e) * 4, Float32)
        group = part.g0 + done + slot
        best, where = finish(t, kind, value, e >> 3, 8 * group + (e & 7), slot < now, best, where)
        parity = parity ^ 1
        done += PASS
    if kind == MATRICES.index("lm_head"):
        best_of_part(t, best, where)
    return k


@cute.jit
def finish_query(t, kind, value, b, row, valid, best, where):
    p = t.p
    if valid & (b < t.B) & (row < p.mla_heads * p.config.qk_head_dim):
        store_bf16(t.row("mla.q", b, row), value)
    return best, where


@cute.jit
def finish_normed(t, kind, value, b, row, valid, best, where):
    """One sum ``y[b, row]`` to where the matrix' stage puts it; SiTU takes the rows of two lanes."""
    p, c = t.p, t.p.config
    other = from_other(value, 1)
    valid = valid & (b < t.B)
    for name, field in ROUNDED.items():
        if cutlass.const_expr(field in t.geo.fields):
            if valid & (kind == MATRICES.index(name)) & (row < tiling(p, name).rows):
                store_bf16(t.row(field, b, row), value)
    if cutlass.const_expr(p.ways > 1 and c.num_moe_layers > 0):
        if valid & (kind == MATRICES.index("latent_down")) & (row < p.latent_rows):
            store(t.given(b, row), Float32, round_bf16(value))
    if cutlass.const_expr(c.num_moe_layers > 0):
        if valid & (kind == MATRICES.index("router")) & (row < p.E):
            store(t.row("rlogit", b, row), Float32, value)
    for name, field in GATED.items():
        if cutlass.const_expr(field in t.geo.fields):
            if valid & (kind == MATRICES.index(name)) & ((row & 1) == 0) & (row < tiling(p, name).rows):
                store_bf16(t.row(field, b, row >> 1), situ(round_bf16(value), round_bf16(other), c))
    if kind == MATRICES.index("lm_head"):
        if valid & (row < p.W):
            shown = select(t.refused(b), Float32(float("nan")), Float32(0))
            shown = select(t.runs(b), value, shown)
            store(t.logits + (Int64(b) * p.W + Int64(row)) * 4, Float32, shown)
            better = value > best  # rows ascend, so the first of equal logits stays
            best = select(better, value, best)
            where = select_int(better, row, where)
    return best, where


def situ(gate, up, c):
    """``beta tanh(g / beta) sigmoid(g) * linear tanh(u / linear)`` of rounded gate and up."""
    beta, linear = c.activation_situ_beta, c.activation_situ_linear_beta
    a = Float32(beta) * tanh(gate * Float32(1 / beta)) * sigmoid(gate)
    return a * (Float32(linear) * tanh(up * Float32(1 / linear)))


@cute.jit
def best_of_part(t, best, where):
    """The best logit of this SM's rows, per token, with its row (the lowest on ties), to ``best``."""
    t.sync()
    store_shared(t.scratch + 8 * t.tid, Float32, best)
    store_shared(t.scratch + 8 * t.tid + 4, Int32, where)
    t.sync()
    if t.tid < t.B:
        top, row = Float32(-float("inf")), Int32(0x7FFFFFFF)
        for slot in cutlass.range(PASS, unroll=1):
            for r in cutlass.range(8, unroll=1):
                at = t.scratch + 8 * (slot * 64 + t.tid * 8 + r)
                value, here = load_shared(at, Float32), load_shared(at + 4, Int32)
                better = (value > top) | ((value == top) & (here < row))
                top = select(better, value, top)
                row = select_int(better, here, row)
        address = t.at("best", (t.sm * t.B + t.tid) * 8)
        store(address, Int32, float_to_bits(top))
        store(address + 4, Int32, row)


__all__ = ["is_normed", "mla_query", "normed_stages", "situ"]
