"""Gated multi-head latent attention without position encoding (NoPE MLA).

A token leaves one row [c | r] in the cache: c (C wide) expands to every head's keys and values,
r (R wide) is a key piece that all heads share. With q split likewise into nope | shared parts::

    score[n, s] = (K + R)^-1/2 ( q_nope[n] · (W_UK[n] c_s) + q_shared[n] · r_s )
    o[n]        = W_UV[n] sum_s softmax(score)[n, s] c_s
    y           = W_o [ o * sigmoid(W_g x) ]

Prefill expands keys and values block by block; decode absorbs W_UK into the query and W_UV into
the output. K here is qk_nope_head_dim, and nothing is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..config import K3Config
from ..state import CACHE_BLOCK
from .linear import Project, einsum, linear, rounded_einsum
from .norm import rms_norm


def _queries(p: Mapping[str, jax.Array], x: jax.Array, config: K3Config) -> tuple[jax.Array, jax.Array]:
    """q [..., N, K] and [..., N, R], in that order inside a head."""
    low = rms_norm(linear(x, p["q_a_proj"]), p["q_a_layernorm"], config.latent_norm_eps)
    q = linear(low, p["q_b_proj"]).reshape(*x.shape[:-1], config.num_attention_heads, config.qk_head_dim)
    return q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]


def latent_rows(p: Mapping[str, jax.Array], x: jax.Array, config: K3Config) -> jax.Array:
    """Cache rows [c | r] [..., C + R]: c is normed, r is not."""
    a = linear(x, p["kv_a_proj_with_mqa"])
    c = rms_norm(a[..., : config.kv_lora_rank], p["kv_a_layernorm"], config.latent_norm_eps)
    return jnp.concatenate([c, a[..., config.kv_lora_rank :]], axis=-1)


def _up_projections(p: Mapping[str, jax.Array], config: K3Config) -> tuple[jax.Array, jax.Array]:
    """W_UK [N, K, C] and W_UV [N, V, C], the rows of kv_b_proj per head."""
    w = p["kv_b_proj"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    return w[:, : config.qk_nope_head_dim], w[:, config.qk_nope_head_dim :]


def _scale(config: K3Config) -> float:
    return config.qk_head_dim**-0.5


def _output(p: Mapping[str, jax.Array], x: jax.Array, o: jax.Array, project: Project = linear) -> jax.Array:
    """``W_o [ o * sigmoid(W_g x) ]``: the gate is elementwise per head and value, with no norm."""
    gate = jax.nn.sigmoid(linear(x, p["g_proj"]).astype(jnp.float32))
    y = o.reshape(gate.shape).astype(x.dtype).astype(jnp.float32) * gate
    return project(y.astype(x.dtype), p["o_proj"])


def write_rows(
    cache: Float[Array, "batch rows width"],
    new: Float[Array, "batch tokens width"],
    starts: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> Float[Array, "batch rows width"]:
    """The cache with row b's first ``counts[b]`` new rows at ``starts[b]``; other rows untouched."""
    batch, tokens, _ = new.shape
    offset = jnp.arange(tokens)
    # Padding goes past the end, where "drop" discards it.
    index = jnp.where(offset < counts[:, None], starts[:, None] + offset, cache.shape[1])
    return cache.at[jnp.arange(batch)[:, None], index].set(new, mode="drop", unique_indices=False)


