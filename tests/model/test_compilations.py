"""How often things are compiled: a step once, a pass of prefill once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import api
from support import tiny_model
from support.tiny_model import BATCH, CAPACITY, prefilled, tokens

M = tiny_model.model()
CONFIG = tiny_model.config()


def programs(jitted: Any) -> int:
    """How many programs a jitted function holds."""
    return jitted._cache_size()


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Names of the programs compiled so far in the test, by jax's own log."""
    with caplog.at_level(logging.WARNING, logger="jax"), jax.log_compiles():

        def names() -> list[str]:
            found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]
            return [message.split()[1] for message in found]

        yield names


def test_any_number_of_decode_steps_is_one_compilation() -> None:
    chex.clear_trace_counter()
    step = jax.jit(
        chex.assert_max_traces(lambda p, s, t: k3jax.decode_step(p, s, t, config=CONFIG), n=1),
        donate_argnums=1,
    )
    state = prefilled()
    for t in range(6):
        _, state = step(M.params, state, jnp.full((BATCH,), t, jnp.int32))
    assert state.lengths.tolist() == [11] * BATCH


def test_the_models_own_steps_compile_once_from_prefill_on(compiled: Any) -> None:
    before = programs(api._decode)
    state = prefilled()
    M.decode_step([1, 2, 3], state)
    size = programs(api._decode)
    assert size <= before + 1
    _, state = M.decode_step([1, 2, 3], state)
    on_device = jnp.array([1, 2, 3])
    start = len(compiled())
    for t in range(4):
        active = None if t % 2 else np.array([True, False, True])
        _, state = M.decode_step(tokens(1)[:, 0], state, active)
    _, state = M.decode_step(on_device, state)
    assert compiled()[start:] == []
    assert programs(api._decode) == size


def test_prompts_of_any_length_run_the_same_pass() -> None:
    M.prefill(tokens(3), max_length=CAPACITY)
    size = programs(api._chunk)
    state = None
    for length in (1, 2, 63, 64, 65, 130):
        limit = CAPACITY if state is None else None
        _, state = M.prefill(tokens(length), max_length=limit, state=state)
    for lengths in ([1, 2, 3], [0, 0, 3]):
        M.prefill(tokens(3), lengths, max_length=CAPACITY)
    for length in (1, 100, 256):  # the default capacity is the same for all of these
        M.prefill(tokens(length))
    assert programs(api._chunk) == size


def test_a_step_at_the_releases_width_is_traced_without_allocating() -> None:
    """Shapes alone go through two AttnRes blocks of the release."""
    from k3jax.model import abstract_params
    from k3jax.state import abstract_state

    config = k3jax.K3Config.preset("k3-slice", num_layers=13)
    state = abstract_state(config, 2, 4096, jnp.bfloat16)
    logits, after = jax.eval_shape(
        lambda p, s, t: k3jax.decode_step(p, s, t, config=config),
        abstract_params(config),
        state,
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    assert logits.shape == (2, 163_840)
    assert logits.dtype == jnp.float32
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )
