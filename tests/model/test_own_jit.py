"""The pure functions under the caller's own jit: refusals as status bits, and donated states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import ConsumedStateError, State, StateError
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL
from support import tiny_model
from support.tiny_model import CAPACITY, assert_bit_equal, assert_row_bit_equal, bits, prefilled, tokens

M = tiny_model.model()
CONFIG = tiny_model.config()
W = CONFIG.vocab_size
STEP = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"))
DONATING = jax.jit(k3jax.decode_step, static_argnames=("config", "implementation"), donate_argnames="state")
PREFILL = jax.jit(k3jax.prefill, static_argnames=("config", "logits", "max_length"))


def i32(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def with_lengths(state: State, *lengths: int) -> State:
    return State(state.layers, i32(*lengths), state.status, state.max_length)


def test_a_full_row_keeps_its_state_and_says_so_while_the_others_go_on() -> None:
    """SG-07"""
    state = with_lengths(prefilled(), 5, CAPACITY, 6)
    logits, after = STEP(M.params, state, i32(1, 2, 3), config=CONFIG)
    assert np.isnan(np.asarray(logits)[1]).all()
    assert np.isfinite(np.asarray(logits)[[0, 2]]).all()
    assert after.status.tolist() == [0, STATUS_FULL, 0]
    assert after.lengths.tolist() == [6, CAPACITY, 7]
    assert_row_bit_equal(State(after.layers, after.lengths, state.status, CAPACITY), 1, state)
    with pytest.raises(StateError, match=rf"row 1: the row is full \(max_length={CAPACITY}\)") as caught:
        k3jax.check(after)
    assert caught.value.rows == [1]
    # The others are bit for bit what they are beside a row that is not full.
    want, want_state = STEP(M.params, with_lengths(prefilled(), 5, 5, 6), i32(1, 2, 3), config=CONFIG)
    for row in (0, 2):
        assert bits(logits[row]) == bits(want[row])
        assert_row_bit_equal(after, row, want_state)
    k3jax.check(want_state)


def test_capacity_counts_tokens_not_allocated_rows() -> None:
    """SG-07: at capacity - 1 the token is taken, at capacity it is refused."""
    state = prefilled()
    state = State(state.layers, i32(299, 300, 5), state.status, 300)
    logits, after = STEP(M.params, state, i32(1, 2, 3), config=CONFIG)
    assert after.lengths.tolist() == [300, 300, 6]
    assert after.status.tolist() == [0, STATUS_FULL, 0]
    assert np.isnan(np.asarray(logits)).any(axis=1).tolist() == [False, True, False]


def test_a_bad_token_is_refused_like_a_full_row() -> None:
    state = prefilled()
    for bad in (-1, W, 2**31 - 1):
        logits, after = STEP(M.params, state, i32(1, bad, 3), config=CONFIG)
        assert np.isnan(np.asarray(logits)[1]).all()
        assert after.status.tolist() == [0, STATUS_BAD_TOKEN, 0]
        assert_row_bit_equal(State(after.layers, after.lengths, state.status, CAPACITY), 1, state)
        with pytest.raises(StateError, match="row 1: a token id outside the vocabulary"):
            k3jax.check(after)
    both = with_lengths(state, 5, 5, CAPACITY)
    _, after = STEP(M.params, both, i32(1, -1, -1), config=CONFIG)
    assert after.status.tolist() == [0, STATUS_BAD_TOKEN, STATUS_FULL | STATUS_BAD_TOKEN]
    with pytest.raises(
        StateError, match=r"row 1: a token.*; row 2: the row is full .* and a token"
    ) as caught:
        k3jax.check(after)
    assert caught.value.rows == [1, 2]
    _, later = STEP(M.params, with_lengths(after, 5, 5, 5), i32(1, 1, 1), config=CONFIG)
    assert later.status.tolist() == after.status.tolist()  # a status stays until the row begins anew


def test_inactive_rows_keep_their_state_and_have_zero_logits_whatever_their_token_is() -> None:
    """KDA-06"""
    state = prefilled()
    want, want_state = STEP(M.params, state, i32(1, 2, 3), config=CONFIG)
    active = jnp.array([True, False, True])
    for token in (2, -1, W + 5):
        logits, after = STEP(M.params, state, i32(1, token, 3), active, config=CONFIG)
        assert (np.asarray(logits)[1] == 0).all()
        assert not np.signbit(np.asarray(logits)[1]).any()
        assert_row_bit_equal(after, 1, state)
        for row in (0, 2):
            assert bits(logits[row]) == bits(want[row])
            assert_row_bit_equal(after, row, want_state)
    full = with_lengths(state, 5, CAPACITY, 5)
    _, after = STEP(M.params, full, i32(1, 2, 3), active, config=CONFIG)
    assert after.status.tolist() == [0, 0, 0]  # a full row that is not asked for refuses nothing
    poisoned = jax.tree.map(
        lambda a: a.at[1].set(jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, state
    )
    logits, after = STEP(M.params, poisoned, i32(1, 2, 3), active, config=CONFIG)
    assert (np.asarray(logits)[1] == 0).all()
    assert_row_bit_equal(after, 1, poisoned)


def test_prefill_refuses_rows_that_do_not_fit_or_hold_bad_tokens() -> None:
    state = with_lengths(prefilled(), 5, CAPACITY - 8, 5)
    ids = tokens(9)
    ids[2, 4] = W
    logits, after = PREFILL(M.params, ids, config=CONFIG, state=state)
    assert np.isfinite(np.asarray(logits)[0]).all()
    assert np.isnan(np.asarray(logits)[1:]).all()
    assert after.status.tolist() == [0, STATUS_FULL, STATUS_BAD_TOKEN]
    assert after.lengths.tolist() == [14, CAPACITY - 8, 5]
    for row in (1, 2):
        assert_row_bit_equal(State(after.layers, after.lengths, state.status, CAPACITY), row, state)
    # One token fewer fits; a bad token in the padding is no token.
    lengths = i32(9, 8, 4)
    logits, after = PREFILL(M.params, ids, config=CONFIG, state=state, lengths=lengths)
    assert after.status.tolist() == [0, 0, 0]
    assert after.lengths.tolist() == [14, CAPACITY, 9]
    assert np.isfinite(np.asarray(logits)).all()
    assert (np.asarray(logits)[1, 8:] == 0).all()
    assert (np.asarray(logits)[2, 4:] == 0).all()


def consume() -> tuple[State, State]:
    """A state that was donated to a step, and the one the step returned."""
    state = prefilled()
    _, after = DONATING(M.params, state, i32(1, 2, 3), config=CONFIG)
    return state, after


def test_a_donated_state_is_updated_in_place_and_the_returned_one_goes_on() -> None:
    want, want_state = STEP(M.params, prefilled(), i32(1, 2, 3), config=CONFIG)
    before, after = consume()
    assert_bit_equal(after, want_state)
    assert all(leaf.is_deleted() for leaf in (before.lengths, *before.layers[0].values()))
    got, _ = M.decode_step([1, 2, 3], after)
    assert bits(got) == bits(M.decode_step([1, 2, 3], want_state)[0])
    assert np.isfinite(np.asarray(want)).all()


USES: dict[str, Any] = {
    "Model.decode_step": lambda s: M.decode_step([1, 2, 3], s),
    "Model.prefill": lambda s: M.prefill(tokens(2), state=s),
    "select": lambda s: s.select([0]),
    "fork": lambda s: s.fork(2),
    "save": lambda s: s.save("never-written"),
    "check": k3jax.check,
    "decode_step": lambda s: k3jax.decode_step(M.params, s, [1, 2, 3], config=CONFIG),
    "prefill": lambda s: k3jax.prefill(M.params, tokens(2), config=CONFIG, state=s),
    "own jit": lambda s: STEP(M.params, s, i32(1, 2, 3), config=CONFIG),
    "own donating jit": lambda s: DONATING(M.params, s, i32(1, 2, 3), config=CONFIG),
    "any jit": lambda s: jax.jit(lambda t: t.lengths)(s),
    "tree.map": lambda s: jax.tree.map(jnp.copy, s),
}


@pytest.mark.parametrize("use", list(USES))
def test_a_consumed_state_is_refused_with_the_same_words_everywhere(use: str) -> None:
    """NB-03"""
    state, _ = consume()
    with pytest.raises(ConsumedStateError, match=r"^state was consumed; use the returned one$"):
        USES[use](state)


def test_a_step_can_be_scanned_and_mapped_by_the_caller() -> None:
    """FFI-11's kind: ordinary transformations of the pure function."""
    ids = tokens(6, seed=2)

    def body(state: State, token: jax.Array) -> tuple[State, jax.Array]:
        logits, state = k3jax.decode_step(M.params, state, token, config=CONFIG)
        return state, logits

    state, scanned = jax.jit(lambda s, t: jax.lax.scan(body, s, t))(prefilled(), jnp.asarray(ids.T))
    want = prefilled()
    for t in range(6):
        logits, want = M.decode_step(ids[:, t], want)
        np.testing.assert_allclose(np.asarray(scanned[t]), np.asarray(logits), atol=2e-5, rtol=0)
    assert state.lengths.tolist() == want.lengths.tolist()
