"""Residual sum, mixture over depth and norm in one launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas.attn_res import attn_res, reference, supports
from support import megakernel_ops
from support.pallas_ops import Case, OpTests, assert_no_races, lower_for_cuda, sds

EPS = 1e-5
ROUNDING = 2.0**-7
ROUNDING_WHY = "the mixture, the normed value and its product with the gain are rounded to 2^-9 each"


def make(width: int, snapshots: int, slots: tuple[int, ...], restart: bool = False) -> tuple[Any, ...]:
    """Arguments of a call; ``slots`` of each delta."""
    rng = np.random.default_rng(width + snapshots)

    def array(*shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> Any:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    mixed = snapshots > 0
    return (
        None if restart else array(8, width),
        [array(s, 8, width, dtype=jnp.float32) for s in slots],
        [array(8, width, scale=4.0**j) for j in range(snapshots)],
        array(width) if mixed else None,
        array(1, width, scale=2 / width**0.5) if mixed else None,
        array(width),
        EPS,
    )


def exact_sum(pre: Any, deltas: Any) -> Any:
    """bfloat16 running sum: a delta's slots added in float32 in their order, rounded, then added in turn."""
    total = None
    for delta in deltas:
        slots = np.asarray(delta, np.float32)
        added = slots[0]
        for slot in slots[1:]:
            added = added + slot
        rounded = jnp.asarray(added).astype(jnp.bfloat16)
        total = rounded if total is None else total + rounded
    if total is None:
        return pre
    return total if pre is None else pre + total


def check(
    result: Any, pre: Any, deltas: Any, snapshots: Any, norm: Any, proj: Any, gain: Any, _: Any
) -> None:
    x, after = result
    np.testing.assert_array_equal(np.asarray(after), np.asarray(exact_sum(pre, deltas)))
    sources = [np.asarray(v, np.float64) for v in (*snapshots, after)]
    h = sources[-1]
    if snapshots:
        direction = np.asarray(norm, np.float64) * np.asarray(proj[0], np.float64)
        scores = np.stack([(v @ direction) / np.sqrt((v * v).mean(-1) + EPS) for v in sources], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        h = np.sum([weights[:, j, None] * v for j, v in enumerate(sources)], axis=0)
    want = h / np.sqrt((h * h).mean(-1, keepdims=True) + EPS) * np.asarray(gain, np.float64)
    error = np.abs(np.asarray(x, np.float64) - want)
    floor = 2.0**-9 * np.abs(np.asarray(gain, np.float64))  # where sources cancel in the mixture
    assert (error <= ROUNDING * np.abs(want) + 2 * floor).all(), ROUNDING_WHY


class TestAttnRes(OpTests):
    op = staticmethod(attn_res)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_ops.attn_res)
    cases = (
        Case("first layer: a plain norm", partial(make, 256, 0, ()), check),
        Case("a split product's norm", partial(make, 512, 0, (3,), True), check),
        Case("one snapshot", partial(make, 256, 1, (2,)), check),
        Case("a block restarts", partial(make, 256, 2, (1,), True), check),
        Case("two deltas, several chunks", partial(make, 768, 3, (2, 1)), check),
        Case("128 columns", partial(make, 128, 0, (2,), True), check),
        Case("K3's last layer", partial(make, 7168, 8, (3, 4)), check),
        Case("K3's latent norm", partial(make, 3584, 0, (3,), True), check),
    )


def test_no_races() -> None:
    args = make(768, 2, (2,))
    check(assert_no_races(lambda races: attn_res(*args, interpret=races)), *args)


def test_reasons_name_every_unsupported_array_at_once() -> None:
    wide = sds((8, 96), jnp.float32)
    text = "; ".join(supports(wide, [sds((2, 4, 96), jnp.float32)], [wide] * 16, sds((96,), jnp.bfloat16)))
    assert "multiples of 128, got 96" in text
    assert "at most 15, got 16" in text
    assert "pre: expected bfloat16 (8, 96), got float32" in text
    assert "delta: expected float32 [slots, 8, 96]" in text
    assert "expected one of them, got neither" in supports(None, [], [], sds((256,), jnp.bfloat16))[0]


@pytest.mark.parametrize(("width", "snapshots", "slots"), [(7168, 8, (3, 4)), (7168, 0, ()), (3584, 0, (3,))])
def test_k3_widths_lower_for_cuda(width: int, snapshots: int, slots: tuple[int, ...]) -> None:
    bf = jnp.bfloat16
    row, vector = sds((8, width), bf), sds((width,), bf)
    lower_for_cuda(
        lambda pre, deltas, shots, norm, proj, gain: attn_res(pre, deltas, shots, norm, proj, gain, EPS),
        row,
        [sds((s, 8, width), jnp.float32) for s in slots],
        [row] * snapshots,
        vector,
        sds((1, width), bf),
        vector,
    )
