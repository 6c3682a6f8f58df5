"""One training step: the loss falls, the router is balanced, settings reach the step."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.checkpoints import names
from k3jax.checkpoints.training.initial import FASTEST, SLOWEST, initial_params
from k3jax.checkpoints.training.settings import learning_rate, nano_config
from k3jax.checkpoints.training.step import (
    balance,
    bits_of,
    compute_params,
    is_decayed,
    logits_and_routes,
    step_scalars,
    windows,
)
from k3jax.layers.kda import log_decay
from k3jax.model import abstract_params
from support.small_training import small_config, small_settings

CONFIG = small_config()


@pytest.fixture(scope="module")
def master() -> dict:
    return initial_params(CONFIG, 3)


def test_training_runs_the_library_s_model(master: dict) -> None:
    params = compute_params(master, CONFIG, True, "float32")
    tokens = np.random.default_rng(0).integers(0, 256, (2, 30)).astype(np.int32)
    got, _ = jax.jit(logits_and_routes, static_argnames="config")(params, jnp.asarray(tokens), config=CONFIG)
    expected, _ = k3jax.prefill(params, tokens, config=CONFIG)
    # One pass against passes of 64 tokens: float32 sums in another order, logits of size 1.
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), atol=2e-5)


def test_the_load_counts_every_choice_of_the_counted_tokens(master: dict) -> None:
    params = compute_params(master, CONFIG, False, "float32")
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 256, (2, 20)).astype(np.int32))
    counted = jnp.arange(20) < jnp.array([[5], [20]])
    seen = jax.jit(k3jax.capture, static_argnames="config")(params, tokens, config=CONFIG)
    _, load = jax.jit(logits_and_routes, static_argnames="config")(
        params, tokens, config=CONFIG, counted=counted
    )
    for row, layer in enumerate((1, 2)):
        ids = np.asarray(seen[f"layers.{layer}.topk_ids"])[np.asarray(counted)]
        np.testing.assert_array_equal(np.asarray(load[row]), np.bincount(ids.ravel(), minlength=8))
    assert np.asarray(load).sum(axis=-1).tolist() == [50, 50]


def test_compute_params_have_the_released_dtypes_and_shapes(master: dict) -> None:
    expected = dict(names.leaves(abstract_params(CONFIG)))
    for path, leaf in names.leaves(compute_params(master, CONFIG, True)):
        assert leaf.shape == expected[path].shape
        packed = "experts" in path
        assert leaf.dtype == (jnp.bfloat16 if packed else expected[path].dtype), path


def test_initial_decay_rates_cover_their_range(master: dict) -> None:
    attention = master["layers"][0]["self_attn"]
    heads, k = CONFIG.kda_num_heads, CONFIG.kda_head_dim
    g = log_decay(
        jnp.zeros((heads, k)), attention["A_log"], attention["dt_bias"], CONFIG.kda_gate_lower_bound
    )
    rates = -np.asarray(g)
    assert rates.min() > 0.99 * SLOWEST
    assert rates.max() < 1.01 * FASTEST
    assert np.log(rates).std() > 1.2  # an even spread of a logarithm over log(500) has 1.8


def test_balancing_moves_the_bias_against_the_load_by_the_rate(master: dict) -> None:
    load = jnp.array([[4, 0, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 9]])
    moved = balance(master, load, jnp.float32(0.25))
    biases = [layer["block_sparse_moe"]["e_score_correction_bias"] for layer in moved["layers"][1:]]
    np.testing.assert_array_equal(np.asarray(biases[0]), [-0.25, 0.25, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.asarray(biases[1]), [0.25] * 7 + [-0.25])
    same = [path for path, leaf in names.leaves(moved) if leaf is dict(names.leaves(master))[path]]
    assert len(same) == len(list(names.leaves(master))) - 2


def test_only_matrices_decay() -> None:
    decayed = {str(path[-1]) for path, _ in names.leaves(abstract_params(nano_config())) if is_decayed(path)}
    assert {"q_proj", "gate", "w1", "w2", "w3", "embed_tokens", "lm_head", "kv_a_proj_with_mqa"} <= decayed
    kept = {"A_log", "dt_bias", "o_norm", "norm", "q_conv1d", "e_score_correction_bias", "mlp_res_proj"}
    assert not kept & decayed


def test_bits_are_minus_the_binary_logarithm_of_the_probability() -> None:
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]]))
    np.testing.assert_allclose(np.asarray(bits_of(logits, jnp.array([[0, 2]]))), [[1.0, 3.0]], rtol=1e-6)


def test_the_rate_warms_up_stays_falls_and_starts_again_for_the_quantised_steps() -> None:
    s = small_settings(steps=100, quantised_steps=10, warmup=10, decay=0.4, floor=0.1)
    rates = [learning_rate(s, step) for step in range(s.total_steps)]
    assert rates[0] == pytest.approx(s.rate / 10)
    assert rates[9:60] == pytest.approx([s.rate] * 51)
    assert all(a > b for a, b in itertools.pairwise(rates[60:100]))
    assert s.rate * 0.1 < rates[99] < s.rate * 0.13
    assert rates[100] == s.quantised_rate
    assert rates[109] == pytest.approx(s.quantised_rate / 10)
    assert [bool(step_scalars(s, step)["quantised"]) for step in (99, 100)] == [False, True]


def test_windows_lie_inside_one_run() -> None:
    data = windows(
        [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint16), np.arange(4, dtype=np.uint16)], 3
    )
    assert data["tokens"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert data["starts"].tolist() == [0, 1, 8]


def test_runs_shorter_than_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match="length: expected less than the longest run, 5, got 5"):
        windows([np.arange(5, dtype=np.uint16)], 5)
