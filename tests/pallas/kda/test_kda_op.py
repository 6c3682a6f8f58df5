"""KDA decode kernel: numerics, state in place, races, lowering at the release's sizes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.pallas.kda import kda, reference, supports
from support import megakernel_ops
from support.compare import as_float64, assert_close
from support.pallas_ops import RACES, Case, OpTests, assert_no_races, lower_for_cuda, sds
from support.reference_kda import delta_rule, l2_normalize, short_conv
from support.reference_math import rms, sigmoid

RELEASE = K3Config.preset("k3")
BF16 = jnp.bfloat16


def small(heads: int) -> K3Config:
    return dataclasses.replace(RELEASE, kda_num_heads=heads, kda_a_log_size=heads)


def call(batch: int, heads: int, seed: int = 0, active: Any = None, scale: float = 1.0) -> tuple[Any, ...]:
    """Arguments of the op; gates as the release has them: A_log of 1..16, biases that saturate both ways."""
    rng = np.random.default_rng(seed)
    channels = heads * 128

    def normal(*shape: int, dtype: Any = BF16, size: float = scale) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * size, dtype)

    p = {
        **{f"{name}_conv1d": normal(channels, 1, 4, dtype=jnp.float32, size=0.5) for name in "qkv"},
        "f_b_proj": normal(channels, 128, size=0.1),
        "A_log": jnp.asarray(np.log(rng.uniform(1, 16, heads)), jnp.float32),
        "dt_bias": jnp.asarray(rng.uniform(-6, 6, channels), jnp.float32),
        "o_norm": 1 + normal(128, dtype=jnp.float32, size=0.2),
    }
    raw = tuple(normal(batch, channels) for _ in range(4))
    state = normal(batch, heads, 128, 128, dtype=jnp.float32), normal(batch, 3, 3 * channels)
    active = jnp.ones((batch,), bool) if active is None else jnp.asarray(active)
    return p, *raw, normal(batch, heads), normal(batch, 128), *state, active, small(heads)


def float64(p: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any, low: Any, S: Any, conv: Any) -> Any:
    """y [B, N V], S and conv without a rounding."""
    batch, heads = S.shape[:2]
    p = {name: as_float64(leaf) for name, leaf in p.items()}
    q, k, v, gate, beta, low, S, conv = map(as_float64, (q, k, v, gate, beta, low, S, conv))
    raw = np.concatenate([q, k, v], -1)[:, None]
    mixed = short_conv(raw, conv, np.concatenate([p[f"{name}_conv1d"] for name in "qkv"]))
    qn, kn, vn = (part.reshape(batch, 1, heads, 128) for part in np.split(mixed, 3, -1))
    z = (low @ p["f_b_proj"].T + p["dt_bias"]).reshape(batch, 1, heads, 128)
    g = -5.0 * sigmoid(np.exp(p["A_log"])[:, None] * z)
    qn, kn = l2_normalize(qn) * 128**-0.5, l2_normalize(kn)
    o, S = delta_rule(qn, kn, vn, g, sigmoid(beta)[:, None], S)
    y = rms(o[:, 0], p["o_norm"], 1e-5) * sigmoid(gate).reshape(batch, heads, 128)
    return y.reshape(batch, -1), S, np.concatenate([conv, raw], 1)[:, 1:]


def check(result: Any, *args: Any) -> None:
    active, (S, conv) = np.asarray(args[9]) != 0, args[7:9]
    batch = S.shape[0]
    y, new_S, new_conv = result
    want_y, want_S, want_conv = float64(*args[:9])
    reason = "five roundings to bfloat16 (2^-9 each) of inputs to the rule and of its output"
    assert_close("y", y[:batch][active], want_y[active], 8e-3, reason)
    assert_close("S", new_S[active], want_S[active], 8e-3, reason)
    for name, new, old in (("S", new_S, S), ("conv", new_conv, conv)):
        kept = np.asarray(new)[~active].tobytes() == np.asarray(old)[~active].tobytes()
        assert kept, f"{name} of a row that is not active changed"
    np.testing.assert_array_equal(as_float64(new_conv)[active], want_conv[active])


def check_zero(result: Any, *args: Any) -> None:
    for name, array in zip(("y", "S", "conv"), result, strict=True):
        array = np.asarray(array[: args[7].shape[0]]).astype(np.float32)
        assert (array == 0).all(), f"{name}: zero rows must give exact zeros, got {array[array != 0][:4]}"


class TestKda(OpTests):
    op = staticmethod(kda)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_ops.kda)
    cases = (
        Case("one row", partial(call, 1, 2), check),
        Case("eight rows, three not running", partial(call, 8, 1, 1, [1, 0, 1, 1, 0, 1, 1, 0]), check),
        Case("large inputs", partial(call, 2, 1, 2, scale=30.0), check),
        Case("zero rows", partial(call, 2, 1, 3, scale=0.0), check_zero),
    )

    def meant(self, result: Any, args: tuple[Any, ...]) -> Any:
        y, S, conv = result
        return y[: S.shape[0]], S, conv

    @pytest.mark.gpu
    @pytest.mark.parametrize("batch", range(1, 9))
    def test_release_on_the_gpu(self, batch: int) -> None:
        args = call(batch, 96, batch, active=[b != 1 for b in range(batch)])
        check(self.run("pallas", args), *args)

    def test_kernel_equals_the_reference(self) -> None:
        args = call(2, 2, 6)
        for got, want in zip(kda(*args, interpret=True), reference(*args), strict=True):
            reason = "same roundings; sums in another order move a few by one step of 2^-9"
            assert_close("result", got[: want.shape[0]], want, 5e-4, reason)

    def test_warps_and_copies_do_not_race(self) -> None:
        args = call(1, 1, 7)
        check(assert_no_races(lambda interpret: kda(*args, interpret=interpret)), *args)
        assert RACES.detect_races

    def test_activations_may_have_more_rows_than_the_state(self) -> None:
        args = call(2, 1, 8)
        padded = [jnp.pad(a, ((0, 6), (0, 0)), constant_values=jnp.nan) for a in args[1:7]]
        check(kda(args[0], *padded, *args[7:10], config=args[10], interpret=True), *args)


def shapes(batch: int, heads: int) -> tuple[Any, ...]:
    channels = heads * 128
    p = {
        **{f"{name}_conv1d": sds((channels, 1, 4), jnp.float32) for name in "qkv"},
        "f_b_proj": sds((channels, 128), BF16),
        "A_log": sds((heads,), jnp.float32),
        "dt_bias": sds((channels,), jnp.float32),
        "o_norm": sds((128,), jnp.float32),
    }
    raw = tuple(sds((8, channels), BF16) for _ in range(4))
    state = sds((batch, heads, 128, 128), jnp.float32), sds((batch, 3, 3 * channels), BF16)
    return p, *raw, sds((8, heads), BF16), sds((8, 128), BF16), *state, sds((batch,), jnp.int32)


@pytest.mark.parametrize(("batch", "heads"), [(1, 96), (8, 96), (1, 12)])
def test_lowers_for_cuda_and_updates_both_states_in_place(batch: int, heads: int) -> None:
    text = lower_for_cuda(partial(kda, config=small(heads)), *shapes(batch, heads))
    # Operands 14 and 15, S and conv, are results 1 and 2 of the custom call.
    for operand, result in ((14, 1), (15, 2)):
        assert f"output_tuple_indices = [{result}], operand_index = {operand}" in text


def test_unsupported_layers_are_refused_with_every_reason() -> None:
    config = dataclasses.replace(RELEASE, kda_head_dim=64)
    reasons = supports(config, 9, jnp.float32)
    for part in ("1..8 rows, got 9", "bfloat16, got float32", "K = V = 128, got 64"):
        assert any(part in reason for reason in reasons), part
    assert supports(RELEASE, 8, BF16) == ()
