"""The oracle data in tests/data/case_a: a tiny K3 in the released format and its recorded run.

``reference`` was recorded from a float32 run, ``float64`` from a float64 evaluation.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from support.reference_weights import Arch, load_tensors, weight_tree

CASE_A = Path(__file__).resolve().parents[1] / "data" / "case_a"
NUM_LAYERS = 9
MLA_LAYERS = (3, 7, 8)
KDA_LAYERS = (0, 1, 2, 4, 5, 6)
MOE_LAYERS = tuple(range(1, NUM_LAYERS))


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """Stored tensors, names without prefix. Do not change them in place: they are shared."""
    return load_tensors(CASE_A / "model.safetensors")


@functools.cache
def arch() -> Arch:
    return Arch.from_json(CASE_A / "config.json")


@functools.cache
def weights() -> dict[str, Any]:
    """The weights as the float64 reference takes them."""
    return weight_tree(tensors(), arch())


@functools.cache
def reference() -> dict[str, np.ndarray]:
    with np.load(CASE_A / "reference.npz") as data:
        return dict(data)


@functools.cache
def float64() -> dict[str, np.ndarray]:
    with np.load(CASE_A / "float64.npz") as data:
        return dict(data)


@functools.cache
def config() -> Any:
    """The K3Config of the case. A_log is stored eight long for four heads, which only the file tells."""
    from k3jax.config import K3Config

    return dataclasses.replace(K3Config.from_pretrained(CASE_A), kda_a_log_size=8)


def tap(layer: int, name: str, phase: str = "prefill") -> np.ndarray:
    """A recorded intermediate of one layer, its rows as [B,T,...] for flattened ones too."""
    value = reference()[f"{phase}/L{layer}/{name}"]
    batch, length = reference()[f"{phase}/embed"].shape[:2]
    return value if value.shape[:2] == (batch, length) else value.reshape(batch, length, *value.shape[1:])


def conv_history(layer: int, phase: str = "cache_prefill") -> np.ndarray:
    """Recorded last three raw conv inputs [B,3,q|k|v channels], oldest first.

    The record keeps four slots, of which the oldest is not part of the window.
    """
    parts = [reference()[f"{phase}/L{layer}/conv_{p}"] for p in "qkv"]
    return np.concatenate(parts, 1).transpose(0, 2, 1)[:, 1:]
