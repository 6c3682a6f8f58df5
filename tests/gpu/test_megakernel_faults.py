"""Waits that can never end: the step gives up within its limit, says where, and leaves the state alone."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls.decode_megakernel.instructions import Op
from support.megakernel_cases import IMPATIENT, NANO, SPINS, TOO_MANY
from support.megakernel_gpu import Launched, Launcher, random_state, report
from support.megakernel_nano import check_state_of_other_rows, launcher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]

TOKENS = (65, 101, 32)
LIMIT_S = 2.0
"""A poll of SPINS takes some 1 us each; later waits fall through at once."""


def begin(run: Launcher) -> Any:
    return random_state(run.config, (130, 0, 64), 512, seed=1, scale=0.5)


def timed(run: Launcher, state: Any, **options: Any) -> tuple[Launched, float]:
    start = time.perf_counter()
    out = run(state, TOKENS, **options)
    jax.block_until_ready((out.logits, out.state))
    return out, time.perf_counter() - start


def plain() -> Launcher:
    return launcher(next(case for case in NANO if case.batch == 3))


def assert_clean_step(run: Launcher, state: Any) -> None:
    """A step with fresh leaves after a fault is the one it would have been."""
    fresh = run(dataclasses.replace(state, kernel=None), TOKENS)
    want = plain()(dataclasses.replace(state, kernel=None), TOKENS)
    assert fresh.fault is None
    assert np.array_equal(np.asarray(fresh.logits).view(np.uint32), np.asarray(want.logits).view(np.uint32))


@pytest.mark.parametrize("sm", [0, 31, 77, 131])
def test_an_sm_that_never_arrives_is_reported_and_the_state_is_as_it_was(sm: int) -> None:
    run = launcher(IMPATIENT[0])
    state = begin(run)
    run(state, TOKENS, without=(sm,))  # compiled and loaded
    out, seconds = timed(run, state, without=(sm,))
    fault = out.fault
    assert fault is not None, "a step without one of its SMs ended as if nothing were missing"
    report(f"SM {sm} withheld: {fault}, {seconds:.2f} s")
    assert seconds < LIMIT_S
    assert fault["sm"] != sm
    assert 0 <= fault["value"] < fault["target"]
    first = next(i for i in run.schedule.instructions if i.sm0 <= sm < i.sm1)
    waiting = [i for i in run.schedule.instructions if i.op == fault["op"] and i.layer == fault["layer"]]
    assert any(w.counter == fault["counter"] for i in waiting for w in i.waits)
    # Counters are numbered by stage: the wait is for the SM's first stage, or for one that needs it.
    assert fault["counter"] >= first.signal, f"the first stage of the SM is {Op(first.op).name}"
    assert fault["layer"] == 0
    # Every SM has part of KDA_IN, and layer 0's state changes behind it.
    check_state_of_other_rows(state, out, np.zeros(3, bool))
    assert out.state.lengths.tolist() == state.lengths.tolist()


def test_the_record_becomes_an_exception_and_later_steps_touch_nothing() -> None:
    run = launcher(IMPATIENT[0])
    state = begin(run)
    out = run(state, TOKENS, without=(40,))
    with pytest.raises(k3jax.KernelFaultError, match="gave up"):
        k3jax.check(out.state)
    after, seconds = timed(run, out.state)
    assert seconds < LIMIT_S
    assert after.fault == out.fault
    check_state_of_other_rows(out.state, after, np.zeros(3, bool))
    assert after.state.lengths.tolist() == out.state.lengths.tolist()
    assert_clean_step(run, state)


def test_a_cleared_fault_and_the_next_epoch_give_a_right_step() -> None:
    """Arrivals that the aborted step left lie in the bank of its own epoch: the next one finds zeros."""
    run = launcher(IMPATIENT[0])
    state = begin(run)
    out = run(state, TOKENS, without=(100,))
    assert out.fault is not None
    kernel: Any = out.state.kernel
    assert np.asarray(kernel["epoch"]).tolist() == [1]
    cleared = {**kernel, "fault": kernel["fault"] * 0}
    again = run(dataclasses.replace(state, kernel=cleared), TOKENS)
    want = plain()(state, TOKENS)
    assert again.fault is None, again.fault
    assert np.array_equal(np.asarray(again.logits).view(np.uint32), np.asarray(want.logits).view(np.uint32))


def test_a_grid_that_cannot_be_resident_ends_with_a_record() -> None:
    """264 blocks for 132 SMs: the first 132 wait for the others, which cannot start."""
    run = launcher(TOO_MANY[0])
    state = begin(run)
    out, seconds = timed(run, state)
    report(f"264 blocks: {out.fault}, {seconds:.2f} s, {SPINS} polls")
    assert out.fault is not None
    assert out.fault["sm"] < run.plan.sms
    assert seconds < 30  # the first launch, with its compilation
    out, seconds = timed(run, state)
    assert out.fault is not None
    assert seconds < LIMIT_S
    assert out.state.lengths.tolist() == state.lengths.tolist()
    assert_clean_step(plain(), state)


def test_the_impatient_build_passes_where_nothing_is_missing() -> None:
    run = launcher(IMPATIENT[0])
    assert_clean_step(run, begin(run))
