"""Hand-computed values and identities of the float64 reference and of the comparison helpers."""

from __future__ import annotations

import numpy as np
import pytest

from support.compare import assert_argmax_equal, assert_close, assert_routing_equal, relative_rms
from support.random_k3 import random_config, random_tensors
from support.reference import attn_res_mix, forward
from support.reference_kda import delta_rule, short_conv
from support.reference_math import rms, sigmoid, silu, situ_glu
from support.reference_moe import choose, route
from support.reference_weights import Arch, decode_mxfp4, weight_tree


def test_delta_rule_errs_against_the_decayed_state_and_reads_after_the_write() -> None:
    # One channel: S 1, decay 1/2, k = v = beta = 1: S becomes 0.5 + (1 - 0.5) = 1, read as 2 * 1.
    one = np.ones((1, 1, 1, 1))
    o, s = delta_rule(2 * one, one, one, np.log(0.5) * one, one[..., 0], one)
    assert s.item() == pytest.approx(1.0, abs=1e-15)
    assert o.item() == pytest.approx(2.0, abs=1e-15)


def test_a_state_is_values_by_keys() -> None:
    q = k = np.array([1.0, 0.0, 0.0]).reshape(1, 1, 1, 3)
    v = np.array([5.0, 7.0]).reshape(1, 1, 1, 2)
    o, s = delta_rule(q, k, v, 0 * k, np.ones((1, 1, 1)), np.zeros((1, 1, 2, 3)))
    assert s[0, 0].tolist() == [[5, 0, 0], [7, 0, 0]]
    assert o.ravel().tolist() == [5, 7]


