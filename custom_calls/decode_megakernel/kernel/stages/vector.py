"""The input vector of a matrix stage, from global memory into the registers of the lanes that use it.

A lane ``4 g + q`` of a warp holds, for every block of 32 columns that its warp takes, columns
``8 q .. 8 q + 8`` of token g: the columns that it multiplies with its 16 bytes of the packed weight.
Warp w takes blocks ``w, w + 8, ..`` of every chunk. Lanes of tokens the batch has not hold zeros.

``normed``:  x = round(round(h * scale_b) * gain),  scale_b = rsqrt(sum_sm ssq[b, sm] / n + eps)
is computed once per number by all threads together, and passes through shared memory.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...resources import CONSUMER_WARPS
from .. import geometry as g
from ..context import SCALE_AT
from ..ptx import (
    high,
    load,
    load4,
    load4_shared,
    load_shared,
    low,
    pack_bf16,
    round_bf16,
    rsqrt,
    select,
    store4_shared,
    store_shared,
    warp_sum,
)

ROW_PADDING = 64
"""Bytes between rows in shared memory, so that two tokens' pieces lie in different banks."""


@cute.jit
def scale_from_parts(t, name, parts, count, eps):
    """Row scales ``rsqrt(mean of squares + eps)`` to shared memory from each SM's sum of squares.

    Args:
        name: float32 field [B, SMs]; ``parts`` of its columns are written.
        count: columns that the mean is over.
    """
    if t.warp < t.B:
        total = Float32(0)
        for i in cutlass.range_constexpr((parts + 31) // 32):
            at = t.lane + 32 * i
            if at < parts:
                total = total + load(t.row(name, t.warp, at), Float32)
        total = warp_sum(total)
        if t.lane == 0:
            scale = rsqrt(total * Float32(1.0 / count) + Float32(eps))
            store_shared(t.small + SCALE_AT + 4 * t.warp, Float32, scale)
    t.sync()


def load8_rounded(address):
    """8 float32 of global memory, rounded, as four words of packed bf16."""
    a, b = load4(address, Float32), load4(address + Int64(16), Float32)
    return [pack_bf16(x[i], x[i + 1]) for x in (a, b) for i in (0, 2)]


@cute.jit
def scale_of_taken(t, count: cutlass.Constexpr, eps: cutlass.Constexpr):
    """Row scales of the first ``count`` columns of what the ranks exchanged, rounded first; a warp a row."""
    if t.warp < t.B:
        total = Float32(0)
        for i in cutlass.range_constexpr((count // 8 + 31) // 32):
            at = t.lane + 32 * i
            words = load8_rounded(t.taken(t.warp, 8 * cutlass.min(at, Int32(count // 8 - 1))))
            part = Float32(0)
            for w in words:
                part = part + low(w) * low(w) + high(w) * high(w)
            total = total + select(at < count // 8, part, Float32(0))
        total = warp_sum(total)
        if t.lane == 0:
            scale = rsqrt(total * Float32(1.0 / count) + Float32(eps))
            store_shared(t.small + SCALE_AT + 4 * t.warp, Float32, scale)
    t.sync()


@cute.jit
def scale_of_rows(t, name, first, count, eps):
    """Row scales of columns ``first .. first + count`` of a bf16 field [B, columns]; one warp a row."""
    if t.warp < t.B:
        rounds = (count // 8 + 31) // 32
        words = cute.make_rmem_tensor(4 * rounds, Int32)
        for i in cutlass.range_constexpr(rounds):
            at = cutlass.min(t.lane + 32 * i, count // 8 - 1)
            piece = load4(t.row(name, t.warp, first + 8 * at))
            for j in cutlass.range_constexpr(4):
                words[4 * i + j] = piece[j]
        total = Float32(0)
        for i in cutlass.range_constexpr(rounds):
            part = Float32(0)
            for j in cutlass.range_constexpr(4):
                w = words[4 * i + j]
                part = part + low(w) * low(w) + high(w) * high(w)
            total = total + select(t.lane + 32 * i < count // 8, part, Float32(0))
        total = warp_sum(total)
        if t.lane == 0:
            scale = rsqrt(total * Float32(1.0 / count) + Float32(eps))
            store_shared(t.small + SCALE_AT + 4 * t.warp, Float32, scale)
    t.sync()


def normed_word(word, gain, scale):
    """Two packed numbers, normed, times their packed gains, rounded where the model rounds."""
    a = round_bf16(low(word) * scale) * low(gain)
    b = round_bf16(high(word) * scale) * high(gain)
    return pack_bf16(a, b)


def resident_registers(chunks, blocks):
    """Registers of a lane for a vector that stays in them: chunks of ``blocks`` blocks."""
    return 4 * chunks * (-(-blocks // CONSUMER_WARPS))


@cute.jit
def load_resident(t, x, source, row_bytes, gain, tile: cutlass.Constexpr, parts: cutlass.Constexpr):
    """Fill ``x``, the registers of a whole normed vector of ``tile.columns`` columns.

    Chunks pass through scratch, as many at a time as fit. All loads of a pass are on their way together,
    and with them the sums of squares: one trip to memory a pass.

    Args:
        source: address of the raw vectors, ``row_bytes`` a row; ``gain``: of their gains.
        parts: arguments of :func:`scale_from_parts`; None if the scales are in shared memory.
    """
    columns = tile.chunk
    fit = max(1, g.SCRATCH_BYTES // (t.B * (2 * columns + ROW_PADDING)))
    for c0 in cutlass.range_constexpr(0, tile.chunks, fit):
        now = min(fit, tile.chunks - c0)
        pitch = 2 * now * columns + ROW_PADDING
        units = min(now * columns, tile.columns - c0 * columns) // 8
        mine = -(-units // g.CONSUMERS)
        raw = cute.make_rmem_tensor(4 * mine * t.B, Int32)
        gains = cute.make_rmem_tensor(4 * mine, Int32)
        for i in cutlass.range_constexpr(mine):
            at = 16 * cutlass.min(t.tid + g.CONSUMERS * i, units - 1) + 2 * c0 * columns
            _keep(gains, 4 * i, load4(gain + Int64(at)))
            for b in cutlass.range_constexpr(t.B):
                _keep(raw, 4 * (i * t.B + b), load4(source + Int64(b * row_bytes + at)))
        if cutlass.const_expr(parts is not None and c0 == 0):
            scale_from_parts(t, *parts)
        else:
            t.sync()
        for i in cutlass.range_constexpr(mine):
            unit = t.tid + g.CONSUMERS * i
            if unit < units:
                for b in cutlass.range_constexpr(t.B):
                    scale = load_shared(t.small + SCALE_AT + 4 * b, Float32)
                    words = [
                        normed_word(raw[4 * (i * t.B + b) + j], gains[4 * i + j], scale) for j in range(4)
                    ]
                    store4_shared(t.scratch + b * pitch + 16 * unit, words)
        t.sync()
        fragments(t, x, tile, c0, now, pitch, units)
    t.sync()


def _keep(registers, at, words):
    for j in range(4):
        registers[at + j] = words[j]


@cute.jit
def fragments(
    t,
    x,
    tile: cutlass.Constexpr,
    c0: cutlass.Constexpr,
    now: cutlass.Constexpr,
    pitch,
    units: cutlass.Constexpr,
):
    """This lane's registers of chunks ``c0 .. c0 + now`` out of scratch."""
    blocks = tile.chunk // 32
    mine = -(-blocks // CONSUMER_WARPS)
    token, piece = t.lane >> 2, t.lane & 3
    for c in cutlass.range_constexpr(now):
        for j in cutlass.range_constexpr(mine):
            block = t.warp + CONSUMER_WARPS * j
            at = ((c0 + c) * mine + j) * 4
            for i in cutlass.range_constexpr(4):
                x[at + i] = Int32(0)
            unit = (c * tile.chunk + 32 * block) // 8 + piece
            if (token < t.B) & (block < blocks) & (unit < units):
                words = load4_shared(t.scratch + token * pitch + 16 * unit)
                for i in cutlass.range_constexpr(4):
                    x[at + i] = words[i]


__all__ = [
    "load8_rounded",
    "load_resident",
    "normed_word",
    "resident_registers",
    "scale_from_parts",
    "scale_of_rows",
    "scale_of_taken",
]
