"""The experts of one rank for any number of rows, whose choices are counted from its first expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...config import K3Config
from .._launch import Interpret
from . import experts
from .configs import TOKENS


def listed(
    chosen: Int[Array, "batch a"],
) -> tuple[Int[Array, " s"], Int[Array, " 1"], Int[Array, "batch a"]]:
    """The distinct experts of B rows: slots, count and slot_of, as :class:`k3jax.pallas.router.Routing` has.

    By comparing the B A pairs with each other, as the router's kernel does.

    Args:
        chosen: int32 [B, A]; below 0 is no expert of this rank.
    """
    flat = chosen.reshape(-1)
    there = flat >= 0
    number = jnp.arange(flat.shape[0])
    earlier = (flat[:, None] == flat) & (number < number[:, None])
    first = there & ~earlier.any(axis=1)
    place = jnp.sum(first & (flat < flat[:, None]), axis=1, dtype=jnp.int32)
    mine = first & (place == number[:, None])
    slots = jnp.max(jnp.where(mine, flat, -1), axis=1)
    slot_of = jnp.where(there, place, -1).reshape(chosen.shape)
    return slots, jnp.sum(first, dtype=jnp.int32)[None], slot_of


def experts_of_rank(
    p: Mapping[str, Any],
    rows: Float[Array, "rows l"],
    chosen: Int[Array, "rows a"],
    weights: Float[Array, "rows a"],
    config: K3Config,
    *,
    interpret: Interpret = False,
) -> Float[Array, "rows l"]:
    """float32 [R, L], the weighted sum of this rank's experts: :func:`experts` for eight rows at a time.

    A block of eight rows reads its own experts: an expert that rows of several blocks chose is read
    once for each.

    Args:
        p: w1, w3 [E, F, L] and w2 [E, L, F] of this rank, packed MXFP4.
        rows: bfloat16 [R, L].
        chosen: int32 [R, A], experts of this rank; below 0 is none and counts nothing.
        weights: float32 [R, A].

    Raises:
        NotImplementedError: as :func:`experts`.
    """
    parts = []
    for start in range(0, rows.shape[0], TOKENS):
        block = slice(start, start + TOKENS)
        slots, count, slot_of = listed(chosen[block])
        parts.append(
            experts(p, rows[block], weights[block], slots, count, slot_of, config, interpret=interpret)
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


__all__ = ["experts_of_rank", "listed"]
