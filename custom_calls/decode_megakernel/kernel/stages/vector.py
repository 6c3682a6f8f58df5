"""The input vector of a matrix stage, from global memory into the registers of the lanes that use it.

A lane ``4 g + q`` of a warp holds, for every block of 32 columns that its warp takes, columns
``8 q .. 8 q + 8`` of token g: the columns that it multiplies with its 16 bytes of the packed weight.
Warp w takes blocks ``w, w + 8, ..`` of every chunk. Lanes of tokens the batch has not hold zeros.

``normed``:  x = round(round(h * scale_b) * gain),  scale_b = rsqrt(sum_sm ssq[b, sm] / n + eps)
is computed once per number by all threads together, and passes through shared memory.
"""
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202 (values of the tracing compiler)

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


@cute.jit
def scale_of_rows(t, name, first, count, eps):
    """Row scales of columns ``first .. first + count`` of a bf16 field [B, columns]; one warp a row."""
    if t.warp < t.B:
        total = Float32(0)
        for i in cutlass.range((count // 8 + 31) // 32, unroll=1):
            at = t.lane + 32 * i
            if at < count // 8:
                words = load4(t.row(name, t.warp, first + 8 * at))
                for j in cutlass.range_constexpr(4):
                    total = total + low(words[j]) * low(words[j]) + high(words[j]) * high(words[j])
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


@cute.jit
def normed_to_shared(t, source, row_bytes, gain, column, columns, pitch):
    """``[B, columns]`` normed numbers from ``column`` on, to scratch with ``pitch`` bytes a row.

    Args:
        source: address of the raw vectors, ``row_bytes`` a row; gain: of their gains.
    """
    units = columns // 8
    for i in cutlass.range(t.tid, t.B * units, g.CONSUMERS, unroll=1):
        b = i // units
        at = column + 8 * (i - b * units)
        raw = load4(source + Int64(b * row_bytes + 2 * at))
        gains = load4(gain + Int64(2 * at))
        scale = load_shared(t.small + SCALE_AT + 4 * b, Float32)
        words = [normed_word(raw[j], gains[j], scale) for j in range(4)]
        store4_shared(t.scratch + b * pitch + 2 * (at - column), words)


def resident_registers(chunks, blocks):
    """Registers of a lane for a vector that stays in them: chunks of ``blocks`` blocks."""
    return 4 * chunks * (-(-blocks // CONSUMER_WARPS))


@cute.jit
def load_resident(t, x, source, row_bytes, gain, chunks, chunk_columns, columns):
    """Fill ``x``, the registers of a whole normed vector of ``columns`` columns in ``chunks`` chunks.

    The scales must be in shared memory. Chunks pass through scratch, as many at a time as fit.
    """
    blocks = chunk_columns // 32
    mine = -(-blocks // CONSUMER_WARPS)
    fit = max(1, g.SCRATCH_BYTES // (t.B * (2 * chunk_columns + ROW_PADDING)))
    token, piece = t.lane >> 2, t.lane & 3
    for c0 in cutlass.range_constexpr(0, chunks, fit):
        now = min(fit, chunks - c0)
        pitch = 2 * now * chunk_columns + ROW_PADDING
        real = min(now * chunk_columns, columns - c0 * chunk_columns)
        t.sync()
        normed_to_shared(t, source, row_bytes, gain, c0 * chunk_columns, real, pitch)
        t.sync()
        for c in cutlass.range_constexpr(now):
            for j in cutlass.range_constexpr(mine):
                block = t.warp + CONSUMER_WARPS * j
                at = ((c0 + c) * mine + j) * 4
                for i in cutlass.range_constexpr(4):
                    x[at + i] = Int32(0)
                column = c * chunk_columns + 32 * block + 8 * piece
                inside = (token < t.B) & (block < blocks) & (column < real)
                if inside:
                    words = load4_shared(t.scratch + token * pitch + 2 * column)
                    for i in cutlass.range_constexpr(4):
                        x[at + i] = words[i]
    t.sync()


__all__ = [
    "ROW_PADDING",
    "load_resident",
    "normed_to_shared",
    "normed_word",
    "resident_registers",
    "scale_from_parts",
    "scale_of_rows",
]
