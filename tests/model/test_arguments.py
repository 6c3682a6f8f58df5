"""What the model's methods accept, and how they refuse the rest before anything is dispatched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax import CapacityError, TokenError, api
from support import tiny_model
from support.tiny_model import BATCH, CAPACITY, assert_bit_equal, bits, prefilled, tokens

W = tiny_model.config().vocab_size
M = tiny_model.model()


@pytest.fixture
def no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a program of the model is started, or a state made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was dispatched")

    for name in ("_chunk", "_decode", "_head", "_zeros"):
        monkeypatch.setattr(api, name, refuse)


INTEGER_TYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def test_tokens_may_be_of_any_integer_type_lists_numpy_or_jax() -> None:
    ids = tokens(5)
    want, state = M.prefill(ids, max_length=CAPACITY)
    forms = [ids.tolist(), tuple(map(tuple, ids)), jnp.asarray(ids), *(ids.astype(t) for t in INTEGER_TYPES)]
    for form in forms:
        got, _ = M.prefill(form, max_length=CAPACITY)
        assert isinstance(got, jax.Array)
        assert got.dtype == jnp.float32
        assert bits(got) == bits(want)
    step, _ = M.decode_step(ids[:, 0], state)
    for form in (ids[:, 0].tolist(), jnp.asarray(ids[:, 0]), *(ids[:, 0].astype(t) for t in INTEGER_TYPES)):
        got, _ = M.decode_step(form, state)
        assert isinstance(got, jax.Array)
        assert got.dtype == jnp.float32
        assert bits(got) == bits(step)


BAD_TOKENS: list[tuple[Any, str]] = [
    (np.zeros((BATCH, 2), np.float32), "expected integers, got float32"),
    ([[1.0, 2.0]] * BATCH, "expected integers, got float64"),
    (np.ones((BATCH, 2), bool), "expected integers, got bool"),
    ([["a", "b"]] * BATCH, "expected integers"),
    ([[0, -1]] * BATCH, rf"expected ids in 0\.\.{W - 1}, got -1 at \[0, 1\]"),
    ([[0, 1], [0, W], [0, 1]], rf"expected ids in 0\.\.{W - 1}, got {W} at \[1, 1\]"),
    ([[0, 2**40]] * BATCH, "expected ids in"),
    (np.full((BATCH, 2), 2**63, np.uint64), "expected ids in"),
]


@pytest.mark.usefixtures("no_dispatch")
@pytest.mark.parametrize(("wrong", "message"), BAD_TOKENS)
def test_tokens_that_are_no_ids_of_the_vocabulary_are_refused_before_dispatch(
    wrong: Any, message: str
) -> None:
    state = prefilled_elsewhere()
    before = jax.tree.map(np.asarray, state)
    for call in (lambda: M.prefill(wrong), lambda: M.prefill(wrong, state=state)):
        with pytest.raises(TokenError, match=message):
            call()
    column = np.asarray(wrong)[:, 1]
    with pytest.raises(TokenError, match=message.split(", got")[0]):
        M.decode_step(column, state)
    assert_bit_equal(jax.tree.map(np.asarray, state), before)
    assert issubclass(TokenError, ValueError)


def prefilled_elsewhere() -> Any:
    """A usable state that was not made through the functions a test has replaced."""
    from k3jax.state import init_state

    return init_state(tiny_model.config(), BATCH, CAPACITY, jnp.float32)


@pytest.mark.usefixtures("no_dispatch")
def test_wrong_shapes_are_refused_before_dispatch() -> None:
    state = prefilled_elsewhere()
    cases: list[tuple[Any, str]] = [
        (lambda: M.prefill([1, 2, 3]), r"tokens: expected 2 dimensions, got shape \[3\]"),
        (lambda: M.prefill([[1, 2], [3]]), "tokens: expected a rectangular integer array"),
        (lambda: M.prefill(np.zeros((0, 3), np.int32)), "tokens: expected at least one row"),
        (
            lambda: M.prefill(tokens(3, batch=2), state=state),
            "tokens: expected 3 rows, as the state has, got 2",
        ),
        (lambda: M.prefill(tokens(3), lengths=[1, 2]), r"lengths: expected 3 integers in 0\.\.3"),
        (lambda: M.prefill(tokens(3), lengths=[1, 2, 4]), r"lengths: expected 3 integers in 0\.\.3"),
        (lambda: M.prefill(tokens(3), lengths=[1, -1, 3]), r"lengths: expected 3 integers in 0\.\.3"),
        (lambda: M.prefill(tokens(3), lengths=[1.0, 1.0, 1.0]), "lengths: expected integers"),
        (lambda: M.prefill(tokens(3), logits="some"), "logits: expected 'all', 'last' or 'none', got 'some'"),
        (lambda: M.prefill(tokens(3), state=state, max_length=512), "max_length: only with state=None"),
        (lambda: M.decode_step([1, 2], state), "tokens: expected 3 tokens, as the state has rows, got 2"),
        (lambda: M.decode_step([[1, 2, 3]], state), "tokens: expected 1 dimension"),
        (lambda: M.decode_step([1, 2, 3], state, active=[True]), r"active: expected bool \[3\]"),
        (
            lambda: M.decode_step([1, 2, 3], state, active=[1, 0, 1]),
            r"active: expected bool \[3\], got int64",
        ),
        (lambda: M.init_state(0, 10), "batch: expected at least 1, got 0"),
    ]
    for call, message in cases:
        # Where runtime type checks are installed they refuse logits="some" before the method does.
        with pytest.raises((ValueError, TypeError), match=message.split(":")[0]) as caught:
            call()
        if isinstance(caught.value, ValueError):
            caught.match(message)


@pytest.mark.usefixtures("no_dispatch")
@pytest.mark.parametrize("limit", [0, -1, 1025, 10**10])
def test_a_capacity_outside_the_models_limit_is_refused(limit: int) -> None:
    message = rf"max_length: expected 1\.\.1024 \(max_position_embeddings\), got {limit}"
    with pytest.raises(ValueError, match=message):
        M.prefill(tokens(3), max_length=limit)
    with pytest.raises(ValueError, match=message):
        M.init_state(1, limit)


@pytest.mark.usefixtures("no_dispatch")
def test_a_capacity_that_is_no_integer_is_refused() -> None:
    wrong: list[Any] = [True, 3.0, "9"]
    for limit in wrong:
        with pytest.raises(TypeError, match="max_length"):
            M.prefill(tokens(3), max_length=limit)


def test_padding_may_hold_anything() -> None:
    ids = tokens(6)
    lengths = [3, 6, 0]
    want, want_state = M.prefill(ids, lengths, max_length=CAPACITY)
    dirty = ids.copy()
    dirty[0, 3:] = -1
    dirty[2] = 10**6
    got, state = M.prefill(dirty, lengths, max_length=CAPACITY)
    assert bits(got) == bits(want)
    assert_bit_equal(state, want_state)
    step, _ = M.decode_step([1, 2, 10**6], state, active=[True, True, False])
    assert bits(step) == bits(M.decode_step([1, 2, 0], state, active=[True, True, False])[0])


def test_past_capacity_the_host_raises_before_dispatch_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SG-07, EP-08: at capacity - 1, capacity and capacity + 1."""
    _, state = M.prefill(tokens(5), lengths=[3, 5, 0], max_length=CAPACITY)
    before = jax.tree.map(np.array, state)
    free = CAPACITY - 5
    full = np.zeros((BATCH, free), np.int32)
    with monkeypatch.context() as patch:
        for name in ("_chunk", "_decode", "_head", "_zeros"):
            patch.setattr(api, name, None)
        with pytest.raises(
            CapacityError, match=rf"row 1 holds 5 of max_length={CAPACITY} tokens: {free + 1} more"
        ):
            M.prefill(np.zeros((BATCH, free + 1), np.int32), lengths=[free + 1] * 3, state=state)
        with pytest.raises(CapacityError, match=r"row 0 holds 0 of max_length=4 tokens: 5 more"):
            M.prefill(tokens(5), max_length=4)
        with pytest.raises(CapacityError, match=r"row 0 holds 0 of max_length=1024 tokens: 1025 more"):
            M.prefill(np.zeros((1, 1025), np.int32))
    assert_bit_equal(jax.tree.map(np.array, state), before)

    _, filled = M.prefill(full, lengths=[0, free, 0], state=state, logits="none")
    assert filled.lengths.tolist() == [3, CAPACITY, 0]
    before = jax.tree.map(np.array, filled)
    with monkeypatch.context() as patch:
        patch.setattr(api, "_decode", None)
        with pytest.raises(CapacityError, match=rf"row 1 holds {CAPACITY} of max_length={CAPACITY} tokens"):
            M.decode_step([1, 1, 1], filled)
    assert_bit_equal(jax.tree.map(np.array, filled), before)
    logits, after = M.decode_step([1, 1, 1], filled, active=[True, False, True])  # the others go on
    assert np.isfinite(np.asarray(logits)).all()
    assert after.lengths.tolist() == [4, CAPACITY, 1]
    k3jax.check(after)


