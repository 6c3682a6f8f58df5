"""MXFP4 decode and quantise, every code with every scale byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.quant import CODE_VALUES, MXFP4, decode_scale, dequantize, quantize
from support.tiny_model import bits

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def every_code_with_every_byte() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [256, 16], scales [256, 1] and the exact float64 values [256, 32], each code twice."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 2)
    codes = np.tile(nibbles[0::2] | (nibbles[1::2] << 4), (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    exact = VALUES[nibbles] * np.ldexp(1.0, scales.astype(int) - 127)
    return codes, scales, exact


def decoded(codes: Any, scales: Any, dtype: Any = jnp.float32) -> np.ndarray:
    return np.asarray(dequantize(jnp.asarray(codes), jnp.asarray(scales), dtype))


def test_every_code_with_every_byte_decodes_exactly_in_float32() -> None:
    """QZ-02, QZ-03, QZ-04: bias 127, fractions, subnormals; no power function is involved."""
    codes, scales, exact = every_code_with_every_byte()
    got = decoded(codes, scales)
    with np.errstate(over="ignore"):
        want = exact[:255].astype(np.float32)  # 254 with codes 4..7 is past float32
    assert bits(got[:255]) == bits(want)
    assert np.isnan(got[255]).all()
    assert np.isfinite(got[:253]).all()
    assert np.isinf(got[253]).sum() == 2 * 2 * 2
    assert np.isinf(got[254]).sum() == 2 * 2 * 4


def test_zero_codes_are_zero_under_every_finite_scale_and_keep_their_sign() -> None:
    """QZ-04, QZ-06: 0 * 2**127 is 0, code 8 is -0."""
    codes, scales, _ = every_code_with_every_byte()
    got = decoded(codes, scales)[:255]
    assert (got[:, [0, 8, 16, 24]] == 0).all()
    assert not np.signbit(got[:, [0, 16]]).any()
    assert np.signbit(got[:, [8, 24]]).all()


def test_bfloat16_is_exact_for_bytes_2_to_252() -> None:
    codes, scales, exact = every_code_with_every_byte()
    got = decoded(codes, scales, jnp.bfloat16).astype(np.float64)
    assert (got[2:253] == exact[2:253]).all()
    assert (np.signbit(got[2:253]) == np.signbit(exact[2:253])).all()
    assert np.isnan(got[255]).all()


def test_a_scale_byte_is_a_power_of_two_by_its_bits() -> None:
    """QZ-02: byte 127 is 1. QZ-01: byte 120 is 2**-7, not 120."""
    got = np.asarray(decode_scale(jnp.arange(256, dtype=jnp.uint8)))
    want = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)
    assert bits(got[:255]) == bits(want)
    assert np.isnan(got[255])
    assert got[127] == 1.0
    assert got[120] == 0.0078125


def test_the_low_nibble_is_the_even_column() -> None:
    """QZ-06"""
    codes = np.full((1, 16), 0x21, np.uint8)
    row = decoded(codes, np.array([[127]], np.uint8))[0]
    assert row[:2].tolist() == [0.5, 1.0]
    assert row.tolist() == [0.5, 1.0] * 16


def test_each_scale_belongs_to_its_own_32_columns() -> None:
    codes = np.full((2, 32), 0x22, np.uint8)
    scales = np.array([[127, 128], [126, 120]], np.uint8)
    got = decoded(codes, scales)
    want = np.repeat([[1.0, 2.0], [0.5, 2.0**-7]], 32, axis=1)
    assert (got == want).all()


def test_a_packed_weight_knows_its_logical_shape_and_can_be_indexed_by_expert() -> None:
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (5, 3, 32), np.uint8))
    weight = MXFP4(codes, jnp.asarray(rng.integers(120, 130, (5, 3, 2), np.uint8)))
    assert weight.shape == (5, 3, 64)
    assert weight.nbytes == 5 * 3 * 34
    whole = np.asarray(weight.decode())
    assert (np.asarray(weight[jnp.array([4, 0])].decode()) == whole[[4, 0]]).all()
    assert [leaf.dtype for leaf in jax.tree.leaves(weight)] == [jnp.uint8, jnp.uint8]


@pytest.mark.parametrize("shape", [(2, 15), (2, 32)])
def test_shapes_that_do_not_belong_together_are_refused(shape: tuple[int, ...]) -> None:
    """QZ-07: 32 inputs a scale."""
    with pytest.raises(ValueError, match=r"expected codes \[\.\.\., out, in/2\] and scales"):
        dequantize(jnp.zeros(shape, jnp.uint8), jnp.zeros((2, 1), jnp.uint8))


def decode64(weight: MXFP4) -> np.ndarray:
    """The value of a packed weight in float64, by table."""
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales).astype(int)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, 32)
    return (VALUES[nibbles] * np.ldexp(1.0, scales - 127)[..., None]).reshape(*codes.shape[:-1], -1)


@given(
    st.lists(st.integers(0, 15), min_size=32, max_size=32),
    st.integers(0, 252),
)
def test_quantising_representable_values_is_exact(codes: list[int], byte: int) -> None:
    values = (VALUES[codes] * np.ldexp(1.0, byte - 127)).astype(np.float32)
    packed = quantize(values)
    got = decode64(packed)
    assert (got == values).all()
    nonzero = values != 0
    assert (np.signbit(got) == np.signbit(values))[nonzero].all()


def test_quantising_twice_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    once = quantize(rng.standard_normal((8, 96)).astype(np.float32))
    twice = quantize(decode64(once))
    assert (decode64(once) == decode64(twice)).all()


@pytest.mark.parametrize("peak", [1e-45, 1e-40, 2.0**-126, 0.999 * 2.0**-3, 1.0, 6.0, 7.0, 2.5e38])
def test_a_quantised_value_is_within_half_a_step(peak: float) -> None:
    """QZ-05"""
    rng = np.random.default_rng(2)
    values = (rng.uniform(-1, 1, (16, 32)) * peak).astype(np.float32)
    values[:, 3] = peak
    packed = quantize(values)
    got = decoded(packed.codes, packed.scales).astype(np.float64)
    assert np.isfinite(got).all()
    ratio = np.abs(values.astype(np.float64)) / np.ldexp(1.0, packed.scales.astype(int) - 127)
    assert ratio.max() <= 6.0  # nothing saturates
    if peak >= 2.0**-124:
        assert (ratio.max(axis=1) > 3.0).all()  # and no bit of the range is wasted
    steps = np.select([ratio < 2, ratio < 4], [0.5, 1.0], 2.0)
    error = np.abs(got - values) / np.ldexp(1.0, packed.scales.astype(int) - 127)
    assert (error <= steps / 2).all()


@pytest.mark.parametrize("value", [3e38, -3e38, float(np.finfo(np.float32).max)])
def test_a_value_past_the_largest_that_float32_decodes_becomes_that_one(value: float) -> None:
    """QZ-05: 4 * 2**126 would be nearer to 3e38, and is infinite in float32."""
    packed = quantize(np.full(32, value, np.float32))
    assert (decoded(packed.codes, packed.scales) == np.copysign(1.5 * 2.0**127, value)).all()


def test_a_block_of_zeros_has_a_plain_scale_and_zero_codes() -> None:
    """QZ-05"""
    values = np.zeros((2, 64), np.float32)
    values[0, 32:] = 3.0
    packed = quantize(values)
    assert packed.scales.tolist() == [[127, 126], [127, 127]]
    assert (packed.codes[0, :16] == 0).all()
    assert (decode64(packed) == values).all()


def test_ties_go_to_the_even_code() -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = np.zeros(32, np.float32)
    values[: len(middles)] = middles
    values[-1] = 6.0  # pins the scale to 1
    packed = quantize(values)
    assert packed.scales.tolist() == [127]
    assert decode64(packed)[: len(middles)].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_quantising_what_is_not_finite_is_refused(wrong: float) -> None:
    values = np.ones((2, 32), np.float32)
    values[1, 5] = wrong
    with pytest.raises(ValueError, match="weight: expected finite numbers"):
        quantize(values)


@pytest.mark.parametrize("shape", [(), (4, 31), (32, 4)])
def test_quantising_a_last_axis_that_is_no_multiple_of_32_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="in a multiple of 32, got"):
        quantize(np.ones(shape, np.float32))


def test_the_code_table_is_e2m1() -> None:
    assert tuple(MAGNITUDES) == CODE_VALUES
