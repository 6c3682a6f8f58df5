"""Between the host and arrays that span processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
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


def spans_processes(array: Any) -> bool:
    """Whether parts of an array are on other processes' devices."""
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not array.is_fully_addressable
    )


def take_rows(array: jax.Array, rows: np.ndarray) -> jax.Array:
    """``array[rows]`` along the first dimension; of an array that spans processes, all must ask together.

    Such a result is cut as the array is, but not by rows where they do not divide.

    Args:
        rows: int32 [B'].
    """
    if not spans_processes(array):
        return jnp.take(array, rows, axis=0)
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"array: expected a NamedSharding across processes, got {sharding}")
    cut = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    pieces = array.shape[0] // sharding.shard_shape(array.shape)[0]
    first = cut[0] if len(rows) % pieces == 0 else None
    return _taker(NamedSharding(sharding.mesh, PartitionSpec(first, *cut[1:])))(array, rows)


@functools.lru_cache(maxsize=64)
def _taker(target: NamedSharding) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    return jax.jit(lambda array, rows: jnp.take(array, rows, axis=0), out_shardings=target)


def wait_for_all(name: str) -> None:
    """Return when every process has come here; at once where there is one.

    Args:
        name: the same on each.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


__all__ = ["host", "put", "spans_processes", "take_rows", "wait_for_all"]
