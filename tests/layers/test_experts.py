"""Routed experts: both ways of running them, and the memory they may take."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import MXFP4, K3Config
from k3jax.layers import moe
from k3jax.model import abstract_params
from support.compare import assert_close
from support.jaxpr_walk import outputs, trace
from support.random_k3 import params_from_tensors, random_config, random_tensors
from support.reference_moe import latent_expert_sum, moe_layer
from support.reference_weights import Arch, weight_tree

CONFIG = dataclasses.replace(
    random_config(
        5, layer_types=("kda", "kda"), first_k_dense_replace=1, num_experts=10, num_experts_per_token=3,
        hidden_size=32, routed_expert_hidden_size=64, moe_intermediate_size=32,
    ),
    routed_scaling_factor=2.5,
)  # fmt: skip
TENSORS = random_tensors(CONFIG, 5)
ARCH = Arch.of(CONFIG)
WEIGHTS = weight_tree(TENSORS, ARCH)["layers"][1]["block_sparse_moe"]
PARAMS = params_from_tensors(CONFIG, TENSORS, "float32")["layers"][1]["block_sparse_moe"]
FLOATS = {name: leaf.decode() for name, leaf in PARAMS["experts"].items()}
L = CONFIG.routed_expert_hidden_size
WAYS: dict[str, Any] = {"by_pair": moe.experts_by_pair, "by_block": moe.experts_by_block}
RUN = {name: jax.jit(way, static_argnames="config") for name, way in WAYS.items()}
ROUNDING = "float32 rounding; 3e-7 measured"


def drawn(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """latents, distinct ids per token, and weights."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(CONFIG.num_experts)[:3] for _ in range(tokens)]).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, (tokens, 3)).astype(np.float32)
    return rng.standard_normal((tokens, L)).astype(np.float32), ids, weights


def run(way: str, experts: Any, latent: Any, ids: Any, weights: Any) -> np.ndarray:
    return np.asarray(RUN[way](experts, *map(jnp.asarray, (latent, ids, weights)), config=CONFIG))


def exact(latent: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return latent_expert_sum(WEIGHTS["experts"], ARCH, latent.astype(np.float64), ids, weights)


@pytest.mark.parametrize("limit", [moe.DECODED_LIMIT, 3 * 64 * 32 * 5, 1])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 7])
def test_both_ways_equal_the_reference_in_one_block_and_in_many(
    monkeypatch: pytest.MonkeyPatch, limit: int, packed: bool, tokens: int
) -> None:
    monkeypatch.setattr(moe, "DECODED_LIMIT", limit)  # 1: one expert at a time
    latent, ids, weights = drawn(tokens)
    want = exact(latent, ids, weights)
    for way in WAYS.values():
        fresh = jax.jit(functools.partial(way, config=CONFIG))
        got = fresh(PARAMS["experts"] if packed else FLOATS, *map(jnp.asarray, (latent, ids, weights)))
        assert_close(way.__name__, got, want, 2e-6, ROUNDING)


def test_many_pairs_run_as_a_loop_and_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "DECODED_LIMIT", 1)
    latent, ids, weights = drawn(12)
    assert ids.size > moe.UNROLL_LIMIT
    got = moe.experts_by_pair(PARAMS["experts"], *map(jnp.asarray, (latent, ids, weights)), config=CONFIG)
    assert_close("by pair", got, exact(latent, ids, weights), 2e-6, ROUNDING)


@pytest.mark.parametrize("way", list(WAYS))
def test_the_last_expert_and_a_crowded_one_are_counted(way: str) -> None:
    """RT-11, EP-01's kind: every token on one expert, the last one included."""
    latent, ids, weights = drawn(7)
    for crowd in ([9, 8, 7], [0, 1, 9]):
        ids[:] = crowd
        got = run(way, PARAMS["experts"], latent, ids, weights)
        assert_close(way, got, exact(latent, ids, weights), 2e-6, ROUNDING)


@pytest.mark.parametrize("way", list(WAYS))
def test_each_slot_contributes_with_its_own_weight(way: str) -> None:
    """RT-12: outputs of single slots add up to that of all."""
    latent, ids, weights = drawn(7)
    alone = [run(way, PARAMS["experts"], latent, ids, weights * (np.arange(3) == slot)) for slot in range(3)]
    assert all(np.abs(part).min(axis=0).max() > 0 for part in alone)
    assert_close(way, run(way, PARAMS["experts"], latent, ids, weights), sum(alone), 1e-6, ROUNDING)
    doubled = run(way, PARAMS["experts"], latent, ids, 2 * weights)
    np.testing.assert_array_equal(doubled, 2 * run(way, PARAMS["experts"], latent, ids, weights))


def test_a_tokens_sum_does_not_depend_on_the_tokens_beside_it() -> None:
    latent, ids, weights = drawn(7)
    other, other_ids, other_weights = drawn(7, seed=9)
    for way in WAYS:
        want = run(way, PARAMS["experts"], latent, ids, weights)
        keep = np.arange(7) == 2
        mixed = (
            np.where(keep[:, None], latent, other),
            np.where(keep[:, None], ids, other_ids),
            np.where(keep[:, None], weights, other_weights),
        )
        got = run(way, PARAMS["experts"], *mixed)
        assert got[2].tobytes() == want[2].tobytes()


