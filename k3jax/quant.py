"""MXFP4 weights: packed 4-bit codes with one power-of-two scale per 32 inputs.

A weight is ``code * 2**(byte - 127)``; a code is a sign bit over an E2M1 magnitude out of
{0, 0.5, 1, 1.5, 2, 3, 4, 6}. Two codes share a byte, the even column in the low nibble. Layout
and values as in the release (compressed-tensors "mxfp4-pack-quantized"); scale bytes are OCP
Microscaling E8M0: 255 is NaN, 0 is 2**-127.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Input columns that share one scale."""

CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; bit 3 is the sign."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A packed weight of logical shape [..., out, in].

    Attributes:
        codes: uint8 [..., out, in / 2], the checkpoint's ``weight_packed``.
        scales: uint8 [..., out, in / 32], the checkpoint's ``weight_scale`` (E8M0 bytes).
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.codes.size + self.scales.size

    def __getitem__(self, index: Any) -> MXFP4:
        """Index leading axes (experts); the last two must stay whole."""
        return MXFP4(self.codes[index], self.scales[index])

    def decode(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight as a float array of ``dtype``, exact wherever ``dtype`` can hold it."""
        return dequantize(self.codes, self.scales, dtype)


def decode_scale(scales: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 ``2**(byte - 127)`` by bit pattern: exact for every byte, 0 (subnormal) and 255 (NaN) too.

    Args:
        scales: uint8, E8M0 bytes.
    """
    bits = scales.astype(jnp.uint32) << 23
    # Byte 0 is 2**-127, below the normal numbers; byte 255 as an exponent would read +inf.
    bits = jnp.where(scales == 0, jnp.uint32(1 << 22), bits)
    bits = jnp.where(scales == 255, jnp.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def unpack_codes(codes: UInt8[Array, "*rows half"]) -> UInt8[Array, "*rows whole"]:
    """One code 0..15 a byte, from two: [..., n] to [..., 2 n], the low nibble first.

    Args:
        codes: uint8, packed.
    """
    pair = jnp.stack([codes & 0xF, codes >> 4], axis=-1)
    return pair.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def dequantize(
    codes: UInt8[Array, "*rows half"], scales: UInt8[Array, "*rows blocks"], dtype: Any = jnp.float32
) -> Float[Array, "*rows whole"]:
    """Exact decode of an MXFP4 weight.

    Args:
        codes: uint8 [..., out, in / 2].
        scales: uint8 [..., out, in / 32].
        dtype: of the result; float32 holds every value, bfloat16 those of scale bytes 2..252.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if codes.shape[:-1] != scales.shape[:-1] or codes.shape[-1] * 2 != scales.shape[-1] * BLOCK:
        raise ValueError(
            f"MXFP4: expected codes [..., out, in/2] and scales [..., out, in/{BLOCK}], "
            f"got {tuple(codes.shape)} and {tuple(scales.shape)}"
        )
    nibble = unpack_codes(codes).reshape(*scales.shape, BLOCK).astype(jnp.int32)
    byte = scales.astype(jnp.int32)[..., None]
    return _float_of(nibble, byte).reshape(*codes.shape[:-1], -1).astype(dtype)


def _float_of(nibble: jax.Array, byte: jax.Array) -> jax.Array:
    """float32 of a code and a scale byte in integer arithmetic: no product that could flush a subnormal."""
    low, high = nibble & 1, (nibble >> 1) & 3
    # Code 1 is 2**-1 with no fraction; the others are (1 + low/2) * 2**(high - 1).
    half = (high == 0) & (low == 1)
    fraction = jnp.where(half, 0, low)
    exponent = byte + jnp.where(half, -1, high - 1)
    # Exponent fields 0 and -1 are subnormal: the implicit one becomes a written one.
    subnormal = ((2 + fraction) << 21) >> -jnp.minimum(exponent, 0)
    bits = jnp.where(exponent > 0, (exponent << 23) | (fraction << 22), subnormal)
    bits = jnp.where(exponent >= 255, 0x7F800000, bits)  # past float32, as the product would be
    bits = jnp.where(byte == 255, 0x7FC00000, bits)
    bits = jnp.where((nibble & 7 == 0) & (byte != 255), 0, bits)
    sign = (nibble >> 3).astype(jnp.uint32) << 31
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) | sign, jnp.float32)


def quantize(weight: Any) -> MXFP4:
    """Round a float weight to MXFP4 on the host, exactly on representable values.

    Per block of 32 inputs the scale is the smallest power of two with ``max|w| <= 6 * scale``
    (so nothing saturates); codes round to nearest, ties to the even code. An all-zero block gets
    byte 127 and zero codes. Past 1.5 * 2**127, the largest value that float32 can hold, nearest is that.

    Args:
        weight: finite float [..., out, in], ``in`` a multiple of 32.

    Raises:
        ValueError: a non-finite value, or a last axis that is no multiple of 32.
    """
    w = np.asarray(weight, dtype=np.float32)
    if w.ndim < 1 or w.shape[-1] % BLOCK:
        raise ValueError(f"weight: expected [..., in] with in a multiple of {BLOCK}, got {w.shape}")
    if not np.isfinite(w).all():
        raise ValueError("weight: expected finite numbers, got NaN or infinity")
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK).astype(np.float64)
    peak = np.abs(blocks).max(axis=-1)
    # frexp: peak / 6 = m * 2**e with m in [0.5, 1); m == 0.5 is itself a power of two.
    mantissa, exponent = np.frexp(peak / 6.0)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    byte = np.where(peak == 0, 127, np.clip(exponent + 127, 0, 254)).astype(np.uint8)
    magnitude = np.abs(blocks) / np.exp2(byte.astype(np.float64) - 127.0)[..., None]
    code = np.where(byte[..., None] == 253, np.minimum(_nearest_code(magnitude), 5), _nearest_code(magnitude))
    code = code | np.where(np.signbit(blocks), 8, 0).astype(np.uint8)
    code = code.reshape(w.shape)
    return MXFP4(codes=code[..., 0::2] | (code[..., 1::2] << 4), scales=byte)


def _nearest_code(magnitude: np.ndarray) -> np.ndarray:
    """Code 0..7 of the nearest magnitude, ties to the even code."""
    values = np.array(CODE_VALUES)
    middle = (values[1:] + values[:-1]) / 2
    below = np.searchsorted(middle, magnitude, side="left")  # a tie counts as below the middle
    above = np.searchsorted(middle, magnitude, side="right")
    return np.where(below % 2 == 0, below, above).astype(np.uint8)


__all__ = ["BLOCK", "CODE_VALUES", "MXFP4", "decode_scale", "dequantize", "quantize", "unpack_codes"]
