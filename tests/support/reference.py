"""Float64 numpy reference of the whole K3 text model.

Written from the formulas alone and independent of the library, so that it can judge it. Slow and
literal on purpose: token by token, expanded keys, plain lists of residual blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.reference_kda import kda_layer
from support.reference_math import rms, softmax
from support.reference_mla import mla_layer
from support.reference_moe import dense_ffn, moe_layer
from support.reference_weights import Arch, load_tensors, weight_tree

LayerState = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one forward pass gives."""

    logits: np.ndarray
    """[B,T,W]"""
    state: list[LayerState]
    """Per layer: KDA {"S" [B,N,V,K], "conv" [B,3,ch]}, MLA {"cache" [B,S,C+R]}."""
    taps: dict[str, np.ndarray]
    """Every intermediate: "embed", "L3/attn_in", ..., "output_attn_res", "final_norm"."""

    def smallest_margin(self, arch: Arch) -> float:
        """Least gap between the last chosen and the first refused expert over all picks."""
        gaps = [np.inf]
        for name, scores in self.taps.items():
            if name.endswith("/selection") and scores.shape[-1] > arch.top_k:
                ranked = np.sort(scores, -1)[..., ::-1]
                gaps.append(float((ranked[..., arch.top_k - 1] - ranked[..., arch.top_k]).min()))
        return min(gaps)


def attn_res_mix(sources: Sequence[np.ndarray], norm: np.ndarray, proj: np.ndarray, eps: float) -> np.ndarray:
    """softmax_j(<v_j / rms(v_j), norm * proj>)-weighted sum of the raw sources v_j [B,T,D]."""
    v = np.stack(sources)
    k = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
    p = softmax(np.moveaxis(k @ (norm * proj[0]), 0, -1))
    return np.einsum("jbtd,btj->btd", v, p)


def forward(
    w: Mapping[str, Any],
    arch: Arch,
    tokens: np.ndarray,
    state: Sequence[LayerState] | None = None,
    forced_ids: Mapping[int, np.ndarray] | None = None,
) -> Run:
    """Run tokens [B,T] after ``state`` (None: from the start).

    forced_ids: per layer, expert ids [B,T,A] to use instead of the router's own choice.
    """
    taps: dict[str, np.ndarray] = {}
    new_state: list[LayerState] = []
    pre = taps["embed"] = w["embed_tokens"][np.asarray(tokens)]
    blocks: list[np.ndarray] = []

    def mix(layer: Mapping[str, Any], name: str) -> np.ndarray:
        return attn_res_mix([*blocks, pre], layer[f"{name}_norm"], layer[f"{name}_proj"], arch.eps)

    for i, layer in enumerate(w["layers"]):
        tap = {"attn_mix": mix(layer, "self_attention_res") if blocks else pre}
        start = i % arch.block_size == 0
        if start:
            blocks.append(pre)
        tap["attn_in"] = rms(tap["attn_mix"], layer["input_layernorm"], arch.eps)
        attention = kda_layer if arch.layer_types[i] == "kda" else mla_layer
        before = None if state is None else state[i]
        tap["attn_out"], after, inner = attention(layer["self_attn"], arch, tap["attn_in"], before)
        new_state.append(after)
        pre = tap["attn_out"] if start else pre + tap["attn_out"]
        tap["mlp_mix"] = mix(layer, "mlp_res")
        tap["mlp_in"] = rms(tap["mlp_mix"], layer["post_attention_layernorm"], arch.eps)
        if i < arch.dense_layers:
            tap["mlp_out"] = dense_ffn(layer["mlp"], arch, tap["mlp_in"])
        else:
            forced = None if forced_ids is None else forced_ids.get(i)
            tap["mlp_out"], routing = moe_layer(layer["block_sparse_moe"], arch, tap["mlp_in"], forced)
            tap |= routing
        pre = tap["prefix_sum"] = pre + tap["mlp_out"]
        tap["blocks"] = np.stack(blocks, 2)
        taps |= {f"L{i}/{name}": value for name, value in (tap | inner).items()}

    x = taps["output_attn_res"] = mix(w, "output_attn_res")
    x = taps["final_norm"] = rms(x, w["norm"], arch.eps)
    return Run(x @ w["lm_head"].T, new_state, taps)


__all__ = ["Arch", "Run", "attn_res_mix", "forward", "load_tensors", "weight_tree"]
