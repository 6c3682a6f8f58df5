"""The router: what is chosen, and with what weights. Never tested through logits, which hide it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers import moe
from k3jax.layers.moe import latent_moe, route, router_logits, select_experts
from support.jaxpr_walk import trace
from support.random_k3 import random_config
from support.reference_math import sigmoid

CHOOSE = jax.jit(route, static_argnames="config")


def config_of(experts: int, chosen: int, **changes: Any) -> Any:
    base = random_config(0, num_experts=experts, num_experts_per_token=chosen, hidden_size=32)
    return dataclasses.replace(base, **({"moe_renormalize": True, "routed_scaling_factor": 1.0} | changes))


def with_logits(logits: Any, bias: Any = None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Router parameters and an input that give exactly these logits [T, E]."""
    rows = np.asarray(logits, np.float32)
    tokens, experts = rows.shape
    gate = rows.T.copy()  # token t is the unit vector t
    bias = np.zeros(experts) if bias is None else bias
    p = {"gate": jnp.asarray(gate), "e_score_correction_bias": jnp.asarray(np.asarray(bias, np.float32))}
    return p, jnp.eye(tokens, dtype=jnp.float32)


def chosen_by(logits: Any, config: Any, bias: Any = None) -> tuple[np.ndarray, np.ndarray]:
    p, x = with_logits(logits, bias)
    ids, weights = CHOOSE(p, x, config=config)
    return np.asarray(ids), np.asarray(weights)


@pytest.mark.parametrize("batch", [1, 64])
def test_logits_that_differ_only_in_float32_are_told_apart_at_every_batch_size(batch: int) -> None:
    """RT-01: 4 and 4 + 2^-12 are one number in bfloat16; ranks 16 and 17."""
    hidden = 32
    config = config_of(40, 16)
    logits = np.full(40, 1.0, np.float32)
    logits[:15] = 6.0
    logits[20], logits[30] = 4.0, 4.0 + 2.0**-12
    # A bfloat16 weight and input as in the release: the last bits come from a second product.
    gate = np.zeros((40, hidden), np.float32)
    gate[:, 0] = np.where(logits == np.float32(4.0 + 2.0**-12), 4.0, logits)
    gate[30, 1] = 2.0**-12
    p = {"gate": jnp.asarray(gate, jnp.bfloat16), "e_score_correction_bias": jnp.zeros(40)}
    x = jnp.zeros((batch, hidden), jnp.bfloat16).at[:, :2].set(1.0)
    ids, _ = CHOOSE(p, x, config=config)
    assert router_logits(p, x).dtype == jnp.float32
    for row in np.asarray(ids):
        assert set(row.tolist()) == {*range(15), 30}


def test_the_router_computes_in_float32_at_full_precision_whatever_its_inputs_are() -> None:
    """RT-01, NUM-07"""
    p = {"gate": jnp.zeros((8, 32), jnp.bfloat16), "e_score_correction_bias": jnp.zeros(8)}
    dots = [
        e
        for e in trace(router_logits, p, jnp.zeros((2, 32), jnp.bfloat16))
        if e.primitive.name == "dot_general"
    ]
    assert len(dots) == 1
    assert [v.aval.dtype for v in (*dots[0].invars, *dots[0].outvars)] == [jnp.float32] * 3
    assert "HIGHEST" in str(dots[0].params["precision"])


def test_896_biases_of_the_releases_spread_stay_distinct() -> None:
    """RT-02: in bfloat16 only 9 of them would be."""
    config = config_of(896, 16)
    bias = np.linspace(6.817, 7.063, 896).astype(np.float32)
    assert len(np.unique(bias.astype(jnp.bfloat16))) == 9
    ids, weights = chosen_by(np.zeros((2, 896)), config, bias)
    for row in ids:
        assert sorted(row.tolist()) == list(range(880, 896))
    np.testing.assert_allclose(weights, 1 / 16, rtol=1e-6)  # RT-03: no trace of the bias


def test_the_bias_selects_and_does_not_weigh() -> None:
    """RT-03: 0.5 / 0.5, not 0.525 / 0.475."""
    ids, weights = chosen_by(np.zeros((1, 4)), config_of(4, 2), [10.0, 9.0, 0.0, 0.0])
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_renormalising_and_scaling_are_independent_and_happen_once(renormalize: bool, scale: float) -> None:
    """RT-04, RT-13"""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((5, 9)).astype(np.float32)
    config = config_of(9, 3, moe_renormalize=renormalize, routed_scaling_factor=scale)
    ids, weights = chosen_by(logits, config)
    s = sigmoid(logits.astype(np.float64))
    want = np.take_along_axis(s, ids, -1)
    if renormalize:
        want = want / want.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, scale * want, rtol=1e-6)
    np.testing.assert_array_equal(ids, np.argsort(-s, axis=-1, kind="stable")[:, :3])


