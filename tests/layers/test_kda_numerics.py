"""The delta rule's arithmetic: chunked and recurrent form against token-by-token float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.kda import CHUNK, chunk_scan, log_decay, recurrent_step, short_conv, unit_lower_inverse
from k3jax.layers.norm import l2_norm
from support.compare import assert_close, relative_rms
from support.reference_kda import delta_rule, l2_normalize

B, N, K, V = 1, 2, 8, 12
"""Key and value sizes differ, so that a transposed state cannot hide (KDA-01)."""

chunked = jax.jit(chunk_scan)


def stepped(S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[jax.Array, jax.Array]:
    """The recurrent form over T tokens."""

    def step(S: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        o, S = recurrent_step(S, *x)
        return S, o

    S, o = jax.lax.scan(step, S, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(o, 0, 1), S


def drawn(length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of the delta rule in float32 with mild decay."""
    rng = np.random.default_rng(seed)
    one = {
        "S": rng.standard_normal((B, N, V, K)),
        "q": l2_normalize(rng.standard_normal((B, length, N, K))) * K**-0.5,
        "k": l2_normalize(rng.standard_normal((B, length, N, K))),
        "v": rng.standard_normal((B, length, N, V)),
        "g": -rng.uniform(0.01, 1.0, (B, length, N, K)),
        "beta": rng.uniform(0.05, 0.95, (B, length, N)),
    }
    return {name: value.astype(np.float32) for name, value in one.items()}


