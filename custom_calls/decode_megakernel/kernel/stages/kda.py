"""KDA_STEP: everything between KDA's projections and o_proj, for one (head, row) unit after another.

::

    q, k, v  = round(silu(conv(raw)));   q, k of unit length, q times K^-1/2
    a        = exp(bound sigmoid(rate (z + dt_bias)));   beta = sigmoid(b)
    S       <- a S;   u = beta (v - S k);   o = round(S q + u (k q));   S <- S + u k^T
    y        = round( o rsqrt(mean o^2 + eps) o_norm sigmoid(gate) )

S [V, K] float32 comes through the ring (it does not depend on this step), is held in registers (warp w
rows 16 w .. 16 w + 16 of values, lane l columns 4 l .. 4 l + 4 of keys, 64 numbers a lane) and goes back
in place. ``S_new q`` is taken as ``S q + u (k q)``, so both products with S are reduced together: 32 sums
over 32 lanes by halving, 31 exchanges, after which lane r has (S k) of row r and lane 16 + r (S q).
A row that does not run leaves y and touches no state.

Constraints: K = V = 128.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, cute

from .. import geometry as g
from ..context import SUMS_AT, Fixed, Part
from ..flow import release, signal, take, wait
from ..ptx import (
    exp,
    from_lane,
    from_other,
    load,
    load4_shared,
    load_bf16,
    load_shared,
    round_bf16,
    rsqrt,
    select,
    sigmoid,
    store4,
    store_bf16,
    store_shared,
    warp_sum,
)

WIDTH = 128
"""Key and value channels of a head."""
ROWS = 16
"""Rows of S that a warp holds."""
Q_AT, K_AT, V_AT, DECAY_AT = 0, 512, 1024, 1536
"""float32 vectors of a unit in scratch."""
L2_EPS = 1e-6


@cute.jit
def kda_step(t, record, k):
    """All units of this SM's part."""
    part = Part(t, record)
    wait(t, record)
    for i in cutlass.range(part.n, unroll=1):
        unit = part.g0 + i
        head = unit // t.B
        k = step_unit(t, part.place, head, unit - head * t.B, k)
    signal(t, record)
    return k


class Channel(Fixed):
    """Registers of one channel of the short convolution: its raw input, window and taps."""

    def __init__(self, taps):
        self.x, self.weight = cute.make_rmem_tensor(taps, Float32), cute.make_rmem_tensor(taps, Float32)


def window_at(t, place, b, i, channel):
    """Address of the i-th oldest input of a channel in row b's window."""
    channels = t.p.kda_heads * (2 * t.p.K + t.p.V)
    taps = t.p.config.short_conv_kernel_size
    window = t.pointer(t.geo.kda_entry + 2 * place + 1)
    return window + (Int64(b * (taps - 1) + i) * channels + Int64(channel)) * 2


def load_channel(t, c, place, b, channel):
    """All of a channel's loads, on their way together."""
    p = t.p
    taps = p.config.short_conv_kernel_size
    for i in range(taps - 1):
        c.x[i] = load_bf16(window_at(t, place, b, i, channel))
    c.x[taps - 1] = load_bf16(t.row("kda.proj", b, p.K + p.kda_heads + channel))
    for i in range(taps):
        at = i * p.kda_heads * (2 * p.K + p.V)
        c.weight[i] = load(t.stacked("kda.taps", place, at + channel), Float32)


def convolve(t, c):
    """round(silu(sum of taps))."""
    total = Float32(0)
    for i in range(t.p.config.short_conv_kernel_size):
        total = total + c.x[i] * c.weight[i]
    return round_bf16(total * sigmoid(total))


@cute.jit
def move_window(t, c, place, b, channel):
    """The window moves on by one token."""
    for i in cutlass.range_constexpr(t.p.config.short_conv_kernel_size - 1):
        store_bf16(window_at(t, place, b, i, channel), c.x[i + 1])


@cute.jit
def vectors(t, place, head, b):
    """q, k (not yet of unit length), v and the decay to scratch; sums of squares of q and k to SUMS."""
    p = t.p
    half = t.tid // WIDTH  # 0: q, then v; 1: k, then the decay
    i = t.tid - half * WIDTH
    keys = p.kda_heads * p.K
    first, second = Channel(p.config.short_conv_kernel_size), Channel(p.config.short_conv_kernel_size)
    own, value = half * keys + head * WIDTH + i, 2 * keys + head * WIDTH + i
    load_channel(t, first, place, b, own)
    load_channel(t, second, place, b, value)
    z = load_bf16(t.row("kda.z", b, head * WIDTH + i))
    bias = load(t.stacked("kda.dt_bias", place, head * WIDTH + i), Float32)
    rate = load(t.stacked("kda.rate", place, head), Float32)
    x = convolve(t, first)
    store_shared(t.scratch + half * K_AT + 4 * i, Float32, x)
    square = warp_sum(x * x)
    if t.lane == 0:
        store_shared(t.small + SUMS_AT + 4 * t.warp, Float32, square)
    run = t.runs(b)
    if run == 1:
        move_window(t, first, place, b, own)
    if half == 0:
        store_shared(t.scratch + V_AT + 4 * i, Float32, convolve(t, second))
        if run == 1:
            move_window(t, second, place, b, value)
    else:
        decay = exp(Float32(p.config.kda_gate_lower_bound) * sigmoid(rate * (z + bias)))
        store_shared(t.scratch + DECAY_AT + 4 * i, Float32, decay)


