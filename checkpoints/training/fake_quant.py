"""Rounding to MXFP4 inside a compiled step, with straight-through gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from k3jax.quant import BLOCK

# A magnitude past each border takes the next code; at a tie the even code wins, so borders below
# an odd code are strict. A step is the distance between the codes' magnitudes.
_BORDERS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))
_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """float32 ``2**exponent`` by bit pattern, exponent in -126..127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def round_to_mxfp4(weight: Float[Array, "*rows i"]) -> Float[Array, "*rows i"]:
    """``quantize(weight).decode()`` of :mod:`k3jax.quant`, bit for bit, as a traced function.

    Args:
        weight: float32 [..., in], ``in`` a multiple of 32; numbers below 2**-126 in magnitude
            (subnormal) count as 0.
    """
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    peak = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    bits = lax.bitcast_convert_type(peak, jnp.int32)
    # peak = m 2**k, m in [1, 2): the smallest e with peak <= 6 * 2**e is k - 2 up to m = 1.5, else k - 1.
    over = (bits & 0x7FFFFF) > 0x400000
    exponent = jnp.clip((bits >> 23) - 129 + over.astype(jnp.int32), -126, 127)
    # Two factors, since 2**127 alone has no float32 inverse.
    half = exponent // 2
    magnitude = jnp.abs(blocks) * _power_of_two(-half) * _power_of_two(half - exponent)
    value = jnp.zeros_like(magnitude)
    for (border, strict), size in zip(_BORDERS, _STEPS, strict=True):
        above = magnitude > border if strict else magnitude >= border
        value = value + jnp.where(above, jnp.float32(size), 0.0)
    value = value * _power_of_two(exponent)
    return jnp.copysign(value, blocks).reshape(weight.shape)


@jax.custom_vjp
def fake_quantize(weight: Float[Array, "*rows i"]) -> Float[Array, "*rows i"]:
    """:func:`round_to_mxfp4` whose gradient is that of the identity (straight-through)."""
    return round_to_mxfp4(weight)


def _forward(weight: jax.Array) -> tuple[jax.Array, None]:
    return round_to_mxfp4(weight), None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (gradient,)


fake_quantize.defvjp(_forward, _backward)
