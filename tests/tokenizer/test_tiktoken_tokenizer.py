"""K3's byte-pair tokenizer on a small synthetic tiktoken.model (known faults TK-01, TK-02)."""

import base64
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax import tokenizer as tok
from k3jax.config import K3Config
from support.merges import lines, merges, write_model

FIRST = len(merges())
RELEASE_NAMES = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
    163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
    163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>",
    163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return tok.TiktokenTokenizer(merges())


def pieces(text):
    """Pieces into which the pre-tokenizer cuts ``text``: with byte-only merges nothing else joins bytes."""
    import tiktoken

    cuts = []
    # Give the whole of each candidate piece a rank; a piece is then exactly one token.
    table = {bytes([b]): b for b in range(256)}
    raw = text.encode()
    for start in range(len(raw)):
        for end in range(start + 2, len(raw) + 1):
            table.setdefault(raw[start:end], len(table))
    encoding = tiktoken.Encoding("t", pat_str=tok._PATTERN, mergeable_ranks=table, special_tokens={})
    for token in encoding.encode_ordinary(text):
        cuts.append(encoding.decode_single_token_bytes(token).decode())
    return cuts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc中文def", ["abc", "中文", "def"]),
        ("HelloWorld", ["Hello", "World"]),
        ("HTMLParser", ["HTMLParser"]),
        ("It's we'LL don't", ["It's", " we'LL", " don't"]),
        ("1234567", ["123", "456", "7"]),
        ("a  b", ["a", " ", " b"]),
        ("x \n\n y", ["x", " \n\n", " y"]),
        ("foo(bar)!!\n", ["foo", "(bar", ")!!\n"]),
        ("tail   ", ["tail", "   "]),
        ("né Ünï", ["né", " Ünï"]),
        ("，中", ["，", "中"]),
    ],
)
def test_text_is_cut_into_han_runs_cased_words_digit_triples_punctuation_and_space(text, expected):
    assert pieces(text) == expected


def test_every_special_id_has_the_name_of_the_release():
    for offset in range(256):
        expected = RELEASE_NAMES.get(163584 + offset, f"<|reserved_token_{163584 + offset}|>")
        assert tok.special_name(offset, 163584) == expected
    assert len({tok.special_name(offset, 163584) for offset in range(256)}) == 256


def test_special_ids_follow_the_merges_and_the_stop_token_is_the_third(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert sorted(tokenizer.special_tokens.values()) == list(range(FIRST, FIRST + 256))
    assert tokenizer.special_tokens["[PAD]"] == FIRST + 255
    assert tokenizer.special_tokens[f"<|reserved_token_{FIRST + 8}|>"] == FIRST + 8
    assert tokenizer.stop_tokens == (FIRST + 2,)
    assert tokenizer.decode([FIRST + 3]) == "<|open|>"


@pytest.mark.parametrize("text", ["<|end_of_msg|><|open|>message", "[PAD][BOS]", "<|reserved_token_9|>"])
def test_user_text_never_becomes_a_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert max(ids) < FIRST
    assert tokenizer.decode(ids) == text


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_decoding_undoes_encoding(text):
    tokenizer = tok.TiktokenTokenizer(merges())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < FIRST for i in ids)


def test_merges_are_used(tokenizer):
    assert tokenizer.encode("hello world") == [merges()[b"hello"], merges()[b" world"]]
    assert tokenizer.encode("123") == [merges()[b"123"]]


def test_long_runs_of_one_class_are_cut_every_25000_characters(tokenizer):
    text = "x" + " " * 60_001 + "y" * 25_000 + " z"
    cut = list(tok._pieces(text))
    assert "".join(cut) == text
    assert [len(piece) for piece in cut] == [25_001, 25_000, 10_001 + 25_000 + 2]
    # A merge across the first cut would join the two spaces at it.
    pair = merges()[b"  "]
    assert tokenizer.encode(" " * 25_001)[-1] == ord(" ")
    assert tokenizer.encode(" " * 25_000)[-1] == pair


def test_text_is_cut_every_400000_characters():
    text = "ab " * 300_000
    assert [len(piece) for piece in tok._pieces(text)] == [400_000, 400_000, 100_000]


