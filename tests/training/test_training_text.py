"""The training text: parsing, the split, and that the split keeps texts apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3jax.checkpoints.training.text import (
    BLOCK_BYTES,
    END_OF_TEXT,
    PACKAGE,
    Corpus,
    is_installed,
    parse,
    read_corpus,
    words,
)

needs_text = pytest.mark.skipif(
    not is_installed(), reason=f"needs the Debian packages bible-kjv and {PACKAGE}"
)


def numbered_corpus(blocks: int) -> Corpus:
    """A text whose every four bytes name their place."""
    count = blocks * BLOCK_BYTES // 4
    return Corpus(np.arange(count, dtype=">u4").tobytes(), (BLOCK_BYTES // 2, 3 * BLOCK_BYTES, 4 * count))


def test_references_are_cut_off_and_books_end_where_the_next_begins() -> None:
    corpus = parse(b"Ge1:1 In the beginning: yes.\nGe12:3 And.\n1Sam1:1 Now\n1Sam1:2 (he)\n")
    assert corpus.text == b"In the beginning: yes.\nAnd.\nNow\n(he)\n"
    assert corpus.book_ends == (28, 37)


def test_a_line_without_a_reference_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match="line 2: expected a reference and a verse, got b'no reference"):
        parse(b"Ge1:1 In\nno reference here\n")


def test_no_place_is_in_two_parts_of_the_split_and_none_is_lost() -> None:
    corpus = numbered_corpus(83)
    held = set(np.frombuffer(b"".join(corpus.held_out()), ">u4").tolist())
    chosen = set(np.frombuffer(b"".join(corpus.validation()), ">u4").tolist())
    runs = [run[run != END_OF_TEXT].astype(np.uint8) for run in corpus.training_runs()]
    trained = set(np.frombuffer(b"".join(run.tobytes() for run in runs), ">u4").tolist())
    known = set(np.frombuffer(corpus.not_held_out(), ">u4").tolist())
    pairs = [(held, chosen), (held, trained), (chosen, trained), (held, known)]
    assert all(a.isdisjoint(b) for a, b in pairs)
    assert held | chosen | trained == set(range(83 * BLOCK_BYTES // 4))
    assert known == trained | chosen
    assert (len(corpus.held_out()), len(corpus.validation())) == (4, 2)


def test_every_book_that_ends_in_the_training_text_is_followed_by_the_end_token() -> None:
    corpus = numbered_corpus(5)
    (run,) = corpus.training_runs()
    places = np.flatnonzero(run == END_OF_TEXT)
    assert places.tolist() == [BLOCK_BYTES // 2, 3 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 2]


def test_words_are_runs_of_at_least_three_letters_in_lower_case() -> None:
    assert words("In the LORD's house, an ox; Ab-imelech") == ["the", "lord", "house", "imelech"]


def test_another_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"Ge1:1 In the beginning\n")
    with pytest.raises(ValueError, match="expected SHA-256"):
        read_corpus(file)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=PACKAGE):
        read_corpus()


@needs_text
def test_the_package_gives_the_text_of_the_model_card() -> None:
    corpus = read_corpus()
    assert corpus.text.startswith(b"In the beginning God created the heaven and the earth.\n")
    assert (len(corpus.text), len(corpus.book_ends)) == (4_137_850, 66)
    assert len(corpus.held_out()) == 10
