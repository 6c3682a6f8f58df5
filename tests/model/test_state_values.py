"""A state is a value: rows are picked, copied, written to a file, and go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from k3jax import State
from k3jax.state import abstract_state, cache_rows, init_state, state_axes
from support import tiny_model
from support.tiny_model import (
    BATCH,
    CAPACITY,
    assert_bit_equal,
    assert_row_bit_equal,
    bits,
    prefilled,
    tokens,
)

M = tiny_model.model()
CONFIG = tiny_model.config()


def test_a_new_state_is_empty_and_has_the_documented_layout() -> None:
    """KDA-01: values first, keys last."""
    state = M.init_state(2, 300)
    c = CONFIG
    assert state.batch == 2
    assert state.max_length == 300
    assert state.layers[0]["S"].shape == (2, c.kda_num_heads, c.kda_v_head_dim, c.kda_head_dim)
    assert state.layers[0]["conv"].shape == (2, 3, c.conv_channels)
    assert state.layers[1]["cache"].shape == (2, CAPACITY, c.kv_lora_rank + c.qk_rope_head_dim)
    assert state.lengths.dtype == state.status.dtype == jnp.int32
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(state))
    shapes = abstract_state(c, 2, 300, jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    assert jax.tree.structure(state_axes(c, 300)) == jax.tree.structure(shapes)


@pytest.mark.parametrize(("length", "rows"), [(1, 256), (255, 256), (256, 256), (257, 512), (1000, 1024)])
def test_cache_rows_come_in_blocks_of_256(length: int, rows: int) -> None:
    assert cache_rows(length) == rows
    assert init_state(CONFIG, 1, length).layers[1]["cache"].shape[1] == rows


def test_selected_rows_go_on_as_the_rows_they_came_from() -> None:
    state = prefilled()
    want, want_state = M.decode_step([4, 5, 6], state)
    picked = state.select([2, 0, 2])
    for row, source in enumerate((2, 0, 2)):
        assert_row_bit_equal(picked, row, state, source)
    got, got_state = M.decode_step([6, 4, 6], picked)
    for row, source in enumerate((2, 0, 2)):
        assert bits(got[row]) == bits(want[source])
        assert_row_bit_equal(got_state, row, want_state, source)
    for form in (np.array([1]), jnp.array([1]), (1,)):
        assert_row_bit_equal(state.select(form), 0, state, 1)
    with pytest.raises(ValueError, match="at least one row"):
        state.select([])


def test_forked_rows_lie_side_by_side_and_are_copies() -> None:
    state = prefilled()
    forked = state.fork(2)
    assert forked.batch == 2 * BATCH
    for row in range(2 * BATCH):
        assert_row_bit_equal(forked, row, state, row // 2)
    assert_bit_equal(state.fork(1), state)


def test_rows_that_do_not_exist_are_refused() -> None:
    """KDA-07"""
    state = prefilled()
    for rows in ([3], [-1], [0, 7]):
        with pytest.raises(IndexError, match=r"rows: expected 0\.\.2, got"):
            state.select(rows)
    wrong: list[Any] = [[0.5], [True, False, True], [[0, 1]], 1]
    for rows in wrong:
        with pytest.raises(TypeError):
            state.select(rows)
    with pytest.raises(ValueError, match="n: expected an integer of at least 1, got 0"):
        state.fork(0)


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_restored_state_is_bit_equal_and_goes_on_bit_equal(dtype: str | None, tmp_path: Path) -> None:
    """KDA-04: all parts of a row are written together."""
    model, state = tiny_model.model(dtype), prefilled(dtype=dtype)
    assert state.layers[1]["cache"].dtype == (jnp.float32 if dtype else jnp.bfloat16)
    assert state.layers[0]["S"].dtype == jnp.float32
    state.save(tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]  # no half-written file is left
    restored = State.restore(str(tmp_path / "state"))
    assert_bit_equal(restored, state)
    assert restored.max_length == state.max_length
    for call in (lambda s: model.decode_step([1, 2, 3], s), lambda s: model.prefill(tokens(3), state=s)):
        assert_bit_equal(call(restored), call(state))


def test_the_bits_of_nan_and_negative_zero_survive_a_file(tmp_path: Path) -> None:
    state = prefilled()
    odd = state.layers[0]["S"].at[0, 0, 0, :2].set(jnp.array([jnp.nan, -0.0]))
    strange = State(
        ({**state.layers[0], "S": odd}, *state.layers[1:]), state.lengths, state.status.at[1].set(3), 17
    )
    strange.save(tmp_path / "s")
    again = State.restore(tmp_path / "s")
    assert_bit_equal(again, strange)
    assert again.max_length == 17


def test_what_is_no_saved_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no saved state at"):
        State.restore(tmp_path / "absent")
    (tmp_path / "garbage").write_bytes(b"garbage " * 20)
    (tmp_path / "empty").write_bytes(b"")
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "other")
    for name in ("garbage", "empty", "other"):
        with pytest.raises(ValueError, match=f"{name}: expected a file written by State.save"):
            State.restore(tmp_path / name)


def test_a_row_that_held_nan_leaves_nothing_to_a_fresh_one() -> None:
    """KDA-02, KDA-11: a slot is reused through a new state; the run is that of a first one, bit for bit."""
    fresh, fresh_state = M.prefill(tokens(9), max_length=CAPACITY)
    state = prefilled()
    poisoned = jax.tree.map(
        lambda a: a.at[1].set(jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
    )
    poisoned_logits, _ = M.decode_step([1, 2, 3], poisoned)
    assert np.isnan(np.asarray(poisoned_logits)[1]).all()
    again, again_state = M.prefill(tokens(9), max_length=CAPACITY)
    assert_bit_equal((again, again_state), (fresh, fresh_state))
    # And rows selected beside a poisoned one do not change.
    healthy = poisoned.select([0, 2, 0])
    got, _ = M.decode_step([1, 3, 1], healthy)
    want, _ = M.decode_step([1, 2, 3], state)
    for row, source in enumerate((0, 2, 0)):
        assert bits(got[row]) == bits(want[source])


def test_a_nan_in_one_row_stays_in_that_row() -> None:
    """SG-01: through prefill and decode, every leaf of the other rows' states included."""
    state = prefilled()
    poisoned = jax.tree.map(lambda a: a, state)
    S = state.layers[0]["S"].at[1, 0, 0, 0].set(jnp.nan)
    poisoned = State(
        ({**state.layers[0], "S": S}, *state.layers[1:]), state.lengths, state.status, state.max_length
    )
    for call in (lambda s: M.decode_step([1, 2, 3], s), lambda s: M.prefill(tokens(70), state=s)):
        (got, got_state), (want, want_state) = call(poisoned), call(state)
        assert np.isnan(np.asarray(got)[1]).any()
        for row in (0, 2):
            assert bits(got[row]) == bits(want[row])
            assert_row_bit_equal(got_state, row, want_state)


