"""The model is differentiable: through the pure function, through the Flax module, at the gate's floor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import k3jax
from k3jax import MXFP4
from k3jax.model import abstract_params, param_axes
from support import tiny_model
from support.compare import assert_close
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.tiny_model import assert_bit_equal, tokens

CONFIG = tiny_model.config()
IDS = jnp.asarray(tokens(20, batch=2))


def is_packed(leaf: Any) -> bool:
    return isinstance(leaf, MXFP4)


def float_params() -> Any:
    """The shared model's parameters with float experts."""
    params = tiny_model.model().params
    return jax.tree.map(lambda leaf: leaf.decode() if is_packed(leaf) else leaf, params, is_leaf=is_packed)


def cross_entropy(logits: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, IDS[:, 1:, None], axis=-1))


def loss(params: Any) -> jax.Array:
    logits, _ = k3jax.prefill(params, IDS, config=CONFIG, max_length=32, chunk_size=None)
    assert logits is not None
    return cross_entropy(logits)


# Layer 0 mixes a single source, so the release's two vectors for it are never read.
UNREAD = {"layers.0.self_attention_res_norm", "layers.0.self_attention_res_proj"}
# The bias takes part in a choice, which has no derivative.
NO_DERIVATIVE = "e_score_correction_bias"
GRAD = jax.jit(jax.value_and_grad(loss))


def named(tree: Any) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): np.asarray(v)
        for path, v in flat
    }


def check_gradients(grads: Any) -> None:
    for name, g in named(grads).items():
        assert np.isfinite(g).all(), name
        silent = name in UNREAD or name.endswith(NO_DERIVATIVE)
        assert (np.abs(g).max() == 0) == silent, name


def test_every_parameter_has_a_finite_gradient_and_all_but_the_unread_ones_a_nonzero_one() -> None:
    params = float_params()
    value, grads = GRAD(params)
    assert np.isfinite(float(value))
    check_gradients(grads)
    # The gradient is that of the loss: a small step along it lowers the loss by the predicted amount.
    square = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads))
    size = 1e-4 / square**0.5
    down, _ = GRAD(jax.tree.map(lambda p, g: p - size * g, params, grads))
    up, _ = GRAD(jax.tree.map(lambda p, g: p + size * g, params, grads))
    slope = (float(up) - float(down)) / (2 * size)
    # float32 losses differ by 1e-7; the difference here is about 1e-4 in size.
    assert slope == pytest.approx(square, rel=0.02)


def test_gradients_are_finite_at_the_gates_floor_and_at_no_decay() -> None:
    """NUM-02, through the whole model: dt_bias far on either side of the sigmoid."""
    for bias in (60.0, -60.0):
        params = float_params()
        for layer in (0, 2):
            attention = params["layers"][layer]["self_attn"]
            attention["dt_bias"] = jnp.full_like(attention["dt_bias"], bias)
        value, grads = GRAD(params)
        assert np.isfinite(float(value))
        assert all(np.isfinite(g).all() for g in named(grads).values())
        assert np.abs(named(grads)["layers.0.self_attn.q_proj"]).max() > 0


def small() -> tuple[Any, Any]:
    """A model that compiles fast, MLA with the dense FFN and with a LatentMoE: config, packed parameters."""
    config = random_config(12, layer_types=("mla", "mla"), first_k_dense_replace=1, attn_res_block_size=2)
    return config, params_from_tensors(config, random_tensors(config, 12), "float32")


def test_the_flax_module_is_differentiable_and_gives_the_pure_functions_gradients() -> None:
    config, packed = small()
    ids = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)).astype(np.int32))

    def pure(params: Any) -> jax.Array:
        logits, _ = k3jax.prefill(params, ids, config=config, max_length=9, chunk_size=None)
        assert logits is not None
        return jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    floats = jax.tree.map(lambda leaf: leaf.decode() if is_packed(leaf) else leaf, packed, is_leaf=is_packed)
    want, want_grads = jax.jit(jax.value_and_grad(pure))(floats)
    module = k3jax.K3(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    module.update(floats)
    assert_bit_equal(module.params(), floats)
    value, grads = nnx.jit(nnx.value_and_grad(lambda m: jnp.mean(jax.nn.log_softmax(m(ids))[..., 3])))(module)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    got = nnx.to_pure_dict(grads)
    assert_close("embed_tokens", got["embed_tokens"], want_grads["embed_tokens"], 1e-4, "two compilations")
    w1 = got["layers"][1]["block_sparse_moe"]["experts"]["w1"]
    wanted = want_grads["layers"][1]["block_sparse_moe"]["experts"]["w1"]
    assert np.abs(np.asarray(wanted)).max() > 0
    assert_close("w1", w1, wanted, 1e-4, "two compilations")
    # Float leaves around packed experts have the same gradients.
    some = {name: packed[name] for name in ("lm_head", "norm", "embed_tokens")}
    around = jax.jit(jax.grad(lambda leaves: pure({**packed, **leaves})))(some)
    for name, g in around.items():
        assert_close(name, g, want_grads[name], 1e-4, "float32 sums in another order")


def test_the_module_names_its_parameters_as_the_tree_does_and_refuses_float_experts_if_packed() -> None:
    packed = k3jax.K3(CONFIG, rngs=nnx.Rngs(0), packed_experts=True)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), packed.params())
    assert shapes == abstract_params(CONFIG)
    axes = param_axes(CONFIG)
    flat_axes, structure = jax.tree.flatten(axes)
    assert structure == jax.tree.structure(shapes)
    for names, leaf in zip(flat_axes, jax.tree.leaves(shapes), strict=True):
        assert len(names.names) == len(leaf.shape)
    packed.update(tiny_model.model(None).params)
    assert_bit_equal(packed.params(), tiny_model.model(None).params)
    with pytest.raises(TypeError, match=r"params: expected MXFP4 at layers\.1\.block_sparse_moe\.experts\.w"):
        packed.update(float_params())
