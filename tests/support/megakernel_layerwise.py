"""The library's layers one at a time, from any running sum and snapshots: in its dtype or in float32.

What a whole step of many layers is compared with: a layer can begin where the kernel's layer began. Three
programs serve all layers, since snapshots lie in one array, of which a number is taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import K3Config
from k3jax.layers.attn_res import mix
from k3jax.layers.ffn import dense_ffn
from k3jax.layers.kda import kda_step
from k3jax.layers.mla import mla_step
from k3jax.layers.moe import latent_moe
from k3jax.layers.norm import rms_norm
from k3jax.state import State

Stream = tuple[jax.Array, jax.Array, int]
"""Running sum [B, D], snapshots [J, B, D], and how many of them are taken."""


@functools.partial(jax.jit, static_argnames=("config", "kind", "moe", "wide"))
def _layer(
    config: K3Config, kind: str, moe: bool, wide: bool, p: Any, pre: jax.Array, blocks: jax.Array,
    count: jax.Array, starts: jax.Array, state: Any, lengths: jax.Array, run: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """A layer as in :func:`k3jax.model.layer`, the first ``count`` snapshots taken."""
    if wide:
        p, state = (jax.tree.map(_float32, tree) for tree in (p, state))
    eps = config.rms_norm_eps

    def mixed(pre: jax.Array, count: jax.Array, name: str) -> jax.Array:
        there = (jnp.arange(len(blocks)) < count)[:, None, None]
        clean = jnp.where(there, blocks, jnp.zeros((), blocks.dtype))
        h = mix((*clean, pre), p[f"{name}_norm"], p[f"{name}_proj"], eps, count)
        return jnp.where(count == 0, pre, h)

    x = rms_norm(mixed(pre, count, "self_attention_res"), p["input_layernorm"], eps)
    blocks = jnp.where(starts, lax.dynamic_update_slice(blocks, pre[None], (count, 0, 0)), blocks)
    count = count + starts.astype(jnp.int32)
    if kind == "kda":
        out, _ = kda_step(p["self_attn"], x, state, run, config)
    else:
        out, _ = mla_step(p["self_attn"], x, state["cache"], lengths, run, config)
    pre = jnp.where(starts, out, pre + out)
    x = rms_norm(mixed(pre, count, "mlp_res"), p["post_attention_layernorm"], eps)
    ffn = latent_moe(p["block_sparse_moe"], x, config) if moe else dense_ffn(p["mlp"], x, config)
    return pre + ffn, blocks


def _float32(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.dtype == jnp.uint8 else leaf.astype(jnp.float32)


class Layers:
    """The layers of a model on one step's inputs.

    Args:
        params: parameter tree; state: before the step, cache rows past a row's end may be NaN.
        run: bool [B], rows that run.
        wide: in float32, weights and state widened; else in the dtype of the parameters.
    """

    def __init__(self, params: Mapping[str, Any], config: K3Config, state: Any, run: Any, wide: bool):
        self.params, self.config, self.wide = params, config, wide
        self.run, self.lengths = jnp.asarray(run), state.lengths
        self.states = clean(state).layers

    def begin(self, tokens: np.ndarray) -> Stream:
        """The embeddings, and no snapshot."""
        pre = self.params["embed_tokens"][jnp.asarray(tokens, jnp.int32)]
        pre = pre.astype(jnp.float32) if self.wide else pre
        most = -(-self.config.num_hidden_layers // self.config.attn_res_block_size)
        return pre, jnp.zeros((most, *pre.shape), pre.dtype), 0

    def __call__(self, i: int, stream: Stream) -> Stream:
        """Layer ``i`` from the stream before it to that behind it."""
        c, (pre, blocks, count) = self.config, stream
        starts = c.starts_block(i)
        pre, blocks = _layer(
            c, c.layer_types[i], c.is_moe(i), self.wide, self.params["layers"][i], pre, blocks,
            jnp.int32(count), jnp.asarray(starts), self.states[i], self.lengths, self.run,
        )  # fmt: skip
        return pre, blocks, count + starts


def clean(state: State) -> State:
    """``state`` with zeros where its caches hold no token: XLA multiplies all that lies there."""
    layers = tuple(_without_nan(layer, state.lengths) for layer in state.layers)
    return dataclasses.replace(state, layers=layers)


def _without_nan(layer: Mapping[str, jax.Array], lengths: jax.Array) -> dict[str, jax.Array]:
    if "cache" not in layer:
        return dict(layer)
    cache = layer["cache"]
    there = (jnp.arange(cache.shape[1]) < lengths[:, None])[..., None]
    return {"cache": jnp.where(there, cache, jnp.zeros((), cache.dtype))}


def row_errors(got: Any, want: Any) -> np.ndarray:
    """|got - want| / |want| of every row [B]; inf where a number of ``got`` is not finite."""
    g, w = (np.asarray(x).astype(np.float64) for x in (got, want))
    error = np.linalg.norm(g - w, axis=-1) / np.linalg.norm(w, axis=-1)
    return np.where(np.isfinite(g).all(axis=-1), error, np.inf)


__all__ = ["Layers", "Stream", "clean", "row_errors"]
