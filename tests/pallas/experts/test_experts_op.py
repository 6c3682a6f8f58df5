"""Expert kernels on packed MXFP4: numerics, scale bytes, routing extremes, races, lowering."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.pallas.experts import check_scales, configs, experts, reference, supports
from k3jax.pallas.experts.packed_dot import permute_columns
from k3jax.quant import MXFP4, dequantize
from support import megakernel_ops
from support.compare import as_float64, assert_close
from support.pallas_ops import Case, OpTests, assert_no_races, lower_for_cuda, sds
from support.reference_math import situ_glu

RELEASE = K3Config.preset("k3")
BF16 = jnp.bfloat16
SCALES = (118, 124)
"""Scale bytes of weights around 1/sqrt(columns) of the small cases."""


def small(count: int, latent: int, width: int, choices: int) -> K3Config:
    return dataclasses.replace(
        RELEASE, num_experts=count, num_experts_per_token=choices, routed_expert_hidden_size=latent,
        moe_intermediate_size=width,
    )  # fmt: skip


def packed(rng: np.random.Generator, shape: tuple[int, int, int], scales: tuple[int, int]) -> MXFP4:
    """Every code, scale bytes from scales[0] up to, not including, scales[1]."""
    count, rows, columns = shape
    codes = rng.integers(0, 256, (count, rows, columns // 2), dtype=np.uint8)
    return MXFP4(
        jnp.asarray(codes), jnp.asarray(rng.integers(*scales, (count, rows, columns // 32), dtype=np.uint8))
    )


def listed(ids: np.ndarray, active: np.ndarray, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(slots, count, slot_of) of a routing, as the router's kernel lists them."""
    distinct = np.unique(ids[active])
    slots = np.full(min(ids.size, count), -1, np.int32)
    slots[: len(distinct)] = distinct
    slot_of = np.where(active[:, None], np.searchsorted(distinct, ids), -1)
    return jnp.asarray(slots), jnp.asarray([len(distinct)], jnp.int32), jnp.asarray(slot_of, jnp.int32)


def call(
    batch: int,
    size: tuple[int, int, int, int] = (6, 128, 64, 2),
    seed: int = 0,
    routing: str = "random",
    scales: tuple[int, int] = SCALES,
    active: list[bool] | None = None,
    latent: float = 1.0,
) -> tuple[Any, ...]:
    """Experts, latent, ids, weights, slots, count, slot_of, config of (E, L, F, A)."""
    count, columns, width, choices = size
    rng = np.random.default_rng(seed)
    weights = {
        "w1": packed(rng, (count, width, columns), scales),
        "w3": packed(rng, (count, width, columns), scales),
        "w2": packed(rng, (count, columns, width), scales),
    }
    ids = np.stack([rng.permutation(count)[:choices] for _ in range(batch)]).astype(np.int32)
    if routing == "together":
        ids[:] = np.arange(choices)[::-1] + count - choices
    running = np.ones(batch, bool) if active is None else np.asarray(active)
    mix = rng.random((batch, choices)) + 0.1
    x = jnp.asarray(rng.normal(size=(batch, columns)) * latent, BF16)
    return (
        weights, x, jnp.asarray(ids), jnp.asarray(mix / mix.sum(-1, keepdims=True), jnp.float32),
        *listed(ids, running, count), small(count, columns, width, choices),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("config", "interpret", "sms"))
def run_kernel(
    weights: Any, x: Any, ids: Any, mix: Any, slots: Any, count: Any, slot_of: Any, config: K3Config,
    interpret: Any = False, sms: int | None = None,
) -> Any:  # fmt: skip
    del ids
    return experts(weights, x, mix, slots, count, slot_of, config, interpret=interpret, sms=sms)


# XLA would leave out roundings to bfloat16 between operations that it fuses.
@partial(jax.jit, static_argnames="config", compiler_options={"xla_allow_excess_precision": False})
def run_reference(
    weights: Any, x: Any, ids: Any, mix: Any, slots: Any, count: Any, slot_of: Any, config: K3Config
) -> Any:
    del slots, count
    total = reference(weights, x, ids, mix, config)
    return jnp.where((slot_of >= 0).all(-1, keepdims=True), total, 0.0)


def float64(weights: Any, x: Any, ids: Any, mix: Any, slot_of: Any) -> np.ndarray:
    """The weighted sum without a rounding; rows that are not running give 0."""
    x, mix, ids = as_float64(x), as_float64(mix), np.asarray(ids)
    total = np.zeros_like(x)
    for b, a in np.argwhere(np.asarray(slot_of) >= 0):
        w1, w3, w2 = (as_float64(weights[name][int(ids[b, a])].decode()) for name in ("w1", "w3", "w2"))
        total[b] += mix[b, a] * (w2 @ situ_glu(w1 @ x[b], w3 @ x[b], 4.0, 25.0))
    return total


def check(result: Any, *args: Any) -> None:
    weights, x, ids, mix, _, _, slot_of, _ = args
    reason = "gate, up, hidden and each expert's output are rounded to bfloat16 (2^-9 each)"
    assert_close("y", result, float64(weights, x, ids, mix, slot_of), 8e-3, reason)


def check_zero(result: Any, *args: Any) -> None:
    assert (np.asarray(result) == 0).all(), "a zero latent must give exact zeros"


