"""Absorbed MLA over a latent cache cut by position: each device reads its positions, for every head.

The devices' partial softmaxes merge by their common peak (log-sum-exp)::

    m = max over devices of the largest score;  o = sum_d e^(s - m) c / sum_d e^(s - m)

A device without a visible position adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..config import K3Config
from ..layers.linear import einsum
from ..layers.mla import _output, _queries, _scale, _up_projections, latent_rows, write_rows


def mla_split_step(
    p: Mapping[str, jax.Array],
    x: Float[Array, "batch d"],
    cache: Float[Array, "batch rows width"],
    lengths: Int[Array, " batch"],
    active: Bool[Array, " batch"],
    config: K3Config,
    project: Callable[[jax.Array, jax.Array], jax.Array],
    axes: tuple[str, ...],
) -> tuple[Float[Array, "batch d"], Float[Array, "batch rows width"]]:
    """As :func:`k3jax.layers.mla.mla_step` under ``shard_map`` over mesh axes that cut heads and cache.

    Args:
        p: the layer's ``self_attn`` parameters, this device's heads.
        x: [B, D] normed input, the same on all devices of ``axes``.
        cache: [B, S / devices, C + R], positions from this device's index times S / devices.
        lengths: int32 [B], tokens cached before on all devices; the new row is written by one device.
        active: bool [B].
        config: with this device's number of heads.
        project: the output product, which sums over ``axes``.
        axes: mesh axes.
    """
    own, width = cache.shape[1], config.kv_lora_rank
    first = lax.axis_index(axes) * own
    q_nope, q_shared = _queries(p, x, config)
    here = active & (lengths >= first) & (lengths < first + own)
    new = latent_rows(p, x, config).astype(cache.dtype)
    cache = write_rows(cache, new[:, None], lengths - first, here.astype(jnp.int32))
    w_uk, w_uv = _up_projections(p, config)
    q_latent = jnp.moveaxis(einsum("bnk,nkc->nbc", q_nope, w_uk), 0, 1).astype(x.dtype)
    q = lax.all_gather(jnp.concatenate([q_latent, q_shared], axis=-1), axes, axis=1, tiled=True)
    score = einsum("bnc,bsc->bns", q, cache) * _scale(config)
    seen = (first + jnp.arange(own) <= lengths[:, None])[:, None]
    score = jnp.where(seen, score, -jnp.inf)
    peak = lax.pmax(jnp.max(score, axis=-1), axes)  # finite: some device holds position 0
    weight = jnp.exp(score - peak[..., None])
    mass = jnp.sum(weight, axis=-1)
    context = einsum("bns,bsc->bnc", weight.astype(x.dtype), cache[..., :width])
    both = jnp.concatenate([context, mass[..., None]], axis=-1)
    both = lax.psum_scatter(both, axes, scatter_dimension=1, tiled=True)  # back to this device's heads
    context = (both[..., :width] / both[..., width:]).astype(x.dtype)
    return _output(p, x, einsum("bnc,nvc->bnv", context, w_uv), project), cache


__all__ = ["mla_split_step"]
