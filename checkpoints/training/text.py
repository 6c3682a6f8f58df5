"""The training text: the King James Bible out of Debian's package bible-kjv-text, and its split.

The package's program prints one verse a line behind its reference. References are cut off and
verses kept one a line, 4.1 MB of ASCII. Blocks of 20 KB are dealt out: every 20th is held out
for the reported numbers, every 40th is for choosing settings, and the others are trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

PACKAGE = "bible-kjv-text"
COMMAND = ("bible", "-f", "gen1:1-rev22:21")
SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
BLOCK_BYTES = 20_480
HELD_OUT = 19
"""Block b is held out if b % 20 is this."""
VALIDATION = 9
"""Block b is for validation if b % 40 is this."""

END_OF_TEXT = 256
"""Token after the last verse of a book; the checkpoint's eos_token_id."""
HIDDEN = 257
"""Token that stands for a hidden byte of the input, in training only."""

_LINE = re.compile(rb"(\d?[A-Za-z]+)\d+:\d+ (.*)")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text and where its books end.

    Attributes:
        text: verses, one a line.
        book_ends: offset past each book's last byte, ascending.
    """

    text: bytes
    book_ends: tuple[int, ...]

    def blocks(self) -> list[tuple[int, bytes]]:
        """(offset, bytes) of every block."""
        return [(at, self.text[at : at + BLOCK_BYTES]) for at in range(0, len(self.text), BLOCK_BYTES)]

    def held_out(self) -> list[bytes]:
        """The blocks of the reported numbers."""
        return [block for i, (_, block) in enumerate(self.blocks()) if i % 20 == HELD_OUT]

    def validation(self) -> list[bytes]:
        return [block for i, (_, block) in enumerate(self.blocks()) if i % 40 == VALIDATION]

    def not_held_out(self) -> bytes:
        """Everything but the held-out blocks: what baselines may see."""
        return b"".join(block for i, (_, block) in enumerate(self.blocks()) if i % 20 != HELD_OUT)

    def training_runs(self) -> list[np.ndarray]:
        """Unbroken stretches of the training text as tokens (uint16), with END_OF_TEXT after each book."""
        runs: list[list[np.ndarray]] = [[]]
        for i, (at, block) in enumerate(self.blocks()):
            if i % 20 == HELD_OUT or i % 40 == VALIDATION:
                runs.append([])
                continue
            ends = [end - at for end in self.book_ends if at < end <= at + len(block)]
            runs[-1].append(np.insert(np.frombuffer(block, np.uint8).astype(np.uint16), ends, END_OF_TEXT))
        return [np.concatenate(run) for run in runs if run]

    def words(self) -> list[str]:
        """Words of three letters or more of the training text, in lower case, sorted."""
        found: set[str] = set()
        for run in self.training_runs():
            text = run[run < 256].astype(np.uint8).tobytes().decode("ascii")
            found.update(words(text))
        return sorted(found)


def words(text: str) -> list[str]:
    """The words of three letters or more in ``text``, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Za-z]{3,}", text)]


def parse(printed: bytes) -> Corpus:
    """The corpus from what the package's program prints.

    Raises:
        ValueError: a line that is not a reference and a verse.
    """
    text, ends, book = bytearray(), [], b""
    for number, line in enumerate(printed.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number}: expected a reference and a verse, got {line[:80]!r}")
        if book and match[1] != book:
            ends.append(len(text))
        book = match[1]
        text += match[2] + b"\n"
    return Corpus(bytes(text), (*ends, len(text)))


def is_installed() -> bool:
    """Whether the package that carries the text is installed here."""
    return shutil.which(COMMAND[0]) is not None


def read_corpus(file: Path | None = None) -> Corpus:
    """The corpus, from the installed package or from a file that holds what its program printed.

    Raises:
        FileNotFoundError: no file given and the package is not installed.
        ValueError: another text than the one the numbers of the model card belong to.
    """
    if file is not None:
        printed = file.read_bytes()
    elif is_installed():
        printed = subprocess.run(COMMAND, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout
    else:
        raise FileNotFoundError(
            f"no program {COMMAND[0]!r}: install the Debian packages bible-kjv and {PACKAGE}, or give a file "
            f"with the output of `{' '.join(COMMAND)}`"
        )
    digest = hashlib.sha256(printed).hexdigest()
    if digest != SHA256:
        raise ValueError(f"text: expected SHA-256 {SHA256}, got {digest}: not the text of the model card")
    return parse(printed)
