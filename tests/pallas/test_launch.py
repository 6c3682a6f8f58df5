"""What the Pallas ops share: CTA counts, reasons, and reductions of several warpgroups."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.pallas import _launch
from support.pallas_ops import lower_for_cuda, sds


def test_cta_count_is_that_asked_for_or_of_an_h200_without_a_gpu() -> None:
    assert _launch.sm_count(sms=7) == 7
    assert _launch.sm_count(interpret=True) == _launch.INTERPRETED_SMS
    if not any(d.platform == "gpu" for d in jax.local_devices()):
        assert _launch.sm_count() == 132


def test_a_cpu_is_refused_with_what_was_expected() -> None:
    (reason,) = _launch.device_reasons(jax.devices("cpu")[0])
    assert "9.0" in reason
    assert "cpu" in reason


def test_all_reasons_are_raised_at_once() -> None:
    _launch.require("op", ())
    with pytest.raises(NotImplementedError, match="op: first; second"):
        _launch.require("op", ("first", "second"))


@pytest.mark.parametrize("batch", [0, 9])
def test_batches_outside_one_to_eight_have_a_reason(batch: int) -> None:
    assert f"got {batch}" in _launch.batch_reasons(batch)[0]
    assert _launch.batch_reasons(8) == ()


def _sums(x: jax.Array, interpret: bool) -> jax.Array:
    """float32 [3]: the sum of each row, one warpgroup a row, all at the same time."""

    def body(x: Any, out: Any, shared: Any, met: Any) -> None:
        def mine(i: int) -> None:
            shared[pl_row(i)] = jnp.broadcast_to(jnp.sum(x[i]), (128,))
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            out[i] = shared[pl_row((i + 1) % 3)]

        _launch.per_warpgroup(3, mine)

    def pl_row(i: int) -> slice:
        return slice(i * 128, (i + 1) * 128)

    scratch = [plgpu.SMEM((384,), jnp.float32), plgpu.Barrier(num_arrivals=3)]
    out = sds((3, 128), jnp.float32)
    return _launch.launch(
        body, [x], out_type=out, scratch_types=scratch, ctas=1, warpgroups=3, interpret=interpret
    )


def test_every_warpgroup_reduces_its_own_row() -> None:
    x = jnp.arange(384, dtype=jnp.float32).reshape(3, 128)
    got = np.asarray(_sums(x, interpret=True))
    want = np.roll(np.asarray(x).sum(axis=1), -1)
    np.testing.assert_array_equal(got, np.broadcast_to(want[:, None], (3, 128)))


@pytest.mark.gpu
def test_warpgroups_that_reduce_at_once_do_not_mix_their_sums_on_the_gpu() -> None:
    x = jnp.arange(384, dtype=jnp.float32).reshape(3, 128)
    want = np.roll(np.asarray(x).sum(axis=1), -1)
    run = jax.jit(lambda x: lax.map(lambda _: _sums(x, interpret=False), jnp.arange(200)))
    got = np.asarray(run(x))
    np.testing.assert_array_equal(got, np.broadcast_to(want[None, :, None], got.shape))


def test_several_reducing_warpgroups_lower_for_cuda() -> None:
    lower_for_cuda(lambda x: _sums(x, interpret=False), sds((3, 128), jnp.float32))
