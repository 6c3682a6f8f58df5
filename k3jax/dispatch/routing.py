"""From chosen experts to physical slots: which replica of an expert serves a token."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def chosen_slots(
    placement: Mapping[str, jax.Array],
    ids: Int[Array, "rows a"],
    live: Bool[Array, " rows"],
    first_row: jax.Array | int,
) -> Int[Array, "rows a"]:
    """int32 [rows, A], the physical slot of each (token, choice); -1 for a row that is not live.

    Replicas of an expert are used in turn by the token's number in the batch: always the same one
    for the same place in a batch, whatever the other rows hold.

    Args:
        placement: ``slots`` int32 [E, R] and ``copies`` int32 [E], see
            :meth:`k3jax.mesh.Placement.slot_table`.
        ids: int32 [rows, A], expert ids.
        live: bool [rows].
        first_row: number of the first row in the whole batch.
    """
    row = first_row + jnp.arange(ids.shape[0], dtype=jnp.int32)
    replica = row[:, None] % placement["copies"][ids]
    slots = placement["slots"][ids, replica]
    return jnp.where(live[:, None], slots, -1)


__all__ = ["chosen_slots"]
