"""Gated NoPE MLA: expanded prefill, absorbed decode and the latent cache, against float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.layers.mla import latent_rows, mla_prefill, mla_step, write_rows
from k3jax.model import abstract_params
from k3jax.state import CACHE_BLOCK
from support.compare import assert_close
from support.jaxpr_walk import outputs, trace
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.reference_mla import expand_rows, mla_layer
from support.reference_weights import Arch, weight_tree
from support.tiny_model import bits

B, T, ROWS = 3, 20, 2 * CACHE_BLOCK
CONFIG = random_config(
    7, layer_types=("mla",), num_attention_heads=3, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6,
    v_head_dim=10, hidden_size=32,
)  # fmt: skip
TENSORS = random_tensors(CONFIG, 7)
ARCH = Arch.of(CONFIG)
WEIGHTS = weight_tree(TENSORS, ARCH)["layers"][0]["self_attn"]
PARAMS = params_from_tensors(CONFIG, TENSORS, "float32")["layers"][0]["self_attn"]
WIDTH = CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim
ROUNDING = "float32 rounding; 1e-6 measured"

prefill = jax.jit(functools.partial(mla_prefill, config=CONFIG, num_blocks=ROWS // CACHE_BLOCK))
step = jax.jit(functools.partial(mla_step, config=CONFIG))


def drawn(length: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, length, CONFIG.hidden_size)).astype(np.float32)


def random_cache(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, ROWS, WIDTH)).astype(np.float32)


def vector(values: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.int32), (B,))


def reference(
    x: np.ndarray, cache: np.ndarray, held: int, weights: dict[str, Any] = WEIGHTS
) -> tuple[np.ndarray, np.ndarray]:
    """Output and cache of the float64 layer after ``held`` cached rows."""
    before = {"cache": cache[:, :held].astype(np.float64)}
    out, state, _ = mla_layer(weights, ARCH, x.astype(np.float64), before)
    return out, state["cache"]


LIVE = jnp.ones(B, bool)


@pytest.mark.parametrize("held", [0, 1, 7, 255, 256, 257, 480])
def test_prefill_and_decode_equal_the_reference_at_every_cache_length(held: int) -> None:
    """Expanded (prefill) and absorbed (decode) forms, also across the edges of a cache block."""
    x, cache = drawn(), random_cache()
    want, rows = reference(x, cache, held)
    out, after = prefill(PARAMS, jnp.asarray(x), jnp.asarray(cache), vector(held), vector(T))
    assert_close("prefill", out, want, 1e-5, ROUNDING)
    assert_close("cache", after[:, : held + T], rows, 1e-5, ROUNDING)
    assert bits(after[:, held + T :]) == bits(cache[:, held + T :])
    assert bits(after[:, :held]) == bits(cache[:, :held])

    state = jnp.asarray(cache)
    for t in range(3):
        y, state = step(PARAMS, jnp.asarray(x[:, t]), state, vector(held + t), LIVE)
        assert_close(f"step {t}", y, want[:, t], 1e-5, ROUNDING)
    assert bits(state[:, held + 3 :]) == bits(cache[:, held + 3 :])


def test_rows_of_different_lengths_equal_the_rows_alone() -> None:
    x, cache = drawn(), random_cache()
    starts, counts = [0, 250, 257], [20, 10, 1]
    out, after = prefill(PARAMS, jnp.asarray(x), jnp.asarray(cache), jnp.asarray(starts), jnp.asarray(counts))
    y, _ = step(PARAMS, jnp.asarray(x[:, 0]), jnp.asarray(cache), jnp.asarray(starts), LIVE)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        want, rows = reference(x[:, :count], cache, start)
        assert_close("prefill", out[row, :count], want[row], 1e-5, ROUNDING)
        assert_close("cache", after[row, : start + count], rows[row], 1e-5, ROUNDING)
        assert bits(after[row, start + count :]) == bits(cache[row, start + count :])
        assert_close("step", y[row], want[row, 0], 1e-5, ROUNDING)


def test_no_position_enters_the_scores() -> None:
    """MLA-02: the order of the past does not matter, and neither does where it lies."""
    x, cache = drawn(), random_cache()
    held = 37
    order = np.random.default_rng(3).permutation(held)
    shuffled = cache.copy()
    shuffled[:, :held] = cache[:, order]
    for form, xs in ((step, x[:, 0]), (prefill, x)):
        last = LIVE if form is step else vector(T)
        a = form(PARAMS, jnp.asarray(xs), jnp.asarray(cache), vector(held), last)[0]
        b = form(PARAMS, jnp.asarray(xs), jnp.asarray(shuffled), vector(held), last)[0]
        assert_close("permuted past", b, a, 1e-6, "the same sum in another order")
        # Each row twice: the positions of all that follows shift, the softmax does not.
        twice = cache.copy()
        twice[:, : 2 * held] = np.concatenate([cache[:, :held], cache[:, :held]], axis=1)
        if form is step:
            want, _ = reference(x[:, :1], twice, 2 * held)
            got = step(PARAMS, jnp.asarray(xs), jnp.asarray(twice), vector(2 * held), LIVE)[0]
            assert_close("doubled past", got, want[:, 0], 1e-5, ROUNDING)


def with_weights(**changes: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The library's and the reference's parameters, with the same replacements."""
    jaxed = {name: jnp.asarray(value, jnp.float32) for name, value in changes.items()}
    return PARAMS | jaxed, WEIGHTS | {name: value.astype(np.float64) for name, value in changes.items()}


