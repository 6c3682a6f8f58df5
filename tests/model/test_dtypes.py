"""Which arithmetic each dtype means, read off the program itself."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.layers.linear import einsum, linear
from k3jax.model import abstract_params
from k3jax.quant import MXFP4
from support import tiny_model
from support.jaxpr_walk import outputs, trace
from support.tiny_model import prefilled, tokens

CONFIG = tiny_model.config()


def program(dtype: str | None, which: str) -> list[Any]:
    """All equations of a decode step or of prefill."""
    model = tiny_model.model(dtype)
    if which == "decode":
        run = functools.partial(k3jax.decode_step, config=CONFIG)
        return trace(run, model.params, prefilled(dtype=dtype), jnp.zeros(3, jnp.int32))
    run = functools.partial(k3jax.prefill, config=CONFIG, max_length=512)
    return trace(run, model.params, jnp.asarray(tokens(70)))


@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_float32_means_float32_everywhere(which: str) -> None:
    narrow = [v for v in outputs(program("float32", which)) if jnp.issubdtype(v.dtype, jnp.floating)]
    assert {v.dtype for v in narrow} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize("which", ["decode", "prefill"])
def test_every_product_asks_for_full_precision_and_accumulates_in_float32(
    which: str, dtype: str | None
) -> None:
    """NUM-07: TF32 is the default of a GPU, and would miss the float32 reference by 1e-4."""
    dots = [e for e in program(dtype, which) if e.primitive.name == "dot_general"]
    assert len(dots) > 20
    for eqn in dots:
        assert "HIGHEST" in str(eqn.params["precision"]), eqn
        assert eqn.outvars[0].aval.dtype == jnp.float32, eqn


def test_the_einsum_helper_returns_float32_and_linear_rounds_once() -> None:
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    assert einsum("bi,oi->bo", x, w).dtype == jnp.float32
    assert linear(x, w).dtype == jnp.bfloat16
    # 1 + 2^-9 twice in float32 is 2 + 2^-8; summed in bfloat16 it would be 2.
    x = jnp.array([[1.0, 2.0**-9, 1.0, 2.0**-9]], jnp.bfloat16)
    assert float(einsum("bi,oi->bo", x, jnp.ones((1, 4), jnp.bfloat16))[0, 0]) == 2 + 2.0**-8


FLOAT32_NAMES = {
    *("q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias"),
}


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_released_dtypes_are_bfloat16_and_float32_where_the_release_has_it(dtype: str | None) -> None:
    """RT-02: the correction bias above all."""
    config = k3jax.K3Config.preset("k3-slice", num_layers=4)
    flat, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    seen = set()
    for path, leaf in flat:
        names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]
        if names[-1] in ("codes", "scales"):
            assert leaf.dtype == jnp.uint8
            continue
        seen.add(names[-1])
        wide = dtype == "float32" or names[-1] in FLOAT32_NAMES
        assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), names
    assert seen >= FLOAT32_NAMES | {"embed_tokens", "lm_head", "gate", "q_a_layernorm", "mlp_res_proj"}


@pytest.mark.parametrize("wrong", ["bfloat16", "float16", "f32", ""])
def test_any_other_dtype_is_refused(wrong: str) -> None:
    message = f"dtype: expected None .* or 'float32', got '{wrong}'"
    for call in (
        lambda: k3jax.random_model(CONFIG, dtype=wrong),
        lambda: abstract_params(CONFIG, wrong),
        lambda: k3jax.load("nano", dtype=wrong),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_bfloat16_keeps_the_recurrent_state_the_router_and_the_logits_in_float32() -> None:
    """LC-07, RT-01"""
    model, state = tiny_model.model(None), prefilled(dtype=None)
    assert model.dtype == jnp.bfloat16
    assert state.layers[0]["S"].dtype == jnp.float32
    assert state.layers[0]["conv"].dtype == state.layers[1]["cache"].dtype == jnp.bfloat16
    logits, after = model.decode_step([1, 2, 3], state)
    assert logits.dtype == jnp.float32
    assert after.layers[0]["S"].dtype == jnp.float32
    assert np.isfinite(np.asarray(logits)).all()
    seen = jax.eval_shape(
        functools.partial(k3jax.capture, config=CONFIG), model.params, jnp.asarray(tokens(2))
    )
    assert seen["layers.1.topk_w"].dtype == jnp.float32
    assert seen["layers.1.routed_latent_sum"].dtype == jnp.float32
    assert seen["layers.1.mlp_in"].dtype == jnp.bfloat16


def test_packed_experts_stay_packed_in_either_dtype() -> None:
    for dtype in (None, "float32"):
        leaf = tiny_model.model(dtype).params["layers"][1]["block_sparse_moe"]["experts"]["w1"]
        assert isinstance(leaf, MXFP4)
        assert leaf.shape == (6, CONFIG.moe_intermediate_size, CONFIG.routed_expert_hidden_size)
