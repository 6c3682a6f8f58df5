"""Matrix products with float32 accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Full float32 products: on a GPU the default would be TF32, which misses the float32 reference.
PRECISION = lax.Precision.HIGHEST


def einsum(spec: str, *operands: jax.Array) -> jax.Array:
    """``jnp.einsum`` accumulated and returned in float32, without TF32."""
    return jnp.einsum(spec, *operands, precision=PRECISION, preferred_element_type=jnp.float32)


def linear(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """``y = x Wᵀ``, accumulated in float32, rounded once to x's dtype.

    Args:
        x: [..., in], bfloat16 or float32.
        weight: [out, in], the same dtype.
    """
    return einsum("...i,oi->...o", x, weight).astype(x.dtype)
