"""An interpreted kernel under ``jax.shard_map``: every device interprets alone, one after another.

Pallas's GPU interpreter keeps one memory for all devices of a process. Where several run a kernel at
once it takes a device's barriers for leftovers of another (jax 0.11.2, 0.12.0.1). Here the host runs
the kernel for one device at a time, outside the mesh: the kernels hand nothing between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

# One thread: one kernel at a time, and one set of jax's thread-local settings, hence one compilation.
_interpreting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="k3jax-interpreter")


def under_mesh() -> bool:
    """Whether what is traced now runs once per device of a mesh."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def run_apart(kernel: Callable[..., Any], inputs: Sequence[Any], out_type: Any) -> Any:
    """``kernel(*inputs)`` in a program of its own on the host's CPU.

    Args:
        kernel: an interpreted kernel.
        inputs: arrays, and refs that it updates in place.
        out_type: shape and dtype of its result, or a tuple of them.
    """
    held = [isinstance(x, jax.Ref) for x in inputs]
    values = [x[...] if is_ref else x for x, is_ref in zip(inputs, held, strict=True)]

    @jax.jit
    def program(*values: jax.Array) -> tuple[Any, list[jax.Array]]:
        given = [jax.new_ref(v) if is_ref else v for v, is_ref in zip(values, held, strict=True)]
        out = kernel(*given)
        return out, [jax.freeze(g) for g in given if isinstance(g, jax.Ref)]

    def alone(*values: np.ndarray) -> Any:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, program(*values))

    def host(*values: Any) -> Any:
        return _interpreting.submit(alone, *map(np.asarray, values)).result()

    refs = [x for x, is_ref in zip(inputs, held, strict=True) if is_ref]
    new_types = [
        jax.ShapeDtypeStruct(v.shape, v.dtype) for v, is_ref in zip(values, held, strict=True) if is_ref
    ]
    out, new = jax.pure_callback(host, (out_type, new_types), *values)
    for ref, value in zip(refs, new, strict=True):
        ref[...] = as_varying(value, axes_of(ref))
    return out


def axes_of(x: Any) -> frozenset[Any]:
    """Mesh axes over which an array, or a ref's array, differs from device to device."""
    return jax.typeof(x).manual_axis_type.varying


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """``x``, said to differ over ``axes`` too."""
    missing = tuple(sorted(axes - axes_of(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


__all__ = ["as_varying", "axes_of", "run_apart", "under_mesh"]
