"""LatentMoE: routed experts in a latent space, one shared expert beside them.

::

    s   = sigmoid(W_gate x)                      float32
    ids = top_A(s + bias)                        the bias selects only; ties go to the lowest id
    w   = s[ids] / (sum s[ids] + 1e-20) * routed_scaling_factor
    y   = sum_i w_i w2_i SiTU(w1_i l, w3_i l)    l = W_down x, the latent
    out = W_up rms(y) + shared(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..config import K3Config
from ..quant import MXFP4
from .ffn import dense_ffn, situ
from .linear import einsum, linear, rounded_einsum
from .norm import rms_norm

DECODED_LIMIT = 1 << 25
"""Expert weights decoded at a time, in numbers: one full-size K3 expert (33 M) or fewer smaller ones."""

PAIR_LIMIT = 128
"""Up to this many (token, slot) pairs, experts are fetched pair by pair: 8 rows of K3's 16."""

UNROLL_LIMIT = 16
"""Up to this many blocks of pairs are unrolled; a loop costs the GPU a host round trip each."""


def router_logits(p: Mapping[str, Any], x: Float[Array, "*rows d"]) -> Float[Array, "*rows e"]:
    """float32 ``W_gate x``, x and the weight widened first: bf16 logits would change the choice."""
    return einsum("...d,ed->...e", x.astype(jnp.float32), p["gate"].astype(jnp.float32))


def route(
    p: Mapping[str, Any],
    x: Float[Array, "*rows d"],
    config: K3Config,
    ids: Int[Array, "*rows a"] | None = None,
) -> tuple[Int[Array, "*rows a"], Float[Array, "*rows a"]]:
    """Expert ids int32 [..., A], best first, and their float32 weights [..., A].

    Args:
        p: the layer's ``block_sparse_moe`` parameters.
        x: [..., D].
        ids: forces the choice; the weights are then those of these experts.
    """
    score = jax.nn.sigmoid(router_logits(p, x))
    if ids is None:
        ids = select_experts(score, p["e_score_correction_bias"], config)
    weight = jnp.take_along_axis(score, ids, axis=-1)
    # top_k may rank a NaN last, by its sign bit: a row with one is lost, whichever ids it chose.
    weight = jnp.where(jnp.isnan(score).any(axis=-1, keepdims=True), jnp.nan, weight)
    if config.moe_renormalize:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return ids, weight * config.routed_scaling_factor


def select_experts(
    score: Float[Array, "*rows e"], bias: Float[Array, " e"], config: K3Config
) -> Int[Array, "*rows a"]:
    """Ids of the A largest ``score + bias``, ties to the lowest id. ``lax.top_k`` orders so."""
    return lax.top_k(score + bias, config.num_experts_per_token)[1].astype(jnp.int32)


def _weights(leaf: Any, index: Any, dtype: Any) -> jax.Array:
    """Experts ``index`` of a leaf as floats [..., out, in]; a packed leaf is decoded exactly."""
    chosen = leaf[index]
    return chosen.decode(dtype) if isinstance(chosen, MXFP4) else chosen.astype(dtype)


