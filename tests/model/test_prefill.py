"""Prefill: logits modes, ragged prompts, and prompts in pieces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.model import PREFILL_CHUNK
from support import tiny_model
from support.compare import assert_close
from support.reference import Arch, forward, weight_tree
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
WHOLE = "one prompt in pieces is one prompt: the issue's bound for float32"
LENGTH = 2 * PREFILL_CHUNK + 3


def whole(length: int = LENGTH, dtype: str | None = "float32") -> tuple[jax.Array, Any]:
    return tiny_model.model(dtype).prefill(tokens(length), max_length=CAPACITY)


def test_prefill_and_decode_equal_the_float64_reference() -> None:
    arch = Arch.of(CONFIG)
    ids = tokens(LENGTH)
    run = forward(weight_tree(tiny_model.tensors(), arch), arch, ids)
    assert run.smallest_margin(arch) > 1e-5  # no pick of an expert hangs on rounding
    logits, state = M.prefill(ids[:, :-4], max_length=CAPACITY)
    rows = [logits]
    for t in range(LENGTH - 4, LENGTH):
        step, state = M.decode_step(ids[:, t], state)
        rows.append(step[:, None])
    assert_close("logits", jnp.concatenate(rows, axis=1), run.logits, 5e-5, "float32 against float64")
    for i in (0, 2):
        for name in ("S", "conv"):
            assert_close(f"layer {i} {name}", state.layers[i][name], run.state[i][name], 5e-5, "as above")
    assert_close("cache", state.layers[1]["cache"][:, :LENGTH], run.state[1]["cache"], 5e-5, "as above")
    assert (np.asarray(state.layers[1]["cache"][:, LENGTH:]) == 0).all()


def test_logits_come_for_all_tokens_for_the_last_one_or_not_at_all() -> None:
    every, state = whole(70)
    assert every is not None
    assert every.shape == (BATCH, 70, CONFIG.vocab_size)
    last, last_state = M.prefill(tokens(70), max_length=CAPACITY, logits="last")
    assert last is not None
    assert last.dtype == every.dtype == jnp.float32
    assert_close("last", last, every[:, -1], 1e-6, "the same product in another shape")
    for mode in ("none", None):
        nothing, state_only = M.prefill(tokens(70), max_length=CAPACITY, logits=mode)
        assert nothing is None
        assert_bit_equal(state_only, state)
    assert_bit_equal(last_state, state)


def test_ragged_rows_equal_the_rows_alone_and_have_zero_logits_past_their_length() -> None:
    ids, lengths = tokens(70), [1, 70, 66]
    every, state = M.prefill(ids, lengths, max_length=CAPACITY)
    last, _ = M.prefill(ids, lengths, max_length=CAPACITY, logits="last")
    assert state.lengths.dtype == jnp.int32
    assert state.lengths.tolist() == lengths
    for row, length in enumerate(lengths):
        alone, alone_state = M.prefill(ids[:, :length], max_length=CAPACITY)
        assert bits(every[row, :length]) == bits(alone[row])
        assert (np.asarray(every[row, length:]) == 0).all()
        assert_close("last", last[row], alone[row, -1], 1e-6, "the same product in another shape")
        assert_row_bit_equal(state, row, alone_state)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int64, jnp.uint8])
def test_lengths_of_any_integer_type_mean_the_same(dtype: Any) -> None:
    """A pass starts at 64: an unsigned difference with a shorter row would wrap around."""
    ids = tokens(70)
    want, want_state = M.prefill(ids, [10, 70, 66], max_length=CAPACITY)
    got, got_state = M.prefill(ids, np.array([10, 70, 66]).astype(dtype), max_length=CAPACITY)
    assert got_state.lengths.tolist() == [10, 70, 66]
    assert bits(got) == bits(want)
    assert_bit_equal(got_state, want_state)


def test_a_row_of_length_zero_keeps_its_state_bit_for_bit() -> None:
    state = prefilled()
    every, after = M.prefill(tokens(70), lengths=[0, 70, 3], state=state)
    last, _ = M.prefill(tokens(70), lengths=[0, 70, 3], state=state, logits="last")
    assert_row_bit_equal(after, 0, state)
    assert (np.asarray(every[0]) == 0).all()
    assert (np.asarray(last[0]) == 0).all()
    assert (np.asarray(last[1:]) != 0).any()
    for nothing in (np.zeros((BATCH, 0), np.int32), [[], [], []]):
        none, same = M.prefill(nothing, state=state)
        assert none.shape == (BATCH, 0, CONFIG.vocab_size)
        assert_bit_equal(same, state)
    _, same = M.prefill(tokens(70), lengths=[0, 0, 0], state=state)
    assert_bit_equal(same, state)


@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130])
def test_a_prompt_in_two_pieces_is_the_prompt_in_one(cut: int, dtype: str | None) -> None:
    """NUM-08, KDA-05: the first piece bit for bit, the second within the bound."""
    model = tiny_model.model(dtype)
    ids = tokens(LENGTH)
    want, want_state = whole(dtype=dtype)
    first, state = model.prefill(ids[:, :cut], max_length=CAPACITY)
    assert bits(first) == bits(want[:, :cut])
    second, state = model.prefill(ids[:, cut:], state=state)
    assert state.lengths.tolist() == want_state.lengths.tolist()
    if dtype is None:  # bfloat16 picks other experts on rounding, so only finiteness is promised
        assert np.isfinite(np.asarray(second)).all()
        return
    assert_close("second piece", second, want[:, cut:], 5e-5, WHOLE)
    for got, expected in zip(jax.tree.leaves(state.layers), jax.tree.leaves(want_state.layers), strict=True):
        assert_close("state", got, expected, 5e-5, WHOLE)


def test_a_prompt_token_by_token_is_the_prompt_in_one() -> None:
    """NUM-08: pieces of one token, and decode steps, give the same logits."""
    ids = tokens(LENGTH)[:, :40]
    want = whole()[0][:, :40]
    _, pieces = M.prefill(ids[:, :1], max_length=CAPACITY)
    state = pieces
    for t in range(1, 40):
        one, pieces = M.prefill(ids[:, t : t + 1], state=pieces)
        step, state = M.decode_step(ids[:, t], state)
        assert_close(f"piece {t}", one[:, 0], want[:, t], 5e-5, WHOLE)
        assert_close(f"step {t}", step, want[:, t], 5e-5, WHOLE)


def test_a_prompt_in_equal_pieces_and_a_rest_is_the_prompt_in_one() -> None:
    """NUM-08: four pieces and three tokens, cut where passes do not end."""
    ids = tokens(LENGTH)
    state, rows = None, []
    for start in (0, 32, 64, 96, 128):
        piece = ids[:, start : start + 32]
        logits, state = M.prefill(piece, state=state, max_length=CAPACITY if state is None else None)
        rows.append(logits)
    assert_close("logits", jnp.concatenate(rows, axis=1), whole()[0], 5e-5, WHOLE)


def test_the_pure_function_gives_what_the_method_gives() -> None:
    ids, lengths = tokens(70), np.array([70, 0, 9], np.int32)
    pure = jax.jit(k3jax.prefill, static_argnames=("config", "max_length", "logits"))
    want, want_state = M.prefill(ids, lengths, max_length=CAPACITY, logits="last")
    got, state = pure(M.params, ids, config=CONFIG, lengths=lengths, max_length=CAPACITY, logits="last")
    assert_close("logits", got, want, 1e-6, "two compilations of the same program")
    for a, b in zip(jax.tree.leaves(state.layers), jax.tree.leaves(want_state.layers), strict=True):
        assert_close("state", a, b, 1e-6, "two compilations of the same program")
    assert state.max_length == want_state.max_length
    assert state.lengths.tolist() == want_state.lengths.tolist()


def test_the_pure_function_refuses_what_it_can_see_on_the_host() -> None:
    state = prefilled()
    cases: list[tuple[Any, str]] = [
        (lambda: k3jax.prefill(M.params, np.zeros((3, 2)), config=CONFIG), "tokens: expected integers"),
        (lambda: k3jax.prefill(M.params, np.zeros(3, np.int32), config=CONFIG), "tokens: expected shape"),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, lengths=[1, 2, 4]),
            r"lengths: .* in 0\.\.3",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, lengths=[1, -2, 3]),
            r"lengths: .* in 0\.\.3",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, lengths=[1, 2]),
            "lengths: expected shape",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3, 2), config=CONFIG, state=state),
            "tokens: expected 3 rows",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, state=state, max_length=512),
            "max_length: only with state=None",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, chunk_size=0),
            "chunk_size: expected a positive",
        ),
        (
            lambda: k3jax.prefill(M.params, tokens(3), config=CONFIG, max_length=2000),
            "max_length: expected 1",
        ),
        (lambda: k3jax.decode_step(M.params, state, np.zeros((3, 1), np.int32), config=CONFIG), "tokens"),
        (lambda: k3jax.decode_step(M.params, state, np.zeros(3), config=CONFIG), "tokens: expected integers"),
        (lambda: k3jax.decode_step(M.params, state, [1, 2, 2**40], config=CONFIG), "tokens: expected int32"),
        (
            lambda: k3jax.decode_step(M.params, state, [1, 2, 3], np.array([1, 0, 1]), config=CONFIG),
            "active",
        ),
    ]
    for call, message in cases:
        # Where runtime type checks are installed they may refuse a dtype or rank before the function does.
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        if "jaxtyping" in type(caught.value).__module__:
            assert message.split(":")[0] in str(caught.value)
        else:
            caught.match(message)
