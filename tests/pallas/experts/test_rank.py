"""A rank's experts for any number of rows: the list of those chosen, and blocks of eight rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.layers.moe import experts_by_block
from k3jax.pallas.experts.rank import experts_of_rank, listed
from k3jax.quant import MXFP4
from support.compare import assert_close
from support.pallas_ops import reset_interpreter


@pytest.fixture(autouse=True)
def _clean_interpreter() -> Iterator[None]:
    yield
    reset_interpreter()


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_list_of_a_ranks_experts_holds_each_once_and_every_choice_its_place(batch: int) -> None:
    rng = np.random.default_rng(batch)
    for density in (0.0, 0.3, 1.0):
        chosen = rng.integers(0, 9, (batch, 16)).astype(np.int32)
        chosen[rng.random(chosen.shape) >= density] = -1
        slots, count, slot_of = (np.asarray(x) for x in listed(jnp.asarray(chosen)))
        distinct = np.unique(chosen[chosen >= 0])
        assert count.tolist() == [len(distinct)]
        assert slots[: len(distinct)].tolist() == distinct.tolist()
        assert (slots[len(distinct) :] == -1).all()
        assert np.array_equal(slot_of >= 0, chosen >= 0)
        assert np.array_equal(slots[slot_of[chosen >= 0]], chosen[chosen >= 0])


def test_rows_past_eight_are_computed_like_the_others_and_others_experts_count_nothing() -> None:
    """11 rows, of whose three choices some are another rank's; row 9 has none here."""
    count, latent, width, rows = 4, 64, 64, 11
    config = dataclasses.replace(
        K3Config.preset("k3"), num_experts=count, num_experts_per_token=3, routed_expert_hidden_size=latent,
        moe_intermediate_size=width,
    )  # fmt: skip
    rng = np.random.default_rng(2)

    def packed(out: int, into: int) -> MXFP4:
        codes = rng.integers(0, 256, (count, out, into // 2), dtype=np.uint8)
        return MXFP4(jnp.asarray(codes), jnp.full((count, out, into // 32), 122, jnp.uint8))

    p = {"w1": packed(width, latent), "w3": packed(width, latent), "w2": packed(latent, width)}
    x = jnp.asarray(rng.standard_normal((rows, latent)), jnp.bfloat16)
    chosen = np.stack([rng.permutation(count)[:3] for _ in range(rows)]).astype(np.int32)
    chosen[rng.random(chosen.shape) < 0.3] = -1
    chosen[9] = -1
    weights = jnp.asarray(rng.uniform(0.2, 1.0, chosen.shape).astype(np.float32))
    run = jax.jit(partial(experts_of_rank, config=config, interpret=True))
    got = np.asarray(run(p, x, jnp.asarray(chosen), weights))
    want = np.asarray(experts_by_block(p, x, jnp.asarray(chosen), weights, config))
    assert not got[9].any()
    assert_close("experts", got, want, 5e-3, "bfloat16 roundings (2^-9 each) of sums in another order")
