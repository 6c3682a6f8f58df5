"""Prompts as users give them, turned into checked token ids on the host before anything is dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | jax.Array
Prompts = Prompt | Sequence[Prompt]


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, jax.Array))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _rows(prompts: Any) -> list[Any]:
    """One entry per row: a string, a sequence of ids, or an array of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if _is_array(prompts):
        if prompts.ndim not in (1, 2):
            raise ValueError(f"prompts: expected an array [T] or [B, T], got shape {prompts.shape}")
        host = np.asarray(prompts)
        return [host] if host.ndim == 1 else list(host)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts: expected a string, token ids, or a sequence of those, got {type(prompts).__name__}"
        )
    if not prompts:
        raise ValueError("prompts: expected at least one prompt with at least one token, got an empty list")
    if isinstance(prompts[0], (str, Sequence)) or (_is_array(prompts[0]) and prompts[0].ndim == 1):
        return list(prompts)
    return [list(prompts)]


def _ids(prompt: Any, row: int, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if _is_array(prompt):
        host = np.asarray(prompt)
        if host.ndim != 1 or not (host.size == 0 or np.issubdtype(host.dtype, np.integer)):
            raise TypeError(
                f"prompts: row {row}: expected integer token ids [T], got {host.dtype} of shape {host.shape}"
            )
        return host.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompts: row {row}: expected a string or token ids, got {type(prompt).__name__}")
    values = [v.item() if _is_array(v) and v.ndim == 0 else v for v in prompt]
    if bad := [v for v in values if not _is_id(v)]:
        raise TypeError(f"prompts: row {row}: expected integer token ids, got {bad[0]!r}")
    return [int(v) for v in values]


def tokenise(prompts: Any, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: one string, one sequence or array [T] of ids; or a sequence of those, or an array
            [B, T], one row each.
        tokenizer: encodes the strings.
        vocab_size: ids must be 0..vocab_size-1.

    Raises:
        TypeError: neither strings nor integers.
        ValueError: an empty prompt (its row is named), or an id outside the vocabulary.
    """
    rows = [_ids(prompt, row, tokenizer) for row, prompt in enumerate(_rows(prompts))]
    if not rows:
        raise ValueError("prompts: expected at least one prompt, got none")
    for row, ids in enumerate(rows):
        if not ids:
            raise ValueError(f"prompts: row {row} is empty; expected at least one token")
        if bad := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"prompts: row {row}: expected token ids in 0..{vocab_size - 1}, got {bad[0]}")
    return rows


def pad_right(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one array int32 [B, T], padded with 0 at the right, and their lengths int32 [B]."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


__all__ = ["Prompt", "Prompts", "pad_right", "tokenise"]
