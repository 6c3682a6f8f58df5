"""``capture`` refuses what has no meaning, and names its values as documented."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import k3jax
from support import tiny_model


@pytest.mark.parametrize(
    "tokens", [[[-1, 3]], [[0, 61]], np.zeros((1, 0), np.int32), np.zeros((1, 1025), np.int32)]
)
def test_ids_and_lengths_out_of_range_are_refused(tokens: object) -> None:
    model = tiny_model.model()
    with pytest.raises(ValueError, match="tokens: expected"):
        k3jax.capture(model.params, np.asarray(tokens), config=model.config)


def test_under_a_jit_a_bad_id_makes_its_row_nan_and_no_other() -> None:
    model = tiny_model.model()
    seen = jax.jit(lambda p, t: k3jax.capture(p, t, config=model.config))(
        model.params, np.array([[1, 61, 2], [1, 5, 2]], np.int32)
    )
    logits = np.asarray(seen["logits"])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    assert seen["layers.1.topk_ids"].shape == (2, 3, 2)
    assert seen["layers.0.attn_in"].shape == (2, 3, 32)
