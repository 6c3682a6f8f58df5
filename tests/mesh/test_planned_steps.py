"""Decode steps and prefill over a plan equal the model on one device."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import mesh, sharded_step
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, init_state
from support import mesh_cases
from support.compare import assert_close

BOUND, WHY = 5e-5, "a mesh sums in another order: the bound for float32"
WEIGHTS = 2e-5
"""Absolute, of a mixing weight of up to 2.5: the largest of 1,700, where BOUND is for a mean of squares."""


def plan_for(cpu_devices: list[Any], n: int, **options: Any) -> mesh.MeshPlan:
    return mesh.for_devices(n, mesh_cases.config(), devices=tuple(cpu_devices[:n]), **options)


def assert_equal(found: dict[str, Any]) -> None:
    assert found["logits"] <= BOUND, found
    assert found["state"] <= BOUND, found
    assert found["weights"] <= WEIGHTS, found
    assert found["routing"], found
    assert found["lengths"], found


@pytest.mark.parametrize(
    ("n", "options", "batch"),
    [
        (8, {"tensor": 2, "dispatch": "all_to_all", "capacity": 1}, 9),
        pytest.param(8, {"tensor": 4, "expert_width": 2, "split_sequence": True}, 3, marks=pytest.mark.slow),
        pytest.param(8, {"tensor": 2, "dispatch": "gather"}, 5, marks=pytest.mark.slow),
        pytest.param(1, {}, 2, marks=pytest.mark.slow),
        pytest.param(8, {"tensor": 1, "dispatch": "all_to_all"}, 16, marks=pytest.mark.slow),
        pytest.param(8, {"tensor": 8, "dispatch": "gather"}, 1, marks=pytest.mark.slow),
        pytest.param(8, {"tensor": 8, "expert_width": 2}, 4, marks=pytest.mark.slow),
        pytest.param(1, {"dispatch": "all_to_all"}, 3, marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 2, "split_sequence": True}, 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_decode_steps_equal_those_of_one_device(
    n: int, options: dict[str, Any], batch: int, cpu_devices: list[Any]
) -> None:
    assert_equal(mesh_cases.compare(plan_for(cpu_devices, n, **options), batch, "as scored"))


@pytest.mark.slow
@pytest.mark.parametrize("routing", mesh_cases.ROUTINGS)
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("batch", [1, 72, 144])
def test_eight_devices_equal_one_whatever_the_routing(
    batch: int, kind: str, routing: str, cpu_devices: list[Any]
) -> None:
    """22 experts in 24 slots: the replicas touch four of the ranks, the others' experts lie nowhere else."""
    plan = plan_for(cpu_devices, 8, tensor=2, dispatch=kind)
    found = mesh_cases.compare(plan, batch, routing, num_experts=22)
    assert_equal(found)
    if routing == "one rank":
        assert found["busiest"] == 1.0
    if routing == "one expert":
        assert found["busiest"] >= 0.5
    if routing == "a rank without tokens" and batch > 1:
        assert found["counts"][0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("routing", mesh_cases.ROUTINGS)
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
@pytest.mark.parametrize("batch", [1, 72, 144])
def test_a_mesh_of_one_device_equals_one_without_whatever_the_routing(
    batch: int, kind: str, routing: str, cpu_devices: list[Any]
) -> None:
    found = mesh_cases.compare(plan_for(cpu_devices, 1, dispatch=kind), batch, routing)
    assert_equal(found)
    assert found["busiest"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
def test_where_the_router_chooses_every_expert_as_often(kind: str, cpu_devices: list[Any]) -> None:
    """Ten rows, two choices, twenty experts in 24 slots of eight ranks: once each, in every layer."""
    plan = plan_for(cpu_devices, 8, tensor=2, dispatch=kind)
    found = mesh_cases.compare(plan, 10, "even", steps=1)
    assert_equal(found)
    assert found["counts"] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_prefill_equals_that_of_one_device(split: bool, cpu_devices: list[Any]) -> None:
    """70 tokens are two passes; the second row is shorter, the third empty."""
    c, one = mesh_cases.config(), k3jax.Model(mesh_cases.params(), mesh_cases.config())
    plan = plan_for(cpu_devices, 8, tensor=4, split_sequence=split)
    many = k3jax.Model(mesh.arrange(mesh_cases.params(), c, plan), c, mesh=plan)
    ids, lengths = mesh_cases.tokens(3, 70), [70, 11, 0]
    want, state = one.prefill(ids, lengths=lengths)
    got, spread = many.prefill(ids, lengths=lengths)
    assert_close("logits", got, want, BOUND, WHY)
    assert (np.asarray(got)[1, 11:] == 0).all()
    back = mesh.from_plan(spread, 3)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert_close("state", a, b, BOUND, WHY)
    last, _ = many.prefill(ids, lengths=lengths, logits="last")
    assert_close("last", last, one.prefill(ids, lengths=lengths, logits="last")[0], BOUND, WHY)


def filled_state(lengths: list[int], max_length: int) -> Any:
    """A state of one device with random contents and the given lengths."""
    rng = np.random.default_rng(5)
    state = init_state(mesh_cases.config(), len(lengths), max_length, jnp.float32)
    filled = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape).astype(a.dtype)), state.layers)
    return dataclasses.replace(state, layers=filled, lengths=jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize(
    "options",
    [{"tensor": 4, "split_sequence": True}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)],
)
def test_cache_writes_at_every_boundary_of_a_cut_axis_land(
    options: dict[str, Any], cpu_devices: list[Any]
) -> None:
    """256 positions in 4 pieces of 64, rows in groups: first and last position of each, and past the end."""
    c = mesh_cases.config()
    lengths = [0, 1, 62, 63, 64, 65, 127, 128, 191, 192, 254, 255, 256]
    state = filled_state(lengths, 256)
    plan = plan_for(cpu_devices, 8, **options)
    ids = mesh_cases.tokens(len(lengths), 1)[:, 0]
    want, after = jax.jit(functools.partial(k3jax.decode_step, config=c))(mesh_cases.params(), state, ids)
    rows = plan.padded(len(lengths))
    step = jax.jit(functools.partial(sharded_step.decode_step, config=c, plan=plan))
    spread = mesh.to_plan(state, c, plan)
    got, moved = step(
        mesh.arrange(mesh_cases.params(), c, plan), spread,
        np.pad(ids, (0, rows - len(ids))), np.arange(rows) < len(ids),
    )  # fmt: skip
    back = mesh.from_plan(moved, len(lengths))
    for i in (1, 3):
        old, new = np.asarray(state.layers[i]["cache"]), np.asarray(back.layers[i]["cache"])
        written = (old != new).any(axis=-1)
        assert [np.flatnonzero(row).tolist() for row in written] == [[n] for n in lengths[:-1]] + [[]]
        assert_close("cache", new, after.layers[i]["cache"], BOUND, WHY)
    assert_close("logits", np.asarray(got)[:12], want[:12], BOUND, WHY)
    assert np.isnan(np.asarray(got)[12]).all()
    assert back.status.tolist() == [0] * 12 + [STATUS_FULL]
    assert back.lengths.tolist() == [n + 1 for n in lengths[:-1]] + [256]
    with pytest.raises(k3jax.StateError, match="row 12: the row is full"):
        k3jax.check(moved)


