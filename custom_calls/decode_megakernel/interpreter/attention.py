"""Stages of the two attention kinds."""

from __future__ import annotations

import numpy as np

from ..shapes import SPLIT
from .common import end_matrix, f32, normed_input, rms_rows, sigmoid
from .machine import Piece


def kda_in(t: Piece) -> None:
    lo, hi = t.columns(t.plan.kda_rows)
    t.write("kda.proj", lo, t.round(t.product(normed_input(t))).T[: hi - lo])


def kda_decay(t: Piece) -> None:
    lo, hi = t.columns(t.plan.kda_heads * t.plan.K)
    t.write("kda.z", lo, t.round(t.product(t.read_all("kda.proj").T)).T[: hi - lo])


def kda_step(t: Piece) -> None:
    """The delta rule of this piece's (head, row) units, their states updated in place."""
    for unit in range(t.g0, t.g1):
        head, b = divmod(unit, t.plan.B)
        y, S, conv = _kda_unit(t, unit, head, b)
        t.write("kda.y", unit, y[None])
        keep = not t.rows.run[b]
        i = t.ins.layer
        t.write(f"S.{i}", unit, t.read(f"S.{i}", unit, unit + 1) if keep else S[None])
        t.write(f"conv.{i}", unit, t.read(f"conv.{i}", unit, unit + 1) if keep else conv[None])


def _l2(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x) + np.float32(1e-6))


