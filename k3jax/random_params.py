"""Random weights with the statistics a decode step should meet, made on the device."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .axes import param_shardings
from .config import K3Config
from .nnx_model import abstract_params
from .sampling import seed_data

# Root mean square of the sixteen E2M1 codes, for choosing scale bytes.
_CODE_RMS = math.sqrt(68.5 / 8)
# Standard deviation of the sum of four random bytes.
_BELL_DEVIATION = math.sqrt(4 * (256**2 - 1) / 12)


def random_params(config: K3Config, seed: int = 0, dtype: str | None = None, mesh: Mesh | None = None) -> Any:
    """A parameter tree with random weights, leaf by leaf on the device (or over ``mesh``).

    Linear weights are bell shaped with variance 1 / fan-in, so activations stay of order one; router
    logits have variance about 1 and the correction bias 0.05, so routing is spread; decay gates
    cover their range from near 1 to the floor; experts are uniform random MXFP4 codes.

    Args:
        seed: 0..2**64-1; the same seed gives the same weights on any mesh.
        dtype: None for the released dtypes, "float32" for float32 everywhere but packed bytes.
    """
    shapes = abstract_params(config, dtype)
    shardings = None if mesh is None else param_shardings(config, mesh)
    flat, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    targets = [None] * len(flat) if shardings is None else jax.tree.leaves(shardings)
    leaves = []
    root = jax.random.wrap_key_data(seed_data(seed, 1)[0], impl="threefry2x32")
    for (path, leaf), sharding in zip(flat, targets, strict=True):
        names = [_key(k) for k in path]
        # A name's own stream: independent of which other parameters there are.
        key = jax.random.fold_in(root, zlib.crc32("/".join(names).encode()))
        make = _maker(_kind(names), leaf.shape, jnp.dtype(leaf.dtype).name, sharding)
        leaves.append(make(key))
    return jax.tree.unflatten(treedef, leaves)


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _kind(names: list[str]) -> str:
    """Which distribution a parameter has, from its name."""
    last = names[-1]
    if last in ("codes", "scales", "A_log", "dt_bias", "embed_tokens", "e_score_correction_bias"):
        return last
    if last.endswith("norm"):
        return "norm"
    return "conv" if last.endswith("conv1d") else "linear"


@functools.lru_cache(maxsize=256)
def _maker(kind: str, shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
    """A compiled function from a key to one parameter; equal parameters share it."""
    return jax.jit(lambda key: _draw(key, kind, shape, dtype), out_shardings=sharding)


def _bell(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 integers, bell shaped around 0: the sum of four random bytes.

    Exact, hence the same however a mesh cuts the array; the last bit of a true normal is not.
    """
    bits = jax.random.bits(key, shape, jnp.uint32)
    total = sum(((bits >> shift) & 0xFF).astype(jnp.int32) for shift in (0, 8, 16, 24))
    return (jnp.asarray(total) - 510).astype(jnp.float32)


def _draw(key: jax.Array, kind: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if kind == "codes":
        # An expert at a time: random bits need several times their own size in temporaries.
        return jax.lax.map(
            lambda k: jax.random.bits(k, shape[1:], jnp.uint8), jax.random.split(key, shape[0])
        )
    if kind == "scales":
        middle = 127 + round(math.log2((shape[-1] * 32) ** -0.5 / _CODE_RMS))
        return (middle - jax.random.bernoulli(key, 0.5, shape).astype(jnp.int32)).astype(jnp.uint8)
    if kind == "A_log":
        values = jax.random.uniform(key, shape, jnp.float32, 0.0, math.log(4.0))
    elif kind == "dt_bias":
        values = jax.random.uniform(key, shape, jnp.float32, -4.0, 0.0)
    else:
        fixed = {"conv": 0.5, "embed_tokens": 1.0, "e_score_correction_bias": 0.05}
        scale = fixed.get(kind, 1.0 / math.sqrt(shape[-1]))
        if kind == "norm":
            # About 1 +- 0.1; product and sum are exact, so that it does not matter whether they are fused.
            values = np.float32(1.0) + _bell(key, shape) * np.float32(11 * 2.0**-14)
        else:
            values = _bell(key, shape) * np.float32(scale / _BELL_DEVIATION)
    return values.astype(dtype)


__all__ = ["random_params"]
