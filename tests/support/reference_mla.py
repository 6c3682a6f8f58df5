"""Float64 reference of the gated MLA sublayer, in expanded form (keys and values per head)."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.reference_math import rms, sigmoid, softmax
from support.reference_weights import Arch

Weights = dict[str, Any]


def latent_rows(w: Weights, arch: Arch, x: np.ndarray) -> np.ndarray:
    """Cache rows [B,T,C+R] = [normed latent c | raw shared key piece r]; nothing is rotated."""
    a = x @ w["kv_a_proj_with_mqa"].T
    c = w["kv_a_layernorm"].shape[0]
    return np.concatenate([rms(a[..., :c], w["kv_a_layernorm"], arch.latent_eps), a[..., c:]], -1)


def expand_rows(w: Weights, arch: Arch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys [B,S,N,nope+R] = [W_UK c | r] and values [B,S,N,V] = W_UV c of latent rows [B,S,C+R]."""
    c = w["kv_a_layernorm"].shape[0]
    up = w["kv_b_proj"].reshape(arch.mla_heads, -1, c)
    key = np.einsum("nkc,bsc->bsnk", up[:, : arch.nope], rows[..., :c])
    value = np.einsum("nvc,bsc->bsnv", up[:, arch.nope :], rows[..., :c])
    shared = np.broadcast_to(rows[:, :, None, c:], (*key.shape[:3], rows.shape[-1] - c))
    return np.concatenate([key, shared], -1), value


def mla_layer(
    w: Weights, arch: Arch, x: np.ndarray, state: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sublayer output [B,T,D], the state after it (cache [B,S+T,C+R]) and intermediates.

    x [B,T,D] is the normed input; T new tokens follow the S cached ones of ``state``.
    """
    batch, length, _ = x.shape
    rows = latent_rows(w, arch, x)
    cache = rows if state is None else np.concatenate([state["cache"], rows], 1)
    past = cache.shape[1] - length
    q = rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], arch.latent_eps) @ w["q_b_proj"].T
    q = q.reshape(batch, length, arch.mla_heads, arch.nope + arch.rope)
    key, value = expand_rows(w, arch, cache)
    scores = np.einsum("btnk,bsnk->bnts", q, key) * (arch.nope + arch.rope) ** -0.5
    visible = np.arange(cache.shape[1])[None, :] <= past + np.arange(length)[:, None]
    p = softmax(np.where(visible, scores, -np.inf))
    o = np.einsum("bnts,bsnv->btnv", p, value).reshape(batch, length, -1)
    out = (o * sigmoid(x @ w["g_proj"].T)) @ w["o_proj"].T
    return out, {"cache": cache}, {"rows": rows, "o": o}
