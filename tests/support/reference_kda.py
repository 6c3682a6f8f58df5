"""Float64 reference of the KDA sublayer: one token after the other, never in chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.reference_math import rms, sigmoid, silu
from support.reference_weights import Arch

Weights = dict[str, Any]
TAPS = 3  # raw inputs kept before the current one: the convolution is four wide


def kda_sizes(w: Weights, arch: Arch) -> tuple[int, int]:
    """(key size, value size) of one head, from the weights."""
    return w["k_proj"].shape[0] // arch.kda_heads, w["v_proj"].shape[0] // arch.kda_heads


def kda_init_state(w: Weights, arch: Arch, batch: int) -> dict[str, np.ndarray]:
    """Zero state: S [B,N,V,K] (V-major) and conv [B,3,q|k|v channels], oldest first."""
    k, v = kda_sizes(w, arch)
    channels = arch.kda_heads * (2 * k + v)
    return {"S": np.zeros((batch, arch.kda_heads, v, k)), "conv": np.zeros((batch, TAPS, channels))}


def short_conv(raw: np.ndarray, history: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """silu(sum_i taps[c,0,i] x_{t-3+i}[c]) of raw [B,T,ch] after history [B,3,ch]; tap 3 is now."""
    x = np.concatenate([history, raw], 1)
    length = raw.shape[1]
    windows = np.stack([x[:, i : i + length] for i in range(TAPS + 1)], -1)
    return silu((windows * taps[:, 0]).sum(-1))


def log_decay(w: Weights, arch: Arch, x: np.ndarray) -> np.ndarray:
    """g [B,T,N,K] in (lower bound, 0): bound * sigmoid(exp(A_log[n]) (z + dt_bias))."""
    z = x @ w["f_a_proj"].T @ w["f_b_proj"].T + w["dt_bias"]
    z = z.reshape(*x.shape[:2], arch.kda_heads, -1)
    return arch.gate_lower_bound * sigmoid(np.exp(w["A_log"])[:, None] * z)


def l2_normalize(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """o [B,T,N,V] and the last state [B,N,V,K].

    Per token: decay the key channels, write beta (v - S k) k^T against the decayed state, then
    read with q. q, k, g [B,T,N,K]; v [B,T,N,V]; beta [B,T,N]; q and k already normalised and scaled.
    """
    outputs = []
    s = state
    for t in range(q.shape[1]):
        s = s * np.exp(g[:, t])[:, :, None, :]
        error = v[:, t] - np.einsum("bnvk,bnk->bnv", s, k[:, t])
        s = s + np.einsum("bnv,bnk->bnvk", beta[:, t, :, None] * error, k[:, t])
        outputs.append(np.einsum("bnvk,bnk->bnv", s, q[:, t]))
    return np.stack(outputs, 1), s


def kda_layer(
    w: Weights, arch: Arch, x: np.ndarray, state: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sublayer output [B,T,D], the state after it, and intermediates, for normed input x [B,T,D]."""
    batch, length, _ = x.shape
    n = arch.kda_heads
    key, value = kda_sizes(w, arch)
    state = state or kda_init_state(w, arch, batch)
    edges = [n * key, 2 * n * key]
    raw = np.concatenate([x @ w[f"{p}_proj"].T for p in "qkv"], -1)
    taps = np.concatenate([w[f"{p}_conv1d"] for p in "qkv"])
    q, k, v = np.split(short_conv(raw, state["conv"], taps), edges, -1)
    q = l2_normalize(q.reshape(batch, length, n, key)) * key**-0.5
    k = l2_normalize(k.reshape(batch, length, n, key))
    v = v.reshape(batch, length, n, value)
    g = log_decay(w, arch, x)
    beta = sigmoid(x @ w["b_proj"].T)
    o, s = delta_rule(q, k, v, g, beta, state["S"])
    gate = sigmoid(x @ w["g_proj"].T).reshape(o.shape)
    y = rms(o, w["o_norm"], arch.eps) * gate
    out = y.reshape(batch, length, -1) @ w["o_proj"].T
    history = np.concatenate([state["conv"], raw], 1)[:, -TAPS:]
    return out, {"S": s, "conv": history}, {"q": q, "k": k, "v": v, "g": g, "beta": beta, "o": o}