def _length(t, first):
    """rsqrt of a sum of squares that four warps left."""
    total = Float32(0)
    for w in range(4):
        total = total + load_shared(t.small + SUMS_AT + 4 * (first + w), Float32)
    return rsqrt(total + Float32(L2_EPS))


@cute.jit
def read_state(t, S, k):
    """This warp's rows of the state, out of the ring."""
    pieces = 4 * WIDTH * WIDTH // g.STATE_PIECE_BYTES
    warps = 8 // pieces  # warps whose rows one piece holds
    for piece in cutlass.range_constexpr(pieces):
        tile = take(t, k)
        if t.warp // warps == piece:
            rows = tile + (t.warp % warps) * (ROWS * WIDTH * 4)
            for r in cutlass.range_constexpr(ROWS):
                words = load4_shared(rows + r * (WIDTH * 4) + t.lane * 16, Float32)
                for c in cutlass.range_constexpr(4):
                    S[4 * r + c] = words[c]
        release(t, k)
        k += 1
    return k


def halve(values, lane):
    """Sums over 32 lanes of 32 numbers each: lane l is left with the sum of number l."""
    mask = 16
    while mask:
        n = len(values) // 2
        upper = (lane & mask) != 0
        kept = []
        for a, b in zip(values[:n], values[n:], strict=True):
            kept.append(select(upper, b, a) + from_other(select(upper, a, b), mask))
        values, mask = kept, mask // 2
    return values[0]


@cute.jit
def step_unit(t, place, head, b, k):
    """One (head, row)."""
    p = t.p
    vectors(t, place, head, b)
    value = ROWS * t.warp + (t.lane & (ROWS - 1))
    gate_at = p.K + p.kda_heads * (1 + 2 * p.K + p.V) + head * WIDTH
    gate = load_bf16(t.row("kda.proj", b, gate_at + value))
    norm = load(t.stacked("kda.o_norm", place, value), Float32)
    beta = sigmoid(load_bf16(t.row("kda.proj", b, p.K + head)))
    S = cute.make_rmem_tensor(4 * ROWS, Float32)
    for i in cutlass.range_constexpr(4 * ROWS):
        S[i] = Float32(0)
    k = read_state(t, S, k)
    t.sync()
    qn = _length(t, 0) * Float32(WIDTH**-0.5)
    kn = _length(t, 4)
    q = [x * qn for x in _four(t, Q_AT)]
    key = [x * kn for x in _four(t, K_AT)]
    decay = _four(t, DECAY_AT)
    for r in cutlass.range_constexpr(ROWS):
        for c in cutlass.range_constexpr(4):
            S[4 * r + c] = S[4 * r + c] * decay[c]
    dots = [_dot(S, r, key) for r in range(ROWS)] + [_dot(S, r, q) for r in range(ROWS)]
    mine = halve(dots, t.lane)
    kq = warp_sum(key[0] * q[0] + key[1] * q[1] + key[2] * q[2] + key[3] * q[3])
    v = load_shared(t.scratch + V_AT + 4 * value, Float32)
    u = beta * (v - mine)  # lanes 0..15
    o = round_bf16(from_other(mine, 16) + u * kq)
    update(t, place, head, b, S, key, u)
    square = warp_sum(select(t.lane < ROWS, o * o, Float32(0)))
    t.sync()  # all have read the sums of q and k
    if t.lane == 0:
        store_shared(t.small + SUMS_AT + 4 * t.warp, Float32, square)
    t.sync()
    total = Float32(0)
    for w in cutlass.range_constexpr(8):
        total = total + load_shared(t.small + SUMS_AT + 4 * w, Float32)
    if t.lane < ROWS:
        scale = rsqrt(total * Float32(1.0 / WIDTH) + Float32(p.config.rms_norm_eps))
        store_bf16(t.row("kda.y", b, head * WIDTH + value), o * scale * norm * sigmoid(gate))
    t.sync()  # scratch and sums are free for the next unit
    return k


def _four(t, at):
    """This lane's four key channels of a vector in scratch."""
    words = load4_shared(t.scratch + at + 16 * t.lane, Float32)
    return [words[c] for c in range(4)]


def _dot(S, r, x):
    return S[4 * r] * x[0] + S[4 * r + 1] * x[1] + S[4 * r + 2] * x[2] + S[4 * r + 3] * x[3]


@cute.jit
def update(t, place, head, b, S, key, u):
    """``S + u k^T``, back to global memory if the row runs."""
    p = t.p
    base = t.pointer(t.geo.kda_entry + 2 * place)
    base = base + Int64(b * p.kda_heads + head) * (4 * WIDTH * WIDTH)
    base = base + Int64(t.warp * (ROWS * WIDTH * 4) + t.lane * 16)
    run = t.runs(b)
    for r in cutlass.range_constexpr(ROWS):
        step = from_lane(u, r)
        words = [S[4 * r + c] + step * key[c] for c in range(4)]
        if run == 1:
            store4(base + Int64(r * WIDTH * 4), words, Float32)


__all__ = ["kda_step"]
