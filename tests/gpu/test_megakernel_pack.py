"""``Model.pack()`` on the GPU takes the bytes of its result and one matrix more, as the device counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls.decode_megakernel.operands import is_matrix, packed_shapes
from k3jax.custom_calls.pack import PACKED, plan_of
from support.megakernel_cases import config
from support.megakernel_gpu import report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

SLACK = 256 << 20
"""Bytes that the count may be too high by: XLA's allocator hands out a block up to 128 MiB larger than asked
for rather than cut it, for the matrix and for one of the small arrays beside it."""


def whole_head() -> Any:
    """The widest matrix is the output's, 2.3 GB, and there is one: 11 GB of weights."""
    return config("slice4-e16")


def small_head() -> Any:
    """Eight layers with a sixteenth of the vocabulary: the widest is the dense network's, 1 GB, and six
    of KDA, 0.7 GB each, are packed one behind the other, so the work spaces of several at once would show."""
    few = k3jax.K3Config.preset("k3-slice", num_layers=8, num_experts=16)
    names = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return dataclasses.replace(few, vocab_size=few.vocab_size // 16, **names)


def largest_matrix(c: Any) -> int:
    """Bytes of the largest matrix of one layer, or of the output, as packed."""
    shapes = packed_shapes(plan_of(c)).items()
    return max(2 * int(np.prod(shape[1:])) for name, (_, shape) in shapes if is_matrix(name))


def counted() -> dict[str, int]:
    """The device's memory: bytes in use, the most that ever were, and the limit."""
    found = jax.devices()[0].memory_stats()
    assert found is not None, "the device does not count its memory"
    return {name: int(found[name]) for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")}


def fill_to_the_peak(need: int) -> list[jax.Array]:
    """Arrays that make the bytes in use the most that ever were: the peak then is that of what follows.

    Args:
        need: bytes that must be left.
    """
    held = []
    while True:
        now = counted()
        missing = now["peak_bytes_in_use"] - now["bytes_in_use"]
        if missing <= 0:
            return held
        left = now["bytes_limit"] - now["peak_bytes_in_use"]
        assert left >= need, (
            f"the peak of this process is {now['peak_bytes_in_use']} of {now['bytes_limit']} bytes, packing "
            f"may take {need}: run this file by itself"
        )
        held.append(jax.block_until_ready(jnp.zeros(min(missing, 1 << 30), jnp.uint8)))


@pytest.mark.parametrize("make", [whole_head, small_head])
def test_packing_takes_its_result_and_one_matrix(make: Any) -> None:
    c = make()
    one = largest_matrix(c)
    model = k3jax.random_model(c, seed=1, implementation="xla")
    plain = dict(model.params)
    model.pack()  # compiles: what compilation tries on the device is not packing's
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(model.params[PACKED])))
    assert result > 2 * one, "too small a model to tell one matrix from the result"
    model.params = plain
    held = fill_to_the_peak(result + 2 * one + SLACK)
    begin = counted()
    assert begin["peak_bytes_in_use"] == begin["bytes_in_use"]
    model.pack()
    jax.block_until_ready(model.params[PACKED])
    end = counted()
    assert end["peak_bytes_in_use"] >= begin["bytes_in_use"] + result, "the peak is not packing's"
    extra = end["peak_bytes_in_use"] - end["bytes_in_use"]
    report(
        f"pack, {make.__name__}: result {result / 1e9:.2f} GB, beside it {extra / 1e9:.3f} GB, largest "
        f"matrix {one / 1e9:.3f} GB"
    )
    assert extra <= one + SLACK
    held.clear()