def test_rows_that_are_not_active_keep_their_bits_and_bad_tokens_are_refused(cpu_devices: list[Any]) -> None:
    c = mesh_cases.config()
    plan = plan_for(cpu_devices, 8, tensor=2)
    state = mesh.to_plan(filled_state([3, 4, 5, 6], 256), c, plan)
    tree = mesh.arrange(mesh_cases.params(), c, plan)
    step = jax.jit(functools.partial(sharded_step.decode_step, config=c, plan=plan))
    logits, after = step(tree, state, np.array([1, 99, 2, 3], np.int32), np.array([True, True, False, True]))
    for old, new in zip(jax.tree.leaves(state.layers), jax.tree.leaves(after.layers), strict=True):
        for row in (1, 2):
            assert np.asarray(old)[row].tobytes() == np.asarray(new)[row].tobytes()
    assert after.status.tolist() == [0, STATUS_BAD_TOKEN, 0, 0]
    assert np.isnan(np.asarray(logits)[1]).all()
    assert (np.asarray(logits)[2] == 0).all()


def test_what_crosses_devices_is_what_the_step_says_and_no_weight(cpu_devices: list[Any]) -> None:
    """No compiler-placed communication: the collectives are counted, and none is larger than activations."""
    c = mesh_cases.config()
    plan = plan_for(cpu_devices, 8, tensor=2, dispatch="gather")
    tree = mesh.arrange(mesh_cases.params(), c, plan)
    state = mesh.planned_state(c, plan, 4, 256, jnp.float32)
    step = jax.jit(functools.partial(sharded_step.decode_step, config=c, plan=plan))
    text = step.lower(tree, state, np.zeros(4, np.int32), np.ones(4, bool)).compile().as_text()
    assert text is not None
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    sizes = [
        int(np.prod([int(n) for n in dims.split(",") if n]))
        for shapes, _ in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]
    assert max(sizes) <= 4 * max(c.hidden_size, c.routed_expert_hidden_size)
    kinds = [kind for _, kind in found]
    # Embedding; per layer one sum after each sublayer; per LatentMoE a scatter and a sum more.
    assert kinds.count("all-reduce") == 1 + 2 * 4 + 3
    assert kinds.count("reduce-scatter") == 3
    assert kinds.count("all-gather") <= 3 * 4
    assert set(kinds) == {"all-reduce", "reduce-scatter", "all-gather"}


