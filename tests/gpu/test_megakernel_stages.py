"""Every stage of the decode megakernel on the GPU is what the CPU interpreter makes of the same inputs.

A step is stopped behind each of its sublayers, and every field that the sublayer's stages left in the
workspace, and the state, is compared with the interpreter's, fed with the kernel's own inputs of that
stage (``support.megakernel_replay``). Kernels: ``tests/gpu/build_artifacts.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import k3jax
from k3jax.custom_calls.pack import with_packed
from support.megakernel_cases import NANO, KernelCase, config
from support.megakernel_gpu import last_sublayer, random_state
from support.megakernel_nano import (
    assert_stages_agree,
    check_state_of_other_rows,
    launcher,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

LENGTHS = (64, 0, 129, 1, 127, 63, 128, 300)


def by_batch(batch: int) -> KernelCase:
    return next(case for case in NANO if case.batch == batch)


@functools.cache
def random_params() -> Any:
    """nano's widths with random weights."""
    return with_packed(k3jax.random_model(config("nano"), seed=3).params, config("nano"))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_every_stage_of_the_shipped_model_is_the_interpreters(batch: int) -> None:
    state = random_state(config("nano"), LENGTHS[:batch], 1024, seed=batch, scale=0.5)
    tokens = np.random.default_rng(batch).integers(0, 256, batch)
    assert_stages_agree(f"nano, batch {batch}", launcher(by_batch(batch)), state, tokens)


@pytest.mark.parametrize("batch", [3, 5, 6, 7])
def test_every_stage_with_random_weights_is_the_interpreters(batch: int) -> None:
    run = launcher(by_batch(batch)).with_params(random_params())
    state = random_state(config("nano"), LENGTHS[:batch], 1024, seed=batch)
    tokens = np.random.default_rng(batch).integers(0, config("nano").vocab_size, batch)
    assert_stages_agree(f"random weights, batch {batch}", run, state, tokens)


def test_rows_that_do_not_run_change_nothing_and_the_others_are_right() -> None:
    """Inactive, full, and with a token below and past the vocabulary, among rows with the border tokens."""
    run, vocab = launcher(by_batch(8)), config("nano").vocab_size
    lengths = (5, 70, 512, 0, 130, 64, 512, 9)
    state = random_state(config("nano"), lengths, 512, seed=5, scale=0.5)
    tokens = np.array([0, 7, 3, -1, vocab - 1, vocab, 4, 8])
    active = np.array([True, False, True, True, True, True, False, False])
    assert_stages_agree("row masks", run, state, tokens, active)
    out = run(state, tokens, active)
    runs = np.array([True, False, False, False, True, False, False, False])
    check_state_of_other_rows(state, out, runs)
    logits = np.asarray(out.logits)
    assert np.isfinite(logits[runs]).all()
    assert np.isnan(logits[[2, 3, 5]]).all(), "refused rows"
    assert not logits[[1, 6, 7]].any(), "inactive rows"
    assert out.state.lengths.tolist() == [6, 70, 512, 0, 131, 64, 512, 9]
    assert out.state.status.tolist() == [0, 0, 1, 2, 0, 2, 0, 0]
    assert out.token.tolist()[0] == logits[0].argmax()
    assert out.token.tolist()[4] == logits[4].argmax()


def test_a_batch_without_a_running_row_ends_and_changes_nothing() -> None:
    run = launcher(by_batch(3))
    state = random_state(config("nano"), (5, 0, 512), 512)
    out = run(state, [1, 2, 3], [False, False, True])
    assert out.fault is None
    check_state_of_other_rows(state, out, np.zeros(3, bool))
    assert out.state.lengths.tolist() == [5, 0, 512]
    assert out.fields["route.count"][0] == 0


def test_a_stopped_step_shows_the_numbers_of_the_whole_one() -> None:
    """What the other tests look at is what a whole step computes: the last stop is the step itself."""
    run = launcher(by_batch(3))
    state = random_state(config("nano"), (5, 0, 130), 512)
    whole, stopped = run(state, [1, 2, 3]), run(state, [1, 2, 3], until=last_sublayer(run) - 1)
    for name in ("pre", "score", "block"):
        a, b = (np.asarray(x.fields[name]).view(np.uint8) for x in (whole, stopped))
        assert np.array_equal(a, b), name
    same = jax.tree.map(
        lambda a, b: np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)),
        whole.state.layers,
        stopped.state.layers,
    )
    assert all(jax.tree.leaves(same))
    assert np.isnan(np.asarray(stopped.logits)).all(), (
        "logits were written by a step that stopped before them"
    )
