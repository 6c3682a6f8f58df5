"""Block attention residuals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3Config
from k3jax.layers.attn_res import mix, source_score
from k3jax.model import run_layers
from support.compare import assert_close
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.reference import Arch, attn_res_mix, weight_tree
from support.reference_math import rms
from support.reference_moe import dense_ffn
from support.tiny_model import bits

D, EPS = 24, 1e-5
RNG = np.random.default_rng(0)
NORM = (1.0 + 0.5 * RNG.standard_normal(D)).astype(np.float32)
PROJ = (0.4 * RNG.standard_normal((1, D))).astype(np.float32)


def drawn(sources: int) -> list[np.ndarray]:
    return [RNG.standard_normal((2, 5, D)).astype(np.float32) for _ in range(sources)]


def mixed(sources: list[np.ndarray], norm: np.ndarray = NORM) -> np.ndarray:
    return np.asarray(mix([jnp.asarray(v) for v in sources], jnp.asarray(norm), jnp.asarray(PROJ), EPS))


def exact(sources: list[np.ndarray], norm: np.ndarray = NORM) -> np.ndarray:
    return attn_res_mix([v.astype(np.float64) for v in sources], norm, PROJ, EPS)


@pytest.mark.parametrize("sources", [2, 3, 9])
def test_the_mixture_is_a_softmax_over_sources_of_the_raw_values(sources: int) -> None:
    values = drawn(sources)
    assert_close("mixture", mixed(values), exact(values), 1e-6, "float32 rounding")


def test_the_score_does_not_depend_on_a_sources_scale_but_the_mixture_does() -> None:
    """AR-02: gain times projection is the direction; the values mixed are the raw ones."""
    values = drawn(3)
    values[1] *= 1000
    assert_close("mixture", mixed(values), exact(values), 1e-6, "float32 rounding")
    direction = jnp.asarray(NORM * PROJ[0])
    one, thousand = (source_score(jnp.asarray(v), direction, EPS) for v in (values[1] / 1000, values[1]))
    assert_close("score", thousand, one, 1e-5, "float32 rounding and the norm's epsilon")
    # Without the gain in the score, or with it twice, the weights differ.
    for wrong in (np.ones_like(NORM), NORM * NORM):
        assert np.abs(mixed(values) - exact(values, wrong)).max() > 1.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_single_source_is_returned_bit_for_bit(dtype: jnp.dtype) -> None:
    """AR-04"""
    value = jnp.asarray(drawn(1)[0], dtype) * jnp.asarray(3e4, dtype)
    assert bits(mix([value], jnp.asarray(NORM, dtype), jnp.asarray(PROJ, dtype), EPS)) == bits(value)


def test_equal_sources_are_returned_whatever_their_number() -> None:
    value = drawn(1)[0]
    assert_close("mixture", mixed([value] * 7), value, 1e-6, "float32 rounding of weights that sum to 1")


def test_sources_of_extreme_size_give_finite_mixtures_and_gradients() -> None:
    values = [np.zeros((1, 1, D), np.float32), drawn(1)[0][:1, :1] * 1e15, drawn(1)[0][:1, :1] * 1e-20]
    assert np.isfinite(mixed(values)).all()
    assert_close("mixture", mixed(values), exact(values), 1e-5, "float32 rounding")

    def loss(sources: list[jax.Array], norm: jax.Array) -> jax.Array:
        return jnp.sum(mix(sources, norm, jnp.asarray(PROJ), EPS))

    gradients = jax.grad(loss, (0, 1))([jnp.asarray(v) for v in values[:1]] * 2, jnp.asarray(NORM))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_bfloat16_sources_are_mixed_in_float32_and_rounded_once() -> None:
    values = [jnp.asarray(v, jnp.bfloat16) for v in drawn(4)]
    norm, proj = jnp.asarray(NORM, jnp.bfloat16), jnp.asarray(PROJ, jnp.bfloat16)
    got = mix(values, norm, proj, EPS)
    wide = mix(
        [v.astype(jnp.float32) for v in values], norm.astype(jnp.float32), proj.astype(jnp.float32), EPS
    )
    assert got.dtype == jnp.bfloat16
    assert bits(got) == bits(wide.astype(jnp.bfloat16))


def test_4096_tokens_need_a_few_bytes_a_value_beside_the_sources() -> None:
    """AR-03: at K3's width and nine sources, at most two float32 copies of one source at a time."""
    tokens, width, sources = 4096, K3Config.preset("k3").hidden_size, 9
    value = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    norm, proj = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((width,), (1, width)))
    compiled = jax.jit(lambda v, n, p: mix(v, n, p, EPS)).lower([value] * sources, norm, proj).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        pytest.skip("this jaxlib reports no memory analysis")
    assert analysis.temp_size_in_bytes <= 2 * tokens * width * 4


@pytest.mark.parametrize("block", [1, 2, 3, 5, 7])
def test_snapshots_are_taken_at_block_starts_and_a_short_last_block_counts_once(block: int) -> None:
    """AR-01, AR-05: every mixture of five layers, and the final one, with an attention of x -> x / 2."""
    config = random_config(
        3, layer_types=("kda",) * 5, attn_res_block_size=block, hidden_size=32, first_k_dense_replace=5
    )
    tensors = random_tensors(config, 3)
    arch = Arch.of(config)
    w = weight_tree(tensors, arch)
    pre = np.random.default_rng(4).standard_normal((2, 3, 32)).astype(np.float32)
    seen: dict[str, jax.Array] = {}
    out, _ = run_layers(
        params_from_tensors(config, tensors, "float32"), config, jnp.asarray(pre), [{}] * 5,
        lambda kind, p, x, state: (0.5 * x, state), tap=seen.__setitem__,
    )  # fmt: skip

    total, blocks = pre.astype(np.float64), []
    for i, layer in enumerate(w["layers"]):
        sources = [*blocks, total]
        mixture = attn_res_mix(
            sources, layer["self_attention_res_norm"], layer["self_attention_res_proj"], arch.eps
        )
        assert_close(f"layer {i} attn_mix", seen[f"layers.{i}.attn_mix"], mixture, 1e-5, "float32 rounding")
        a = 0.5 * rms(mixture, layer["input_layernorm"], arch.eps)
        if i % block == 0:
            blocks.append(total)
            total = a
        else:
            total = total + a
        mixture = attn_res_mix([*blocks, total], layer["mlp_res_norm"], layer["mlp_res_proj"], arch.eps)
        assert_close(f"layer {i} mlp_mix", seen[f"layers.{i}.mlp_mix"], mixture, 1e-5, "float32 rounding")
        total = total + dense_ffn(
            layer["mlp"], arch, rms(mixture, layer["post_attention_layernorm"], arch.eps)
        )
        assert_close(f"layer {i} sum", seen[f"layers.{i}.prefix_sum"], total, 1e-5, "float32 rounding")
    assert len(blocks) == -(-5 // block)
    mixture = attn_res_mix([*blocks, total], w["output_attn_res_norm"], w["output_attn_res_proj"], arch.eps)
    assert_close("final mixture", seen["output_attn_res"], mixture, 1e-5, "float32 rounding")
    assert_close("output", out, rms(mixture, w["norm"], arch.eps), 1e-5, "float32 rounding")
    assert bits(seen["layers.0.attn_mix"]) == bits(pre)  # layer 0 has one source
