"""Plain bytes as tokens, for checkpoints that ship no tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.tokenizer import ByteTokenizer


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_ids_are_the_bytes_of_utf8(text):
    tokenizer = ByteTokenizer(512)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_from_256_decode_to_nothing():
    tokenizer = ByteTokenizer(512)
    assert tokenizer.decode([104, 256, 511, 105]) == "hi"
    assert tokenizer.is_text(255)
    assert not tokenizer.is_text(256)


def test_a_byte_outside_a_small_vocabulary_is_refused():
    tokenizer = ByteTokenizer(128)
    assert tokenizer.encode("~") == [126]
    with pytest.raises(ValueError, match="byte 195 is outside this vocabulary of 128 ids"):
        tokenizer.encode("é")


def test_impossible_vocabularies_and_stop_tokens_are_refused():
    with pytest.raises(ValueError, match="vocab_size: expected at least 1, got 0"):
        ByteTokenizer(0)
    with pytest.raises(ValueError, match=r"stop_tokens: expected ids in 0..9, got \[10\]"):
        ByteTokenizer(10, (10,))
