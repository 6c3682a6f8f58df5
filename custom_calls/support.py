"""What an implementation of the decode step needs, and what of it is missing: all reasons at once."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.implementations import KNOWN
from k3jax.mesh import MeshPlan

from . import ffi
from .artifacts import ArtifactError, Key, find, load
from .compile import compiler_problem
from .decode_megakernel.resources import most_registers
from .decode_megakernel.shapes import Plan, Target
from .fit import plan_reasons
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
        ways: tensor-parallel ranks that share the model, without a plan.
        params: a parameter tree; None leaves out what depends on it (its dtype, packed weights, MXFP4).
        plan: how the model lies on many devices; None is one device, or ``ways`` of them.

    Raises:
        ValueError: an unknown implementation; ways below 1, or with a plan, which has its own.
    """
    if implementation == "auto" or implementation not in KNOWN:
        names = ", ".join(name for name in KNOWN if name != "auto")
        raise ValueError(f"implementation: expected one of {names}, got {implementation!r}")
    if ways < 1 or (plan is not None and ways != 1):
        raise ValueError(f"ways: expected at least 1, and none with a plan, got {ways}")
    if implementation.startswith("pallas"):
        if plan is None and ways != 1:
            plan = MeshPlan(data=1, tensor=ways)
        return tuple(_pallas(config, device, batch, implementation, dtype, params, plan))
    reasons = () if plan is None else tuple(f"mesh: {fault}" for fault in plan.faults(config))
    if implementation == "megakernel":
        own = _megakernel(config, _device(device), batch, dtype, ways, params)
        return (*reasons, *_one_device(plan), *own)
    if implementation == "megakernel-interpret":
        return (*reasons, *_one_device(plan), *_plan(config, batch, Target(), ways)[1])
    return reasons


def first_reason(
    config: K3Config,
    device: Any,
    batch: int,
    params: Mapping[str, Any] | None,
    plan: MeshPlan | None = None,
) -> str | None:
    """The first of the reasons of :func:`supports` against the megakernel, or None; looks no further."""
    own = _megakernel(config, _device(device), batch, jnp.bfloat16, 1, params)
    return next(itertools.chain(_one_device(plan), own), None)


def _one_device(plan: MeshPlan | None) -> Iterator[str]:
    if plan is not None:
        yield f"mesh: the megakernel runs on one device without a plan, got one of {plan.num_devices}"


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
    plan, reasons = _plan(config, batch, target, ways)
    yield from reasons
    if ways != 1 and plan is not None:
        yield f"ways: the step of a share ({ways} ways) needs exchanges that this version has not"
    if params is None and jnp.dtype(dtype) != jnp.bfloat16:
        yield f"dtype: the megakernel computes in bfloat16, got {jnp.dtype(dtype)}"
    if params is not None:
        yield from packing_problems(params)
        if PACKED not in params:
            yield f"params[{PACKED!r}]: the weights are not packed; call Model.pack()"
    try:
        ffi.runtime_library()
    except FileNotFoundError as error:
        yield str(error)
    if plan is not None:
        yield from plan_reasons(plan)
        yield from _compiled(plan, arch, device)


def _target(device: Any) -> tuple[str, Target, list[str]]:
    """(architecture, SMs, what is wrong with the device)."""
    if device.platform != "gpu":
        return "sm_90a", Target(), [f"device: expected an NVIDIA GPU, got {device.platform}"]
    try:
        arch, target = target_of(device)
    except NotImplementedError as error:
        return "sm_90a", Target(), [str(error)]
    return arch, target, []


def _plan(config: K3Config, batch: int, target: Target, ways: int) -> tuple[Plan | None, list[str]]:
    try:
        return Plan(config, batch, target, ways), []
    except ValueError as error:
        return None, [str(error)]


def _compiled(plan: Plan, arch: str, device: Any) -> Iterator[str]:
    """No compiled kernel and no compiler, or one that does not fit an SM."""
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
    registers, most = artifact.about["registers"], most_registers(plan.target)
    if registers > most:
        yield f"occupancy: the kernel takes {registers} registers a thread, an SM has {most}"
    shared = getattr(device, "shared_memory_per_block_optin", None)
    if shared is not None and shared < plan.target.shared_bytes:
        yield f"occupancy: a block takes {plan.target.shared_bytes} bytes of shared memory, got {shared}"


__all__ = ["first_reason", "supports"]
