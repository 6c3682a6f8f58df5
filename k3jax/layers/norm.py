"""RMS normalisation with the released code's rounding points."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*rows d"]:
    """``w * x / sqrt(mean(x²) + eps)``, the plain weight (not 1 + w).

    The normalised value is computed in float32, rounded to x's dtype, then multiplied by the
    weight in that dtype: two roundings, as Hugging Face's modules do.

    Args:
        x: [..., D].
        weight: [D], x's dtype.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def l2_norm(x: Float[Array, "*rows d"], eps: float = 1e-6) -> Float[Array, "*rows d"]:
    """``x / sqrt(sum(x²) + eps)`` in float32: eps is added to the sum, inside the root."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
