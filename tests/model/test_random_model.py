"""Random weights: the same for a seed, spread like a trained model's where a decode step can tell."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import k3jax
from k3jax.model import abstract_params
from support.random_k3 import random_config
from support.tiny_model import assert_bit_equal, bits

CONFIG = random_config(
    21, layer_types=("kda", "mla"), first_k_dense_replace=1, num_experts=64, num_experts_per_token=4,
    vocab_size=128, hidden_size=64, kda_num_heads=2, num_attention_heads=2,
)  # fmt: skip


@functools.cache
def drawn(seed: int = 3, dtype: str | None = None) -> Any:
    return k3jax.random_model(CONFIG, seed=seed, dtype=dtype)


def test_shapes_and_dtypes_are_the_released_ones() -> None:
    for dtype in (None, "float32"):
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), drawn(dtype=dtype).params)
        assert shapes == abstract_params(CONFIG, dtype)


def test_a_seed_gives_the_same_weights_and_another_seed_others() -> None:
    again = k3jax.random_model(CONFIG, seed=3)
    assert_bit_equal(again.params, drawn().params)
    other = k3jax.random_model(CONFIG, seed=4)
    for a, b in zip(jax.tree.leaves(other.params), jax.tree.leaves(drawn().params), strict=True):
        assert bits(a) != bits(b)


def test_no_two_parameters_are_the_same_numbers() -> None:
    leaves = [bits(leaf)[:16] for leaf in jax.tree.leaves(drawn().params)]
    assert len(set(leaves)) == len(leaves)


def test_float32_weights_are_the_bfloat16_ones_before_rounding() -> None:
    for wide, narrow in zip(
        jax.tree.leaves(drawn(dtype="float32").params), jax.tree.leaves(drawn().params), strict=True
    ):
        assert bits(wide.astype(narrow.dtype)) == bits(narrow)


def test_a_mesh_gives_the_same_weights(cpu_devices: list[Any]) -> None:
    mesh = Mesh(np.array(cpu_devices).reshape(4, 2), ("expert", "tensor"))
    sharded = k3jax.random_model(CONFIG, seed=3, mesh=mesh)
    assert_bit_equal(sharded.params, drawn().params)
    w1 = sharded.params["layers"][1]["block_sparse_moe"]["experts"]["w1"].codes
    assert {shard.data.shape[0] for shard in w1.addressable_shards} == {64 // 4}


def test_routing_is_spread_over_the_experts() -> None:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 32)).astype(np.int32)
    run = jax.jit(functools.partial(k3jax.capture, config=CONFIG))
    seen = run(drawn(dtype="float32").params, jnp.asarray(ids))
    assert np.isfinite(np.asarray(seen["logits"])).all()
    picks = np.asarray(seen["layers.1.topk_ids"]).reshape(-1, 4)
    counts = np.bincount(picks.ravel(), minlength=64)
    # 512 picks of 64 experts: 8 each if even. One in four tokens on one expert would be a collapse.
    assert counts.max() < len(picks) / 4
    distinct = len(np.unique(picks))
    expected = 64 * (1 - (1 - 4 / 64) ** len(picks))
    assert distinct > 0.75 * expected
    weights = np.asarray(seen["layers.1.topk_w"])
    assert weights.max() < 0.9 * weights.sum(-1).max()  # no expert takes it all
    for name, value in seen.items():
        size = float(np.sqrt(np.mean(np.square(np.asarray(value, np.float64)))))
        assert 1e-3 < size < 1e3, name


def test_the_decay_gates_cover_their_range() -> None:
    attention = drawn().params["layers"][0]["self_attn"]
    assert ((np.asarray(attention["A_log"]) >= 0) & (np.asarray(attention["A_log"]) <= np.log(4))).all()
    rate = np.exp(np.asarray(attention["A_log"]))[:, None]
    bias = np.asarray(attention["dt_bias"]).reshape(CONFIG.kda_num_heads, -1)
    g = CONFIG.kda_gate_lower_bound / (1 + np.exp(-rate * bias))
    assert g.max() > -0.3
    assert g.min() < -1.0


@pytest.mark.parametrize("name", ["megakernel", "pallas"])
def test_an_implementation_that_cannot_run_here_raises_with_the_reason(name: str) -> None:
    model, (ids, config) = drawn(), ([[1, 2]], CONFIG)
    state = model.init_state(1, 16)
    # A method chooses among implementations; a pure step knows only its own reasons.
    reason = (
        rf"implementation '{name}' is not .*; available: auto, xla|{name}: device: expected an NVIDIA GPU"
    )
    for call in (
        lambda: k3jax.random_model(config, implementation=name),
        lambda: k3jax.load("nano", implementation=name),
        lambda: k3jax.Model(model.params, config, implementation=name),
        lambda: k3jax.prefill(model.params, np.array(ids), config=config, implementation=name),
        lambda: k3jax.decode_step(model.params, state, [1], config=config, implementation=name),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            call()


def test_an_unknown_implementation_is_a_wrong_argument() -> None:
    for call in (
        lambda: k3jax.random_model(CONFIG, implementation="cuda"),
        lambda: k3jax.load("nano", implementation="cuda"),
        lambda: k3jax.decode_step(
            drawn().params, drawn().init_state(1, 16), [1], config=CONFIG, implementation=""
        ),
    ):
        with pytest.raises(ValueError, match="implementation: expected one of auto, xla, pallas"):
            call()
    assert drawn().implementation == "xla"
