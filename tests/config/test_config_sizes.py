"""Parameters and bytes against the release's published totals, and against the parameter tree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import MXFP4, K3Config
from k3jax.model import abstract_params
from k3jax.state import abstract_state, cache_rows
from support.random_k3 import random_config, random_tensors

K3 = K3Config.preset("k3")


def test_the_release_has_its_published_totals() -> None:
    assert K3.param_count() == 2_779_484_478_208
    assert K3.active_param_count() == 104_189_614_848
    assert K3.checkpoint_bytes() == 1_559_965_606_912


def test_state_bytes_of_the_release() -> None:
    assert K3.state_bytes(1, 0) == 449_372_160
    assert K3.state_bytes(1, 1) - K3.state_bytes(1, 0) == 27_648
    assert K3.state_bytes(5, 1000) == 5 * (449_372_160 + 27_648_000)


def test_bytes_of_a_step_at_batch_one() -> None:
    step = K3.bytes_per_step(1)
    assert dict(step) == {
        "weights": 136_990_317_568,
        "unused": 37_504,
        "state_read": 449_372_160,
        "state_write": 449_372_160,
        "cache_read": 0,
        "cache_write": 27_648,
    }
    assert step.total == 136_990_317_568 - 37_504 + 2 * 449_372_160 + 27_648
    assert step["weights"] == step.weights
    with pytest.raises(KeyError):
        step["total_"]


def test_bytes_of_a_step_grow_with_rows_and_length_as_they_should() -> None:
    one, many = K3.bytes_per_step(1), K3.bytes_per_step(8, length=1000)
    assert many.state_read == many.state_write == 8 * one.state_read
    assert many.cache_read == 8 * 1000 * 27_648
    assert many.cache_write == 8 * 27_648
    assert many.unused == one.unused
    distinct = 896 * (1 - (1 - 16 / 896) ** 8)
    assert distinct == pytest.approx(120.3, abs=0.1)  # the spec's table: 120
    experts = round(92 * distinct * 17_547_264) - 92 * 16 * 17_547_264
    assert many.weights - one.weights == experts + 7 * 2 * 7168  # and one embedding row per sequence


def test_distinct_experts_may_be_given_for_all_layers_or_for_each() -> None:
    number = K3.bytes_per_step(4, distinct_experts=50)
    for same in (50.0, [50] * 92, np.full(92, 50), tuple([50.0] * 92)):
        assert K3.bytes_per_step(4, distinct_experts=same) == number
    mixed = K3.bytes_per_step(4, distinct_experts=[16] * 91 + [64])
    floor = K3.bytes_per_step(4, distinct_experts=16)
    assert mixed.weights - floor.weights == 48 * 17_547_264
    assert K3.bytes_per_step(1, distinct_experts=16) == K3.bytes_per_step(1)


@pytest.mark.parametrize(
    ("distinct", "message"),
    [
        (-1, "expected 0..896 per layer, got -1"),
        (897, "expected 0..896 per layer, got 897"),
        (math.nan, "expected 0..896 per layer, got nan"),
        ([16] * 91, "92 numbers"),
        ([16] * 90 + [-1, 33], "expected 0..896 per layer, got -1"),
    ],
)
def test_impossible_numbers_of_distinct_experts_are_refused(distinct: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        K3.bytes_per_step(4, distinct_experts=distinct)


def test_impossible_batches_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="batch: expected at least 1, got 0"):
        K3.bytes_per_step(0)
    with pytest.raises(ValueError, match="length: expected at least 0, got -1"):
        K3.state_bytes(1, -1)


def logical_size(leaf: Any) -> int:
    return math.prod(leaf.shape)


@pytest.mark.parametrize("config", [K3, K3Config.preset("k3-slice", num_layers=5, num_experts=32)])
def test_the_parameter_tree_has_as_many_parameters_as_the_arithmetic_says(config: K3Config) -> None:
    tree = abstract_params(config)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, MXFP4))
    padding = config.num_kda_layers * (config.kda_a_log_size - config.kda_num_heads)
    assert sum(map(logical_size, leaves)) + padding == config.param_count()
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    assert stored + 4 * padding == config.checkpoint_bytes()


def test_slices_add_up_to_the_release() -> None:
    """The layers of slices cost what the release's own layers cost."""
    parts = [K3Config.preset("k3-slice", num_layers=n) for n in (1, 2, 4, 93)]
    counts = [p.param_count() for p in parts]
    kda_moe = 443_580_416 + 160_000 + 43_008 + 189_926_912 + 896 + 29_595_009_024
    mla_moe = kda_moe - 443_580_416 - 160_000 + 232_196_096
    assert counts[1] - counts[0] == kda_moe
    assert counts[2] - counts[1] == kda_moe + mla_moe
    assert counts[3] == K3.param_count()
    fewer = K3Config.preset("k3-slice", num_layers=2, num_experts=16)
    assert counts[1] - fewer.param_count() == 880 * (33_030_144 + 7168 + 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_checkpoint_holds_as_many_bytes_as_the_arithmetic_says(seed: int) -> None:
    config = random_config(seed)
    tensors = random_tensors(config, seed)
    assert sum(t.nbytes for t in tensors.values()) == config.checkpoint_bytes()
    packed = sum(t.size for name, t in tensors.items() if name.endswith("weight_packed"))
    scales = sum(t.size for name, t in tensors.items() if name.endswith("weight_scale"))
    every = sum(t.size for t in tensors.values())
    assert every - packed - scales + 2 * packed == config.param_count()


@pytest.mark.parametrize("seed", range(4))
def test_a_states_arrays_hold_as_many_bytes_as_the_arithmetic_says(seed: int) -> None:
    config = random_config(seed)
    state = abstract_state(config, 3, 300, jnp.bfloat16)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.layers))
    assert stored == config.state_bytes(3, cache_rows(300))


def test_value_heads_of_another_size_are_counted() -> None:
    small = random_config(1, layer_types=("kda",), kda_head_dim=16, kda_v_head_dim=8, kda_num_heads=2)
    large = dataclasses.replace(small, kda_v_head_dim=24)
    # v_proj, g_proj [N V, D], o_proj [D, N V], v_conv1d [N V, 1, 4] and o_norm [V].
    grown = 2 * 16
    assert large.param_count() - small.param_count() == grown * (3 * small.hidden_size + 4) + 16
