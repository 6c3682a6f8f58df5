"""Absorbed MLA decode over the latent cache, between the projections; the cache in place.

With the cache row ``[c | r]`` and q split into nope | shared parts::

    q~[n]       = W_UK[n]ᵀ q_nope[n]
    score[n, s] = (K + R)^-1/2 ( q~[n] · c_s + q_shared[n] · r_s )
    y[n]        = ( W_UV[n] sum_s softmax(score)[n, s] c_s ) sigmoid(gate[n])

The new row, ``[rms(kv) | kv]``, is written at ``lengths[b]`` first. Rounding points are those of
:func:`k3jax.layers.mla.mla_step`, except that softmax weights are rounded to bfloat16 before they
are divided by their sum, not after.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...config import K3Config
from ...layers.linear import einsum
from ...layers.mla import write_rows
from ...layers.norm import rms_norm
from .._launch import Interpret, batch_reasons, launch, require
from . import kernel
from .configs import HEAD, ROWS, SPLIT, absorb_columns, items, padded_heads


def reference(
    p: Mapping[str, jax.Array],
    q: Float[Array, "rows nk"],
    kv: Float[Array, "rows width"],
    gate: Float[Array, "rows nv"],
    cache: Float[Array, "batch s width"],
    lengths: Int[Array, " batch"],
    active: Bool[Array, " batch"] | Int[Array, " batch"],
    config: K3Config,
) -> tuple[Float[Array, "batch nv"], Float[Array, "batch s width"]]:
    """The op in plain jnp; see :func:`mla`."""
    batch, rank = cache.shape[0], config.kv_lora_rank
    active = active.astype(bool)
    q, kv, gate = q[:batch], kv[:batch], gate[:batch]
    q = q.reshape(batch, config.num_attention_heads, -1)
    q_nope, q_shared = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    c = rms_norm(kv[..., :rank], p["kv_a_layernorm"], config.latent_norm_eps)
    new = jnp.concatenate([c, kv[..., rank:]], axis=-1).astype(cache.dtype)
    cache = write_rows(cache, new[:, None], lengths, active.astype(jnp.int32))
    w = p["kv_b_proj"].reshape(config.num_attention_heads, -1, rank)
    w_uk, w_uv = w[:, : config.qk_nope_head_dim], w[:, config.qk_nope_head_dim :]
    q_latent = jnp.moveaxis(einsum("bnk,nkc->nbc", q_nope, w_uk), 0, 1).astype(q.dtype)
    score = einsum("bnc,bsc->bns", q_latent, cache[..., :rank])
    score = score + einsum("bnr,bsr->bns", q_shared, cache[..., rank:])
    seen = (jnp.arange(cache.shape[1]) <= lengths[:, None])[:, None]
    weight = jax.nn.softmax(score * config.qk_head_dim**-0.5, axis=-1, where=seen)
    context = einsum("bns,bsc->bnc", weight.astype(q.dtype), cache[..., :rank]).astype(q.dtype)
    o = jnp.moveaxis(einsum("bnc,nvc->nbv", context, w_uv), 0, 1).reshape(gate.shape)
    y = o.astype(q.dtype).astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
    return y.astype(q.dtype), cache


def supports(config: K3Config, batch: int, capacity: int, dtype: Any) -> tuple[str, ...]:
    """Every reason why the kernels do not take these layers; () if they do."""
    reasons = list(batch_reasons(batch))
    if jnp.dtype(dtype) != jnp.bfloat16:
        reasons.append(f"activations: expected bfloat16, got {jnp.dtype(dtype)}")
    if (config.qk_nope_head_dim, config.v_head_dim) != (HEAD, HEAD):
        reasons.append(
            f"MLA heads: expected K = V = {HEAD}, got {config.qk_nope_head_dim} and {config.v_head_dim}"
        )
    if config.kv_lora_rank % 128 or not 128 <= config.kv_lora_rank <= 512:
        reasons.append(f"kv_lora_rank: expected 128, 256, 384 or 512, got {config.kv_lora_rank}")
    if config.qk_rope_head_dim != 64:
        reasons.append(f"qk_rope_head_dim: expected 64, got {config.qk_rope_head_dim}")
    if capacity % SPLIT or capacity > 1 << 20:
        reasons.append(f"cache: expected a multiple of {SPLIT} rows, 1048576 at most, got {capacity}")
    return tuple(reasons)


def mla(
    p: Mapping[str, jax.Array],
    q: Float[Array, "rows nk"],
    kv: Float[Array, "rows width"],
    gate: Float[Array, "rows nv"],
    cache: Float[Array, "batch s width"],
    lengths: Int[Array, " batch"],
    active: Bool[Array, " batch"] | Int[Array, " batch"],
    config: K3Config,
    *,
    interpret: Interpret = False,
) -> tuple[Float[Array, "out nv"], Float[Array, "batch s width"]]:
    """What o_proj reads, and the new cache; in place where the cache is donated.

    The output is bfloat16 [8, N V], as the skinny GEMM takes it; rows past B have no meaning.

    Args:
        p: the layer's ``self_attn`` parameters.
        q: bfloat16 [B or more, N (K + R)], the output of q_b_proj.
        kv: bfloat16 [B or more, C + R], the output of kv_a_proj_with_mqa, not normed.
        gate: bfloat16 [B or more, N V], W_g x.
        cache: bfloat16 [B, S, C + R], B <= 8.
        lengths: int32 [B], tokens cached before.
        active: bool or int32 [B]; caches of rows with 0 are left as they are.

    Raises:
        NotImplementedError: with all reasons of :func:`supports`.
    """
    batch, capacity, width = cache.shape
    require("mla", supports(config, batch, capacity, q.dtype))
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    padded, split = padded_heads(heads), items(capacity)
    rows = jax.new_ref(cache)
    if q.shape[0] < ROWS:
        q = jnp.pad(q, ((0, ROWS - q.shape[0]), (0, 0)))
    absorbed = launch(
        partial(
            kernel.absorb_body, heads=heads, latent=latent, shared=width - latent, capacity=capacity,
            eps=config.latent_norm_eps,
        ),
        (q[:ROWS], kv, p["kv_b_proj"], p["kv_a_layernorm"], lengths, active.astype(jnp.int32), rows),
        out_type=jax.ShapeDtypeStruct((ROWS, padded, width), jnp.bfloat16),
        scratch_types=kernel.absorb_scratch(latent, width - latent),
        ctas=heads * (latent // absorb_columns(latent)) + batch,
        interpret=interpret,
        name="mla_absorb",
    )  # fmt: skip
    cache = jax.freeze(rows)
    context, peak, mass = launch(
        partial(
            kernel.attend_body, items=split, groups=padded // 64, latent=latent, capacity=capacity,
            scale=config.qk_head_dim**-0.5,
        ),
        (absorbed, lengths, cache),
        out_type=(
            jax.ShapeDtypeStruct((batch, split, padded, latent), jnp.float32),
            jax.ShapeDtypeStruct((batch, split, padded), jnp.float32),
            jax.ShapeDtypeStruct((batch, split, padded), jnp.float32),
        ),
        scratch_types=kernel.attend_scratch(width, bool(interpret)),
        ctas=batch * split * (padded // 64),
        warpgroups=2,
        interpret=interpret,
        name="mla_attend",
    )  # fmt: skip
    y = launch(
        partial(kernel.merge_body, heads=heads, latent=latent, capacity=capacity),
        (context, peak, mass, lengths, p["kv_b_proj"], gate),
        out_type=jax.ShapeDtypeStruct((ROWS, heads * HEAD), jnp.bfloat16),
        scratch_types=kernel.merge_scratch(latent),
        ctas=batch * heads,
        interpret=interpret,
        name="mla_merge",
    )
    return y, cache


__all__ = ["mla", "reference", "supports"]
