"""Matrix products with float32 accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Full float32 products: on a GPU the default would be TF32, which misses the float32 reference.
PRECISION = lax.Precision.HIGHEST


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` accumulated and returned in float32, without TF32."""
    return jnp.einsum(spec, *operands, precision=PRECISION, preferred_element_type=jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def rounded_einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """:func:`einsum` of two arrays of one dtype, rounded once to it.

    Its derivative stays in that dtype: differentiating the cast and the product apart would make
    float32 products of bfloat16 values, which a GPU's matrix units do not take.
    """
    return einsum(spec, x, y).astype(x.dtype)


@rounded_einsum.defjvp
def _rounded_einsum_jvp(spec: str, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    x, y = primals
    product = partial(jnp.einsum, spec, precision=PRECISION, preferred_element_type=x.dtype)
    return rounded_einsum(spec, x, y), product(tangents[0], y) + product(x, tangents[1])


def linear(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """``y = x Wᵀ``, accumulated in float32, rounded once to x's dtype.

    Args:
        x: [..., in], bfloat16 or float32.
        weight: [out, in], the same dtype.
    """
    return rounded_einsum("...i,oi->...o", x, weight)


Project = Callable[[jax.Array, jax.Array], jax.Array]
"""``(x [..., in], weight [out, in]) -> [..., out]``: :func:`linear`, or one that sums over devices."""
