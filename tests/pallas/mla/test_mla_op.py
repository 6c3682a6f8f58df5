"""MLA decode kernels: numerics at hostile lengths, cache in place, races, lowering at the release's sizes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.pallas.mla import configs, mla, reference, supports
from k3jax.pallas.mla.kernel import item_tokens
from support import megakernel_ops
from support.compare import as_float64, assert_close
from support.pallas_ops import Case, OpTests, assert_no_races, lower_for_cuda, sds
from support.reference_math import rms, sigmoid, softmax

RELEASE = K3Config.preset("k3")
BF16 = jnp.bfloat16


def small(heads: int, latent: int = 128) -> K3Config:
    return dataclasses.replace(RELEASE, num_attention_heads=heads, kv_lora_rank=latent)


def call(
    lengths: list[int],
    capacity: int,
    heads: int = 2,
    latent: int = 128,
    seed: int = 0,
    active: list[bool] | None = None,
    query: float = 1.0,
) -> tuple[Any, ...]:
    """Arguments of the op. Rows past a length hold NaN-free rubbish a thousand times too large."""
    rng = np.random.default_rng(seed)
    batch, width = len(lengths), latent + 64

    def normal(*shape: int, size: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * size, BF16)

    p = {
        "kv_b_proj": normal(heads * 256, latent, size=latent**-0.5),
        "kv_a_layernorm": 1 + normal(latent, size=0.2),
    }
    cache = rng.normal(size=(batch, capacity, width))
    cache = np.where(np.arange(capacity)[:, None] < np.reshape(lengths, (-1, 1, 1)), cache, 1e3 * cache)
    return (
        p, normal(batch, heads * 192, size=query), normal(batch, width), normal(batch, heads * 128),
        jnp.asarray(cache, BF16), jnp.asarray(lengths, jnp.int32),
        jnp.asarray([True] * batch if active is None else active), small(heads, latent),
    )  # fmt: skip


def float64(p: Any, q: Any, kv: Any, gate: Any, cache: Any, lengths: Any, heads: int) -> np.ndarray:
    """y [B, N V] without a rounding, in expanded form: per-head keys and values."""
    p = {name: as_float64(leaf) for name, leaf in p.items()}
    q, kv, gate, cache = map(as_float64, (q, kv, gate, cache))
    latent = p["kv_a_layernorm"].shape[0]
    new = np.concatenate([rms(kv[:, :latent], p["kv_a_layernorm"], 1e-6), kv[:, latent:]], -1)
    up = p["kv_b_proj"].reshape(heads, 256, latent)
    out = []
    for b, length in enumerate(np.asarray(lengths)):
        rows = np.concatenate([cache[b, :length], new[b : b + 1]])
        query = q[b].reshape(heads, 192)
        key = np.einsum("nkc,sc->nsk", up[:, :128], rows[:, :latent], optimize=True)
        score = (
            np.einsum("nk,nsk->ns", query[:, :128], key, optimize=True) + query[:, 128:] @ rows[:, latent:].T
        )
        value = np.einsum("nvc,sc->nsv", up[:, 128:], rows[:, :latent], optimize=True)
        out.append(np.einsum("ns,nsv->nv", softmax(score * 192**-0.5), value, optimize=True).reshape(-1))
    return np.stack(out) * sigmoid(gate)


def check(result: Any, *args: Any, tol: float = 1e-2) -> None:
    p, q, kv, gate, cache, lengths, active, config = args
    y, new_cache = result
    active = np.asarray(active) != 0
    want = float64(p, q, kv, gate, cache, lengths, config.num_attention_heads)
    reason = "query, weights, context and output are rounded to bfloat16 (2^-9 each), the new row twice"
    for b in np.flatnonzero(active):  # each by itself: a long row's average is small beside a short row's
        assert_close(f"y of row {b}", y[b], want[b], tol, reason)
    check_cache(new_cache, reference(*args)[1], cache, lengths, active)


def check_cache(new: Any, want: Any, old: Any, lengths: Any, active: Any) -> None:
    """Only row ``lengths[b]`` of an active row changed, to the row the library computes."""
    changed = (np.asarray(new) != np.asarray(old)).any(-1)
    expected = np.zeros_like(changed)
    for b, length in enumerate(np.asarray(lengths)):
        expected[b, length] = active[b]
    np.testing.assert_array_equal(changed, expected)
    np.testing.assert_array_equal(as_float64(new), as_float64(want))


# Scores of several hundred: bfloat16 queries alone are off by whole units in the exponent.
check_deep = partial(check, tol=0.5)


class TestMla(OpTests):
    op = staticmethod(mla)
    reference = staticmethod(reference)
    stage = staticmethod(megakernel_ops.mla)
    cases = (
        Case("lengths around a split", partial(call, [0, 1, 127, 128, 129], 256), check),
        Case("rows not running", partial(call, [5, 255], 256, active=[True, False], seed=1), check),
        Case("last row of the cache", partial(call, [255], 256, seed=2), check),
        Case("near-uniform scores", partial(call, [70], 256, seed=3, query=1e-3), check),
        Case("scores of hundreds", partial(call, [140], 256, seed=4, query=40.0), check_deep),
        Case("latent 512", partial(call, [65], 128, latent=512, seed=5), check),
    )  # fmt: skip

    def meant(self, result: Any, args: tuple[Any, ...]) -> Any:
        y, cache = result
        return y[: cache.shape[0]], cache

    @pytest.mark.gpu
    @pytest.mark.parametrize("heads", [96, 12, 6, 2])
    @pytest.mark.parametrize(
        ("lengths", "capacity"),
        [([0], 512), ([4097, 17], 4352), ([8320], 8704), ([20000, 0, 8192], 20224),
         ([0, 1, 127, 128, 129, 500, 9, 64], 512)],
    )  # fmt: skip
    def test_release_on_the_gpu(self, lengths: list[int], capacity: int, heads: int) -> None:
        args = call(lengths, capacity, heads, 512, seed=heads)
        check(self.run("pallas", args), *args)

    def test_neighbours_do_not_change_a_row(self) -> None:
        alone = mla(*call([100], 256, seed=11), interpret=True)[0][:1]
        args = call([100, 255], 256, seed=12)
        one = call([100], 256, seed=11)
        merged = [
            jnp.concatenate([a, b[1:]]) if i in (0, 1, 2, 3) else b
            for i, (a, b) in enumerate(zip(one[1:5], args[1:5], strict=True))
        ]
        both = mla(one[0], *merged, *args[5:7], config=args[7], interpret=True)[0][:1]
        np.testing.assert_array_equal(as_float64(alone), as_float64(both))

    def test_a_full_row_writes_nothing(self) -> None:
        args = call([128], 128, seed=13)
        assert (np.asarray(mla(*args, interpret=True)[1]) == np.asarray(args[4])).all()

    def test_warpgroups_and_copies_do_not_race(self) -> None:
        args = call([200], 256, heads=1, seed=14)
        check(assert_no_races(lambda interpret: mla(*args, interpret=interpret)), *args)


def shapes(batch: int, heads: int, latent: int, capacity: int) -> tuple[Any, ...]:
    p = {"kv_b_proj": sds((heads * 256, latent), BF16), "kv_a_layernorm": sds((latent,), BF16)}
    return (
        p, sds((8, heads * 192), BF16), sds((8, latent + 64), BF16), sds((8, heads * 128), BF16),
        sds((batch, capacity, latent + 64), BF16), sds((batch,), jnp.int32), sds((batch,), jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "heads", "latent", "capacity"),
    [(1, 96, 512, 8192), (8, 96, 512, 1 << 20), (2, 12, 512, 4096), (1, 6, 512, 512), (1, 2, 128, 512)],
)
def test_lowers_for_cuda_and_writes_the_cache_in_place(
    batch: int, heads: int, latent: int, capacity: int
) -> None:
    text = lower_for_cuda(partial(mla, config=small(heads, latent)), *shapes(batch, heads, latent, capacity))
    assert "output_tuple_indices = [1], operand_index = 6" in text


@pytest.mark.parametrize("tokens", [1, 128, 129, 8192, 8193, 16385, 1 << 20])
def test_work_items_cover_a_row_within_the_grid(tokens: int) -> None:
    size = int(item_tokens(jnp.int32(tokens)))
    assert size % configs.SPLIT == 0
    assert -(-tokens // size) <= configs.items(-(-tokens // 256) * 256)


def test_unsupported_layers_are_refused_with_every_reason() -> None:
    config = dataclasses.replace(RELEASE, v_head_dim=64, kv_lora_rank=96, qk_rope_head_dim=32)
    reasons = supports(config, 9, 1000, jnp.float32)
    for part in ("1..8 rows, got 9", "got float32", "128 and 64", "got 96", "got 32", "got 1000"):
        assert any(part in reason for reason in reasons), part
    assert supports(RELEASE, 8, 1 << 20, BF16) == ()