def _block_size(config: K3Config, count: int) -> int:
    """Experts decoded together, out of ``count``: the largest divisor within DECODED_LIMIT."""
    per_expert = 3 * config.routed_expert_hidden_size * config.moe_intermediate_size
    limit = max(1, min(count, DECODED_LIMIT // per_expert))
    return next(size for size in range(limit, 0, -1) if count % size == 0)


def experts_by_pair(
    experts: Mapping[str, Any],
    latent: Float[Array, "tokens l"],
    ids: Int[Array, "tokens a"],
    weights: Float[Array, "tokens a"],
    config: K3Config,
) -> Float[Array, "tokens l"]:
    """float32 weighted sum of chosen experts' outputs, fetched per (token, slot) pair: few tokens.

    Args:
        experts: w1, w3 [E, F, L] and w2 [E, L, F], each MXFP4 or float.
        latent: [T, L].
        ids: int32 [T, A].
        weights: float32 [T, A].
    """
    tokens, slots = ids.shape
    dtype = latent.dtype
    pairs = tokens * slots
    block = _block_size(config, pairs)

    @jax.checkpoint  # a gradient decodes again instead of keeping every block's decoded experts
    def some(ids: jax.Array, x: jax.Array) -> jax.Array:  # [block], [block, L] -> [block, L]
        gate = einsum("pfl,pl->pf", _weights(experts["w1"], ids, dtype), x).astype(dtype)
        up = einsum("pfl,pl->pf", _weights(experts["w3"], ids, dtype), x).astype(dtype)
        return einsum("plf,pf->pl", _weights(experts["w2"], ids, dtype), situ(gate, up, config)).astype(dtype)

    blocks = ids.reshape(-1, block), jnp.repeat(latent, slots, axis=0).reshape(-1, block, latent.shape[-1])
    count = pairs // block
    if count <= UNROLL_LIMIT:
        parts = [some(blocks[0][0], blocks[1][0])]
        for i in range(1, count):
            # A block waits for the one before it, and its gradient for the one after it: else XLA
            # decodes the experts of all of them at once.
            index, x, parts[-1] = lax.optimization_barrier((blocks[0][i], blocks[1][i], parts[-1]))
            parts.append(some(index, x))
        y = jnp.stack(parts)
    else:
        y = lax.map(lambda pair: some(*pair), blocks)
    y = y.reshape(tokens, slots, -1).astype(jnp.float32)
    return jnp.sum(weights[..., None] * y, axis=1)


def experts_by_block(
    experts: Mapping[str, Any],
    latent: Float[Array, "tokens l"],
    ids: Int[Array, "tokens a"],
    weights: Float[Array, "tokens a"],
    config: K3Config,
) -> Float[Array, "tokens l"]:
    """As :func:`experts_by_pair` for many tokens: every chosen expert decoded once, for all tokens.

    Experts pass in blocks of bounded size; a block that no token chose is skipped. Every token
    meets every expert of a visited block, so a row's arithmetic does not depend on the others. An id
    outside 0..E-1 is no expert's: a device that holds some of the experts marks the others' so.
    """
    block = _block_size(config, config.num_experts)
    dtype = latent.dtype
    # [T, E] mixing weights: 0 where not chosen.
    combine = jnp.sum(
        jax.nn.one_hot(ids, config.num_experts, dtype=jnp.float32) * weights[..., None], axis=-2
    )
    chosen = jnp.any(ids[..., None] == jnp.arange(config.num_experts), axis=-2)

    @jax.checkpoint  # as in experts_by_pair
    def compute(total: jax.Array, start: jax.Array) -> jax.Array:
        def part(leaf: Any) -> jax.Array:
            piece = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, block, axis=0), leaf)
            return piece.decode(dtype) if isinstance(piece, MXFP4) else piece.astype(dtype)

        gate = rounded_einsum("tl,efl->etf", latent, part(experts["w1"]))
        up = rounded_einsum("tl,efl->etf", latent, part(experts["w3"]))
        y = rounded_einsum("etf,elf->etl", situ(gate, up, config), part(experts["w2"]))
        mine = lax.dynamic_slice_in_dim(combine, start, block, axis=1).T[..., None]
        used = lax.dynamic_slice_in_dim(chosen, start, block, axis=1).T[..., None]
        return total + jnp.sum(jnp.where(used, mine * y.astype(jnp.float32), 0.0), axis=0)

    def step(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        any_chosen = jnp.any(lax.dynamic_slice_in_dim(chosen, start, block, axis=1))
        return lax.cond(any_chosen, compute, lambda total, start: total, total, start), None

    # Made like latent: under shard_map the loop's carry must vary over the devices as it does.
    zero = jnp.zeros_like(latent, jnp.float32)
    starts = jnp.arange(0, config.num_experts, block)
    if starts.shape[0] == 1:
        return compute(zero, starts[0])
    return lax.scan(step, zero, starts)[0]


def latent_moe(
    p: Mapping[str, Any],
    x: Float[Array, "*rows d"],
    config: K3Config,
    ids: Int[Array, "*rows a"] | None = None,
    tap: Any = None,
) -> Float[Array, "*rows d"]:
    """The whole LatentMoE sublayer.

    Args:
        p: the layer's ``block_sparse_moe`` parameters.
        x: [..., D] normed input.
        ids: forces the routing, int32 [..., A].
        tap: called with (name, array) for topk_ids, topk_w and routed_latent_sum.
    """
    ids, weights = route(p, x, config, ids)
    flat = x.reshape(-1, x.shape[-1])
    latent = linear(flat, p["routed_expert_down_proj"])
    slots = config.num_experts_per_token
    by = experts_by_pair if flat.shape[0] * slots <= PAIR_LIMIT else experts_by_block
    total = by(p["experts"], latent, ids.reshape(-1, slots), weights.reshape(-1, slots), config)
    total = total.reshape(*x.shape[:-1], -1)
    if tap is not None:
        tap("topk_ids", ids)
        tap("topk_w", weights)
        tap("routed_latent_sum", total)
    normed = rms_norm(total.astype(x.dtype), p["routed_expert_norm"], config.rms_norm_eps)
    return linear(normed, p["routed_expert_up_proj"]) + dense_ffn(p["shared_experts"], x, config)