def mla_prefill(
    p: Mapping[str, jax.Array],
    x: Float[Array, "batch tokens d"],
    cache: Float[Array, "batch rows width"],
    starts: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    config: K3Config,
    num_blocks: int | jax.Array,
    project: Project = linear,
) -> tuple[Float[Array, "batch tokens d"], Float[Array, "batch rows width"]]:
    """Causal MLA of T new tokens over the cache and themselves, keys in blocks: no T x T array.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: [B, T, D] normed input.
        cache: [B, S, C + R] latent rows, S a multiple of CACHE_BLOCK.
        starts: int32 [B], tokens cached before.
        counts: int32 [B], real tokens among the T.
        num_blocks: cache blocks to read; a Python int gives a differentiable loop, a traced
            number stops at the longest row.
        project: the output product; a device that holds a part of the heads sums over the others here.

    Returns:
        output [B, T, D] (padding positions hold numbers without meaning) and the new cache.
    """
    batch, tokens, _ = x.shape
    heads = config.num_attention_heads
    q_nope, q_shared = _queries(p, x, config)
    cache = write_rows(cache, latent_rows(p, x, config).astype(cache.dtype), starts, counts)
    w_uk, w_uv = _up_projections(p, config)
    position = starts[:, None] + jnp.arange(tokens)  # of each query

    @jax.checkpoint  # a gradient recomputes a block's scores: kept, they would be a T x S array
    def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, mass, acc = carry
        rows = lax.dynamic_slice_in_dim(cache, i * CACHE_BLOCK, CACHE_BLOCK, axis=1)
        c, r = rows[..., : config.kv_lora_rank], rows[..., config.kv_lora_rank :]
        key = rounded_einsum("bsc,nkc->bsnk", c, w_uk)
        value = rounded_einsum("bsc,nvc->bsnv", c, w_uv)
        score = einsum("btnk,bsnk->bnts", q_nope, key) + einsum("btnr,bsr->bnts", q_shared, r)
        seen = (i * CACHE_BLOCK + jnp.arange(CACHE_BLOCK) <= position[..., None])[:, None]
        score = jnp.where(seen, score * _scale(config), -jnp.inf)
        # Softmax does not depend on the subtracted peak, so no gradient runs through it.
        new_peak = lax.stop_gradient(jnp.maximum(peak, score.max(axis=-1)))
        shift = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)  # -inf while nothing was seen
        weight = jnp.exp(score - shift[..., None])
        keep = jnp.exp(peak - shift)
        mass = mass * keep + weight.sum(axis=-1)
        acc = acc * keep[..., None] + einsum("bnts,bsnv->bntv", weight.astype(x.dtype), value)
        return new_peak, mass, acc

    shape = (batch, heads, tokens)
    start = (  # made like q: under shard_map the loop's carry must vary over the devices as it does
        jnp.full_like(q_nope, -jnp.inf, jnp.float32, shape),
        jnp.zeros_like(q_nope, jnp.float32, shape),
        jnp.zeros_like(q_nope, jnp.float32, (*shape, config.v_head_dim)),
    )
    _, mass, acc = lax.fori_loop(0, num_blocks, block, start)
    o = acc / jnp.where(mass == 0, 1.0, mass)[..., None]
    return _output(p, x, jnp.moveaxis(o, 1, 2), project), cache


def mla_step(
    p: Mapping[str, jax.Array],
    x: Float[Array, "batch d"],
    cache: Float[Array, "batch rows width"],
    lengths: Int[Array, " batch"],
    active: Bool[Array, " batch"],
    config: K3Config,
    project: Project = linear,
) -> tuple[Float[Array, "batch d"], Float[Array, "batch rows width"]]:
    """Absorbed MLA of one token per row over the latent cache and itself.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: [B, D] normed input.
        cache: [B, S, C + R]; a row that is not active is left as it is.
        lengths: int32 [B], tokens cached before.
        active: bool [B].
        project: as in :func:`mla_prefill`.
    """
    q_nope, q_shared = _queries(p, x, config)
    new = latent_rows(p, x, config).astype(cache.dtype)
    cache = write_rows(cache, new[:, None], lengths, active.astype(jnp.int32))
    w_uk, w_uv = _up_projections(p, config)
    c, r = cache[..., : config.kv_lora_rank], cache[..., config.kv_lora_rank :]
    # Heads first: as "->bnc" XLA forms a bfloat16 product that its CPU backend does not have.
    q_latent = jnp.moveaxis(einsum("bnk,nkc->nbc", q_nope, w_uk), 0, 1).astype(x.dtype)
    score = einsum("bnc,bsc->bns", q_latent, c) + einsum("bnr,bsr->bns", q_shared, r)
    seen = (jnp.arange(cache.shape[1]) <= lengths[:, None])[:, None]
    weight = jax.nn.softmax(score * _scale(config), axis=-1, where=seen)
    context = einsum("bns,bsc->bnc", weight.astype(x.dtype), c).astype(x.dtype)
    return _output(p, x, einsum("bnc,nvc->bnv", context, w_uv), project), cache