def test_ties_go_to_the_lowest_ids() -> None:
    """RT-05: a zero gate and zero bias."""
    config = config_of(896, 16)
    ids, weights = chosen_by(np.zeros((32, 896)), config)
    np.testing.assert_array_equal(ids, np.tile(np.arange(16), (32, 1)))
    np.testing.assert_allclose(weights, 1 / 16, rtol=1e-6)


def test_the_sign_of_a_zero_bias_breaks_no_tie() -> None:
    """RT-10: a score is at least +0, so a sum with -0 is +0: the lowest ids win here too."""
    bias = np.where(np.arange(40) % 2 == 0, -0.0, 0.0)
    ids, _ = chosen_by(np.full((1, 40), -200.0), config_of(40, 16), bias)
    assert ids.tolist() == [list(range(16))]


def test_all_negative_logits_are_chosen_from_like_any_others() -> None:
    """RT-08, RT-09"""
    rng = np.random.default_rng(2)
    logits = rng.uniform(-9, -8, (7, 896)).astype(np.float32)
    ids, weights = chosen_by(logits, config_of(896, 16))
    s = sigmoid(logits.astype(np.float64))
    best = np.argsort(-s, axis=-1, kind="stable")[:, :16]
    for row in range(7):
        assert set(ids[row].tolist()) == set(best[row].tolist())
    picked = np.take_along_axis(s, ids, -1)
    np.testing.assert_allclose(weights, picked / picked.sum(-1, keepdims=True), rtol=2e-6)


def test_scores_that_all_underflow_give_finite_weights() -> None:
    _, weights = chosen_by(np.full((1, 20), -200.0), config_of(20, 4))
    assert np.isfinite(weights).all()
    assert (weights == 0).all()  # 0 / 1e-20, as in the released code


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_non_finite_logits_keep_to_valid_distinct_ids_and_leave_the_others_alone(
    bad: float,
) -> None:
    """RT-06"""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((8, 896)).astype(np.float32)
    config = config_of(896, 16)
    bias = jnp.zeros(896)
    clean = np.asarray(select_experts(jax.nn.sigmoid(jnp.asarray(logits)), bias, config))
    for columns in (slice(None), slice(5, 6)):
        dirty = logits.copy()
        dirty[7, columns] = bad
        ids = np.asarray(select_experts(jax.nn.sigmoid(jnp.asarray(dirty)), bias, config))
        assert ((ids >= 0) & (ids < 896)).all()
        assert all(len(set(row.tolist())) == 16 for row in ids)
        np.testing.assert_array_equal(ids[:7], clean[:7])


def test_a_nan_row_of_the_whole_sublayer_is_nan_and_the_others_are_bit_unchanged() -> None:
    """RT-06, SG-01: no crash, and a row that cannot be routed says so."""
    from support.random_k3 import params_from_tensors, random_tensors

    config = config_of(8, 2)
    config = dataclasses.replace(
        config, layer_types=("kda", "kda"), num_hidden_layers=2, first_k_dense_replace=1
    )
    p = params_from_tensors(config, random_tensors(config, 0), "float32")["layers"][1]["block_sparse_moe"]
    moe = jax.jit(latent_moe, static_argnames="config")
    for tokens in (4, 80):  # by pair and by block
        x = np.random.default_rng(4).standard_normal((tokens, 32)).astype(np.float32)
        dirty = x.copy()
        dirty[3] = np.nan
        want, got = (np.asarray(moe(p, jnp.asarray(a), config=config)) for a in (x, dirty))
        assert np.isnan(got[3]).all()
        keep = np.arange(tokens) != 3
        assert got[keep].tobytes() == want[keep].tobytes()


def test_forced_ids_keep_their_own_weights() -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((3, 9)).astype(np.float32)
    forced = np.array([[8, 0], [4, 5], [1, 7]], np.int32)
    p, x = with_logits(logits, rng.standard_normal(9))
    ids, weights = route(p, x, config_of(9, 2), jnp.asarray(forced))
    np.testing.assert_array_equal(np.asarray(ids), forced)
    picked = np.take_along_axis(sigmoid(logits.astype(np.float64)), forced, -1)
    np.testing.assert_allclose(np.asarray(weights), picked / picked.sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("bits", [0xFFC00000, 0x7FC00000])
def test_one_nan_logit_loses_its_row_whatever_its_sign(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RT-06: top_k ranks a NaN first or last by its sign bit; the row must not pass as routed."""
    logits = np.random.default_rng(6).standard_normal((2, 9)).astype(np.float32)
    logits[1, 0] = np.array([bits], np.uint32).view(np.float32)[0]
    monkeypatch.setattr(moe, "router_logits", lambda p, x: jnp.asarray(logits))
    p, x = with_logits(np.zeros((2, 9)))
    _, weights = route(p, x, config_of(9, 2))
    assert np.isnan(np.asarray(weights)[1]).all()
    assert np.isfinite(np.asarray(weights)[0]).all()
