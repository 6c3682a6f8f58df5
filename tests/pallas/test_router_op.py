"""Routing in one launch: the exact choice, its weights, and the list of distinct experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas.router import Routing, reference, route, supports
from support import megakernel_ops
from support.pallas_ops import Case, OpTests, assert_no_races, lower_for_cuda, sds

WEIGHT_TOLERANCE = 1e-6
WEIGHT_WHY = "float32 sigmoids and a sum of at most 16 of them, in another order"


def make(
    batch: int, experts: int, choices: int, logits: str = "normal", off: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    """Arguments of a call; rows ``off`` are not active."""
    rng = np.random.default_rng(experts + batch)
    values = rng.standard_normal((8, experts)).astype(np.float32) * 2
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32)
    if logits == "tied":
        values, bias = np.zeros_like(values), np.zeros_like(bias)
    if logits == "few values":  # many ties, not all
        values, bias = np.round(values), np.zeros_like(bias)
    if logits == "saturated":  # sigmoid is 1 or 0 for most
        values = values * 100
    if logits == "nan":
        values[0, 3] = np.nan
    if logits == "nan row":  # padding must not come before NaN: it is no expert
        values[0] = np.nan
    active = np.ones(batch, np.int32)
    active[list(off)] = 0
    return jnp.asarray(values), jnp.asarray(bias), jnp.asarray(active), choices


def check(routing: Routing, logits: Any, bias: Any, active: Any, choices: int) -> None:
    batch = active.shape[0]
    score = 1 / (1 + np.exp(-np.asarray(logits, np.float64)[:batch]))
    want = reference(logits, bias, active, choices)  # its order of equals is lax.top_k's, lowest id first
    lost = np.isnan(score).any(axis=1)
    ids = np.asarray(routing.ids)
    assert ((ids >= 0) & (ids < logits.shape[-1])).all()
    np.testing.assert_array_equal(ids[~lost], np.asarray(want.ids)[~lost])
    chosen = np.take_along_axis(score, ids, axis=1)
    weights = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20)
    weights[lost] = np.nan
    np.testing.assert_allclose(
        np.asarray(routing.weights), weights, rtol=WEIGHT_TOLERANCE, atol=0, err_msg=WEIGHT_WHY
    )
    live = np.asarray(active) != 0
    distinct = sorted(set(ids[live].ravel().tolist()))
    assert int(routing.count[0]) == len(distinct)
    slots = np.asarray(routing.slots)
    assert slots.tolist() == distinct + [-1] * (128 - len(distinct))
    slot_of = np.asarray(routing.slot_of)
    assert (slot_of[~live] == -1).all()
    np.testing.assert_array_equal(slots[slot_of[live]], ids[live])


class TestRouter(OpTests):
    op = staticmethod(route)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_ops.route)
    cases = (
        Case("K3's numbers, one row", partial(make, 1, 896, 16), check),
        Case("nano's numbers", partial(make, 3, 32, 4), check),
        Case("one choice", partial(make, 2, 16, 1), check),
        Case("all experts", partial(make, 2, 16, 16), check),
        Case("all tied", partial(make, 2, 128, 8, "tied"), check),
        Case("many ties", partial(make, 3, 128, 8, "few values"), check),
        Case("saturated", partial(make, 2, 128, 8, "saturated"), check),
        Case("NaN in one row", partial(make, 2, 128, 4, "nan"), check),
        Case("a row of NaN, fewer experts than columns", partial(make, 2, 32, 4, "nan row"), check),
        Case("all experts, one of them NaN", partial(make, 2, 16, 16, "nan"), check),
        Case("a row that is not active", partial(make, 3, 32, 4, "normal", (1,)), check),
        Case("no active row", partial(make, 2, 32, 4, "normal", (0, 1)), check),
        Case("K3's numbers, eight rows", partial(make, 8, 896, 16), check),
    )


@pytest.mark.parametrize(("renormalize", "factor"), [(False, 1.0), (True, 2.5)])
def test_weights_follow_the_config(renormalize: bool, factor: float) -> None:
    logits, bias, active, choices = make(2, 32, 4)
    got = route(logits, bias, active, choices, renormalize, factor, interpret=True)
    want = reference(logits, bias, active, choices, renormalize, factor)
    np.testing.assert_allclose(np.asarray(got.weights), np.asarray(want.weights), rtol=WEIGHT_TOLERANCE)


def test_no_races() -> None:
    args = make(3, 32, 4)
    check(assert_no_races(lambda races: route(*args, interpret=races)), *args)


def test_reasons_name_every_unsupported_number_at_once() -> None:
    text = "; ".join(supports(9, 2000, 17))
    assert "batch: expected 1..8 rows, got 9" in text
    assert "experts: expected 1..1024, got 2000" in text
    assert "choices: expected 1..16, got 17" in text
    assert supports(8, 896, 16) == ()
    with pytest.raises(TypeError, match="active: expected int32, got bool"):
        route(jnp.zeros((8, 16)), jnp.zeros(16), jnp.ones(1, bool), 4)


@pytest.mark.parametrize("batch", [1, 8])
def test_k3_numbers_lower_for_cuda(batch: int) -> None:
    lower_for_cuda(
        lambda logits, bias, active: route(logits, bias, active, 16),
        sds((8, 896), jnp.float32),
        sds((896,), jnp.float32),
        sds((batch,), jnp.int32),
    )
