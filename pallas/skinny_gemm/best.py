"""The greedy choice beside a product: every CTA keeps the best of what it computed, a small sum picks.

A value and its id are compared as two integers, so that the choice is ``lax.argmax``'s whatever the
order: a NaN is above every number, -0 equals +0, and of equal values the lowest id wins.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .configs import ROWS, TOKENS

NOTHING = -(2**31)
"""Key below that of every value: of a row that pads the matrix, and of a CTA without a tile."""

NAN = 2**31 - 1
"""Key above that of every number."""


def greedy(logits: jax.Array) -> jax.Array:
    """int32 [rows], the lowest id of the largest logit of each row [rows, N]; a NaN is the largest."""
    return lax.argmax(logits, 1, jnp.int32)


def order(x: jax.Array) -> jax.Array:
    """int32 that compare as the float32 do."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(x == x, jnp.where(x == 0, 0, key), NAN)


def scratch() -> dict[str, Any]:
    """Shared memory: the best key so far, and its id, of every token and lane (row of a block)."""
    return {name: plgpu.SMEM((TOKENS, ROWS), jnp.int32) for name in ("best_key", "best_id")}


def start(best_key: Any, best_id: Any) -> None:
    """Nothing is the best so far."""
    for ref, value in ((best_key, NOTHING), (best_id, 0)):
        ref.T[...] = plgpu.layout_cast(jnp.full((ROWS, TOKENS), value, jnp.int32), _LAYOUT)


def compete(best_key: Any, best_id: Any, row: jax.Array, value: jax.Array, end: int) -> None:
    """Let a block's sums [64 rows, 8 tokens] compete; ``row`` is the first one's id, ids reach ``end``.

    A CTA's blocks come in ascending order: only a greater key takes a lane over from a lower id.
    """
    value = plgpu.layout_cast(value, _LAYOUT)
    ids = row + plgpu.broadcasted_iota(jnp.int32, (ROWS, TOKENS), 0, layout=_LAYOUT)
    key = jnp.where(ids < end, order(value), NOTHING)
    before = plgpu.load(best_key.T, layout=_LAYOUT, optimized=False)
    better = key > before
    ids = jnp.where(better, ids, plgpu.load(best_id.T, layout=_LAYOUT, optimized=False))
    best_key.T[...] = jnp.where(better, key, before)
    best_id.T[...] = ids


def pick(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """int32 [8], the greedy ids, of what every CTA kept: int32 [CTAs, 8, 64] each."""
    best = jnp.max(keys, axis=(0, 2), keepdims=True)
    return jnp.min(jnp.where(keys == best, ids, NAN), axis=(0, 2))


_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED
"""Of the sums on their way out: every thread reads and writes its own lanes."""


__all__ = ["compete", "greedy", "order", "pick", "scratch", "start"]
