"""One small K3 for tests of the API's contract: shared, so that each program compiles once a process.

Three layers: KDA with the dense FFN, MLA and KDA with a LatentMoE; AttnRes blocks of two, so the last
one is short; key and value head sizes differ.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from support.random_k3 import params_from_tensors, random_config, random_tensors

BATCH, CAPACITY = 3, 512
"""Rows and capacity most tests use: other ones mean other programs."""


@functools.cache
def config() -> Any:
    return random_config(
        11,
        layer_types=("kda", "mla", "kda"),
        attn_res_block_size=2,
        first_k_dense_replace=1,
        vocab_size=61,
        hidden_size=32,
        num_experts=6,
        num_experts_per_token=2,
        kda_num_heads=2,
        kda_head_dim=8,
        kda_v_head_dim=12,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(config(), 5)


@functools.cache
def model(dtype: str | None = "float32") -> Any:
    """The model; its parameters are shared and must not be donated."""
    import k3jax

    return k3jax.Model(params_from_tensors(config(), tensors(), dtype), config())


def tokens(length: int, batch: int = BATCH, seed: int = 4) -> np.ndarray:
    """Random ids int32 [batch, length]."""
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, config().vocab_size, (batch, length)).astype(np.int32)


def prefilled(length: int = 5, dtype: str | None = "float32", seed: int = 4) -> Any:
    """A state of BATCH rows with CAPACITY that holds ``length`` random tokens each."""
    _, state = model(dtype).prefill(tokens(length, seed=seed), max_length=CAPACITY, logits="none")
    return state


def bits(array: Any) -> bytes:
    """The bytes of an array, for bit equality (-0 and NaN included)."""
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_bit_equal(got: Any, want: Any, what: str = "") -> None:
    """Fail unless two trees have the same structure, dtypes, shapes and bits."""
    import jax

    a, tree_a = jax.tree_util.tree_flatten_with_path(got)
    b, tree_b = jax.tree_util.tree_flatten_with_path(want)
    if tree_a != tree_b:
        raise AssertionError(f"{what}: structures differ: {tree_a} and {tree_b}")
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = what + jax.tree_util.keystr(path)
        if x.dtype != y.dtype or x.shape != y.shape:
            raise AssertionError(f"{name}: {x.dtype}{x.shape} and {y.dtype}{y.shape}")
        if bits(x) != bits(y):
            different = np.asarray(x).astype(np.float64) != np.asarray(y).astype(np.float64)
            raise AssertionError(f"{name}: {int(different.sum())} of {different.size} entries differ")


def row_of(state: Any, row: int) -> list[np.ndarray]:
    """Every array of one row of a state, on the host."""
    import jax

    return [np.asarray(leaf)[row] for leaf in jax.tree.leaves(state)]


def assert_row_bit_equal(got: Any, row: int, want: Any, want_row: int | None = None) -> None:
    """Fail unless a row of one state is bit for bit a row of another."""
    want_row = row if want_row is None else want_row
    for i, (x, y) in enumerate(zip(row_of(got, row), row_of(want, want_row), strict=True)):
        if bits(x) != bits(y):
            raise AssertionError(f"leaf {i} of row {row} changed")