@pytest.mark.parametrize(("length", "capacity"), [(1, 512), (256, 512), (257, 768), (512, 768), (800, 1024)])
def test_the_default_capacity_is_256_more_tokens_rounded_up_to_256_within_the_models_limit(
    length: int, capacity: int
) -> None:
    from k3jax.state import default_max_length

    assert default_max_length(tiny_model.config(), length) == capacity


def test_a_state_holds_no_more_than_it_says_though_its_rows_are_allocated_in_blocks() -> None:
    _, state = M.prefill(tokens(5), max_length=300, logits="none")
    assert state.max_length == 300
    assert state.layers[1]["cache"].shape[1] == CAPACITY
    with pytest.raises(CapacityError, match="max_length=300"):
        M.prefill(np.zeros((BATCH, 296), np.int32), state=state)
    _, filled = M.prefill(np.zeros((BATCH, 295), np.int32), state=state, logits="none")
    assert filled.lengths.tolist() == [300] * BATCH


def test_methods_leave_the_state_they_are_given_usable() -> None:
    state = prefilled()
    before = jax.tree.map(np.array, state)
    M.prefill(tokens(4), state=state)
    M.prefill(tokens(70), state=state, logits="last")
    first, _ = M.decode_step([1, 2, 3], state)
    again, _ = M.decode_step([1, 2, 3], state)
    assert bits(first) == bits(again)
    assert_bit_equal(jax.tree.map(np.array, state), before)
