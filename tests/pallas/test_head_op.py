"""Logits and greedy tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.pallas.head import head, logits_of, reference, supports
from k3jax.pallas.skinny_gemm import Epilogue, Product, skinny_gemm
from k3jax.pallas.skinny_gemm.best import NOTHING, greedy, order, pick
from support import megakernel_ops
from support.pallas_ops import Case, OpTests, assert_no_races, launches, lower_for_cuda, sds

NAN, INF = float("nan"), float("inf")


def make(width: int, words: int, copies: int = 1) -> tuple[Any, ...]:
    """Activations and a head; of ``copies`` > 1, every row of the head is there so many times."""
    rng = np.random.default_rng(words)
    x, weight = rng.standard_normal((8, width)), rng.standard_normal((words // copies, width))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(np.tile(weight, (copies, 1)), jnp.bfloat16)


def check(result: Any, x: Any, weight: Any) -> None:
    logits, tokens = result
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # float32 sums: 2^-24 for each of up to 7,168 products of the largest partial sum.
    np.testing.assert_allclose(np.asarray(logits), want, rtol=0, atol=1e-5 * np.abs(want).max())
    # The lowest id of equal logits is numpy's choice too.
    np.testing.assert_array_equal(np.asarray(tokens), np.asarray(logits).argmax(axis=1))


class TestHead(OpTests):
    op = staticmethod(head)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_ops.head)
    cases = (
        Case("nano's head", partial(make, 256, 512), check),
        Case("a ragged vocabulary", partial(make, 128, 200), check),
        Case("equal logits far apart", partial(make, 128, 192, 3), check),
        Case("an eighth of K3's head", partial(make, 7168, 20480), check, interpret=False),
    )


FINITE: tuple[dict[int, float], ...] = (
    {},
    {3: 2.0, 190: 2.0},  # equal, far apart
    {70: 2.0, 134: 2.0, 6: 2.0},  # equal, in one lane
    {199: 1.0},  # the last id, whose block is moved up
    dict.fromkeys(range(200), -2.0) | {131: -1.0},  # all negative
    dict.fromkeys(range(200), -2.0),  # all equal, none of them 0
    {0: -1.0, 199: -1.0},
    {128: 1.0, 64: 1.0},
)
"""Logits of each row, 0 where none is named."""


@pytest.mark.parametrize("sms", [1, 9])
def test_ties_go_to_the_lowest_id_however_the_vocabulary_is_cut(sms: int) -> None:
    weight = np.zeros((200, 64))
    for row, logits in enumerate(FINITE):
        weight[list(logits), row] = list(logits.values())
    logits, tokens = head(
        jnp.eye(8, 64, dtype=jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), interpret=True, sms=sms
    )
    np.testing.assert_array_equal(logits, weight[:, :8].T)
    assert tokens.tolist() == [0, 3, 6, 199, 131, 0, 1, 64]
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ({9: INF, 67: NAN, 66: NAN}, 66),
        (dict.fromkeys(range(70), NAN), 0),
        (dict.fromkeys(range(70), -INF), 0),
    ],
    ids=["the first NaN, above inf", "nothing but NaN", "nothing but -inf"],
)
def test_logits_that_are_no_numbers_choose_as_argmax_does(logits: dict[int, float], token: int) -> None:
    weight = (
        jnp.zeros((70, 64), jnp.bfloat16)
        .at[jnp.array(list(logits))]
        .set(jnp.array(list(logits.values()), jnp.bfloat16)[:, None])
    )
    seen, tokens = head(jnp.ones((8, 64), jnp.bfloat16), weight, interpret=True, sms=2)
    np.testing.assert_array_equal(tokens, greedy(seen))
    np.testing.assert_array_equal(tokens, np.asarray(seen).argmax(axis=1))
    assert tokens.tolist() == [token] * 8


def test_the_padding_of_a_small_vocabulary_is_never_chosen() -> None:
    """Of 50 negative logits the 14 zeros behind them would win."""
    weight = -jnp.ones((50, 64), jnp.bfloat16)
    _, tokens = head(jnp.ones((8, 64), jnp.bfloat16), weight.at[33].set(-0.5), interpret=True)
    assert tokens.tolist() == [33] * 8


def test_rows_choose_alone() -> None:
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((8, 64)), jnp.bfloat16).at[2].set(NAN)
    weight = jnp.asarray(rng.standard_normal((300, 64)), jnp.bfloat16)
    logits, tokens = head(x, weight, interpret=True, sms=2)
    np.testing.assert_array_equal(tokens, np.asarray(logits).argmax(axis=1))
    assert tokens[2] == 0
    assert len(set(tokens.tolist())) > 4, "rows that differ choose alike"


def test_logits_keep_their_bits_beside_the_choice() -> None:
    x, weight = make(256, 200)
    plain = Product((weight,), Epilogue.WIDE)
    (want,) = skinny_gemm([x], [plain], interpret=True)
    np.testing.assert_array_equal(head(x, weight, interpret=True)[0], want)
    np.testing.assert_array_equal(logits_of(x, weight, interpret=True), want)


def test_the_head_does_not_race() -> None:
    """Whole blocks of 64 rows: the last one of others is moved up, and two CTAs store the same bits."""
    x, weight = make(64, 256)
    check(assert_no_races(lambda races: head(x, weight, interpret=races, sms=2)), x, weight)


def test_keys_order_as_the_numbers_do() -> None:
    ascending = [-INF, -3.0e38, -1.0, -1e-37, 0.0, 1e-37, 1.0, 3.0e38, INF, NAN]
    keys = [int(order(jnp.float32(x))) for x in ascending]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert keys[0] > NOTHING
    assert order(jnp.float32(-0.0)) == order(jnp.float32(0.0))
    assert order(jnp.float32(-NAN)) == order(jnp.float32(NAN))


def test_the_pick_prefers_the_lowest_id_whichever_cta_has_it() -> None:
    keys = jnp.full((3, 8, 64), NOTHING).at[0, :, 5].set(7).at[2, :, 1].set(7).at[1, 3, 9].set(8)
    ids = jnp.zeros((3, 8, 64), jnp.int32).at[0, :, 5].set(90).at[2, :, 1].set(17).at[1, 3, 9].set(300)
    assert pick(keys, ids).tolist() == [17, 17, 17, 300, 17, 17, 17, 17]


def test_a_part_of_the_vocabulary_has_ids_of_its_own(cpu_devices: Any) -> None:
    """As under a plan, where each device holds a part: its choice is that of its own logits."""
    x, weight = make(64, 144)
    mesh = jax.make_mesh((2,), ("w",), (jax.sharding.AxisType.Auto,), devices=cpu_devices[:2])
    run = jax.shard_map(
        lambda x, w: head(x, w, interpret=True),
        mesh=mesh,
        in_specs=(P(), P("w")),
        out_specs=(P(None, "w"), P("w")),
    )
    logits, tokens = jax.jit(run)(x, weight)
    check((logits, np.asarray(logits).argmax(axis=1)), x, weight)
    parts = np.asarray(logits).reshape(8, 2, 72).argmax(axis=2)
    np.testing.assert_array_equal(tokens, parts.T.ravel())


@pytest.mark.parametrize("words", [163840, 20480])
def test_lowers_for_cuda_at_the_release_size_without_a_pass_over_the_logits(words: int) -> None:
    text = lower_for_cuda(
        lambda x, w: head(x, w, sms=132), sds((8, 7168), jnp.bfloat16), sds((words, 7168), jnp.bfloat16)
    )
    assert launches(text) == {"k3_skinny_gemm": 1}
    passes = [line for line in text.splitlines() if f"tensor<8x{words}xf32>" in line and "reduce" in line]
    assert not passes, "XLA looks at the logits again"


def test_supports_passes_on_the_reasons_of_the_product() -> None:
    (reason,) = supports(sds((8, 100), jnp.bfloat16), sds((64, 100), jnp.bfloat16))
    assert "multiples of 64, got 100" in reason