class TestExperts(OpTests):
    op = staticmethod(run_kernel)
    reference = staticmethod(run_reference)
    stage = staticmethod(megakernel_ops.experts)
    cases = (
        Case("one row", partial(call, 1), check),
        Case("eight rows", partial(call, 8, seed=1), check),
        Case("all tokens to one set of experts", partial(call, 8, seed=2, routing="together"), check),
        Case("rows not running", partial(call, 4, seed=3, active=[True, False, True, False]), check),
        Case("zero latent", partial(call, 2, seed=4, latent=0.0), check_zero),
        Case("all scale bytes", partial(call, 1, seed=5, scales=(0, 129), latent=1e-2), check),
        Case("columns split among warpgroups", partial(call, 1, (3, 1024, 512, 1), 6), check),
        Case("several row tiles", partial(call, 2, (4, 192, 128, 2), 7), check),
    )

    @pytest.mark.gpu
    @pytest.mark.parametrize("batch", range(1, 9))
    def test_release_sizes_equal_the_library_on_the_gpu(self, batch: int) -> None:
        args = call(batch, (24, 3584, 3072, 16), batch, scales=(116, 121))
        got, want = self.run("pallas", args), run_reference(*args)
        reason = "same roundings; sums in another order move a few by one step of 2^-9"
        assert_close("y", got, want, 1e-3, reason)
        assert (np.asarray(self.run("pallas", args)) == np.asarray(got)).all()

    def test_kernel_equals_the_reference(self) -> None:
        args = call(2, seed=8)
        reason = "same roundings; sums in another order move a few by one step of 2^-9"
        assert_close("y", self.run("pallas-interpret", args), run_reference(*args), 1e-3, reason)

    def test_the_number_of_ctas_does_not_change_a_bit(self) -> None:
        args = call(2, seed=9)
        one, five = (run_kernel(*args, interpret=True, sms=sms) for sms in (1, 5))
        np.testing.assert_array_equal(np.asarray(one), np.asarray(five))

    def test_warpgroups_and_copies_do_not_race(self) -> None:
        args = call(1, (2, 512, 512, 1), 10)
        check(assert_no_races(lambda interpret: run_kernel(*args, interpret=interpret)), *args)


@pytest.mark.parametrize("batch", [1, 8])
def test_lowers_for_cuda_at_the_release_sizes(batch: int) -> None:
    def leaf(rows: int, columns: int) -> MXFP4:
        return MXFP4(sds((896, rows, columns // 2), jnp.uint8), sds((896, rows, columns // 32), jnp.uint8))

    weights = {"w1": leaf(3072, 3584), "w3": leaf(3072, 3584), "w2": leaf(3584, 3072)}
    text = lower_for_cuda(
        partial(experts, config=RELEASE), weights, sds((8, 3584), BF16), sds((batch, 16), jnp.float32),
        sds((128,), jnp.int32), sds((1,), jnp.int32), sds((batch, 16), jnp.int32),
    )  # fmt: skip
    touching = [line for line in text.splitlines() if "stablehlo." in line and "tensor<896x" in line]
    touching = [line for line in touching if "custom_call" not in line]
    assert not touching, "an operation outside the kernels reads whole weights"


@pytest.mark.parametrize("columns", [256, 512, 3072, 3584])
@pytest.mark.parametrize("matrices", [1, 2])
def test_every_plan_covers_its_columns_and_fits(matrices: int, columns: int) -> None:
    plan = configs.pick(matrices, columns)
    assert plan.columns == columns
    assert plan.warpgroups <= 4
    assert plan.shared_bytes <= configs.SHARED_MEMORY


def test_every_bit_pattern_of_the_register_decode_is_its_weight() -> None:
    """The kernel's bit formula, on all 16 codes and all 129 scale bytes, in float64."""
    code = np.arange(16, dtype=np.uint16)
    byte = np.arange(129, dtype=np.uint16)[:, None]
    bits = ((code & 8) << 12) | ((code & 7) << 6)
    factor = (byte + 126) << 7
    product = as_float64(bits.view(BF16)) * as_float64(factor.view(BF16))
    packed_codes = jnp.asarray(np.tile(code[0::2] | code[1::2] << 4, 2).astype(np.uint8))
    codes = jnp.broadcast_to(packed_codes, (129, 16))
    want = dequantize(codes, jnp.asarray(byte.astype(np.uint8)), jnp.float32)[:, :16]
    np.testing.assert_array_equal(product, as_float64(want))


def test_permutation_takes_every_column_once_to_the_stated_place() -> None:
    order = np.asarray(permute_columns(jnp.arange(512)))
    p = np.arange(256)
    j, i, c, q, b = p >> 7, p >> 5 & 3, p >> 3 & 3, p >> 1 & 3, p & 1
    np.testing.assert_array_equal(order[0], 64 * q + 32 * j + 8 * i + 4 * b + c)
    np.testing.assert_array_equal(order[1], order[0] + 256)


def test_scale_bytes_outside_the_range_are_refused_by_name() -> None:
    weights = call(1)[0]
    check_scales(weights)
    bad = weights["w3"].scales.at[2, 5, 1].set(129)
    with pytest.raises(NotImplementedError, match=r"w3.*0\.\.128.*got 129 at expert 2, row 5, block 1"):
        check_scales({**weights, "w3": MXFP4(weights["w3"].codes, bad)})


def test_unsupported_experts_are_refused_with_every_reason() -> None:
    float_leaf = sds((8, 64, 128), BF16)
    odd = MXFP4(sds((896, 3584, 96), jnp.uint8), sds((896, 3584, 6), jnp.uint8))
    few_rows = MXFP4(sds((8, 48, 128), jnp.uint8), sds((8, 48, 8), jnp.uint8))
    reasons = supports({"w1": float_leaf, "w3": few_rows, "w2": odd}, 9, jnp.float32)
    for part in ("1..8 rows, got 9", "got float32", "w1: expected packed MXFP4, got bfloat16", "w3", "w2"):
        assert any(part in reason for reason in reasons), (part, reasons)
