"""Every sublayer of the shipped model on the GPU is the float32 model's on the same input, at every batch.

What the kernel's normed input is, and which experts it chose, the float32 model is given; and every stage is
computed again in jax.numpy from the fields that it read (``support.megakernel_sublayers``). The weights are
the trained ones of nano, which are not of one size as random ones are. Kernels:
``tests/gpu/build_artifacts.py --only nano-b``.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.megakernel_cases import NANO, KernelCase, config
from support.megakernel_gpu import random_state
from support.megakernel_nano import launcher
from support.megakernel_sublayers import check_every_sublayer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]

LENGTHS = (64, 0, 129, 1, 127, 63, 128, 300)


@pytest.mark.parametrize("case", NANO, ids=str)
def test_every_sublayer_of_the_shipped_model_is_the_float32_models(case: KernelCase) -> None:
    """States of half the size of random ones: trained layers meet no larger ones."""
    state = random_state(config("nano"), LENGTHS[: case.batch], 1024, seed=case.batch, scale=0.5)
    tokens = np.random.default_rng(case.batch).integers(0, 256, case.batch)
    check_every_sublayer(f"{case}, trained", launcher(case), state, tokens, np.ones(case.batch, bool))


@pytest.mark.parametrize("case", [case for case in NANO if case.batch in (3, 8)], ids=str)
def test_rows_that_do_not_run_are_not_looked_at(case: KernelCase) -> None:
    """An inactive row beside others: its fields may be anything, the others are the float32 model's."""
    state = random_state(config("nano"), LENGTHS[: case.batch], 1024, seed=9, scale=0.5)
    tokens = np.random.default_rng(9).integers(0, 256, case.batch)
    active = np.arange(case.batch) != 1
    check_every_sublayer(f"{case}, a row apart", launcher(case), state, tokens, active)
