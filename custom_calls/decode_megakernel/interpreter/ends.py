"""First and last stages of a step, and the mixture that opens every sublayer."""

from __future__ import annotations

import numpy as np

from ..stages import sublayer
from .common import add_residual, f32, normed_input
from .machine import Piece


def embed(t: Piece) -> None:
    lo, hi = t.columns(t.plan.D)
    if t.plan.ways > 1:
        t.write("pre.0", lo, t.round(t.read("take", lo, hi)))
        return
    t.write("pre.0", lo, f32(t.m.weights.params["embed_tokens"][t.rows.tokens, lo:hi]).T)


def residual(t: Piece) -> None:
    """The end of a sublayer of a share, on this piece's columns of the ranks' sum."""
    lo, hi = t.columns(t.plan.D)
    add_residual(t, t.round(t.read("take", lo, hi).T))


def mix(t: Piece) -> None:
    """The AttnRes mixture on this piece's columns, its sum of squares, and the snapshot if a block starts."""
    p = t.plan
    sub = sublayer(t.ins.op, t.ins.layer, t.ins.c0)
    lo, hi = t.columns(p.D)
    pre = t.read(f"pre.{sub % 2}", lo, hi)
    count = p.snapshots(sub)
    h = pre
    if sub:
        part = t.read_all("score").sum(axis=0)[:, : count + 1]  # [B, J, 2], SM after SM
        score = part[..., 1] / np.sqrt(part[..., 0] / np.float32(p.D) + np.float32(p.config.rms_norm_eps))
        weight = np.exp(score - score.max(axis=-1, keepdims=True))
        weight = weight / weight.sum(axis=-1, keepdims=True)
        total = np.zeros_like(pre)
        for j in range(count):
            total += weight[:, j] * t.read(f"block.{j}", lo, hi)
        h = t.round(total + weight[:, count] * pre)
    t.write("h", lo, h)
    t.write("h.ssq", t.sm, np.sum(h * h, axis=0)[None])
    if t.declares_write(f"block.{count}"):
        t.write(f"block.{count}", lo, pre)


def lm_head(t: Piece) -> None:
    """Logits of this piece's tokens, and the best of them per row (the lowest id on ties)."""
    lo, hi = t.columns(t.plan.W)
    y = t.product(normed_input(t))[:, : hi - lo]
    at = y.argmax(axis=-1)
    best = np.stack([y[np.arange(t.plan.B), at], (lo + at).astype(np.float32)], axis=-1)
    t.write("best", t.sm, best[None])
    other = np.where(t.rows.refused, np.nan, 0.0)[:, None]
    t.write("logits", lo, np.where(t.rows.run[:, None], y, other).T)


def finish(t: Piece) -> None:
    best = t.read_all("best")  # [SMs, B, 2], ids ascending with the SM
    at = best[:, :, 0].argmax(axis=0)
    t.write("token", 0, best[at, np.arange(t.plan.B), 1])
    t.write("lengths", 0, t.read_all("lengths") + t.rows.run)
    t.write("status", 0, (t.read_all("status").astype(np.int64) | t.rows.bits).astype(np.float64))


__all__ = ["embed", "finish", "lm_head", "mix", "residual"]
