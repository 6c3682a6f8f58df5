"""What an implementation of the decode step needs, and what of it is missing: all reasons at once."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.implementations import KNOWN
from k3jax.mesh.plan import MeshPlan

from . import ffi
from .artifacts import ArtifactError, Key, find, load
from .compile import compiler_problem
from .decode_megakernel.shapes import Plan, Target, plan_faults
from .fit import device_problems, kernel_reasons, nearest_plan
from .pack import PACKED, packing_problems
from .step import target_of


def supports(
    config: K3Config,
    device: Any = None,
    batch: int = 1,
    *,
    implementation: str = "megakernel",
    dtype: Any = jnp.bfloat16,
    ways: int = 1,
    params: Mapping[str, Any] | None = None,
    plan: MeshPlan | None = None,
) -> tuple[str, ...]:
    """Why an implementation cannot run a decode step; an empty tuple if it can.

    Args:
        config: the architecture.
        device: a jax device; None is the default one.
        batch: rows of the step, over all devices.
        implementation: one of the names of :mod:`k3jax.implementations` but "auto".
        dtype: compute dtype of the model.
        ways: tensor-parallel ranks that share the model, each expert's width cut by all; a rank runs on
            the device.
        params: a parameter tree; None leaves out what depends on it (its dtype, packed weights, MXFP4).
        plan: a mesh that the model lies on, in place of ``device`` and ``ways``; None is one device, or
            for "pallas" ``ways`` of them.

    Raises:
        ValueError: an unknown implementation; ways below 1, or with a plan, which has its own.
    """
    if implementation == "auto" or implementation not in KNOWN:
        names = ", ".join(name for name in KNOWN if name != "auto")
        raise ValueError(f"implementation: expected one of {names}, got {implementation!r}")
    if ways < 1 or (plan is not None and ways != 1):
        raise ValueError(f"ways: expected at least 1, and none with a plan, got {ways}")
    if implementation.startswith("megakernel") and plan is not None:
        return tuple(_planned(config, plan, batch, implementation, dtype, params))
    if implementation == "megakernel":
        return tuple(_megakernel(config, _device(device), batch, dtype, ways, params))
    if implementation == "megakernel-interpret":
        return tuple(plan_faults(config, batch, Target(), ways))
    if implementation.startswith("pallas"):
        if plan is None and ways != 1:
            plan = MeshPlan(data=1, tensor=ways)
        return tuple(_pallas(config, device, batch, implementation, dtype, params, plan))
    return () if plan is None else tuple(f"mesh: {fault}" for fault in plan.faults(config))


def first_reason(
    config: K3Config,
    device: Any,
    batch: int,
    params: Mapping[str, Any] | None,
    plan: MeshPlan | None = None,
) -> str | None:
    """Why "auto" is not the megakernel: the first of the reasons of :func:`supports`, or None."""
    if plan is not None:
        return f"mesh: over a plan only by its name, got a plan of {plan.num_devices} devices"
    return next(_megakernel(config, _device(device), batch, jnp.bfloat16, 1, params), None)


def _device(device: Any) -> Any:
    return jax.devices()[0] if device is None else device


def _pallas(
    config: K3Config, device: Any, batch: int, implementation: str, dtype: Any, params: Any, plan: Any
) -> Iterator[str]:
    name = "k3jax.pallas.step"
    if importlib.util.find_spec(name) is None:
        yield f"{name}: not part of this version of k3jax"
        return
    module = importlib.import_module(name)
    reasons: Callable[..., Any] = module.supports
    interpret = implementation == "pallas-interpret"
    yield from reasons(config, device, batch, dtype, interpret=interpret, params=params, plan=plan)


# -- the megakernel -------------------------------------------------------------------------------


def _megakernel(
    config: K3Config, device: Any, batch: int, dtype: Any, ways: int, params: Mapping[str, Any] | None
) -> Iterator[str]:
    arch, target, reasons = _target(device)
    yield from reasons
    yield from plan_faults(config, batch, target, ways)
    if params is None and jnp.dtype(dtype) != jnp.bfloat16:
        yield f"dtype: the megakernel computes in bfloat16, got {jnp.dtype(dtype)}"
    if params is not None:
        yield from packing_problems(params)
        if PACKED not in params:
            yield f"params[{PACKED!r}]: the weights are not packed; call Model.pack()"
    yield from _runtime()
    yield from kernel_reasons(config, batch, target, ways)
    yield from _compiled(nearest_plan(config, batch, target, ways), config, arch, device)


def _runtime() -> Iterator[str]:
    try:
        ffi.runtime_library()
    except FileNotFoundError as error:
        yield str(error)


def _planned(
    config: K3Config, plan: MeshPlan, batch: int, implementation: str, dtype: Any, params: Any
) -> Iterator[str]:
    """Reasons against the megakernel over a mesh."""
    from .planned import planned_problems, target_of_plan, ways_of

    try:
        devices = list(plan.mesh.devices.flat)
    except ValueError as error:  # fewer devices than the plan needs
        yield str(error)
        devices = []
    yield from planned_problems(config, plan, batch, params, implementation)
    if implementation != "megakernel":
        return
    if others := sorted({d.platform for d in devices} - {"gpu", "cuda"}):
        yield f"device: expected NVIDIA GPUs, got {', '.join(others)}"
    if params is None and jnp.dtype(dtype) != jnp.bfloat16:
        yield f"dtype: the megakernel computes in bfloat16, got {jnp.dtype(dtype)}"
    yield from _runtime()
    try:
        arch, target = target_of_plan(plan) if devices else ("sm_90a", Target())
    except NotImplementedError as error:
        yield str(error)
    else:
        share = nearest_plan(config, batch, target, *ways_of(plan))
        yield from _compiled(share, config, arch, devices[0] if devices else None)


def _target(device: Any) -> tuple[str, Target, list[str]]:
    """(architecture, SMs, what is wrong with the device)."""
    if device.platform != "gpu":
        return "sm_90a", Target(), [f"device: expected an NVIDIA GPU, got {device.platform}"]
    try:
        arch, target = target_of(device)
    except NotImplementedError as error:
        return "sm_90a", Target(), [str(error)]
    return arch, target, []


def _compiled(plan: Plan | None, config: K3Config, arch: str, device: Any) -> Iterator[str]:
    """No compiled kernel and no compiler, or one that does not fit an SM.

    Args:
        plan: the nearest one that there can be, if any: with other rows its kernel stands for all.
    """
    if plan is None or plan.config != config:
        return
    key = Key(plan, arch)
    path, compiler = find(key), compiler_problem()
    if path is None:
        if compiler is not None:
            yield f"kernel: {key.file_name} is not in the cache, and {compiler}"
        return
    try:
        artifact = load(path)
    except ArtifactError as error:
        if compiler is not None:
            yield f"kernel: {error}"
        return
    yield from device_problems(artifact, plan, arch, device)


__all__ = ["first_reason", "supports"]
