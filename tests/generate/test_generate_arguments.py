"""Wrong arguments of generate and stream are refused on the host, by name."""

import numpy as np
import pytest

from k3jax import GenerateResult, Sampling
from support.generation import VOCABULARY, model


@pytest.fixture(autouse=True)
def _nothing_is_dispatched(monkeypatch):
    monkeypatch.setattr(type(model()), "prefill", lambda *_, **__: pytest.fail("dispatched"))


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "row 0 is empty"),
        (["a", ""], "row 1 is empty"),
        ([[1], [2], []], "row 2 is empty"),
        ([], "got an empty list"),
        (np.zeros((0, 3), np.int32), "at least one prompt, got none"),
        (np.zeros((2, 0), np.int32), "row 0 is empty"),
        ([[1, VOCABULARY]], rf"row 0: expected token ids in 0..{VOCABULARY - 1}, got {VOCABULARY}"),
        (["a", [5, -1]], "row 1: expected token ids .* got -1"),
        (np.zeros((1, 1, 1), np.int32), r"\[T\] or \[B, T\], got shape \(1, 1, 1\)"),
    ],
)
def test_prompts_that_are_empty_or_outside_the_vocabulary(call, prompts, message):
    with pytest.raises(ValueError, match=message):
        getattr(model(), call)(prompts)


@pytest.mark.parametrize(
    "prompts",
    [3, None, b"bytes", [1.5], [[1, 2.0]], [True, 2], ["a", 5], ["a", None], np.array([1.0]), [b"x"]],
)
def test_prompts_that_are_neither_text_nor_ids(prompts):
    with pytest.raises(TypeError, match="prompts"):
        model().generate(prompts)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected at least 0, got -1"),
        ({"max_new_tokens": 1.0}, TypeError, "max_new_tokens"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens: expected an integer, got True"),
        ({"sampling": [Sampling()]}, ValueError, "one for each of 2 rows, got 1"),
        ({"sampling": [Sampling(), None]}, TypeError, "sampling"),
        ({"sampling": "greedy"}, TypeError, "sampling"),
        (
            {"sampling": Sampling(stop_tokens=(VOCABULARY,))},
            ValueError,
            rf"row 0: stop_tokens: .*got \[{VOCABULARY}\]",
        ),
        ({"seed": [1]}, ValueError, "seed: .*one for each of 2 rows, got 1"),
        ({"seed": -5}, ValueError, r"seed: expected 0..2\*\*64-1"),
    ],
)
def test_other_arguments(options, error, message):
    with pytest.raises(error, match=message):
        model().stream(["a", "b"], **options)


def test_no_new_tokens_are_an_empty_result():
    result = model().generate(["a", "bc"], max_new_tokens=0)
    assert result == GenerateResult([[], []], ["", ""], [[], []], ["length", "length"])
    assert list(model().stream(["a", "bc"], max_new_tokens=0)) == []
    with pytest.raises(ValueError, match="row 1 is empty"):
        model().generate(["a", ""], max_new_tokens=0)
