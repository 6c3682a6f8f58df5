"""Skinny GEMM: its partition of the weights, its numbers, its races, its lowering at K3's shapes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.pallas.skinny_gemm import (
    Config,
    Epilogue,
    Product,
    configs,
    reference,
    skinny_gemm,
    supports,
)
from k3jax.pallas.skinny_gemm.partition import Partition, partition
from support import megakernel_products
from support.megakernel_stage import OutsideThePlanError
from support.pallas_ops import Case, OpTests, assert_no_races, lower_for_cuda, sds

ROUND, WIDE, SITU, PARTIAL = Epilogue.ROUND, Epilogue.WIDE, Epilogue.SITU, Epilogue.PARTIAL
BEST = Epilogue.BEST
WIDE_WHY = "float32 sums over 16 columns at a time, each of which the GPU truncates by up to 2^-23 of itself"


def wide_tolerance(columns: int) -> float:
    """For sums of K columns, in the worst case, all of one sign; the interpreter's are rounded."""
    return max(1e-5, columns / 16 * 2.0**-23)


def normal(seed: int, *shape: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.bfloat16)


def make(widths: Sequence[int], rows: Sequence[tuple[int, Epilogue, int]], **options: Any) -> tuple[Any, ...]:
    """Arguments for products of ``rows`` (N, epilogue, index of x) on activations ``widths`` wide."""
    xs = [normal(i, 8, k) for i, k in enumerate(widths)]
    products = [
        Product(tuple(normal(10 * i + j, n, widths[x]) for j in range(2 if e is SITU else 1)), e, x)
        for i, (n, e, x) in enumerate(rows)
    ]
    return xs, products


def exact(product: Product, xs: Sequence[Any]) -> list[np.ndarray]:
    """float64 of the sums of each of the product's matrices."""
    x = np.asarray(xs[product.x], np.float64)
    return [x @ np.asarray(w, np.float64).T for w in product.weights]


def situ(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


def check(results: Sequence[Any], xs: Sequence[Any], products: Sequence[Product]) -> None:
    for result, product in zip(results, products, strict=True):
        sums = exact(product, xs)
        got = np.asarray(result, np.float64)
        assert result.dtype == (jnp.bfloat16 if product.epilogue in (ROUND, SITU) else jnp.float32)
        if product.epilogue is PARTIAL:
            got = got.sum(axis=0)
        assert got.shape == sums[0].shape
        tolerance = wide_tolerance(product.weights[0].shape[1])
        wide = [tolerance * np.abs(s).max() for s in sums]
        if product.epilogue is SITU:
            # Gate and up are rounded to bfloat16, as the library's linear layers are; a sum next to a
            # rounding boundary can get the neighbour: 2^-8 in all.
            off = [2.0**-8 * np.abs(s) + w for s, w in zip(sums, wide, strict=True)]
            want = situ(*sums)
            around = [situ(sums[0] + i * off[0], sums[1] + j * off[1]) for i in (-1, 1) for j in (-1, 1)]
            bound = np.max(np.abs(np.array(around) - want), axis=0) + 2.0**-8 * np.abs(want) + 1e-6
            assert (np.abs(got - want) <= bound).all()
            continue
        error = np.abs(got - sums[0])
        if product.epilogue is ROUND:
            # One rounding to 8 bits of mantissa, after float32 sums.
            assert (error <= 2.0**-8 * np.abs(sums[0]) + wide[0]).all()
        else:
            assert error.max() <= wide[0], WIDE_WHY


CASES = (
    Case("one matrix", partial(make, [512], [(192, ROUND, 0)]), check),
    Case("ragged rows", partial(make, [256], [(72, ROUND, 0), (2, WIDE, 0), (136, WIDE, 0)]), check),
    Case("KDA inputs", partial(make, [256], [*[(128, ROUND, 0)] * 4, (128, ROUND, 0), (1, ROUND, 0)]), check),
    Case("MoE inputs", partial(make, [128], [(32, WIDE, 0), (128, ROUND, 0), (192, SITU, 0)]), check),
    Case("split sums", partial(make, [512], [(192, PARTIAL, 0)]), check),
    Case("split sums of two chunks", partial(make, [2048], [(64, PARTIAL, 0)]), check),
    Case("two split sums", partial(make, [128, 320], [(256, PARTIAL, 0), (256, PARTIAL, 1)]), check),
    Case("narrow columns", partial(make, [64], [(64, ROUND, 0)]), check),
    Case(
        "K3's attention output",
        partial(make, [12288], [(7168, PARTIAL, 0)]),
        check,
        interpret=False,
    ),
    Case(
        "K3's MoE inputs",
        partial(make, [7168], [(896, WIDE, 0), (3584, ROUND, 0), (6144, SITU, 0)]),
        check,
        interpret=False,
    ),
)


class TestSkinnyGemm(OpTests):
    op = staticmethod(skinny_gemm)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_products.products)
    cases = CASES


