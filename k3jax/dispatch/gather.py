"""Dispatch by gathering: every rank sees every token, computes its own experts, and all sum.

For few tokens: one gather and one sum. The sum ends in the latent space, before the latent norm,
which is not linear.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""``(rows [R, L], expert [R, A] of this rank or -1, weights [R, A]) -> float32 [R, L]``."""


def local_slots(slots: jax.Array, rank: jax.Array, per_rank: int) -> jax.Array:
    """``slots`` counted from the first of ``rank``; -1 for those of other ranks."""
    mine = slots // per_rank == rank  # -1 // n is -1: no rank's
    return jnp.where(mine, slots - rank * per_rank, -1)


def gather(
    latent: Float[Array, "rows l"],
    slots: Int[Array, "rows a"],
    weights: Float[Array, "rows a"],
    compute: Compute,
    per_rank: int,
) -> Float[Array, "rows l"]:
    """float32 weighted sum of the chosen experts' outputs for this device's rows.

    Args:
        latent: the rows of this data group, the same on each of its devices.
        slots: int32, physical slots; -1 for none.
        weights: float32 mixing weights.
        compute: this rank's experts.
        per_rank: physical slots of a rank.
    """
    latent, slots, weights = (lax.all_gather(x, "data", axis=0, tiled=True) for x in (latent, slots, weights))
    rank = lax.axis_index(("data", "tensor"))
    part = compute(latent, local_slots(slots, rank, per_rank), weights)
    mine = lax.psum_scatter(part, "data", scatter_dimension=0, tiled=True)
    return lax.psum(mine, ("tensor", "inner"))


__all__ = ["Compute", "gather", "local_slots"]
