"""Latent caches of a million tokens on the device: made, attended to in float32, and compared, by pieces.

A cache of four such rows has more than 2^31 numbers and more than 2^32 bytes. Whatever is made of one here is
made row by row and block by block, so no array beside the cache is larger than a block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 16384
"""Tokens of a piece."""


@functools.partial(jax.jit, static_argnames=("capacity", "width", "block"))
def random_rows(
    key: jax.Array, length: jax.Array, capacity: int, width: int, block: int = BLOCK
) -> jax.Array:
    """One row's cache, bfloat16 [capacity, width]: normal numbers, NaN from ``length`` on."""

    def piece(i: jax.Array) -> jax.Array:
        value = jax.random.normal(jax.random.fold_in(key, i), (block, width), jnp.float32)
        at = i * block + jnp.arange(block)
        return jnp.where((at < length)[:, None], value, jnp.nan).astype(jnp.bfloat16)

    return lax.map(piece, jnp.arange(capacity // block)).reshape(capacity, width)


def needle_places(heads: int, length: int, special: Sequence[int], seed: int) -> np.ndarray:
    """Different places [heads] in 0 .. length - 1: the special ones that there are, and random others."""
    first = list(dict.fromkeys(int(at) for at in special if 0 <= at < length))
    rng = np.random.default_rng(seed)
    others = [int(at) for at in rng.permutation(rng.integers(0, length, 4 * heads)) if int(at) not in first]
    return np.array([*first, *dict.fromkeys(others)][:heads])


@jax.jit
def with_needles(
    row: jax.Array, places: jax.Array, query: jax.Array, scale: jax.Array, score: jax.Array
) -> Any:
    """A row's cache in which head n finds its own query at place n, so that its score there is ``score``.

    Args:
        row: [S, C + R]; places: int32 [N]; query: float32 [N, C + R], a head's absorbed and shared parts.
        scale: what a product of query and cache row is multiplied by.
    """
    square = jnp.sum(query * query, axis=-1, keepdims=True)
    return row.at[places].set((query * (score / scale / square)).astype(row.dtype))


@functools.partial(jax.jit, static_argnames=("values", "block"))
def attend(
    row: jax.Array, new: jax.Array, length: jax.Array, query: jax.Array, scale: jax.Array, values: int,
    block: int = BLOCK,
) -> jax.Array:  # fmt: skip
    """Attention of one token over its row's cache and itself, in float32: contexts [N, values].

    ``softmax_t(scale query[n] . row[t]) . row[t, :values]`` over t <= length, where row[length] is ``new``:
    the largest score first, then sums with it.

    Args:
        row: [S, C + R], S a multiple of ``block``; what lies from ``length`` on is not used.
        new: [C + R]; query: float32 [N, C + R]; values: C.
    """

    def piece(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = i * block + jnp.arange(block)
        keys = lax.dynamic_slice_in_dim(row, i * block, block)
        keys = jnp.where((at < length)[:, None], keys, jnp.where((at == length)[:, None], new, 0)).astype(
            jnp.float32
        )
        score = jnp.einsum("nc,tc->nt", query, keys, precision="highest") * scale
        return keys, jnp.where(at <= length, score, -jnp.inf)

    count = row.shape[0] // block
    peak = lax.fori_loop(
        0, count, lambda i, top: jnp.maximum(top, piece(i)[1].max(axis=1)),
        jnp.full(len(query), -jnp.inf, jnp.float32),
    )  # fmt: skip

    def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keys, score = piece(i)
        weight = jnp.exp(score - peak[:, None])
        context = jnp.einsum("nt,tc->nc", weight, keys[:, :values], precision="highest")
        return sums[0] + context, sums[1] + weight.sum(axis=1)

    none = jnp.zeros((len(query), values), jnp.float32), jnp.zeros(len(query), jnp.float32)
    total, mass = lax.fori_loop(0, count, add, none)
    return total / mass[:, None]


@functools.partial(jax.jit, static_argnames=("b", "block"))
def changed_places(old: jax.Array, new: jax.Array, b: int, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """How many places of row ``b`` differ in a bit between two caches [B, S, C + R], and the last one, -1."""

    def piece(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = (
            lax.bitcast_convert_type(lax.dynamic_slice_in_dim(x[b], i * block, block), jnp.uint16)
            for x in (old, new)
        )
        differs = (one != other).any(axis=-1)
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        return differs.sum(dtype=jnp.int32), jnp.max(jnp.where(differs, at, -1))

    counts, last = lax.map(piece, jnp.arange(old.shape[1] // block, dtype=jnp.int32))
    return counts.sum(dtype=jnp.int32), last.max()


__all__ = ["attend", "changed_places", "needle_places", "random_rows", "with_needles"]