def test_queries_a_hundred_times_larger_stay_exact() -> None:
    """MLA-01: scores of hundreds; the expanded form rescales its sums block by block."""
    x, cache = drawn(), random_cache()
    p, w = with_weights(q_b_proj=100 * WEIGHTS["q_b_proj"])
    want, _ = reference(x, cache, 300, w)
    out, _ = prefill(p, jnp.asarray(x), jnp.asarray(cache), vector(300), vector(T))
    y, _ = step(p, jnp.asarray(x[:, 0]), jnp.asarray(cache), vector(300), LIVE)
    reason = "scores of 1e3 in float32 are off by 1e-4, and so are their exponentials"
    assert_close("prefill", out, want, 2e-3, reason)
    assert_close("step", y, want[:, 0], 2e-3, reason)


@pytest.mark.parametrize("held", [0, 1, 256])
def test_deeply_negative_scores_are_softened_like_any_others(held: int) -> None:
    """NUM-06: all scores -300 but one of -299."""
    n, c, r = CONFIG.num_attention_heads, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim
    q_dim = CONFIG.qk_head_dim
    # A query whose shared part is [-1, 0, ...] and whose other part is 0, whatever the input.
    q_b = np.zeros((n, q_dim, CONFIG.q_lora_rank))
    q_b[:, CONFIG.qk_nope_head_dim, 0] = -1.0
    norm = np.zeros(CONFIG.q_lora_rank)
    norm[0] = 1.0
    q_a = np.zeros((CONFIG.q_lora_rank, CONFIG.hidden_size))
    q_a[0] = 1.0  # the norm makes low[0] = +-sqrt(Q) exactly of this input's sign
    p, w = with_weights(q_b_proj=q_b.reshape(n * q_dim, -1), q_a_proj=q_a, q_a_layernorm=norm)
    x, cache = np.abs(drawn()), random_cache()
    per_unit = CONFIG.q_lora_rank**0.5 * CONFIG.qk_head_dim**-0.5
    cache[..., c:] = 0.0
    cache[..., c] = 300.0 / per_unit
    cache[:, held // 2, c] = 299.0 / per_unit
    kv_a = WEIGHTS["kv_a_proj_with_mqa"].copy()
    kv_a[c:] = 0.0
    kv_a[c] = 300.0 / per_unit / np.abs(x[:, 0]).sum(-1).mean()  # the new token's own score, about -300
    p, w = p | {"kv_a_proj_with_mqa": jnp.asarray(kv_a, jnp.float32)}, w | {"kv_a_proj_with_mqa": kv_a}
    del r
    want, _ = reference(x, cache, held, w)
    out, _ = prefill(p, jnp.asarray(x), jnp.asarray(cache), vector(held), vector(T))
    y, _ = step(p, jnp.asarray(x[:, 0]), jnp.asarray(cache), vector(held), LIVE)
    reason = "scores of 300 in float32 are off by 2e-5"
    assert_close("prefill", out, want, 5e-4, reason)
    assert_close("step", y, want[:, 0], 5e-4, reason)


def test_the_scale_is_that_of_both_query_parts() -> None:
    """MLA-03: (K + R)^-1/2, in the release 192^-1/2."""
    release = K3Config.preset("k3")
    assert release.qk_head_dim**-0.5 == pytest.approx(0.0721688, abs=1e-7)
    # One cached token whose score is known: the softmax over it and the new token tells the scale.
    x, cache = drawn(1), random_cache()
    _, rows = reference(x, cache, 1)
    key, value = expand_rows(WEIGHTS, ARCH, rows)
    low = x.astype(np.float64) @ WEIGHTS["q_a_proj"].T
    low = WEIGHTS["q_a_layernorm"] * low / np.sqrt((low * low).mean(-1, keepdims=True) + 1e-6)
    q = (low @ WEIGHTS["q_b_proj"].T).reshape(B, CONFIG.num_attention_heads, -1)
    score = np.einsum("bnk,bsnk->bns", q, key)
    results = []
    for size in (CONFIG.qk_head_dim, CONFIG.qk_nope_head_dim):
        e = np.exp(score * size**-0.5)
        o = np.einsum("bns,bsnv->bnv", e / e.sum(-1, keepdims=True), value).reshape(B, -1)
        gate = 1 / (1 + np.exp(-(x[:, 0] @ WEIGHTS["g_proj"].T)))
        results.append((o * gate) @ WEIGHTS["o_proj"].T)
    got, _ = step(PARAMS, jnp.asarray(x[:, 0]), jnp.asarray(cache), vector(1), LIVE)
    assert_close("step", got, results[0], 1e-5, ROUNDING)
    assert np.abs(results[1] - results[0]).max() > 1e-2  # the other scale would show


def test_the_output_gate_is_a_plain_sigmoid_before_the_output_projection() -> None:
    """MLA-08: gate weights of 0 give exactly half; a large gate gives the whole."""
    x, cache = drawn(), random_cache()
    zero, w_zero = with_weights(g_proj=np.zeros_like(WEIGHTS["g_proj"]))
    for held in (0, 5):
        half, _ = prefill(zero, jnp.asarray(x), jnp.asarray(cache), vector(held), vector(T))
        half_step, _ = step(zero, jnp.asarray(x[:, 0]), jnp.asarray(cache), vector(held), LIVE)
        twice = zero | {"o_proj": 2 * zero["o_proj"]}
        whole, _ = prefill(twice, jnp.asarray(x), jnp.asarray(cache), vector(held), vector(T))
        want, _ = reference(x, cache, held, w_zero)
        assert bits(whole) == bits(2 * half)
        assert_close("gated by one half", half, want, 1e-5, ROUNDING)
        assert_close("gated by one half", half_step, want[:, 0], 1e-5, ROUNDING)
        _, _, taps = mla_layer(
            w_zero, ARCH, x.astype(np.float64), {"cache": cache[:, :held].astype(np.float64)}
        )
        assert_close("half of ungated", half, 0.5 * taps["o"] @ w_zero["o_proj"].T, 1e-5, ROUNDING)


def test_padding_and_inactive_rows_do_not_touch_the_cache() -> None:
    """MLA-07: NaN in the padding reaches neither the cache nor a real token's output."""
    x, cache = drawn(), jnp.asarray(random_cache())
    counts = [5, 0, T]
    dirty = x.copy()
    for row, count in enumerate(counts):
        dirty[row, count:] = np.nan
    starts = jnp.asarray([0, 300, 12], jnp.int32)
    clean_out, clean = prefill(PARAMS, jnp.asarray(x), cache, starts, jnp.asarray(counts))
    out, after = prefill(PARAMS, jnp.asarray(dirty), cache, starts, jnp.asarray(counts))
    assert bits(after) == bits(clean)
    assert bits(after[1]) == bits(cache[1])
    for row, count in enumerate(counts):
        assert bits(out[row, :count]) == bits(clean_out[row, :count])
    _, stepped = step(PARAMS, jnp.asarray(x[:, 0]), cache, starts, jnp.asarray([True, False, True]))
    assert bits(stepped[1]) == bits(cache[1])
    assert bits(stepped[0]) != bits(cache[0])


def test_a_nan_in_one_row_stays_in_it() -> None:
    """SG-01"""
    x, cache = jnp.asarray(drawn()), jnp.asarray(random_cache())
    poisoned = cache.at[1, 3].set(jnp.nan)
    for form, xs, last in ((prefill, x, vector(T)), (step, x[:, 0], LIVE)):
        got, want = (form(PARAMS, xs, c, vector(9), last)[0] for c in (poisoned, cache))
        assert np.isnan(np.asarray(got)[1]).all()
        for row in (0, 2):
            assert bits(got[row]) == bits(want[row])


def test_a_full_cache_drops_what_does_not_fit() -> None:
    """SG-07: the last row is not overwritten, whatever the caller lets through."""
    cache = jnp.asarray(random_cache())
    new = jnp.ones((B, 4, WIDTH))
    after = write_rows(cache, new, vector(ROWS - 2), vector(4))
    assert bits(after[:, : ROWS - 2]) == bits(cache[:, : ROWS - 2])
    assert (np.asarray(after[:, ROWS - 2 :]) == 1).all()
    assert bits(write_rows(cache, new, vector(ROWS), vector(4))) == bits(cache)


def test_the_shared_key_piece_is_stored_as_it_is_and_the_latent_normed() -> None:
    x = drawn()
    rows = np.asarray(latent_rows(PARAMS, jnp.asarray(x), CONFIG)).astype(np.float64)
    raw = x.astype(np.float64) @ WEIGHTS["kv_a_proj_with_mqa"].T
    c = CONFIG.kv_lora_rank
    assert_close("r", rows[..., c:], raw[..., c:], 1e-6, ROUNDING)
    normed = raw[..., :c] / np.sqrt((raw[..., :c] ** 2).mean(-1, keepdims=True) + 1e-6)
    assert_close("c", rows[..., :c], normed * WEIGHTS["kv_a_layernorm"], 1e-6, ROUNDING)


def test_no_array_has_tokens_by_tokens_entries() -> None:
    length = 1024
    cache = jnp.zeros((1, length, WIDTH))
    x = jnp.zeros((1, length, CONFIG.hidden_size))
    run = functools.partial(mla_prefill, config=CONFIG, num_blocks=length // CACHE_BLOCK)
    start, count = jnp.zeros(1, jnp.int32), jnp.full((1,), length, jnp.int32)
    values = outputs(trace(run, PARAMS, x, cache, start, count))
    assert any(CACHE_BLOCK in v.shape and length in v.shape for v in values)  # the scores were seen
    square = [v.shape for v in values if sum(size >= length for size in v.shape) >= 2]
    assert square == []


def test_cache_rows_are_addressed_by_row_and_position_not_by_one_product() -> None:
    """LC-03: 4 rows of 2^20 tokens, 576 wide, are 2.4e9 numbers; no index multiplies them out."""
    config = K3Config.preset("k3-slice", num_layers=4)
    p = abstract_params(config)["layers"][3]["self_attn"]
    width = config.kv_lora_rank + config.qk_rope_head_dim
    batch, rows = 4, config.max_position_embeddings
    assert batch * rows * width > 2**31

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    eqns = trace(
        functools.partial(mla_step, config=config),
        p, shape(batch, config.hidden_size), shape(batch, rows, width),
        shape(batch, dtype=jnp.int32), shape(batch, dtype=jnp.bool_),
    )  # fmt: skip
    eqns += trace(
        functools.partial(mla_prefill, config=config, num_blocks=rows // CACHE_BLOCK),
        p, shape(batch, 64, config.hidden_size), shape(batch, rows, width),
        shape(batch, dtype=jnp.int32), shape(batch, dtype=jnp.int32),
    )  # fmt: skip
    scatters = [e for e in eqns if e.primitive.name == "scatter"]
    assert len(scatters) == 2
    for eqn in scatters:
        cache, index, _ = (v.aval for v in eqn.invars)
        assert cache.shape == (batch, rows, width)
        assert index.shape[-1] == 2  # (row, position): each below 2^31 on its own
    flat = [v.shape for v in outputs(eqns) if any(size >= 2**31 for size in v.shape)]
    assert flat == []
