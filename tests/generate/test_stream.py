"""Streaming: the same loop as generate, with text in complete characters only."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax import NonFiniteLogitsError, Sampling
from k3jax import generate as generation
from k3jax.generate import _RowText
from k3jax.tokenizer import ByteTokenizer
from support.generation import EOS, model, script_of, scripted

NEVER = Sampling(stop_tokens=())


@pytest.mark.parametrize(
    "s", [NEVER, Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, stop_tokens=())]
)
def test_the_steps_add_up_to_what_generate_returns(s):
    prompts = ["stream", "of", "text"]
    result = model().generate(prompts, max_new_tokens=20, sampling=s, seed=3)
    steps = list(model().stream(prompts, max_new_tokens=20, sampling=s, seed=3))
    assert ["".join(step.text[row] for step in steps) for row in range(3)] == result.text
    assert np.stack([step.tokens for step in steps], 1).tolist() == result.tokens
    assert [step.finished.tolist() for step in steps] == [[False] * 3] * 19 + [[True] * 3]
    assert steps[0].tokens.dtype == np.int32
    assert steps[0].finished.dtype == bool


def test_a_character_waits_for_its_last_byte(monkeypatch):
    text = "é中😀!"
    steps = list(generation.stream(scripted(monkeypatch, script_of([list(text.encode())])), "a", 10))
    assert [step.text[0] for step in steps] == ["", "é", "", "", "中", "", "", "", "😀", "!"]


def test_bytes_that_are_no_utf8_become_the_replacement_character_as_in_generate(monkeypatch):
    tokens = [0x61, 0xFF, 0xE4, 0xB8, 0x62, 0xE4, 0xB8]  # the last two are the start of a character
    fake = scripted(monkeypatch, script_of([tokens]))
    steps = list(generation.stream(fake, "a", len(tokens), NEVER))
    assert [step.text[0] for step in steps] == ["a", "\ufffd", "", "", "\ufffdb", "", "\ufffd"]
    assert generation.generate(fake, "a", len(tokens), NEVER).text == [bytes(tokens).decode(errors="replace")]


def test_an_incomplete_character_comes_out_when_a_stop_token_ends_the_row(monkeypatch):
    steps = list(generation.stream(scripted(monkeypatch, script_of([[0x61, 0xE4, EOS]])), "a", 9))
    assert [step.text[0] for step in steps] == ["a", "", "\ufffd"]
    assert steps[-1].tokens.tolist() == [EOS]


@given(st.binary(max_size=24), st.integers(0, 2**24))
def test_pieces_add_up_to_the_text_however_the_bytes_are_cut(data, cuts):
    row, text, piece = _RowText(ByteTokenizer(256)), "", []
    for i, byte in enumerate(data):
        piece.append(byte)
        if cuts >> i & 1:
            text += row.add(piece, final=False)
            piece = []
    text += row.add(piece, final=True)
    assert text == "".join(row.pieces) == data.decode("utf-8", errors="replace")


def test_rows_that_have_finished_show_minus_one_and_no_text(monkeypatch):
    fake = scripted(monkeypatch, script_of([[65, EOS], [66, 67, 68, EOS], [EOS]]))
    steps = list(generation.stream(fake, ["a", "b", "c"], 10))
    assert [step.tokens.tolist() for step in steps] == [
        [65, 66, EOS], [EOS, 67, -1], [-1, 68, -1], [-1, EOS, -1],
    ]  # fmt: skip
    assert [step.text for step in steps] == [["A", "B", ""], ["", "C", ""], ["", "D", ""], ["", "", ""]]
    assert [step.finished.tolist() for step in steps] == [
        [False, False, True], [True, False, True], [True, False, True], [True, True, True],
    ]  # fmt: skip


def test_rows_with_nan_show_minus_one_and_the_error_comes_after_the_last_step(monkeypatch):
    script = script_of([[65, 66, 67], [65, 66, 67]])
    script[0, 1, 8] = np.nan
    steps = generation.stream(scripted(monkeypatch, script), ["a", "b"], 3, NEVER)
    seen = [(step.tokens.tolist(), step.finished.tolist()) for step in itertools.islice(steps, 3)]
    with pytest.raises(NonFiniteLogitsError) as caught:
        next(steps)
    assert seen == [([65, 65], [False, False]), ([-1, 66], [True, False]), ([-1, 67], [True, True])]
    assert caught.value.rows == [0]
    assert caught.value.result.text == ["A", "ABC"]


def test_a_stream_that_is_left_early_leaves_the_model_usable():
    expected = model().generate("left", max_new_tokens=8, sampling=NEVER)
    steps = model().stream("left", max_new_tokens=8, sampling=NEVER)
    assert next(steps).tokens.tolist() == [expected.tokens[0][0]]
    del steps
    assert model().generate("left", max_new_tokens=8, sampling=NEVER) == expected