def test_a_run_is_counted_anew_after_a_cut_at_400000_characters():
    text = "a " * 190_000 + "b" * 45_000
    # 20,000 of the run stand before character 400,000 and 25,000 after it: no piece is over the limit.
    assert [len(piece) for piece in tok._pieces(text)] == [400_000, 25_000]


def test_ids_past_the_vocabulary_decode_to_nothing_and_negative_ones_raise(tokenizer):
    assert tokenizer.decode([ord("a"), FIRST + 256, ord("b")]) == "ab"
    with pytest.raises(ValueError, match="ids: expected token ids of at least 0, got -1"):
        tokenizer.decode([-1])


def test_only_merges_are_text(tokenizer):
    assert tokenizer.is_text(FIRST - 1)
    assert not tokenizer.is_text(FIRST)


def test_invalid_utf8_decodes_to_the_replacement_character(tokenizer):
    assert tokenizer.decode([0xE4, 0xB8, ord("a")]) == "\ufffda"
    assert tokenizer.decode_bytes([0xE4, 0xB8]) == b"\xe4\xb8"


def test_text_that_is_no_str_or_holds_a_surrogate_is_refused(tokenizer):
    with pytest.raises(TypeError, match="text"):
        tokenizer.encode(b"abc")
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [*t[:9], "not base64! 9", *t[10:]], r"tiktoken.model, line 10: expected 'BASE64 RANK'"),
        (lambda t: [*t[:9], t[9].split()[0], *t[10:]], "line 10: expected 'BASE64 RANK'"),
        (lambda t: [*t[:9], t[9].split()[0] + " x", *t[10:]], "line 10: expected 'BASE64 RANK'"),
        (
            lambda t: [*t, base64.b64encode(b"new").decode() + " 7"],
            f"line {FIRST + 1}: rank 7 was already given in line 8",
        ),
        (
            lambda t: [*t, f"{t[7].split()[0]} {FIRST}"],
            f"line {FIRST + 1}: token .* was already given in line 8",
        ),
        (lambda t: [*t, f"{base64.b64encode(b'new').decode()} -1"], "empty token or negative rank"),
        (lambda t: [*t[:-2], t[-1]], "lines are missing"),
        (lambda t: [t[i] for i in range(len(t)) if i != 65][: FIRST - 1], "lines are missing"),
        (lambda t: [], "256 single bytes have no token, the first is 0x00"),
    ],
)
def test_a_malformed_file_is_refused_with_the_line(tmp_path, change, message):
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(change(lines(merges()))))
    with pytest.raises(ValueError, match=message):
        tok.read_merges(path)


def test_blank_lines_are_no_error_and_a_missing_file_is(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_text("\n\n".join(lines(merges())) + "\n\n")
    assert tok.read_merges(path) == merges()
    with pytest.raises(FileNotFoundError, match="no tokenizer file at"):
        tok.read_merges(tmp_path / "absent")


def config_with_vocabulary(size):
    return dataclasses.replace(K3Config.preset("k3-slice"), vocab_size=size, eos_token_id=5)


def test_a_directory_with_a_tiktoken_model_gets_that_tokenizer(tmp_path):
    write_model(tmp_path)
    loaded = tok.load_tokenizer(tmp_path, config_with_vocabulary(FIRST + 256))
    assert isinstance(loaded, tok.TiktokenTokenizer)
    with pytest.raises(ValueError, match=f"{FIRST + 256} ids, but the model's vocab_size is {FIRST + 255}"):
        tok.load_tokenizer(tmp_path, config_with_vocabulary(FIRST + 255))


def test_a_directory_without_a_tokenizer_gets_bytes_and_one_whose_file_is_missing_is_refused(tmp_path):
    loaded = tok.load_tokenizer(tmp_path, config_with_vocabulary(300))
    assert isinstance(loaded, tok.ByteTokenizer)
    assert (loaded.vocab_size, loaded.stop_tokens) == (300, (5,))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no tiktoken.model in .* tokenizer_config.json"):
        tok.load_tokenizer(tmp_path, config_with_vocabulary(300))
