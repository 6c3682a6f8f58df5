"""Random arrays on the device, and the ceiling of the card, for the benchmarks of single ops."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import read_ceiling


@functools.cache
def _draw(shape: tuple[int, ...], dtype: Any) -> Callable[..., jax.Array]:
    """One program per shape: a benchmark draws some hundred arrays."""
    return jax.jit(lambda key, scale: (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype))


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal numbers of standard deviation ``scale``."""
    return _draw(shape, dtype)(jax.random.key(seed), jnp.float32(scale))


def add_ceiling(parser: argparse.ArgumentParser) -> None:
    """Options for :func:`ceiling_of`."""
    parser.add_argument(
        "--read-kernel", help="what `read_ceiling.py compile` wrote: measure the ceiling first"
    )
    parser.add_argument(
        "--ceiling", type=float, help="read ceiling in TB/s, where --read-kernel is not given"
    )


def ceiling_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> float:
    """TB/s that the card can be read at, measured in this process or given."""
    if (args.read_kernel is None) == (args.ceiling is None):
        parser.error("expected --read-kernel FILE or --ceiling TB/S")
    if args.read_kernel is None:
        return args.ceiling
    from k3jax.custom_calls import ffi

    ffi.register()
    rate = read_ceiling.measure(args.read_kernel)
    print(f"read ceiling {rate:.3f} TB/s, measured by {args.read_kernel}", flush=True)
    return rate


__all__ = ["add_ceiling", "ceiling_of", "normal"]
