"""Small checkpoints on disk for tests of loading, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from support.random_k3 import random_config, random_tensors, write_checkpoint
from support.reference_weights import PREFIX

Tensors = dict[str, np.ndarray]


def small_config(**overrides: Any) -> Any:
    """Three layers with a dense FFN, two LatentMoEs, both attentions; A_log stored 8 long for 4 heads."""
    fields = {
        "layer_types": ("kda", "mla", "kda"),
        "first_k_dense_replace": 1,
        "kda_num_heads": 4,
        "kda_a_log_size": 8,
        "num_experts": 8,
        "num_experts_per_token": 2,
    }
    return random_config(3, **(fields | overrides))


def write_small(
    path: Path,
    change: Callable[[Tensors], Any] = lambda _: None,
    config: Any = None,
    **options: Any,
) -> tuple[Any, Tensors]:
    """Write a small checkpoint after ``change`` has edited its tensors in place.

    Returns:
        (config, tensors): names without prefix.
    """
    config = config or small_config()
    tensors = random_tensors(config, 5)
    change(tensors)
    write_checkpoint(path, config, tensors, **options)
    return config, tensors


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    change(tree)
    path.write_text(json.dumps(tree), encoding="utf-8")


def edit_shard(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Rewrite one file without touching the index."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def retag(path: Path, names: Iterable[str], dtype: str) -> None:
    """Give tensors of one file another dtype of the same width, bytes unchanged."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in names:
        header[PREFIX + name]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def bytes_of(array: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_same_arrays(got: Any, want: Any) -> None:
    """Trees of equal structure whose arrays have equal dtype, shape and bytes."""
    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    want_leaves, want_tree = jax.tree.flatten_with_path(want)
    if got_tree != want_tree:
        raise AssertionError(f"trees differ: got {got_tree}, want {want_tree}")
    if not got_leaves:
        raise AssertionError("nothing to compare")
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise AssertionError(f"{where}: got {a.dtype}{a.shape}, want {b.dtype}{b.shape}")
        if bytes_of(a) != bytes_of(b):
            raise AssertionError(f"{where}: values differ")