@pytest.mark.parametrize("sms", [1, 2, 5])
def test_sums_do_not_depend_on_the_number_of_ctas_unless_split(sms: int) -> None:
    xs, products = make([256], [(192, WIDE, 0), (136, WIDE, 0)])
    one = skinny_gemm(xs, products, interpret=True, sms=1)
    other = skinny_gemm(xs, products, interpret=True, sms=sms)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_best_product_chooses_among_its_own_rows_beside_others() -> None:
    xs, products = make([128], [(136, ROUND, 0), (72, BEST, 0), (128, SITU, 0)])
    narrow, (logits, tokens), gated = skinny_gemm(xs, products, interpret=True)
    check((narrow, logits, gated), xs, products)
    np.testing.assert_array_equal(tokens, np.asarray(logits).argmax(axis=1))
    ((_, other),) = reference(xs, products[1:2])
    np.testing.assert_array_equal(tokens, other)


def test_every_slot_is_filled_where_there_are_more_ctas_than_units() -> None:
    """Memory that the interpreter hands out is NaN: a slot that no CTA writes shows."""
    xs, products = make([256], [(128, PARTIAL, 0)])
    few = Config(blocks=1, columns=128, stages=2)
    (out,) = skinny_gemm(xs, products, interpret=True, sms=9, config=few)
    assert np.isfinite(np.asarray(out)).all()
    check((out,), xs, products)


def test_a_partition_with_idle_ctas_is_refused() -> None:
    with pytest.raises(ValueError, match="ctas: expected at most 4, one a unit, got 9"):
        Partition((2,), (2,), 9, split=True)


def test_a_row_does_not_depend_on_the_others_even_if_they_are_nan() -> None:
    xs, products = make([256], [(128, PARTIAL, 0)])
    alone = [xs[0].at[1:].set(jnp.nan)]
    want = np.asarray(skinny_gemm(xs, products, interpret=True)[0])[:, 0]
    got = np.asarray(skinny_gemm(alone, products, interpret=True)[0])[:, 0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [[(192, ROUND, 0)], [(192, PARTIAL, 0)], [(128, SITU, 0)]])
def test_no_races(rows: Any) -> None:
    xs, products = make([256], rows)
    small = Config(blocks=1, columns=64, stages=2)
    check(
        assert_no_races(lambda races: skinny_gemm(xs, products, interpret=races, sms=2, config=small)),
        xs,
        products,
    )


def test_a_product_without_a_stage_of_the_megakernel_says_why() -> None:
    with pytest.raises(OutsideThePlanError, match="q_lora_rank: 4, not a multiple of 8"):
        megakernel_products.products(*make([64], [(4, ROUND, 0)]))


def test_reasons_name_every_unsupported_shape_at_once() -> None:
    x = sds((8, 96), jnp.bfloat16)
    wide = sds((4, 64), jnp.float32)
    reasons = supports(
        [x, wide],
        [
            Product((sds((100, 96), jnp.bfloat16),), PARTIAL),
            Product((sds((64, 96), jnp.float32),), ROUND),
        ],
    )
    text = "; ".join(reasons)
    assert "x 0: expected K in multiples of 64, got 96" in text
    assert "x 1: expected bfloat16 [8, K], got float32 (4, 64)" in text
    assert "PARTIAL for all or none" in text
    assert "product 0: expected N in multiples of 64 for PARTIAL, got 100" in text
    assert "product 1: expected bfloat16 [N, 96], got float32 (64, 96)" in text
    with pytest.raises(NotImplementedError, match="x 0: expected K in multiples of 64"):
        skinny_gemm([jnp.zeros((8, 96), jnp.bfloat16)], [])