def _kda_unit(t: Piece, unit: int, head: int, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, attn, c = t.plan, t.layer["self_attn"], t.plan.config
    K, V, N = p.K, p.V, p.kda_heads

    def of(start: int, width: int) -> np.ndarray:
        at = K + N + start + head * width
        return t.read("kda.proj", at, at + width)[:, b]

    gate = of(N * (2 * K + V), V)
    raw = np.concatenate([of(0, K), of(N * K, K), of(2 * N * K, V)])
    window = np.concatenate([t.read(f"conv.{t.ins.layer}", unit, unit + 1)[0], raw[None]])
    taps = np.concatenate(
        [
            f32(attn[f"{name}_conv1d"])[head * width : (head + 1) * width, 0]
            for name, width in (("q", K), ("k", K), ("v", V))
        ]
    )
    mixed = np.sum(window * taps.T, axis=0)
    mixed = t.round(mixed * sigmoid(mixed))
    q, k, v = _l2(mixed[:K]) * np.float32(K**-0.5), _l2(mixed[K : 2 * K]), mixed[2 * K :]
    z = t.read("kda.z", head * K, (head + 1) * K)[:, b] + f32(attn["dt_bias"])[head * K : (head + 1) * K]
    g = np.float32(c.kda_gate_lower_bound) * sigmoid(np.exp(f32(attn["A_log"])[head]) * z)
    beta = sigmoid(t.read("kda.proj", K + head, K + head + 1)[0, b])
    S = t.read(f"S.{t.ins.layer}", unit, unit + 1)[0] * np.exp(g)
    S = S + np.outer(beta * (v - S @ k), k)
    o = t.round(S @ q)
    scale = 1.0 / np.sqrt(np.mean(o * o) + np.float32(c.rms_norm_eps))
    y = t.round(o * scale.astype(np.float32) * f32(attn["o_norm"]) * sigmoid(gate))
    return y, S, window[1:]


def kda_out(t: Piece) -> None:
    y = t.read_all("kda.y").reshape(t.plan.kda_heads, t.plan.B, t.plan.V)
    end_matrix(t, t.product(y.transpose(1, 0, 2).reshape(t.plan.B, -1)))


def mla_in(t: Piece) -> None:
    lo, hi = t.columns(t.plan.mla_rows)
    t.write("mla.proj", lo, t.round(t.product(normed_input(t))).T[: hi - lo])


def mla_query(t: Piece) -> None:
    p = t.plan
    lo, hi = t.columns(p.mla_heads * p.config.qk_head_dim)
    x = rms_rows(t, t.read_all("mla.proj").T, t.layer["self_attn"]["q_a_layernorm"], p.config.latent_norm_eps)
    t.write("mla.q", lo, t.round(t.product(x)).T[: hi - lo])


def mla_row(t: Piece) -> None:
    """The cache row [c | r] of each row's token: to the cache, and to the attention stages of this step."""
    p = t.plan
    a = t.read_all("mla.proj").T[t.g0 : t.g1]
    c = rms_rows(t, a[:, : p.C], t.layer["self_attn"]["kv_a_layernorm"], p.config.latent_norm_eps)
    row = np.concatenate([c, a[:, p.C :]], axis=-1)
    t.write("mla.row", t.g0, row)
    t.write(f"cache.{t.ins.layer}", t.g0, row)


def mla_absorb(t: Piece) -> None:
    p = t.plan
    lo, hi = t.columns(p.mla_heads * p.C)
    heads = np.arange(lo, hi) // p.C
    width = p.config.qk_head_dim
    first, last = int(heads[0]), int(heads[-1])
    q = t.read("mla.q", first * width, (last + 1) * width).reshape(-1, width, p.B)
    nope = q[heads - first, : p.config.qk_nope_head_dim]  # [rows, K, B]
    w = t.weight()[: hi - lo, : p.config.qk_nope_head_dim]
    t.write("mla.qt", lo, t.round(np.einsum("rk,rkb->rb", w, nope)))


def mla_attend(t: Piece) -> None:
    """Partial softmax of every (row, lane, head group) of this piece; an empty one has mass 0."""
    p = t.plan
    heads = p.mla_heads // p.head_groups
    q = t.read_all("mla.q").reshape(p.mla_heads, p.config.qk_head_dim, p.B)
    qt = t.read_all("mla.qt").reshape(p.mla_heads, p.C, p.B)
    new = t.read_all("mla.row")
    lengths = t.read_all("lengths").astype(np.int64)
    for unit in range(t.g0, t.g1):
        rest, group = divmod(unit, p.head_groups)
        b, lane = divmod(rest, p.lanes)
        mine = slice(group * heads, (group + 1) * heads)
        query = np.concatenate([qt[mine, :, b], q[mine, p.config.qk_nope_head_dim :, b]], axis=-1)
        part = np.full((heads, p.C + 2), np.nan, np.float32)
        part[:, p.C], part[:, p.C + 1] = -np.inf, 0.0
        if t.rows.run[b]:
            old = t.rows.old[t.ins.layer][b]
            for split in range(lane, int(lengths[b]) // SPLIT + 1, p.lanes):
                rows = f32(old[split * SPLIT : min((split + 1) * SPLIT, int(lengths[b]))])
                if split == lengths[b] // SPLIT:  # the new token closes the last split
                    rows = np.concatenate([rows, new[b : b + 1]])
                part = _add_split(t, part, query, rows)
        t.write("mla.part", unit, part[None])


def _add_split(t: Piece, part: np.ndarray, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    C = t.plan.C
    score = (query @ rows.T) * np.float32(t.plan.config.qk_head_dim**-0.5)
    peak = np.maximum(part[:, C], score.max(axis=-1))
    weight = np.exp(score - peak[:, None])
    keep = np.exp(part[:, C] - peak)
    acc = np.where(part[:, C + 1 :] > 0, part[:, :C], 0.0) * keep[:, None] + t.round(weight) @ rows[:, :C]
    mass = part[:, C + 1] * keep + weight.sum(axis=-1)
    return np.concatenate([acc, peak[:, None], mass[:, None]], axis=-1).astype(np.float32)


def mla_value(t: Piece) -> None:
    """Merge the lanes in their order, then W_UV and the output gate, on this piece's (head, value) rows."""
    p = t.plan
    lo, hi = t.columns(p.mla_values)
    heads = np.arange(lo, hi) // p.config.v_head_dim
    parts = t.read_all("mla.part").reshape(p.B, p.lanes, p.mla_heads, p.C + 2)
    context = np.zeros((p.B, p.mla_heads, p.C), np.float32)
    peak = parts[..., p.C].max(axis=1)
    mass = np.zeros((p.B, p.mla_heads), np.float32)
    for lane in range(p.lanes):
        full = parts[:, lane, :, p.C + 1] > 0
        scale = np.where(full, np.exp(parts[:, lane, :, p.C] - np.where(full, peak, 0.0)), 0.0)
        context += np.where(full[..., None], parts[:, lane, :, : p.C], 0.0) * scale[..., None]
        mass += parts[:, lane, :, p.C + 1] * scale
    context = t.round(context / np.where(mass > 0, mass, 1.0)[..., None])
    o = t.round(np.einsum("rc,brc->br", t.weight()[: hi - lo, : p.C], context[:, heads]))
    gate = t.read("mla.proj", p.Q + p.C + p.R + lo, p.Q + p.C + p.R + hi).T
    t.write("mla.y", lo, t.round(o * sigmoid(gate)).T)


def mla_out(t: Piece) -> None:
    end_matrix(t, t.product(t.read_all("mla.y").T))


__all__ = [
    "kda_decay",
    "kda_in",
    "kda_out",
    "kda_step",
    "mla_absorb",
    "mla_attend",
    "mla_in",
    "mla_out",
    "mla_query",
    "mla_row",
    "mla_value",
]
