"""What every kernel here shares: how it is launched, where it may run, and how it says no.

An op is a package: ``__init__`` with the public function, its plain ``reference`` and ``supports``;
``kernel`` with the Mosaic GPU body; ``configs``, a leaf, with tile sizes as data and the rule that
picks them. The public function has the same arguments as the reference, then keyword-only
``interpret: Interpret = False`` and ``sms: int | None = None``::

    def op(x, w, *, interpret=False, sms=None):
        require("op", supports(x.shape, w.shape))
        return launch(body, (x, w), out_type=..., scratch_types=..., ctas=sm_count(interpret, sms),
                      warpgroups=1, interpret=interpret)

A kernel body runs on ``ctas`` thread blocks, axis "cta", of ``warpgroups`` Pallas threads (one is
128 CUDA threads), axis "wg". The interpreter runs CTAs one after another and warpgroups at once;
it has no semaphores and no atomics, so kernels here hand data from CTA to CTA only through the
next launch. The interpreter does not show every race of the GPU: see :func:`per_warpgroup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

# Interpreting a kernel imports it, and its import adds a setting to the key of all of jax's caches: what
# had been traced and compiled until then would be once more.
import jax.experimental.pallas.fuser
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._apart import as_varying, axes_of, run_apart, under_mesh

Interpret = bool | plgpu.InterpretGPUParams
"""False compiles for the GPU; True interprets on the CPU; parameters interpret with race detection."""

H200_SMS = 132
"""Streaming multiprocessors of the GPU that the configs are chosen for."""

INTERPRETED_SMS = 3
"""CTAs in the interpreter, which runs them in turn: enough for uneven splits of small matrices."""

SHARED_MEMORY = 232448 - 2048
"""Bytes of shared memory a CTA may plan for on sm_90a; the rest is left to barriers and reductions."""


def launch(
    body: Callable[..., None],
    inputs: Sequence[Any],
    *,
    out_type: Any,
    scratch_types: Any,
    ctas: int,
    warpgroups: int = 1,
    interpret: Interpret = False,
    name: str | None = None,
    compiler_params: plgpu.CompilerParams | None = None,
    out_axes: Sequence[frozenset[Any]] | None = None,
) -> Any:
    """Run ``body(*inputs, *outputs, *scratch)`` on every CTA; refs of inputs and outputs are in GMEM.

    Args:
        inputs: arrays, or refs (``jax.new_ref``) to update in place.
        out_type: shape and dtype of the result, or a tuple of them.
        scratch_types: shared memory and barriers of a CTA; a mapping is passed by keyword.
        ctas: thread blocks, at most one wave.
        warpgroups: Pallas threads per block.
        out_axes: under ``jax.shard_map``, the mesh axes over which each result differs from device to
            device; None is those of all inputs together. Results that do not differ must be equal bit
            for bit.
    """
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        interpret=_interpreter(interpret),
        compiler_params=compiler_params,
        kernel_name=name,
    )
    out = run_apart(kernel, inputs, out_type) if interpret and under_mesh() else kernel(*inputs)
    # Pallas knows no mesh: of its results' types JAX believes that no device has others.
    leaves, tree = jax.tree.flatten(out)
    axes = out_axes or [frozenset[Any]().union(*map(axes_of, inputs))] * len(leaves)
    return jax.tree.unflatten(tree, [as_varying(x, a) for x, a in zip(leaves, axes, strict=True)])


def per_warpgroup(count: int, do: Callable[[int], None]) -> None:
    """Run ``do(i)`` on warpgroup i of ``count``, so that each may reduce over its 128 threads.

    Mosaic GPU (0.11, 0.12) reduces through scratch behind the shared memory in use where the
    reduction stands, and synchronises one warpgroup only: two warpgroups that run the same
    reduction corrupt each other. Here warpgroup i stands i allocations deep, hence has its own.
    Barriers inside ``do`` must be met by all warpgroups, as anywhere.
    """
    if count == 1:
        do(0)
        return
    wg = lax.axis_index("wg")

    def level(i: int) -> None:
        if i + 1 < count:
            spacer = plgpu.SMEM((32,), jnp.int32)
            pl.run_scoped(lambda _: level(i + 1), spacer, collective_axes="wg")
        # After the deeper level: entering one waits for the whole CTA.
        pl.when(wg == i)(lambda: do(i))

    level(0)


def _interpreter(interpret: Interpret) -> plgpu.InterpretGPUParams | bool:
    return plgpu.InterpretGPUParams() if interpret is True else interpret


def sm_count(interpret: Interpret = False, sms: int | None = None) -> int:
    """CTAs of one wave: ``sms`` if given, the interpreter's few, or the device's SMs.

    Lowered for CUDA on a host without one, the count is that of an H200.

    Raises:
        ValueError: ``sms`` below 1.
    """
    if sms is not None:
        if sms < 1:
            raise ValueError(f"sms: expected at least 1, got {sms}")
        return sms
    if interpret:
        return INTERPRETED_SMS
    device = next((d for d in jax.local_devices() if d.platform == "gpu"), None)
    return H200_SMS if device is None else int(device.core_count)


def device_reasons(device: Any = None) -> tuple[str, ...]:
    """Why compiled kernels cannot run on ``device`` (default: the first local one); () if they can."""
    device = jax.local_devices()[0] if device is None else device  # Any: jax.Device is no type
    if device.platform != "gpu":
        return (f"device: expected an NVIDIA GPU of compute capability 9.0, got {device.platform}",)
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return (f"device: expected compute capability 9.0 (Hopper), got {capability}",)
    return ()


def require(op: str, reasons: Sequence[str]) -> None:
    """Raise NotImplementedError with all ``reasons`` at once; nothing if there is none."""
    if reasons:
        raise NotImplementedError(f"{op}: " + "; ".join(reasons))


def batch_reasons(batch: int) -> tuple[str, ...]:
    """Why kernels for a padded group of 8 tokens do not take ``batch`` rows."""
    return () if 1 <= batch <= 8 else (f"batch: expected 1..8 rows, got {batch}",)


__all__ = [
    "H200_SMS",
    "INTERPRETED_SMS",
    "SHARED_MEMORY",
    "Interpret",
    "batch_reasons",
    "device_reasons",
    "launch",
    "per_warpgroup",
    "require",
    "sm_count",
]
