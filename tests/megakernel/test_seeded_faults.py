"""The validator accepts the schedule and rejects every kind of planted fault."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.hazards import hazard_problems
from k3jax.custom_calls.decode_megakernel.instructions import Access, Instruction, Op
from k3jax.custom_calls.decode_megakernel.order import simulate
from k3jax.custom_calls.decode_megakernel.schedule import Schedule, build
from k3jax.custom_calls.decode_megakernel.segments import launched, segment_problems
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.decode_megakernel.validate import ScheduleError, problems, validate
from support.schedule_faults import FAULTS, SEGMENT_FAULTS, SHARE_FAULTS, pick, put


@functools.cache
def schedule(batch: int, ways: int, expert_ways: int = 1) -> Schedule:
    """Four layers at the release's widths: KDA with the dense FFN, two KDA and an MLA with experts."""
    config = dataclasses.replace(
        K3Config.preset("k3-slice", num_layers=4, num_experts=64), attn_res_block_size=2
    )
    return build(Plan(config, batch, ways=ways, expert_ways=expert_ways))


@pytest.mark.parametrize(("batch", "ways"), [(1, 1), (1, 2), (8, 1), (8, 4)])
def test_the_schedule_without_a_fault_is_valid(batch: int, ways: int) -> None:
    assert problems(schedule(batch, ways)) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_schedule_with_a_planted_fault_is_rejected(kind: str) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        good = schedule((1, 8)[seed], 1)
        bad = FAULTS[kind](good, rng)
        assert bad != good
        with pytest.raises(ScheduleError):
            validate(bad)


@pytest.mark.parametrize("kind", SHARE_FAULTS)
def test_a_share_with_a_planted_fault_is_rejected(kind: str) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        good = schedule((1, 8, 2)[seed], 2, (1, 2, 2)[seed])
        bad = SHARE_FAULTS[kind](good, rng)
        assert bad != good
        with pytest.raises(ScheduleError):
            validate(bad)


@pytest.mark.parametrize("kind", SEGMENT_FAULTS)
def test_launches_with_a_planted_fault_are_rejected(kind: str) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        good = schedule((1, 8, 2, 1)[seed], 2, (1, 2, 2, 1)[seed])
        assert list(segment_problems(good)) == []
        bad = SEGMENT_FAULTS[kind](good, rng)
        assert bad != launched(good)
        assert list(segment_problems(good, bad))


def test_there_are_at_least_thirty_kinds_of_faults() -> None:
    assert len(FAULTS) >= 30


# The checks of lifetimes by themselves: accesses are taken as declared, not compared with the operation.

Change = Callable[[Instruction], Instruction]


def _swapped(kind: str, name: str, **changes: Any) -> Change:
    def change(ins: Instruction) -> Instruction:
        of = tuple(dataclasses.replace(a, **changes) if a.buffer == name else a for a in getattr(ins, kind))
        return dataclasses.replace(ins, **{kind: of})

    return change


def _added(kind: str, access: Access) -> Change:
    return lambda ins: dataclasses.replace(ins, **{kind: (*getattr(ins, kind), access)})


D = 7168
LIFETIME_FAULTS: dict[str, tuple[Op, int, Change, str]] = {
    "one buffer for both running sums": (Op.KDA_OUT, 1, _swapped("writes", "pre.1", buffer="pre.0"), "pre.1"),
    "a stale lifetime is read": (Op.KDA_IN, 1, _swapped("reads", "h", version=1), "h: .* may still use|h v1"),
    "a lifetime written twice": (
        Op.KDA_OUT,
        1,
        _added("writes", Access("h", 2, 0, D)),
        "h v2: .* is written by",
    ),
    "a hole in what is written": (
        Op.LATENT_DOWN,
        1,
        _swapped("writes", "latent", hi=8),
        "latent v3: .* never",
    ),
    "the next lifetime too early": (
        Op.MLA_IN,
        3,
        _added("writes", Access("h", 7, 0, D)),
        "h: .* may still use v6|h v7",
    ),
    "state read after its update": (
        Op.KDA_OUT,
        1,
        _added("reads", Access("S.1", 1, 0, 96)),
        "S.1: state is read",
    ),
    "state updated twice": (
        Op.KDA_OUT,
        1,
        _added("writes", Access("S.1", 1, 0, 96)),
        "S.1 v1: .* is written by",
    ),
    "state updated while others read": (
        Op.ROUTER,
        1,
        _added("reads", Access("S.1", 0, 0, 96)),
        "S.1: .* while .* may still read",
    ),
    "lengths advanced too early": (Op.MLA_ROW, 3, _added("writes", Access("lengths", 1, 0, 1)), "lengths"),
    "an input written": (
        Op.KDA_OUT,
        1,
        _added("writes", Access("w.1.kda_out", 0, 0, 1)),
        "an input is written",
    ),
    "an output left out": (Op.FINISH, 4, _swapped("writes", "token", buffer="best"), "token"),
    "a buffer that does not exist": (Op.KDA_OUT, 1, _added("reads", Access("nothing", 0, 0, 1)), "no buffer"),
    "past the end of a buffer": (Op.KDA_IN, 1, _swapped("reads", "h", hi=D + 1), "is not within"),
    "local although others wrote it": (
        Op.COMBINE,
        1,
        lambda ins: dataclasses.replace(_swapped("reads", "ey", local=True)(ins), waits=()),
        "ey v3: .* without waiting",
    ),
}


@pytest.mark.parametrize("kind", LIFETIME_FAULTS)
def test_the_lifetime_check_alone_names_the_buffer_at_fault(kind: str) -> None:
    good = schedule(1, 1)
    op, layer, change, message = LIFETIME_FAULTS[kind]
    at = pick(good, np.random.default_rng(0), lambda i: (i.op, i.layer) == (op, layer))
    bad = put(good, at, change(good.instructions[at]))
    order = simulate(bad.instructions, bad.plan.sms)
    assert order.stuck == []
    found = list(hazard_problems(bad.instructions, bad.buffers, order))
    assert any(re.search(message, line) for line in found), found[:5]