@pytest.mark.parametrize(
    ("products", "reason"),
    [
        ([], "products: expected at least one, got none"),
        ([Product((sds((64, 64), jnp.bfloat16),), BEST)] * 2, "products: expected at most one BEST"),
        ([Product(())], "product 0: expected 1 weights, got 0"),
        ([Product((sds((64, 64), jnp.bfloat16),), ROUND, 1)], r"product 0: expected x in 0\.\.0, got 1"),
        ([Product((sds((64, 64), jnp.bfloat16),), ROUND, -1)], r"product 0: expected x in 0\.\.0, got -1"),
        ([Product((sds((0, 64), jnp.bfloat16),))], r"equal numbers of rows, at least 1, got \[0\]"),
        (
            [Product((sds((64, 64), jnp.bfloat16), sds((72, 64), jnp.bfloat16)), SITU)],
            r"equal numbers of rows, at least 1, got \[64, 72\]",
        ),
    ],
)
def test_products_that_are_none_are_refused(products: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        skinny_gemm([jnp.zeros((8, 64), jnp.bfloat16)], products, interpret=True)


def test_a_launch_without_ctas_is_refused() -> None:
    x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="sms: expected at least 1, got 0"):
        skinny_gemm([x], [Product((w,))], interpret=True, sms=0)


@given(
    tiles=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ctas=st.integers(1, 140),
    split=st.booleans(),
)
def test_ctas_cover_the_weights_once_and_slots_hold_all_who_share_a_tile(
    tiles: list[int], chunks: list[int], ctas: int, split: bool
) -> None:
    count = len(tiles)
    lengths = chunks[:count] if split else chunks[:1] * count
    part = partition(tuple(tiles), tuple(lengths), ctas, split)
    total, ctas = part.unit_starts[-1], part.ctas
    cuts = [part.start(i) for i in range(ctas + 1)]
    assert cuts[0] == 0
    assert cuts[-1] == total
    assert cuts == sorted(cuts)
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    if split:
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1, "the slot of a CTA without a unit would be nobody's to fill"
        owners = [next(i for i in range(ctas) if cuts[i] <= u < cuts[i + 1]) for u in range(total)]
        assert [part.owner(u) for u in range(total)] == owners
        for p in range(count):
            first = part.unit_starts[p]
            spans = [
                owners[u + lengths[p] - 1] - owners[u] + 1
                for u in range(first, part.unit_starts[p + 1], lengths[p])
            ]
            assert part.slots(p) == max(spans)
    else:
        assert all(cut % lengths[0] == 0 for cut in cuts)


@pytest.mark.parametrize("name", configs.VARIANTS)
@pytest.mark.parametrize("width", [64, 128, 7168, 12288, 33792])
def test_fitted_configs_divide_the_width_and_stay_within_shared_memory(name: str, width: int) -> None:
    for blocks, best in itertools.product((1, 2), (False, True)):
        config = configs.fit(configs.VARIANTS[name], [width], blocks, best)
        assert width % config.columns == 0
        assert config.stages >= 2
        assert config.shared_bytes + best * configs.BEST_BYTES <= configs.SHARED_MEMORY


K3_LAUNCHES = {
    "KDA inputs": ([7168], [*[(12288, ROUND, 0)] * 4, (128, ROUND, 0), (96, ROUND, 0)]),
    "attention output": ([12288], [(7168, PARTIAL, 0)]),
    "MoE inputs": ([7168], [(896, WIDE, 0), (3584, ROUND, 0), (6144, SITU, 0)]),
    "MoE outputs": ([3584, 6144], [(7168, PARTIAL, 0), (7168, PARTIAL, 1)]),
    "lm_head": ([7168], [(163840, BEST, 0)]),
}


@pytest.mark.parametrize("name", K3_LAUNCHES)
def test_k3_launches_lower_for_cuda(name: str) -> None:
    widths, rows = K3_LAUNCHES[name]
    xs = [sds((8, k), jnp.bfloat16) for k in widths]
    weights = [[sds((n, widths[x]), jnp.bfloat16) for _ in range(2 if e is SITU else 1)] for n, e, x in rows]

    def run(xs: Any, weights: Any) -> Any:
        products = [Product(tuple(w), e, x) for w, (_, e, x) in zip(weights, rows, strict=True)]
        return skinny_gemm(xs, products, sms=132)

    text = lower_for_cuda(run, xs, weights)
    # One launch, and no copy of a weight.
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text


def test_the_overlapping_variant_lowers_with_dependent_launch() -> None:
    overlap = configs.VARIANTS["2x64x128x3-overlap"]
    x, w = sds((8, 7168), jnp.bfloat16), sds((12288, 7168), jnp.bfloat16)
    plain = dataclasses.replace(overlap, overlap=False)
    texts = [
        lower_for_cuda(lambda x, w, c=c: skinny_gemm([x], [Product((w,))], sms=132, config=c), x, w)
        for c in (overlap, plain)
    ]
    assert texts[0] != texts[1]
