"""Rounding to MXFP4 inside a step agrees with the rounding that writes the checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoints.training.fake_quant import fake_quantize, round_to_mxfp4
from k3jax.quant import BLOCK, CODE_VALUES, quantize

rounded = jax.jit(round_to_mxfp4)


def reference(weight: np.ndarray) -> np.ndarray:
    packed = jax.tree.map(jnp.asarray, quantize(weight))
    return np.asarray(packed.decode(jnp.float32))


def assert_same_bits(weight: np.ndarray) -> None:
    got, expected = np.asarray(rounded(jnp.asarray(weight))), reference(weight)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("exponent", [-90, -20, 0, 30, 100])
def test_random_weights_round_to_the_same_bits_at_any_scale(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 100)
    weight = rng.standard_normal((6, 5, 4 * BLOCK)) * np.exp2(exponent + rng.integers(-3, 4, (6, 5, 1)))
    assert_same_bits(weight.astype(np.float32))


def test_ties_between_codes_go_to_the_even_code() -> None:
    values = np.array(CODE_VALUES)
    middle = (values[1:] + values[:-1]) / 2
    # 6 fixes the block's scale at 1, so the others are the numbers that are rounded.
    numbers = np.concatenate([[6.0], values, middle, np.nextafter(middle, 9), np.nextafter(middle, 0)])
    assert len(numbers) <= BLOCK
    block = np.pad(numbers, (0, BLOCK - len(numbers))).astype(np.float32)
    assert_same_bits(np.stack([block, -block]))
    ties = np.asarray(rounded(jnp.asarray(block)))[9:16]
    np.testing.assert_array_equal(ties, [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])


def test_peaks_beside_a_power_of_two_times_six_choose_the_smallest_scale_that_holds_them() -> None:
    peaks = np.array([6, np.nextafter(np.float32(6), np.float32(7)), 3, 1.5, 1, 4, 0.75], np.float32)
    weight = np.zeros((len(peaks), BLOCK), np.float32)
    weight[:, 0], weight[:, 1] = peaks, peaks * np.float32(0.3)
    assert_same_bits(weight)


def test_blocks_of_zeros_stay_zero_and_keep_their_signs() -> None:
    weight = np.zeros((2, 2 * BLOCK), np.float32)
    weight[1] = -0.0
    assert_same_bits(weight)


def test_the_gradient_passes_straight_through() -> None:
    weight = jax.random.normal(jax.random.key(0), (3, BLOCK))
    slope = jax.random.normal(jax.random.key(1), (3, BLOCK))
    gradient = jax.grad(lambda w: jnp.sum(fake_quantize(w) * slope))(weight)
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(slope))
    assert not np.array_equal(np.asarray(fake_quantize(weight)), np.asarray(weight))
