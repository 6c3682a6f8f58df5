"""A small but real ``tiktoken.model``: 256 bytes and a few merges."""

from __future__ import annotations

import base64
from pathlib import Path

WORDS = (
    "he", "ll", "llo", "hello", " w", "or", "ld", "orld", " world", "'s", "中", "文", "中文", "  ",
    "12", "123",
)  # fmt: skip


def merges() -> dict[bytes, int]:
    """Token bytes -> rank: every byte, then the pairs that build ``WORDS``."""
    table = {bytes([b]): b for b in range(256)}
    for word in WORDS:
        encoded = word.encode()
        for end in range(2, len(encoded) + 1):  # every prefix, so that the word can be merged up
            table.setdefault(encoded[:end], len(table))
    return table


def lines(table: dict[bytes, int]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for token, rank in table.items()]


def write_model(directory: Path) -> Path:
    """Write ``tiktoken.model`` into ``directory``."""
    path = directory / "tiktoken.model"
    path.write_text("\n".join(lines(merges())) + "\n")
    return path
