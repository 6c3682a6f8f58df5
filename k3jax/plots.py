"""Pictures of what a model does. Needs matplotlib: ``pip install 'k3jax[viz]'``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import K3Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _figure(**options: Any) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'k3jax[viz]'") from error
    return Figure(**options)


def routing_weights(captured: Mapping[str, Any], config: K3Config, row: int = 0) -> dict[int, np.ndarray]:
    """Mixing weights of one prompt: MoE layer -> float32 [T, E], 0 where an expert was not chosen.

    Args:
        captured: from :func:`k3jax.capture`.
        row: which row of the batch.
    """
    weights = {}
    for layer in range(config.num_hidden_layers):
        if not config.is_moe(layer):
            continue
        ids = np.asarray(captured[f"layers.{layer}.topk_ids"])[row]
        full = np.zeros((ids.shape[0], config.num_experts), np.float32)
        np.put_along_axis(full, ids, np.asarray(captured[f"layers.{layer}.topk_w"])[row], axis=1)
        weights[layer] = full
    if not weights:
        raise ValueError("routing_weights: this model has no LatentMoE layer")
    return weights


def plot_routing(
    captured: Mapping[str, Any],
    config: K3Config,
    tokens: Sequence[str] | None = None,
    layer: int | None = None,
    row: int = 0,
) -> Figure:
    """How one prompt is routed: a layer's weights per token, and every layer's load per expert.

    Args:
        captured: from :func:`k3jax.capture`.
        tokens: a label per token of the prompt.
        layer: the MoE layer shown token by token; default the middle one.
        row: which row of the batch.
    """
    weights = routing_weights(captured, config, row)
    layers = list(weights)
    shown = layers[len(layers) // 2] if layer is None else layer
    if shown not in weights:
        raise ValueError(f"layer: expected one of the MoE layers {layers}, got {layer}")
    figure = _figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    image = left.imshow(
        weights[shown].T, aspect="auto", cmap="magma", origin="lower", interpolation="nearest"
    )
    left.set(title=f"layer {shown}: mixing weight per token", xlabel="token", ylabel="expert")
    if tokens is not None:
        left.set_xticks(range(len(tokens)), [t if t.strip() else "␣" for t in tokens], fontsize=7)
    figure.colorbar(image, ax=left, label="weight")
    load = np.stack([w.astype(bool).mean(axis=0) for w in weights.values()])
    image = right.imshow(load, aspect="auto", cmap="viridis", origin="lower", interpolation="nearest")
    right.set(title="share of tokens that chose the expert", xlabel="expert", ylabel="layer")
    right.set_yticks(range(len(layers)), [str(i) for i in layers])
    figure.colorbar(image, ax=right, label="share of tokens")
    return figure


__all__ = ["plot_routing", "routing_weights"]
