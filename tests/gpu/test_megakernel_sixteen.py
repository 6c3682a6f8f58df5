"""A true share of 16 ways at the release's widths: all 16 ranks by turns on one GPU, segment by segment.

Four layers with 16 experts, all of them active, so that no choice of experts can turn: each rank holds a
sixteenth of every expert, or one whole expert. Some ranks are compared with the interpreter on the same
exchanged numbers; the logits of all, side by side, with XLA's step of the whole model on one device.
Kernels: ``tests/gpu/build_artifacts.py --only slice4-e16-b1``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from support.megakernel_cases import SIXTEEN, KernelCase, config
from support.megakernel_gpu import host, random_state, report
from support.megakernel_layerwise import clean, row_errors
from support.megakernel_share_gpu import TurnTaker, check_every_segment

# The ranks' parts of 11 GB are cut and packed on the host.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500, method="thread")]

INTERPRETED = (0, 5, 10, 15)
LENGTHS = (129,)
WHOLE = 0.05
"""Relative RMS of the logits from XLA's: rounding at 2^-9 through four layers, as on one device."""


@pytest.fixture(scope="module")
def whole() -> Iterator[Any]:
    """(parameters in numpy, state, tokens, XLA's logits in numpy)."""
    c = config("slice4-e16")
    params = k3jax.random_model(c, seed=4, implementation="xla").params
    state = random_state(c, LENGTHS, 512, seed=4)
    tokens = np.random.default_rng(4).integers(0, c.vocab_size, len(LENGTHS))
    step = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"))
    logits, _ = step(params, clean(state), jnp.asarray(tokens, jnp.int32), config=c, implementation="xla")
    held: dict[str, Any] = host(params)
    del params
    yield held, host(state), tokens, np.asarray(logits)
    held.clear()
    gc.collect()


@pytest.mark.parametrize("case", SIXTEEN, ids=str)
def test_sixteen_ranks_by_turns_are_the_whole_model(whole: Any, case: KernelCase) -> None:
    params, state, tokens, want = whole
    run = TurnTaker(params, case, state)
    assert len(run.held) == case.ways == 16
    logits, worst = check_every_segment(run, tokens, np.ones(case.batch, bool), INTERPRETED)
    assert logits.shape == want.shape
    error = row_errors(logits, want)
    report(f"{case}: worst given {worst:.1e}, logits {error} from the whole model's")
    assert (error <= WHOLE).all(), error
