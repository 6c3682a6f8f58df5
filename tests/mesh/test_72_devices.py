"""72 virtual devices, and 16, in a process of their own: K3 over them equals K3 on one device."""

from __future__ import annotations

from typing import Any

import pytest

from support import mesh_worker

NVL72 = {"tensor": 8}
EXPERTS = 140
"""On 72 ranks: two slots each, 4 of 144 are replicas, so most ranks hold experts that lie nowhere else."""
MANY_REPLICAS = 100
"""44 of 144 slots are replicas."""


def assert_equal(found: dict[str, Any]) -> None:
    assert found["logits"] <= 5e-5, found
    assert found["state"] <= 5e-5, found
    assert found["weights"] <= 5e-6, found
    assert found["routing"], found
    assert found["lengths"], found


def case(batch: int, routing: str, dispatch: str, num_experts: int = EXPERTS, **plan: Any) -> dict[str, Any]:
    compare = {"batch": batch, "routing": routing, "num_experts": num_experts}
    return {"plan": {**NVL72, "dispatch": dispatch, **plan}, "compare": compare}


def test_one_decode_step_over_72_devices_equals_one_device() -> None:
    """Attention TP8 x DP9, 100 experts in 144 slots, one row and eight that are padding."""
    work = case(1, "as scored", "all_to_all", MANY_REPLICAS)
    work["compare"]["steps"] = 1
    (found,) = mesh_worker.run(72, [work], timeout=240)
    assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
@pytest.mark.parametrize("batch", [1, 72, 144])
def test_steps_equal_one_device_whatever_the_routing(batch: int, dispatch: str) -> None:
    routings = ("as scored", "one expert", "one rank", "a rank without tokens")
    results = mesh_worker.run(72, [case(batch, name, dispatch) for name in routings], timeout=580)
    assert len(results) == len(routings)
    for name, found in zip(routings, results, strict=True):
        assert_equal(found)
        if name == "one rank":
            assert found["busiest"] == 1.0
        if name == "one expert":
            assert found["busiest"] >= 0.5


@pytest.mark.slow
def test_steps_equal_one_device_where_every_expert_is_chosen_once() -> None:
    """30 rows, two choices, 60 experts in 72 slots; six rows are padding."""
    work = [case(30, "even", kind, 60) for kind in ("gather", "all_to_all")]
    for each in work:
        each["compare"]["steps"] = 1
    for found in mesh_worker.run(72, work, timeout=580):
        assert_equal(found)
        assert found["counts"] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 16])
def test_experts_8_ways_and_each_in_two_on_16_devices_equal_one_device(batch: int) -> None:
    """EP8 x TP2, both dispatches; 22 experts in 24 slots."""
    plan = {"tensor": 2, "expert_width": 2}
    work = [
        {
            "plan": {**plan, "dispatch": kind},
            "compare": {"batch": batch, "routing": routing, "num_experts": 22},
        }
        for kind in ("gather", "all_to_all")
        for routing in ("as scored", "one rank")
    ]
    results = mesh_worker.run(16, work, timeout=580)
    assert len(results) == len(work)
    for each, found in zip(work, results, strict=True):
        assert_equal(found)
        if each["compare"]["routing"] == "one rank":
            assert found["busiest"] == 1.0
        elif batch > 1:
            assert found["busiest"] < 1.0


@pytest.mark.slow
def test_other_plans_of_72_devices_equal_one_device() -> None:
    plans: list[dict[str, Any]] = [
        {"split_sequence": True},
        {"tensor": 4, "expert_width": 2},
        {"tensor": 1},
        {"tensor": 2, "capacity": 1},
    ]
    work = [case(72, "as scored", "all_to_all", MANY_REPLICAS, **plan) for plan in plans]
    for found in mesh_worker.run(72, work, timeout=580):
        assert_equal(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
def test_every_pair_is_computed_once_on_72_ranks(kind: str) -> None:
    """EP-01, EP-02, EP-06: a fifth of the rows is not active; capacity 1 takes many rounds."""
    names = ("uniform", "zipf", "one expert", "one rank", "a rank without tokens")
    cases = [
        {
            "plan": NVL72,
            "pairs": {
                "kind": kind, "routing": name, "rows": rows, "slots": 2, "num_experts": EXPERTS,
                "capacity": 1,
            },
        }
        for rows in (9, 144)
        for name in names
    ]  # fmt: skip
    results = mesh_worker.run(72, cases, timeout=580)
    assert len(results) == len(cases)
    for work, found in zip(cases, results, strict=True):
        assert found["wrong"] == 0, work
        rows = work["pairs"]["rows"]
        assert found["pairs"] == 2 * sum(row % 5 != 4 for row in range(rows)), work
