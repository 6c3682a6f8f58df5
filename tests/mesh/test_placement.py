"""Where experts lie: the map that loader and dispatch share."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from k3jax import mesh
from k3jax.mesh import Placement, place


def test_ep07_896_experts_on_72_ranks_take_13_slots_each_and_40_replicas() -> None:
    placement = place(896, 72)
    assert placement.slots_per_rank == 13
    assert len(placement.experts) == 936
    assert (placement.copies == 2).sum() == 40
    # A rank without replicas holds 13 unshared experts; spread well, none holds more than 12.5.
    assert placement.rank_loads().max() <= 12.5


@hypothesis.settings(max_examples=60)
@hypothesis.given(experts=st.integers(1, 60), ranks=st.integers(1, 40), seed=st.none() | st.integers(0, 99))
def test_ep05_every_expert_is_held_and_no_rank_holds_one_twice(
    experts: int, ranks: int, seed: int | None
) -> None:
    loads = None if seed is None else np.random.default_rng(seed).pareto(1.0, experts)
    placement = place(experts, ranks, loads)
    held = np.asarray(placement.experts).reshape(ranks, -1)
    assert held.shape[1] == -(-experts // ranks)
    assert set(placement.experts) == set(range(experts))
    assert all(len(set(mine)) == len(mine) for mine in held.tolist())
    assert place(experts, ranks, loads) == placement


@hypothesis.given(experts=st.integers(1, 60), ranks=st.integers(1, 40))
def test_ep06_the_slot_table_names_exactly_the_slots_that_hold_the_expert(experts: int, ranks: int) -> None:
    placement = place(experts, ranks)
    table, copies = placement.slot_table(), placement.copies
    assert sorted(s for row, n in zip(table, copies, strict=True) for s in row[:n]) == list(
        range(len(placement.experts))
    )
    for expert, row in enumerate(table):
        assert {placement.experts[slot] for slot in row} == {expert}


def test_spare_slots_go_to_the_busiest_experts_and_the_load_evens_out() -> None:
    loads = np.ones(20)
    loads[[4, 11]] = [40.0, 10.0]
    placement = place(20, 12, loads)  # 24 slots: 4 spare
    assert placement.copies[4] == 5  # 40 / 5 = 8 is below 10, so the last spare but none went to 11
    assert placement.copies.sum() == 24
    alone = place(20, 12)
    assert placement.rank_loads(loads).max() < 0.5 * alone.rank_loads(loads).max()


def test_without_spare_slots_or_loads_experts_lie_in_order() -> None:
    assert place(32, 8).experts == tuple(range(32))


def test_measured_loads_choose_the_replicas_of_each_layer() -> None:
    from support.mesh_cases import config

    c = config(20)
    loads = np.ones((c.num_moe_layers, 20))
    loads[1, 9] = 100.0
    plan = mesh.for_devices(8, c, tensor=2, loads=loads)
    first, second, _ = plan.placements(c)
    assert second.copies[9] == 5
    assert first.copies[9] < 5


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([1.0] * 19, r"loads: expected 20 finite numbers of at least 0, got shape \[19\]"),
        ([-1.0] + [1.0] * 19, "at least 0, got shape .* with values -1.0"),
        ([float("nan")] + [1.0] * 19, "finite numbers"),
    ],
)
def test_wrong_loads_are_refused(loads: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(20, 8, loads)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ((0, 1, 2), "slots in equal shares for 2 ranks, got 3"),
        ((0, 1, 1, 0), "missing \\[2\\]"),
        ((0, 0, 1, 2), "rank 0 holds an expert twice"),
    ],
)
def test_a_placement_that_loses_or_doubles_an_expert_is_refused(experts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(experts, 3, 2)
