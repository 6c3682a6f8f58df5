"""Logits and greedy tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.pallas.head import greedy, head, reference, supports
from support import megakernel_ops
from support.pallas_ops import Case, OpTests, sds


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


def test_the_lowest_of_equal_logits_wins() -> None:
    logits = jnp.zeros((2, 300)).at[0, 7].set(1).at[0, 250].set(1)
    assert greedy(logits).tolist() == [7, 0]
    assert greedy(logits).dtype == jnp.int32


def test_supports_passes_on_the_reasons_of_the_product() -> None:
    (reason,) = supports(sds((8, 100), jnp.bfloat16), sds((64, 100), jnp.bfloat16))
    assert "multiples of 64, got 100" in reason
