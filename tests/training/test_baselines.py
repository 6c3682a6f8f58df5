"""The baselines: the n-gram model against its formula term by term, and the compressor."""

from __future__ import annotations

import math

import numpy as np
import pytest

from k3jax.checkpoints.training.baselines import ngram_bits_per_byte, xz_bits_per_byte
from k3jax.checkpoints.training.text import PACKAGE, is_installed, read_corpus


def probability(train: bytes, context: bytes, byte: int) -> float:
    """The model's formula, counted naively."""
    if context:
        lower = probability(train, context[1:], byte)
        length = len(context)
    else:
        lower, length = 1 / 256, 0
    grams = [train[i : i + length + 1] for i in range(len(train) - length)]
    sizes = [grams.count(gram) for gram in set(grams)]
    once, twice = sizes.count(1), sizes.count(2)
    discount = once / (once + 2 * twice) if once else 0.5
    following = [gram[-1] for gram in grams if gram[:-1] == context]
    if not following:
        return lower
    c = following.count(byte)
    return (max(c - discount, 0) + discount * len(set(following)) * lower) / len(following)


def test_the_ngram_model_is_its_formula() -> None:
    rng = np.random.default_rng(1)
    train = bytes(rng.choice(list(b"abcd "), 160, p=[0.4, 0.3, 0.1, 0.1, 0.1]).tolist())
    blocks = [b"abcab dz", b"ba", b"a"]
    expected = [
        -math.log2(probability(train, block[max(0, i - 3) : i], block[i]))
        for block in blocks
        for i in range(len(block))
    ]
    # Sums of a few float64 numbers in another order.
    assert ngram_bits_per_byte(train, blocks, context=3) == pytest.approx(np.mean(expected), rel=1e-12)


def test_a_model_of_every_order_is_a_distribution() -> None:
    train = b"the light and the darkness and the day"
    for context in (b"", b"t", b"the", b"xyz"):
        assert sum(probability(train, context, byte) for byte in range(256)) == pytest.approx(1, abs=1e-12)


def test_more_context_helps_on_text_that_repeats() -> None:
    train, held = b"in the beginning was the word; " * 40, [b"in the beginning was the word; "]
    bits = [ngram_bits_per_byte(train, held, context=n) for n in (0, 1, 5)]
    assert bits[0] > bits[1] > bits[2]


def test_a_context_that_does_not_fit_its_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"context: expected 0\.\.6, got 7"):
        ngram_bits_per_byte(b"abc", [b"abc"], context=7)


def test_xz_counts_what_the_held_out_text_adds() -> None:
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, 20_000, dtype=np.uint8).tobytes()
    fresh = rng.integers(0, 256, 5_000, dtype=np.uint8).tobytes()
    assert xz_bits_per_byte(train, [train[:5_000]]) < 1  # a copy is a reference, noise is not
    assert 7.9 < xz_bits_per_byte(train, [fresh]) < 8.2  # noise does not compress


@pytest.mark.skipif(not is_installed(), reason=f"needs the Debian packages bible-kjv and {PACKAGE}")
def test_the_ngram_number_of_the_card_is_recomputed() -> None:
    corpus = read_corpus()
    assert ngram_bits_per_byte(corpus.not_held_out(), corpus.held_out()) == pytest.approx(1.5800, abs=5e-5)