def test_a_row_does_not_depend_on_its_batch_mates_or_its_place() -> None:
    """SG-05 at one batch size: bit-equal at every place, beside any others."""
    ids, other = tokens(20), tokens(20, seed=8)
    want, want_state = M.prefill(ids, max_length=CAPACITY)
    step, _ = M.decode_step([9, 9, 9], want_state)
    for place in range(BATCH):
        mixed = other.copy()
        mixed[place] = ids[0]
        got, state = M.prefill(mixed, max_length=CAPACITY)
        assert bits(got[place]) == bits(want[0])
        assert_row_bit_equal(state, place, want_state, 0)
        again, _ = M.decode_step([9, 9, 9], state)
        assert bits(again[place]) == bits(step[0])


def test_states_of_two_models_differ_by_their_own_tokens_only() -> None:
    """KDA-05: a second unrelated prompt starts from nothing."""
    first, _ = M.prefill(tokens(9), max_length=CAPACITY)
    M.prefill(tokens(9, seed=1), max_length=CAPACITY)
    again, _ = M.prefill(tokens(9), max_length=CAPACITY)
    assert bits(first) == bits(again)


def test_a_model_shows_what_it_is() -> None:
    shown = repr(M)
    assert f"{CONFIG.param_count():,} parameters" in shown
    assert "3 layers" in shown
