"""Text to token ids and back: K3's byte-pair tokenizer, and plain bytes for checkpoints that ship none.

Neither ever makes a special token out of user text; a prompt that needs one is given as token ids.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .config import K3Config

NUM_SPECIAL = 256
"""Special tokens that follow the merges; ids N .. N + 255 where N is the number of merges."""

NAMED_SPECIALS: Mapping[int, str] = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>",
    20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Offset from the first special id -> name; every other special is ``<|reserved_token_{id}|>``."""

END_OF_MESSAGE = 2
"""Offset of the stop token ``<|end_of_msg|>``: 163586 in the release."""

MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""Longer runs of only whitespace, or only other characters, are cut: merging is quadratic in a run."""

# The pre-tokenizer's alternatives, tried in this order. Cased words: an optional leading symbol,
# upper-case-like letters, lower-case-like letters, an English contraction; Han is never mixed in.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RUN = re.compile(r"\s+|\S+")

# Files by which other tokenizers are shipped: with one of these and no tiktoken.model, bytes would be wrong.
_OTHER_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@runtime_checkable
class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids that exist are 0..vocab_size-1."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a message."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; never a special token, nothing is prepended."""
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes the ids stand for."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text the ids stand for; invalid UTF-8 becomes U+FFFD."""
        ...

    def is_text(self, token: int) -> bool:
        """Whether the id stands for bytes of text rather than for a control mark or nothing."""
        ...


def _check_text(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"text: expected a str, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: expected valid Unicode, got a lone surrogate at character {error.start}"
        ) from error


def _check_ids(ids: Sequence[int]) -> list[int]:
    plain = [int(i) for i in ids]
    if plain and min(plain) < 0:
        raise ValueError(f"ids: expected token ids of at least 0, got {min(plain)}")
    return plain


class ByteTokenizer:
    """Ids 0..255 are bytes of UTF-8; larger ids decode to nothing.

    Args:
        vocab_size: number of ids.
        stop_tokens: ids that end a message.

    Raises:
        ValueError: vocab_size < 1, or a stop token outside the vocabulary.
    """

    def __init__(self, vocab_size: int = 256, stop_tokens: Sequence[int] = ()):
        if vocab_size < 1:
            raise ValueError(f"vocab_size: expected at least 1, got {vocab_size}")
        if bad := [t for t in stop_tokens if not 0 <= t < vocab_size]:
            raise ValueError(f"stop_tokens: expected ids in 0..{vocab_size - 1}, got {bad}")
        self.vocab_size = vocab_size
        self.stop_tokens = tuple(stop_tokens)

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``.

        Raises:
            ValueError: a byte is outside a vocabulary of fewer than 256 ids, or a lone surrogate.
        """
        ids = list(_check_text(text))
        if ids and max(ids) >= self.vocab_size:
            raise ValueError(f"text: byte {max(ids)} is outside this vocabulary of {self.vocab_size} ids")
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in _check_ids(ids) if i < 256)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_text(self, token: int) -> bool:
        return 0 <= token < min(256, self.vocab_size)


def read_merges(path: str | os.PathLike[str]) -> dict[bytes, int]:
    """Read a ``tiktoken.model``: one line per merge, the token's bytes in base64 and its rank.

    Returns:
        token bytes -> rank; the ranks are 0..N-1.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a malformed line (its number is named), a repeated token or rank, a gap in the
            ranks, or a single byte without a token.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer file at {file}")
    merges: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{file}, line {number}: expected 'BASE64 RANK', got {line[:80]!r}") from error
        if not token or rank < 0:
            raise ValueError(f"{file}, line {number}: empty token or negative rank in {line[:80]!r}")
        if rank in seen:
            raise ValueError(f"{file}, line {number}: rank {rank} was already given in line {seen[rank]}")
        if token in merges:
            first = seen[merges[token]]
            raise ValueError(f"{file}, line {number}: token {token!r} was already given in line {first}")
        merges[token], seen[rank] = rank, number
    if seen and max(seen) != len(seen) - 1:
        raise ValueError(
            f"{file}: expected ranks 0..{len(seen) - 1}, got up to {max(seen)}; lines are missing"
        )
    if missing := [b for b in range(256) if bytes([b]) not in merges]:
        raise ValueError(f"{file}: {len(missing)} single bytes have no token, the first is {missing[0]:#04x}")
    return merges


def special_name(offset: int, first: int) -> str:
    """Name of the special token ``offset`` places after the first special id ``first``."""
    return NAMED_SPECIALS.get(offset, f"<|reserved_token_{first + offset}|>")


class TiktokenTokenizer:
    """K3's byte-pair tokenizer: merges of a ``tiktoken.model``, then 256 special tokens.

    With N merges the special ids are N..N+255 (163584..163839 in the release).

    Args:
        merges: token bytes -> rank, as :func:`read_merges` returns.
    """

    def __init__(self, merges: Mapping[bytes, int]):
        import tiktoken

        first = len(merges)
        self.special_tokens: dict[str, int] = {
            special_name(offset, first): first + offset for offset in range(NUM_SPECIAL)
        }
        """Name -> id of all 256 special tokens."""
        self.vocab_size = first + NUM_SPECIAL
        self.stop_tokens = (first + END_OF_MESSAGE,)
        self._first_special = first
        self._encoding = tiktoken.Encoding(
            "k3",
            pat_str=_PATTERN,
            mergeable_ranks=dict(merges),
            special_tokens=self.special_tokens,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TiktokenTokenizer:
        """Read a ``tiktoken.model``; errors as in :func:`read_merges`."""
        return cls(read_merges(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; the text of a special token is encoded as ordinary text.

        Raises:
            ValueError: a lone surrogate.
        """
        _check_text(text)
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of the ids; a special token gives its name, an id past the vocabulary nothing."""
        return self._encoding.decode_bytes([i for i in _check_ids(ids) if i < self.vocab_size])

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_text(self, token: int) -> bool:
        return 0 <= token < self._first_special


def _pieces(text: str) -> Iterator[str]:
    """``text`` cut every 400,000 characters, and inside those in runs of over 25,000 of one class."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        yield from _cut_runs(text[start : start + MAX_PIECE_CHARS])


def _cut_runs(text: str) -> Iterator[str]:
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    begin = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield text[begin:cut]
            begin = cut
    yield text[begin:]


def load_tokenizer(path: str | os.PathLike[str], config: K3Config) -> ByteTokenizer | TiktokenTokenizer:
    """The tokenizer of a checkpoint directory: its ``tiktoken.model``, or bytes if it ships none.

    Raises:
        FileNotFoundError: the directory belongs to a tokenizer whose ``tiktoken.model`` is missing.
        ValueError: the file is malformed or has more ids than the model.
    """
    directory = Path(path)
    file = directory / "tiktoken.model"
    if file.is_file():
        tokenizer = TiktokenTokenizer.from_file(file)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"{file}: {tokenizer.vocab_size} ids, but the model's vocab_size is {config.vocab_size}"
            )
        return tokenizer
    if others := [name for name in _OTHER_TOKENIZERS if (directory / name).is_file()]:
        raise FileNotFoundError(
            f"no tiktoken.model in {directory}, although {', '.join(others)} says that it has a tokenizer"
        )
    return ByteTokenizer(config.vocab_size, config.stop_token_ids)


__all__ = [
    "NAMED_SPECIALS", "NUM_SPECIAL", "ByteTokenizer", "TiktokenTokenizer", "Tokenizer", "load_tokenizer",
    "read_merges", "special_name",
]  # fmt: skip