def test_states_and_parameters_of_another_layout_are_refused(cpu_devices: list[Any]) -> None:
    c = mesh_cases.config()
    plan = plan_for(cpu_devices, 8, tensor=2)
    tree = mesh.arrange(mesh_cases.params(), c, plan)
    step = functools.partial(sharded_step.decode_step, tree, config=c, plan=plan)
    tokens, active = jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    with pytest.raises(ValueError, match=r"layer 0: expected \['S', 'conv_k'.*got \['S', 'conv'\]"):
        step(filled_state([0] * 4, 256), tokens, active)
    with pytest.raises(ValueError, match="expected a multiple of data=4 rows, got 3"):
        step(filled_state([0] * 3, 256), tokens[:3], active[:3])
    with pytest.raises(ValueError, match="layer 1: expected a tree laid out by the plan"):
        k3jax.Model(mesh_cases.params(), c, mesh=plan)
    with pytest.raises(ValueError, match=r"state: layer 0: expected \['S', 'conv'\]"):
        k3jax.Model(mesh_cases.params(), c).decode_step(
            [0] * 4, mesh.planned_state(c, plan, 4, 256, jnp.float32)
        )


@pytest.mark.slow
def test_bfloat16_steps_stay_finite_and_near_float32(cpu_devices: list[Any]) -> None:
    """Two rows a group: the CPU's matrix products of bfloat16 batches are met."""
    from support.random_k3 import params_from_tensors, random_tensors

    c = mesh_cases.config()
    plan = plan_for(cpu_devices, 8, tensor=4, split_sequence=True, dispatch="all_to_all")
    tensors = random_tensors(c, 31)
    one = params_from_tensors(c, tensors)
    many = k3jax.Model(mesh.arrange(one, c, plan), c, mesh=plan)
    ids = mesh_cases.tokens(4, 6)
    logits, state = many.prefill(ids)
    want, alone = k3jax.Model(one, c).prefill(ids)
    # Before any routing differs, layer 0's state shows the arithmetic alone.
    back = mesh.from_plan(state, 4)
    assert_close("S", back.layers[0]["S"], alone.layers[0]["S"], 0.02, "bfloat16 rounding of inputs")
    step, _ = many.decode_step(ids[:, 0], state)
    assert np.isfinite(np.asarray(step)).all()
    assert np.isfinite(np.asarray(logits)).all()
    assert np.asarray(want).shape == np.asarray(logits).shape
