"""Between the host and arrays that span processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def host(array: Any) -> np.ndarray:
    """The values of an array on every process's host; all processes must ask together."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"array: expected a NamedSharding across processes, got {sharding}")
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(array))


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array on the devices of ``sharding``; in several processes each puts its own parts."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


__all__ = ["host", "put"]