def test_the_last_tap_multiplies_the_current_token() -> None:
    taps = np.array([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 4)
    y = short_conv(np.array([[[4.0], [5.0]]]), np.array([[[1.0], [2.0], [3.0]]]), taps)
    assert y.ravel() == pytest.approx(silu(np.array([4321.0, 5432.0])))


def test_situ_saturates_at_the_product_of_its_betas() -> None:
    assert situ_glu(np.array(1e3), np.array(-1e6), 4.0, 25.0) == pytest.approx(-100.0)
    g, u = 0.7, -1.3
    want = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
    assert situ_glu(np.array(g), np.array(u), 4.0, 25.0) == pytest.approx(want, rel=1e-14)


def test_sigmoid_is_finite_and_exact_at_both_ends() -> None:
    assert sigmoid(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


def test_mxfp4_bytes_decode_low_nibble_first() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :3] = [0x21, 0xF7, 0x80]
    for byte, scale in ((127, 1.0), (0, 2.0**-127), (254, 2.0**127)):
        row = decode_mxfp4(packed, np.full((1, 1), byte, np.uint8))[0]
        assert row[:6].tolist() == [0.5 * scale, 1.0 * scale, 6 * scale, -6 * scale, 0.0, 0.0]
        assert np.signbit(row[5])
    with pytest.raises(ValueError, match="255"):
        decode_mxfp4(packed, np.full((1, 1), 255, np.uint8))


def test_the_router_bias_selects_but_does_not_weigh() -> None:
    arch = Arch.of(random_config(0, num_experts=5, num_experts_per_token=2, moe_renormalize=True))
    w = {"gate": np.zeros((5, 3)), "e_score_correction_bias": np.array([10.0, 9.0, 0, 0, 0])}
    got = route(w, arch, np.ones((1, 1, 3)))
    assert got["topk_ids"].ravel().tolist() == [0, 1]
    assert got["topk_w"].ravel() == pytest.approx([0.5 * arch.routed_scale] * 2)


def test_equal_scores_go_to_the_lowest_index() -> None:
    assert choose(np.array([1.0, 3, 2, 3, 2, 3]), 4).tolist() == [1, 3, 5, 2]


def test_attn_res_mixes_raw_sources_and_scores_normalised_ones() -> None:
    a, b = np.array([[[3.0, 0.0]]]), np.array([[[0.0, 50.0]]])
    even = attn_res_mix([a, b], np.ones(2), np.zeros((1, 2)), 0.0)
    assert even.ravel().tolist() == [1.5, 25.0]
    got = attn_res_mix([a, b], np.array([2.0, 1.0]), np.array([[0.25, 0.5]]), 0.0)
    # Normalised sources are (sqrt 2, 0) and (0, sqrt 2); norm * proj is (1/2, 1/2): equal scores.
    assert got.ravel() == pytest.approx([1.5, 25.0])
    assert attn_res_mix([a], np.ones(2), np.ones((1, 2)), 1e-5).ravel().tolist() == [3.0, 0.0]


def test_rms_uses_a_plain_weight() -> None:
    assert rms(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0) == pytest.approx(
        np.array([3.0, 8.0]) / np.sqrt(12.5)
    )


@pytest.mark.parametrize("seed", range(6))
def test_continuing_from_a_state_equals_one_pass(seed: int) -> None:
    c = random_config(seed)
    arch = Arch.of(c)
    w = weight_tree(random_tensors(c, seed), arch)
    tokens = np.random.default_rng(seed).integers(0, c.vocab_size, (2, 9))
    whole = forward(w, arch, tokens)
    state, logits = None, []
    for a, b in ((0, 1), (1, 3), (3, 8), (8, 9)):
        run = forward(w, arch, tokens[:, a:b], state)
        state = run.state
        logits.append(run.logits)
    assert_close("logits", np.concatenate(logits, 1), whole.logits, 1e-12, "float64, another order of sums")
    for layer, want in zip(run.state, whole.state, strict=True):
        for name in want:
            assert_close(name, layer[name], want[name], 1e-12, "float64, another order of sums")


def test_forced_experts_are_used_and_weighed_by_their_own_scores() -> None:
    c = random_config(4, num_hidden_layers=2, first_k_dense_replace=1, num_experts=8, num_experts_per_token=2)
    arch = Arch.of(c)
    w = weight_tree(random_tensors(c, 4), arch)
    tokens = np.array([[3, 1, 4]])
    free = forward(w, arch, tokens)
    ids = free.taps["L1/topk_ids"]
    again = forward(w, arch, tokens, forced_ids={1: ids[..., ::-1]})
    assert_close("same experts, other order", again.logits, free.logits, 1e-13, "float64")
    other = forward(w, arch, tokens, forced_ids={1: (ids + 1) % 8})
    assert relative_rms(other.logits, free.logits) > 1e-3
    s = sigmoid(other.taps["L1/router_logits"])
    picked = np.take_along_axis(s, (ids + 1) % 8, -1)
    want = picked / picked.sum(-1, keepdims=True) if arch.renormalize else picked
    assert_close("weights", other.taps["L1/topk_w"], want * arch.routed_scale, 1e-14, "float64")


def test_relative_rms_is_the_ratio_of_norms() -> None:
    assert relative_rms([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    assert relative_rms([0.0], [0.0]) == 0.0
    assert relative_rms([1.0], [0.0]) == float("inf")


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([1.0, 2.1], "relative RMS error"),
        ([1.0, np.nan], "non-finite"),
        ([1.0, np.inf], "non-finite"),
        ([[1.0, 2.0]], "shape"),
    ],
)
def test_assert_close_refuses_what_is_not_close(got: list[float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close("x", got, [1.0, 2.0], 1e-3, "a test")
    assert_close("x", [1.0, 2.001], [1.0, 2.0], 1e-3, "a test")


def test_assert_argmax_equal_names_the_row() -> None:
    assert_argmax_equal("x", [[0.0, 2.0]], [[0.0, 1.0]])
    with pytest.raises(AssertionError, match=r"1 of 2 rows, first at \(1,\)"):
        assert_argmax_equal("x", [[0, 1], [1, 0]], [[0, 1], [0, 1]])


SCORES = [[0.9, 0.8, 0.5, 0.499999, 0.1]]


def test_routing_is_compared_as_sets_with_weights_by_id() -> None:
    ids, weights = [[0, 1, 2]], [[0.5, 0.3, 0.2]]
    assert assert_routing_equal([[2, 0, 1]], [[0.2, 0.5, 0.3]], ids, weights, SCORES, 1e-6) == 0
    with pytest.raises(AssertionError, match="expert 0: weight"):
        assert_routing_equal([[2, 0, 1]], [[0.5, 0.2, 0.3]], ids, weights, SCORES, 1e-6)
    with pytest.raises(AssertionError, match="twice"):
        assert_routing_equal([[0, 0, 1]], [[0.2, 0.5, 0.3]], ids, weights, SCORES, 1e-6)
    with pytest.raises(AssertionError, match="expert 0: weight nan"):
        assert_routing_equal([[0, 1, 2]], [[np.nan, 0.3, 0.2]], ids, weights, SCORES, 1e-6)


def test_another_expert_passes_only_as_a_near_tie() -> None:
    ids, weights = [[0, 1, 2]], [[0.5, 0.3, 0.2]]
    tie = ([[0, 1, 3]], [[0.5, 0.3, 0.2]])
    assert assert_routing_equal(*tie, ids, weights, SCORES, 1e-6, tie_margin=1e-5) == 1
    with pytest.raises(AssertionError, match="other experts"):
        assert_routing_equal(*tie, ids, weights, SCORES, 1e-6)
    with pytest.raises(AssertionError, match="other experts"):
        assert_routing_equal([[0, 1, 4]], weights, ids, weights, SCORES, 1e-6, tie_margin=1e-5)
    with pytest.raises(AssertionError, match="expert 0: weight"):
        assert_routing_equal([[0, 1, 3]], [[0.2, 0.6, 0.2]], ids, weights, SCORES, 1e-6, tie_margin=1e-5)
