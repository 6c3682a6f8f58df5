"""Loading a checkpoint of either format onto a device or a mesh."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from k3jax.config import K3Config
from k3jax.mesh import MeshPlan
from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError
from .load_report import LoadReport, Stopwatch, peak_host_bytes
from .manifest import is_orbax_dir, parts
from .place import BLOCK_BYTES, Shardings, needed_bytes, place
from .plan import Plan, preflight
from .release_files import is_release_dir
from .safetensors_file import Reader
from .sources import Readable, ScaleSource


def check_dtype(dtype: Any) -> None:
    if dtype not in (None, "float32"):
        raise ValueError(f"dtype: expected None (released dtypes) or 'float32', got {dtype!r}")


def load(
    path: str | os.PathLike[str],
    dtype: str | None = None,
    mesh: Mesh | MeshPlan | None = None,
    progress: bool = True,
) -> tuple[Any, K3Config]:
    """(params, config) of a checkpoint directory; see :func:`load_params`."""
    params, config, _ = load_params(path, None, dtype, mesh, progress)
    return params, config


def load_params(
    path: str | os.PathLike[str],
    config: K3Config | None = None,
    dtype: str | None = None,
    mesh: Mesh | MeshPlan | None = None,
    progress: bool = True,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Any, K3Config, LoadReport]:
    """The parameters of a checkpoint directory, release format or converted.

    Every leaf is filled exactly once and every tensor used once or reported as skipped. On a mesh
    each process reads the byte ranges its devices need, each once. Host memory stays within three
    blocks of ``block_bytes`` beyond what the devices hold (release format), or one leaf (Orbax).

    Args:
        path: the directory.
        config: architecture to insist on; None takes that of the checkpoint.
        dtype: None for the released dtypes; "float32" widens float leaves, packed ones stay.
        mesh: a plan, or devices to spread the parameters over; None is the default device. Under a plan
            experts are in its physical slots, and every MoE layer also has its ``placement``.
        progress: a bar on stderr where that is a terminal, and the report at the end.
        block_bytes: largest part of a tensor read at a time (release format).

    Returns:
        (params, config, report); ``config.kda_a_log_size`` is the stored length of A_log.

    Raises:
        CheckpointError: anything wrong with the files, named; found before allocation except for
            scale bytes that the compute dtype cannot decode exactly.
        FileNotFoundError: not a checkpoint directory.
    """
    check_dtype(dtype)
    folder = Path(path)
    watch = Stopwatch()
    if is_orbax_dir(folder):
        from .orbax_load import load_orbax

        params, config, amount, skipped = load_orbax(folder, config, dtype, mesh, progress)
        arrays = len(jax.tree.leaves(params))
        counts = ("orbax", arrays, arrays, amount)
    elif is_release_dir(folder):
        plan = preflight(folder, config)
        params, amount = _load_release(plan, dtype, mesh, progress, block_bytes)
        config, skipped = plan.config, plan.skipped
        counts = ("release", len(plan.arrays()), plan.tensors, amount)
    else:
        raise FileNotFoundError(f"path: expected a checkpoint of either format, got {folder}")
    jax.block_until_ready(params)
    report = LoadReport(str(folder), *counts, watch.seconds, peak_host_bytes(), skipped)
    if progress:
        print(report, file=sys.stderr)
    return params, config, report


def _load_release(
    plan: Plan, dtype: str | None, mesh: Mesh | MeshPlan | None, progress: bool, block: int
) -> tuple[Any, int]:
    from k3jax.model import abstract_params

    config, compute = plan.config, dtype or "bfloat16"
    sharding = Shardings(config, mesh)
    total = sum(needed_bytes(source.shape, source.dtype.itemsize, s) for source, s in _arrays(plan, sharding))
    with (
        Reader() as reader,
        tqdm(total=total, unit="B", unit_scale=True, desc="load", disable=None if progress else True) as bar,
    ):

        def array(source: Readable, where: Any) -> jax.Array:
            wide = dtype == "float32" and source.dtype != np.uint8
            kind = np.dtype(np.float32) if wide else source.dtype
            read = lambda box: source.read(reader, box)  # noqa: E731
            return place(read, source.shape, kind, where, block_bytes=block, on_read=bar.update)

        def leaf(path: names.Path_, _: Any) -> Any:
            source = _in_slots(plan.leaves[path], sharding.slots(path))
            if not isinstance(source, MXFP4):
                return array(source, sharding(path, source.shape))
            checked = ScaleSource(source, compute)
            return MXFP4(
                codes=array(source.codes, sharding(path, source.codes.shape, "codes")),
                scales=array(checked, sharding(path, checked.shape, "scales")),
            )

        params = names.map_leaves(leaf, abstract_params(config))
        if reader.bytes_read < total:
            raise CheckpointError(plan.path, [f"read {reader.bytes_read} of {total} bytes"])
        return sharding.with_placement(params), reader.bytes_read


def _in_slots(leaf: Any, experts: tuple[int, ...] | None) -> Any:
    """A leaf's sources in the order of a plan's slots."""
    if isinstance(leaf, MXFP4):
        return MXFP4(leaf.codes.in_slots(experts), leaf.scales.in_slots(experts))
    return leaf.in_slots(experts)


def _arrays(plan: Plan, sharding: Shardings) -> list[tuple[Any, Any]]:
    found = []
    for path, leaf in plan.leaves.items():
        for half, array in parts(_in_slots(leaf, sharding.slots(path))).items():
            found.append((array, sharding(path, array.shape, half or None)))
    return found
