"""Float64 reference of both FFN kinds: the dense SiTU MLP and the LatentMoE."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.reference_math import rms, sigmoid, situ_glu
from support.reference_weights import Arch

Weights = dict[str, Any]


def dense_ffn(w: Weights, arch: Arch, x: np.ndarray) -> np.ndarray:
    """down(SiTU(gate x, up x)), also the shared expert."""
    h = situ_glu(x @ w["gate_proj"].T, x @ w["up_proj"].T, arch.situ_beta, arch.situ_linear_beta)
    return h @ w["down_proj"].T


def choose(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Ids of the ``top_k`` largest of scores [..., E], best first; of equals the lowest id first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]


def route(
    w: Weights, arch: Arch, x: np.ndarray, forced_ids: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Router logits, selection scores, expert ids [..., A] and mixing weights [..., A].

    The correction bias takes part in the selection only; the weights come from the plain scores.
    """
    logits = x @ w["gate"].T
    s = sigmoid(logits)
    selection = s + w["e_score_correction_bias"]
    ids = choose(selection, arch.top_k) if forced_ids is None else np.asarray(forced_ids)
    weights = np.take_along_axis(s, ids, -1)
    if arch.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return {
        "router_logits": logits,
        "selection": selection,
        "topk_ids": ids,
        "topk_w": weights * arch.routed_scale,
    }


def latent_expert_sum(
    experts: Weights, arch: Arch, latent: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """sum_i w_i w2_i SiTU(w1_i l, w3_i l) of latents [T,L], ids and weights [T,A]."""
    total = np.zeros_like(latent)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        l_in = latent[token]
        h = situ_glu(
            l_in @ experts["w1"][expert].T,
            l_in @ experts["w3"][expert].T,
            arch.situ_beta,
            arch.situ_linear_beta,
        )
        np.add.at(total, token, weights[token, slot, None] * (h @ experts["w2"][expert].T))
    return total


def moe_layer(
    w: Weights, arch: Arch, x: np.ndarray, forced_ids: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output [B,T,D] and intermediates of the LatentMoE for normed input x [B,T,D]."""
    taps = route(w, arch, x, forced_ids)
    latent = x @ w["routed_expert_down_proj"].T
    flat = (-1, arch.top_k)
    y = latent_expert_sum(
        w["experts"],
        arch,
        latent.reshape(-1, latent.shape[-1]),
        taps["topk_ids"].reshape(flat),
        taps["topk_w"].reshape(flat),
    ).reshape(latent.shape)
    taps["routed_latent_sum"] = y
    routed = rms(y, w["routed_expert_norm"], arch.eps) @ w["routed_expert_up_proj"].T
    return routed + dense_ffn(w["shared_experts"], arch, x), taps