def in_float64(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    wide = {name: value.astype(np.float64) for name, value in x.items()}
    return delta_rule(wide["q"], wide["k"], wide["v"], wide["g"], wide["beta"], wide["S"])


def both(x: dict[str, np.ndarray]) -> list[tuple[str, jax.Array, jax.Array]]:
    arrays = [jnp.asarray(x[name]) for name in ("S", "q", "k", "v", "g", "beta")]
    return [(name, *form(*arrays)) for name, form in (("chunked", chunked), ("stepped", jax.jit(stepped)))]


def check(x: dict[str, np.ndarray], tol: float, reason: str) -> None:
    o, S = in_float64(x)
    for name, got_o, got_S in both(x):
        assert_close(f"{name} output", got_o, o, tol, reason)
        assert_close(f"{name} state", got_S, S, tol, reason)


def test_both_forms_equal_the_recurrence() -> None:
    """KDA-01"""
    check(drawn(64), 3e-6, "float32 rounding of sums of 64 products; 3e-7 measured")


def slow_decay_gates(dt_bias: float, alike: bool) -> dict[str, np.ndarray]:
    """One repeated key, step size near 1, the decay that K3's gate gives at ``dt_bias``."""
    x = drawn(64, seed=3)
    if alike:
        x["k"][:] = x["k"][:, :1]
    x["beta"][:] = 0.999
    z = 0.1 * np.random.default_rng(4).standard_normal((B, 64, N, K)).astype(np.float32)
    bias = jnp.full((N * K,), dt_bias, jnp.float32)
    x["g"] = np.asarray(log_decay(jnp.asarray(z), jnp.zeros(N), bias, -5.0))
    return x


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("dt_bias", [-8.0, -6.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0])
def test_chunks_of_equal_keys_do_not_cancel_at_any_decay(dt_bias: float, alike: bool) -> None:
    """NUM-01: from a decay of 0.998 (dt_bias -8) to the floor e^-5 (dt_bias 8)."""
    x = slow_decay_gates(dt_bias, alike)
    assert x["g"].min() < -4.99 if dt_bias == 8.0 else x["g"].min() > -4.99
    check(x, 5e-6, "float32 rounding; an inverse by powers of A is off by more than 1 here")


def test_no_decay_at_all_and_full_step_size_stay_exact_in_shape() -> None:
    """NUM-01 at its limit: decay 1, beta 1, one key. The state then holds the last value alone."""
    x = drawn(64, seed=5)
    x["k"][:] = x["k"][:, :1]
    x["beta"][:] = 1.0
    x["g"][:] = 0.0
    check(x, 5e-6, "float32 rounding")
    for name, _, S in both(x):
        read = np.einsum("bnvk,bnk->bnv", np.asarray(S), x["k"][:, -1])
        assert relative_rms(read, x["v"][:, -1]) < 1e-5, name


def test_the_inverse_is_that_of_the_triangle() -> None:
    rng = np.random.default_rng(6)
    A = np.tril(rng.uniform(-1, 1, (3, CHUNK, CHUNK)), -1).astype(np.float32)
    got = np.asarray(unit_lower_inverse(jnp.asarray(A)))
    want = np.linalg.inv(np.eye(CHUNK) + A.astype(np.float64))
    assert_close("inverse", got, want, 2e-5, "forward substitution of entries up to 1e3 in float32")
    assert (np.triu(got, 1) == 0).all()
    assert (np.diagonal(got, axis1=-2, axis2=-1) == 1).all()


def test_gradients_at_the_gate_floor_are_finite_and_those_of_the_recurrence() -> None:
    """NUM-02: pairs of tokens decay by 5 * 63 in the exponent, which overflows for the masked ones."""
    x = drawn(64, seed=7)
    x["g"][:] = -5.0
    order = ("S", "q", "k", "v", "g", "beta")
    arrays = [jnp.asarray(x[name]) for name in order]
    weight = jnp.asarray(np.random.default_rng(8).standard_normal((B, 64, N, V)), jnp.float32)

    def loss(form: Any) -> Any:
        return lambda *a: (lambda o, S: jnp.sum(o * weight) + jnp.sum(S * S))(*form(*a))

    arguments = tuple(range(6))
    got = jax.jit(jax.grad(loss(chunk_scan), arguments))(*arrays)
    want = jax.jit(jax.grad(loss(stepped), arguments))(*arrays)
    for name, a, b in zip(order, got, want, strict=True):
        assert_close(f"gradient of {name}", a, b, 1e-5, "float32 rounding in two orders of summation")
        assert np.abs(np.asarray(b)).max() > 0


def test_the_error_is_taken_against_the_decayed_state() -> None:
    """NUM-04: K = V = 1, S = 1, decay 0.5, k = v = beta = 1 gives 0.5 + (1 - 0.5) = 1."""
    one = jnp.ones((1, 1, 1))
    g = jnp.full((1, 1, 1), np.log(0.5), jnp.float32)
    o, S = recurrent_step(jnp.ones((1, 1, 1, 1)), one, one, one, g, jnp.ones((1, 1)))
    assert float(S[0, 0, 0, 0]) == pytest.approx(1.0, abs=1e-6)
    assert float(o[0, 0, 0]) == pytest.approx(1.0, abs=1e-6)  # read after the update
    _, half = recurrent_step(jnp.ones((1, 1, 1, 1)), one, one, one, g, jnp.full((1, 1), 0.5))
    assert float(half[0, 0, 0, 0]) == pytest.approx(0.75, abs=1e-6)


def test_a_state_with_keys_and_values_swapped_is_refused() -> None:
    """KDA-01"""
    x = drawn(16)
    arrays = [jnp.asarray(x[name]) for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises((ValueError, TypeError)):
        chunk_scan(jnp.zeros((B, N, K, V)), *arrays)
    with pytest.raises((ValueError, TypeError)):
        recurrent_step(jnp.zeros((B, N, K, V)), *(a[:, 0] for a in arrays))


def test_the_decay_gate_is_a_scaled_sigmoid_with_one_rate_per_head() -> None:
    rng = np.random.default_rng(9)
    z = rng.standard_normal((3, N, K)).astype(np.float32)
    a_log = np.array([0.7, -0.5], np.float32)
    dt_bias = rng.uniform(-3, 3, N * K).astype(np.float32)
    got = log_decay(jnp.asarray(z), jnp.asarray(a_log), jnp.asarray(dt_bias), -5.0)
    logits = np.exp(a_log.astype(np.float64))[:, None] * (z.astype(np.float64) + dt_bias.reshape(N, K))
    assert_close("log decay", got, -5.0 / (1.0 + np.exp(-logits)), 1e-6, "float32 rounding")


def test_the_bounded_gate_is_neither_the_unbounded_one_nor_a_clamp_of_it() -> None:
    """NUM-03"""
    z = jnp.asarray([[[-1.0, 0.0, 1.0, 40.0]]])
    g = np.asarray(log_decay(z, jnp.zeros(1), jnp.zeros(4), -5.0))[0, 0]
    softplus = -np.log1p(np.exp(np.array([-1.0, 0.0, 1.0, 40.0])))
    assert (np.abs(g - np.maximum(softplus, -5.0))[:3] > 0.1).all()
    assert g[3] == -5.0
    assert (g >= -5.0).all()
    assert (g < 0).all()


def test_the_last_tap_meets_the_current_token_and_silu_follows() -> None:
    rng = np.random.default_rng(10)
    x = rng.standard_normal((2, 3 + 6, 5)).astype(np.float32)
    w = rng.standard_normal((5, 1, 4)).astype(np.float32)
    want = np.zeros((2, 6, 5))
    for t in range(6):
        y = sum(w[:, 0, i].astype(np.float64) * x[:, t + i] for i in range(4))
        want[:, t] = y / (1 + np.exp(-y))
    assert_close("short conv", short_conv(jnp.asarray(x), jnp.asarray(w)), want, 1e-6, "float32 rounding")


def test_the_l2_norm_adds_its_epsilon_to_the_sum_inside_the_root() -> None:
    x = jnp.asarray([[3e-3, 4e-3]])
    assert float(l2_norm(x)[0, 0]) == pytest.approx(3e-3 / (2.5e-5 + 1e-6) ** 0.5, rel=1e-6)
    assert np.asarray(l2_norm(jnp.zeros((1, 4)))).tolist() == [[0.0] * 4]


def test_a_float32_state_does_not_drift_over_many_steps() -> None:
    """LC-07, short form: 4,096 steps at a decay of about 0.999 against float64."""
    x = drawn(4096, seed=11)
    x["g"] = np.full_like(x["g"], np.log(0.999))
    o, S = in_float64(x)
    arrays = [jnp.asarray(x[name]) for name in ("S", "q", "k", "v", "g", "beta")]
    got_o, got_S = jax.jit(stepped)(*arrays)
    assert_close("state", got_S, S, 2e-6, "float32 state: errors decay with it and do not add up")
    tail = slice(-256, None)
    assert_close("late outputs", got_o[:, tail], o[:, tail], 2e-6, "as the state")
    rounded = S.astype(jnp.bfloat16).astype(np.float64)
    assert relative_rms(rounded, S) > 1e-3  # what one rounding to bfloat16 would cost
