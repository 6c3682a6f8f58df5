"""Arrays put on devices in blocks: what is read is what the devices of this process need, once.

Host memory: at most two blocks of ``BLOCK_BYTES`` are alive (one on its way to the device while
the next is read), and one more, twice as wide, where bfloat16 is widened to float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from k3jax.axes import auto_mesh, partition_spec
from k3jax.config import K3Config
from k3jax.mesh import MeshPlan
from k3jax.mesh.layout import param_specs, placement_leaves
from k3jax.mesh.transfer import put
from k3jax.quant import MXFP4

from . import names
from .safetensors_file import Box

BLOCK_BYTES = 256 << 20
"""Largest part of an array that is read at a time."""


class Shardings:
    """The sharding of each leaf under a plan, on a mesh, or on the default device when there is none.

    Raises:
        ValueError: the plan does not fit the architecture.
    """

    def __init__(self, config: K3Config, mesh: Mesh | MeshPlan | None):
        from k3jax.model import param_axes

        self._config = config
        self._plan = mesh if isinstance(mesh, MeshPlan) else None
        self._mesh = None if mesh is None else mesh.mesh if isinstance(mesh, MeshPlan) else auto_mesh(mesh)
        self._axes = dict(names.leaves(param_axes(config)))
        if self._plan is not None:
            self._plan.check(config)
            self._specs = dict(names.leaves(param_specs(config)))
            self._placements = self._plan.placements(config)

    def __call__(self, path: names.Path_, shape: tuple[int, ...], half: str | None = None) -> Sharding:
        """Sharding of the array of ``shape`` at ``path``; ``half`` is "codes" or "scales" if packed."""
        if self._mesh is None:
            device = jax.config.jax_default_device
            return SingleDeviceSharding(device if isinstance(device, jax.Device) else jax.local_devices()[0])
        if self._plan is not None:
            spec = self._specs[path]
            return NamedSharding(self._mesh, spec.codes if isinstance(spec, MXFP4) else spec)
        axes = self._axes[path]
        if isinstance(axes, MXFP4):
            axes = axes.scales if half == "scales" else axes.codes
        return NamedSharding(self._mesh, partition_spec(self._config, self._mesh, axes, shape))

    def slots(self, path: names.Path_) -> tuple[int, ...] | None:
        """Under a plan the expert in each physical slot of an expert leaf; None for any other leaf."""
        if self._plan is None or "experts" not in path:
            return None
        return self._placements[int(path[1]) - self._config.first_k_dense_replace].experts

    def with_placement(self, params: Any) -> Any:
        """``params`` with the placement maps of a plan, where there is one."""
        if self._plan is None:
            return params
        whole = self._plan.sharding()
        for i, table in enumerate(placement_leaves(self._config, self._plan)):
            layer = params["layers"][self._config.first_k_dense_replace + i]["block_sparse_moe"]
            layer["placement"] = {name: put(value, whole) for name, value in table.items()}
        return params


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """The distinct parts of an array that this process needs, and the devices of each."""
    found: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
        found.setdefault(box, []).append(device)
    return found


def _row_ranges(boxes: list[Box], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of axis 0, at most ``rows`` long, none of which crosses the edge of a box."""
    edges = sorted({edge for box in boxes for edge in (box[0].start, box[0].stop)})
    for start, stop in itertools.pairwise(edges):
        if any(box[0].start <= start and stop <= box[0].stop for box in boxes):
            for first in range(start, stop, rows):
                yield first, min(first + rows, stop)


def _hull(boxes: list[Box]) -> Box:
    """The smallest box around all."""
    return tuple(
        slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*boxes, strict=True)
    )


def _within(box: Box, hull: Box) -> Box:
    """``box`` counted from the start of ``hull``."""
    return tuple(slice(s.start - h.start, s.stop - h.start) for s, h in zip(box, hull, strict=True))


def needed_bytes(shape: tuple[int, ...], itemsize: int, sharding: Sharding) -> int:
    """Bytes of an array that this process has to read."""
    boxes = _boxes(sharding, shape)
    return itemsize * sum(int(np.prod([s.stop - s.start for s in box])) for box in boxes)


@functools.partial(jax.jit, donate_argnums=0)
def _write(buffer: jax.Array, block: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, block, row, axis=0)


def place(
    read: Callable[[Box], np.ndarray],
    shape: tuple[int, ...],
    dtype: Any,
    sharding: Sharding,
    *,
    block_bytes: int = BLOCK_BYTES,
    on_read: Callable[[int], Any] = lambda _: None,
) -> jax.Array:
    """An array on the devices of ``sharding``, read block by block.

    Args:
        read: gives the values of a box.
        shape: of the whole array.
        dtype: of the result; what is read is cast to it.
        on_read: called with the bytes of each block read.
    """
    boxes = _boxes(sharding, shape)
    row_bytes = max(int(np.prod(shape[1:])) * np.dtype(dtype).itemsize, 1)
    parts: dict[Any, jax.Array] = {}
    last: list[jax.Array] = []
    for start, stop in _row_ranges(list(boxes), max(block_bytes // row_bytes, 1)):
        wanted = [box for box in boxes if box[0].start <= start and stop <= box[0].stop]
        hull = (slice(start, stop), *_hull([box[1:] for box in wanted]))
        block = read(hull)
        on_read(block.nbytes)
        block = block.astype(dtype, copy=False)
        jax.block_until_ready(last)
        last = []
        for box in wanted:
            part = block[(slice(None), *_within(box[1:], hull[1:]))]
            for device in boxes[box]:
                piece = jax.device_put(part, device)
                if (start, stop) != (box[0].start, box[0].stop):
                    if device not in parts:
                        parts[device] = jnp.zeros([s.stop - s.start for s in box], dtype, device=device)
                    piece = _write(parts[device], piece, jnp.int32(start - box[0].start))
                parts[device] = piece
                last.append(piece)
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts.values()), dtype=dtype)
