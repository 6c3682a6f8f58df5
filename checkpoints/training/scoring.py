"""Bits per byte and router use of a model on blocks of text."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from k3jax.config import K3Config

from .step import bits_of, logits_and_routes

WINDOW = 1024
"""Bytes read at a time; a window starts with empty states."""


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model makes of a text.

    Attributes:
        bits_per_byte: mean of ``-log2 p(byte)`` over every byte but the first of each block.
        of_each_block: the same of every block alone.
        load: int [MoE layers, E], how many tokens chose each expert.
    """

    bits_per_byte: float
    of_each_block: list[float]
    load: np.ndarray

    @property
    def distinct_experts(self) -> list[int]:
        return np.count_nonzero(self.load, axis=-1).tolist()

    @property
    def max_over_mean_load(self) -> list[float]:
        return (self.load.max(axis=-1) / self.load.mean(axis=-1)).tolist()


def cut(blocks: list[bytes], window: int = WINDOW) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows that overlap by half, and which of their targets count: each byte once.

    A byte is scored with at least half a window before it, or all of its block that there is.

    Returns:
        int32 [windows, window + 1] tokens, bool [windows, window], int [windows] numbers of blocks.
    """
    tokens, counted, origin = [], [], []
    for number, block in enumerate(blocks):
        ids = np.frombuffer(block, np.uint8).astype(np.int32)
        scored = 1  # bytes scored so far; the first has nothing before it
        for start in range(0, max(1, len(ids) - 1), window // 2):
            piece = ids[start : start + window + 1]
            if start + len(piece) <= scored:
                break
            position = start + 1 + np.arange(window)
            tokens.append(np.pad(piece, (0, window + 1 - len(piece))))
            counted.append((position >= scored) & (position < start + len(piece)))
            origin.append(number)
            scored = start + len(piece)
    return np.stack(tokens), np.stack(counted), np.array(origin)


@partial(jax.jit, static_argnames="config")
def _score(
    params: Any, tokens: jax.Array, counted: jax.Array, *, config: K3Config
) -> tuple[jax.Array, jax.Array]:
    logits, load = logits_and_routes(params, tokens[:, :-1], config, counted)
    return jnp.sum(jnp.where(counted, bits_of(logits, tokens[:, 1:]), 0.0), axis=-1), load


def score(
    params: Any,
    config: K3Config,
    blocks: list[bytes],
    *,
    window: int = WINDOW,
    batch: int = 8,
    progress: bool = False,
) -> Score:
    """Bits per byte and expert load of ``params`` on ``blocks``.

    Args:
        params: parameter tree, experts packed or float.
        window: bytes read at a time, see :func:`cut`.
        batch: windows at a time.

    Raises:
        ValueError: no block has two bytes.
    """
    if min(map(len, blocks), default=0) < 2:
        raise ValueError("blocks: expected at least one, each of at least two bytes")
    tokens, counted, origin = cut(blocks, window)
    bits, load = np.zeros(len(blocks)), np.zeros((config.num_moe_layers, config.num_experts), np.int64)
    for at in tqdm(range(0, len(tokens), batch), desc="score", disable=not progress):
        piece, mask = tokens[at : at + batch], counted[at : at + batch]
        missing = batch - len(piece)
        # Repeated rows that do not count keep one program.
        rows = np.concatenate([piece, np.repeat(piece[:1], missing, axis=0)])
        keep = np.concatenate([mask, np.zeros((missing, mask.shape[1]), bool)])
        of_rows, routes = _score(params, rows, keep, config=config)
        np.add.at(bits, origin[at : at + batch], np.asarray(of_rows)[: len(piece)])
        load += np.asarray(routes)
    sizes = np.array([len(block) - 1 for block in blocks])
    return Score(float(bits.sum() / sizes.sum()), (bits / sizes).tolist(), load)
