"""Functions several stages share, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..shapes import Plan
from ..stages import sublayer
from .machine import Piece


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def f32(x: Any) -> Any:
    return np.asarray(x).astype(np.float32)


def rms_rows(
    t: Piece, x: np.ndarray, gain: np.ndarray, eps: float, mean: np.ndarray | None = None
) -> np.ndarray:
    """rms norm of [B, n], rounded before and after the gain; ``mean`` of squares [B] if known."""
    if mean is None:
        mean = np.mean(x * x, axis=-1)
    scale = (1.0 / np.sqrt(mean + np.float32(eps))).astype(np.float32)
    return t.round(t.round(x * scale[:, None]) * f32(gain))


def normed_input(t: Piece) -> np.ndarray:
    """[B, D]: the sublayer's mixture, normed."""
    p, params = t.plan, t.m.weights.params
    sub = sublayer(t.ins.op, t.ins.layer)
    if sub == 2 * p.layers:
        gain = params["norm"]
    else:
        gain = t.layer["post_attention_layernorm" if sub % 2 else "input_layernorm"]
    mean = t.read_all("h.ssq").sum(axis=0) / np.float32(p.D)
    return rms_rows(t, t.read_all("h").T, gain, p.config.rms_norm_eps, mean)


def _direction(t: Piece, sub: int) -> np.ndarray:
    params = t.m.weights.params
    if sub == 2 * t.plan.layers:
        norm, proj = params["output_attn_res_norm"], params["output_attn_res_proj"]
    else:
        name = "mlp_res" if sub % 2 else "self_attention_res"
        layer = params["layers"][sub // 2]
        norm, proj = layer[f"{name}_norm"], layer[f"{name}_proj"]
    return f32(norm) * f32(proj[0])


def add_residual(t: Piece, out: np.ndarray) -> None:
    """Finish a sublayer on this piece's columns: running sum, and partial scores of the next mixture.

    Args:
        out: [B, 8 (g1 - g0)], the sublayer's output rounded.
    """
    p: Plan = t.plan
    sub = sublayer(t.ins.op, t.ins.layer, t.ins.c0)
    lo, hi = t.columns(p.D)
    pre = out[:, : hi - lo]
    if not (sub % 2 == 0 and p.config.starts_block(t.ins.layer)):
        pre = t.round(t.read(f"pre.{sub % 2}", lo, hi).T + pre)
    t.write(f"pre.{(sub + 1) % 2}", lo, pre.T)
    count = p.snapshots(sub + 1)
    sources = [t.read(f"block.{j}", lo, hi).T for j in range(count)] + [pre]
    u = _direction(t, sub + 1)[lo:hi]
    score = np.zeros((1, p.B, p.max_sources, 2), np.float32)
    for j, v in enumerate(sources):
        score[0, :, j, 0] = np.sum(v * v, axis=-1)
        score[0, :, j, 1] = np.sum(v * u, axis=-1)
    t.write("score", t.sm, score)


def end_matrix(t: Piece, out: np.ndarray) -> None:
    """What becomes of the last product of a sublayer: its end, or in a share a part of the ranks' sum.

    Args:
        out: float32 [B, 8 (g1 - g0)], not rounded.
    """
    if t.plan.ways == 1:
        add_residual(t, t.round(out))
        return
    lo, hi = t.columns(t.plan.D)
    t.write("give", lo, out.T[: hi - lo])


def situ(t: Piece, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SiTU of rounded gate and up, rounded."""
    beta = np.float32(t.plan.config.activation_situ_beta)
    linear = np.float32(t.plan.config.activation_situ_linear_beta)
    g, u = t.round(gate), t.round(up)
    return t.round(beta * np.tanh(g / beta) * sigmoid(g) * (linear * np.tanh(u / linear)))


__all__ = ["add_residual", "end_matrix", "f32", "normed_input", "rms_rows", "sigmoid", "situ"]
