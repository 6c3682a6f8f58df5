"""From training's float32 parameters to a checkpoint in the release's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoints import names
from k3jax.checkpoints.writer import write_release
from k3jax.config import K3Config
from k3jax.quant import quantize

from .step import compute_params


def released_params(master: Any, config: K3Config, *, packed: bool) -> Any:
    """The tree in the released dtypes: experts packed as MXFP4, or float32 as they were trained.

    Args:
        master: float32 leaves, experts as float arrays [E, out, in].
    """
    rounded = dict(names.leaves(compute_params(master, config, False)))

    def leaf(path: names.Path_, value: Any) -> Any:
        if "experts" not in path:
            return rounded[path]
        return _pack(value) if packed else jnp.asarray(value, jnp.float32)

    return names.map_leaves(leaf, master)


def packed_params(params: Any) -> Any:
    """A released tree with float experts, its experts rounded to MXFP4 and nothing else changed."""
    return names.map_leaves(lambda path, leaf: _pack(leaf) if "experts" in path else leaf, params)


def _pack(leaf: Any) -> Any:
    return jax.tree.map(jnp.asarray, quantize(np.asarray(leaf)))


def write_checkpoint(path: Path, master: Any, config: K3Config, *, packed: bool) -> None:
    """Write ``master`` as a checkpoint in the release's format; see :func:`released_params`."""
    write_release(path, config, released_params(master, config, packed=packed))