@pytest.mark.parametrize("tokens", [2, 60])
def test_the_sublayer_equals_the_reference_by_pair_and_by_block(tokens: int) -> None:
    """CK-05, RT-04: latent norm, scaling once, shared expert beside it."""
    assert (tokens * 3 <= moe.PAIR_LIMIT) == (tokens == 2)
    x = np.random.default_rng(6).standard_normal((tokens, CONFIG.hidden_size)).astype(np.float32)
    seen: dict[str, Any] = {}
    got = moe.latent_moe(PARAMS, jnp.asarray(x), CONFIG, tap=seen.__setitem__)
    want, taps = moe_layer(WEIGHTS, ARCH, x.astype(np.float64)[None])
    np.testing.assert_array_equal(np.sort(np.asarray(seen["topk_ids"])), np.sort(taps["topk_ids"][0]))
    assert_close("routed sum", seen["routed_latent_sum"], taps["routed_latent_sum"][0], 3e-6, ROUNDING)
    assert seen["routed_latent_sum"].dtype == jnp.float32
    assert_close("output", got, want[0], 3e-6, ROUNDING)
    shifted = PARAMS | {"routed_expert_norm": 3.0 * PARAMS["routed_expert_norm"]}
    assert np.abs(np.asarray(moe.latent_moe(shifted, jnp.asarray(x), CONFIG)) - np.asarray(got)).max() > 0.1


def test_forced_ids_are_used() -> None:
    x = np.random.default_rng(7).standard_normal((4, CONFIG.hidden_size)).astype(np.float32)
    ids = drawn(4)[1]
    got = moe.latent_moe(PARAMS, jnp.asarray(x), CONFIG, ids=jnp.asarray(ids))
    want, _ = moe_layer(WEIGHTS, ARCH, x.astype(np.float64)[None], forced_ids=ids[None])
    assert_close("output", got, want[0], 3e-6, ROUNDING)


@pytest.mark.parametrize("tokens", [2, 60])
def test_gradients_flow_through_float_experts_and_are_equal_both_ways(tokens: int) -> None:
    latent, ids, weights = drawn(tokens)
    direction = jnp.asarray(np.random.default_rng(8).standard_normal((tokens, L)), jnp.float32)
    grads = {}
    for name, way in WAYS.items():

        def loss(experts: Any, latent: Any, weights: Any, way: Any = way) -> jax.Array:
            return jnp.sum(way(experts, latent, jnp.asarray(ids), weights, CONFIG) * direction)

        grads[name] = jax.jit(jax.grad(loss, (0, 1, 2)))(FLOATS, jnp.asarray(latent), jnp.asarray(weights))
    used = np.isin(np.arange(10), ids)
    for a, b in zip(jax.tree.leaves(grads["by_pair"]), jax.tree.leaves(grads["by_block"]), strict=True):
        assert_close("gradient", a, b, 3e-6, "float32 sums in two orders")
    for leaf in grads["by_pair"][0].values():
        sizes = np.abs(np.asarray(leaf)).max(axis=(1, 2))
        assert (sizes[used] > 0).all()
        assert (sizes[~used] == 0).all()


def packed_shapes(config: K3Config) -> dict[str, MXFP4]:
    return abstract_params(config)["layers"][1]["block_sparse_moe"]["experts"]


def pair_arguments(config: K3Config, tokens: int, dtype: Any) -> tuple[Any, ...]:
    a = config.num_experts_per_token
    return (
        packed_shapes(config),
        jax.ShapeDtypeStruct((tokens, config.routed_expert_hidden_size), dtype),
        jax.ShapeDtypeStruct((tokens, a), jnp.int32),
        jax.ShapeDtypeStruct((tokens, a), jnp.float32),
    )


@pytest.mark.parametrize(
    ("way", "tokens"), [("by_pair", 1), ("by_pair", 8), ("by_block", 64), ("by_block", 512)]
)
def test_at_k3s_width_one_expert_is_decoded_at_a_time(way: str, tokens: int) -> None:
    """No array of decoded weights is larger than one matrix of one expert; nothing is computed here."""
    config = K3Config.preset("k3-slice", num_layers=2)
    one = config.moe_intermediate_size * config.routed_expert_hidden_size
    assert 3 * one <= moe.DECODED_LIMIT
    values = outputs(
        trace(functools.partial(WAYS[way], config=config), *pair_arguments(config, tokens, jnp.bfloat16))
    )
    sizes = [math.prod(v.shape) for v in values if jnp.issubdtype(v.dtype, jnp.floating)]
    assert max(sizes) == one
    # Not even packed bytes are copied for more than one expert.
    assert max(math.prod(v.shape) for v in values) <= one


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize(("way", "tokens"), [("by_pair", 1), ("by_pair", 8), ("by_block", 64)])
def test_the_compiled_program_holds_a_bounded_block_of_decoded_experts(
    monkeypatch: pytest.MonkeyPatch, way: str, tokens: int, derivative: bool
) -> None:
    """16 of 64 experts a token, one decoded at a time; a gradient decodes again instead of keeping them."""
    config = dataclasses.replace(
        K3Config.preset("k3-slice", num_layers=2, num_experts=64),
        routed_expert_hidden_size=256,
        moe_intermediate_size=256,
    )
    expert = 3 * 256 * 256
    monkeypatch.setattr(moe, "DECODED_LIMIT", expert)

    def total(latent: jax.Array, *rest: Any) -> jax.Array:
        return WAYS[way](rest[0], latent, *rest[1:], config).sum()

    experts, latent, ids, weights = pair_arguments(config, tokens, jnp.float32)
    function = jax.grad(total) if derivative else total
    compiled = jax.jit(function).lower(latent, experts, ids, weights).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        pytest.skip("this jaxlib reports no memory analysis")
    # Per visited expert an activation [T, F or L] may be kept for the gradient; its weights may not.
    activations = 4 * tokens * 256 * (64 + 16 + 8)
    # float32 weights, their integer codes on the way, and transposes for the products: three copies.
    bound = 3 * 4 * expert + activations
    assert analysis.temp_size_in_bytes <= bound
    assert bound < 16 * 4 * expert  # all experts of a token would show
