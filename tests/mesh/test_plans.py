"""Plans: what fits, what is refused and why, and the bytes that a device holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax import mesh
from k3jax.mesh.layout import param_specs, planned_params
from support import mesh_cases

K3 = k3jax.K3Config.preset("k3")


def test_nvl72_is_tensor_8_by_data_9_with_experts_over_all() -> None:
    plan = mesh.nvl72()
    assert (plan.data, plan.tensor, plan.expert_ranks) == (9, 8, 72)
    assert [len(p.experts) for p in plan.placements(K3)] == [936] * 92
    assert plan.padded(1) == 9
    assert plan.padded(72) == 72


def test_sixteen_devices_take_experts_8_ways_and_each_in_two() -> None:
    plan = mesh.for_devices(16, tensor=2, expert_width=2)
    assert plan.shape == (8, 1, 2)
    assert plan.expert_ranks == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mesh.for_devices(72, tensor=9), r"tensor: expected .* 72 devices .*\(1, 2, 4, 8\), got 9"),
        (lambda: mesh.for_devices(0), "n: expected an integer of at least 1, got 0"),
        (lambda: mesh.for_devices(16, tensor=4, expert_width=3), r"divisor of tensor=4 \(1, 2, 4\), got 3"),
        (lambda: mesh.MeshPlan(8, 12).check(K3), "tensor=12 does not divide .*1, 2, 4, 8, 16, 32"),
        (
            lambda: mesh.MeshPlan(1, 4, 4).check(mesh_cases.config()),
            "expert_width=4 does not cut moe_intermediate_size=64 at blocks of 32; widths that can: 1, 2",
        ),
        (lambda: mesh.MeshPlan(2, 2, dispatch="best"), "dispatch: expected one of auto, gather"),
        (lambda: mesh.MeshPlan(2, 2, capacity=0), "capacity: expected None or an integer .*, got 0"),
        (lambda: mesh.MeshPlan(2, 2, capacity=True), "capacity: expected None or an integer"),
        (lambda: mesh.MeshPlan(0, 2), "data: expected an integer of at least 1, got 0"),
        (lambda: mesh.MeshPlan(2, 2, devices=tuple(jax.devices("cpu")[:3])), "devices: expected 4, got 3"),
        (lambda: mesh.nvl72().check_devices(), r"mesh: expected 72 devices, jax sees \d+"),
        (
            lambda: mesh.MeshPlan(8, 1, loads=np.ones((2, 20))).placements(mesh_cases.config()),
            r"loads: expected \[20\] or \[3, 20\], got \[2, 20\]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_can(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_split_cache_needs_a_tensor_size_that_divides_its_blocks() -> None:
    odd = dataclasses.replace(
        mesh_cases.config(), num_attention_heads=3, kda_num_heads=3, kda_a_log_size=3, intermediate_size=48,
        routed_expert_hidden_size=96, vocab_size=63, moe_intermediate_size=96,
    )  # fmt: skip
    mesh.MeshPlan(1, 3).check(odd)
    with pytest.raises(ValueError, match=r"tensor=3 does not divide cache blocks of 256 rows.*can: 1"):
        mesh.MeshPlan(1, 3, split_sequence=True).check(odd)


def test_every_logical_axis_of_the_model_is_cut_or_known_to_be_whole() -> None:
    from k3jax.axes import Axes
    from k3jax.mesh.plan import MESH_AXES
    from k3jax.nnx_model import param_axes

    every = k3jax.K3Config.preset("k3-slice", num_layers=4)  # both attentions, dense and LatentMoE
    leaves = jax.tree.leaves(param_axes(every), is_leaf=lambda x: isinstance(x, Axes))
    named = {name for axes in leaves for name in axes.names if name is not None}
    assert named <= MESH_AXES.keys()


def test_the_table_counts_what_the_shapes_of_one_device_take() -> None:
    c = mesh_cases.config(20)
    plan = mesh.for_devices(8, c, tensor=4, expert_width=2)
    found = mesh.device_bytes(plan, c, batch=3, context=256)
    sizes = [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(planned_params(c, plan))
    ]
    assert sum(found.weights.values()) == sum(sizes)
    state = mesh.planned_state(c, plan, 3, 256, jax.numpy.bfloat16)
    first = [leaf.addressable_shards[0].data.nbytes for layer in state.layers for leaf in layer.values()]
    assert sum(found.state.values()) == sum(first)


def test_the_release_fits_h200_and_gb300_racks_and_the_table_says_so() -> None:
    text = mesh.table(mesh.nvl72(), K3, batch=72, context=8192)
    assert "936 slots, 13 a rank, 40 of them replicas" in text
    assert "fits H200" in text
    assert "gather: a rank has 1 rows" in text
    # 13 slots of 92 layers, by the release's bytes of an expert.
    assert f"{13 * 92 * 17_547_264:,}" in text
    assert "does not fit H200" in mesh.table(mesh.for_devices(8), K3, batch=1, context=8192)


@pytest.mark.parametrize(
    ("rows", "kind", "why"),
    [
        (9, "gather", "move no less"),
        (216, "gather", "move no less"),
        (288, "all_to_all", "less than a gather"),
    ],
)
def test_the_dispatch_follows_the_batch_with_a_reason(rows: int, kind: str, why: str) -> None:
    choice = mesh.nvl72().choice(K3, rows)
    assert choice.kind == kind
    assert why in choice.reason
    assert "asked for" in mesh.nvl72(dispatch="ragged").choice(K3, rows).reason


def test_specs_and_planned_shapes_have_the_structure_of_what_is_arranged(cpu_devices: list[Any]) -> None:
    c = mesh_cases.config(20)
    plan = mesh.for_devices(8, c, tensor=2, expert_width=2, devices=tuple(cpu_devices[:8]))
    tree = mesh.arrange(mesh_cases.params(20), c, plan)
    shapes = planned_params(c, plan, "float32")
    assert jax.tree.structure(tree) == jax.tree.structure(shapes) == jax.tree.structure(param_specs(c))
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes), strict=True):
        assert (got.shape, got.dtype, got.sharding) == (want.shape, want.dtype, want.sharding)
