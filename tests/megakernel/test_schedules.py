"""Schedules of random models are valid, whatever the sizes, batch, SMs and shares."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel import instructions as tables
from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.partition import deal, runs
from k3jax.custom_calls.decode_megakernel.schedule import build
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.decode_megakernel.traffic import expected, traffic
from k3jax.custom_calls.decode_megakernel.validate import problems, validate
from support.random_k3 import random_config

K3_SECONDS = 60
"""Most seconds that building and validating all 93 layers may take, per batch size, on two cores."""


def random_plan(seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    config = random_config(seed)
    if seed % 4 == 0:  # wide enough for several column chunks
        config = dataclasses.replace(
            config, hidden_size=4160, intermediate_size=2112, moe_intermediate_size=2080
        )
    sms = int(rng.choice([1, 2, 3, 5, 8, 13, 132]))
    return Plan(config, int(rng.integers(1, 9)), Target(f"{sms} SMs", sms))


@pytest.mark.parametrize("seed", range(24))
def test_the_schedule_of_a_random_model_is_valid(seed: int) -> None:
    plan = random_plan(seed)
    assert problems(build(plan)) == []


@pytest.mark.parametrize("seed", range(0, 24, 6))
def test_the_integer_tables_give_the_instructions_back(seed: int) -> None:
    schedule = build(random_plan(seed))
    encoded = tables.encode(schedule.instructions, schedule.plan.sms)
    assert encoded.records.dtype == np.int32
    assert tables.decode(encoded) == schedule.instructions
    for sm in range(schedule.plan.sms):
        mine = encoded.program[encoded.starts[sm] : encoded.starts[sm + 1]].tolist()
        assert mine == [at for at, i in enumerate(schedule.instructions) if i.sm0 <= sm < i.sm1]


def test_a_record_ends_with_the_place_of_its_matrix_in_the_stack_of_its_kind() -> None:
    config = random_config(3, layer_types=("kda", "mla", "kda", "mla"), first_k_dense_replace=1)
    schedule = build(Plan(config, 1))
    records = tables.encode(schedule.instructions, schedule.plan.sms).records
    place = {
        (i.op, i.layer): int(r[tables.STACK]) for i, r in zip(schedule.instructions, records, strict=True)
    }
    assert [place[Op.KDA_IN, 0], place[Op.KDA_STEP, 2], place[Op.MLA_ATTEND, 1], place[Op.MLA_OUT, 3]] == [
        0,
        1,
        0,
        1,
    ]
    assert [place[Op.GATE_UP, layer] for layer in range(4)] == [0, 0, 1, 2]  # dense, then three shared ones
    assert [place[Op.EXPERT_IN, layer] for layer in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_of_a_random_model_are_those_of_its_configuration(seed: int) -> None:
    plan = random_plan(seed)
    schedule, c = build(plan), plan.config
    for distinct in {1, min(plan.A, plan.slots), plan.slots} if c.num_moe_layers else {0}:
        got = traffic(schedule, 300, distinct)
        assert got.total == c.bytes_per_step(plan.batch, 300, distinct).total


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16])
def test_a_share_of_k3_is_valid_and_streams_its_share(ways: int) -> None:
    config = K3Config.preset("k3-slice", num_layers=5)
    schedule = build(Plan(config, 1, ways=ways))
    report = validate(schedule)
    assert (
        report.fewest_experts.weights < config.bytes_per_step(1).weights / ways * 1.2
    )  # some parts are whole
    assert (Op.EXCHANGE in {i.op for i in schedule.instructions}) == (ways > 1)


def test_a_sixteenth_of_k3_streams_what_the_specification_says() -> None:
    plan = Plan(K3Config.preset("k3"), 1, ways=16)
    assert round(expected(plan, 0, 16).weights / 1e9, 2) == 10.48


@pytest.mark.parametrize(("config", "batch", "ways"), [("k3", 8, 1), ("k3", 1, 16), ("random", 5, 1)])
def test_the_validator_counts_the_shared_memory_that_the_kernel_allocates(
    config: str, batch: int, ways: int
) -> None:
    """To the byte: an SM with what the block takes is enough, one with a byte less is not."""
    whole = K3Config.preset("k3-slice", num_layers=4) if config == "k3" else random_config(3)
    schedule = build(Plan(whole, batch, ways=ways))
    need = Geometry(schedule).shared_bytes

    def found(size: int) -> list[str]:
        target = dataclasses.replace(schedule.plan.target, shared_bytes=size)
        return problems(dataclasses.replace(schedule, plan=dataclasses.replace(schedule.plan, target=target)))

    assert found(need) == []
    assert found(need - 1) == [f"shared memory: a block takes {need} bytes, sm_90a has {need - 1}"]


@pytest.mark.parametrize("batch", range(1, 9))
def test_all_of_k3_is_built_and_proven_within_a_minute(batch: int) -> None:
    start = time.process_time()
    report = validate(build(Plan(K3Config.preset("k3"), batch)), length=8192)
    assert time.process_time() - start < K3_SECONDS
    assert report.fewest_experts.padding == 0
    want = K3Config.preset("k3").bytes_per_step(batch, 8192, 16)
    assert report.fewest_experts.total == want.total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 9}, "batch: expected 1..8"),
        ({"batch": 0}, "batch"),
        ({"ways": 7}, "ways: 7 does not divide"),
        (
            {"batch": 9, "ways": 7, "expert_ways": 2},
            "batch: .*; ways: 7 does .*; expert_ways: expected a divi",
        ),
        (
            {"batch": 9, "ways": 0, "target": Target(sms=0)},
            "batch: .*; target.sms: .*; ways: expected at least",
        ),
    ],
)
def test_a_plan_outside_the_limits_names_the_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"config": K3Config.preset("k3"), "batch": 1, **changes})


@pytest.mark.parametrize("seed", range(20))
def test_dealing_leaves_no_two_sms_further_apart_than_one_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 50, int(rng.integers(1, 20))).tolist()
    each, groups = int(rng.integers(1, 12)), int(rng.integers(0, 200))
    counts = deal(groups, each, loads)
    assert sum(counts) == groups
    full = [load + count * each for load, count in zip(loads, counts, strict=True)]
    least = min(full)
    assert all(count == 0 or total - each <= least for count, total in zip(counts, full, strict=True))
    covered = [
        (sm, g)
        for sm0, sm1, g0, g1 in runs(counts)
        for sm in range(sm0, sm1)
        for g in range(
            g0 + (sm - sm0) * ((g1 - g0) // (sm1 - sm0)), g0 + (sm - sm0 + 1) * ((g1 - g0) // (sm1 - sm0))
        )
    ]
    assert [g for _, g in covered] == list(range(groups))
    assert [sum(sm == s for s, _ in covered) for sm in range(len(loads))] == counts
