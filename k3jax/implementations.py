"""Names of the ways to run a decode step, and which of them run here."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import K3Config
    from .mesh import MeshPlan
    from .state import State

AVAILABLE = ("xla", "pallas", "pallas-interpret", "megakernel", "megakernel-interpret")
KNOWN = ("auto", *AVAILABLE)
ALWAYS = ("auto", "xla", "megakernel-interpret")
"""Those that run anywhere, the last one without a plan."""

_PALLAS_STEP = "k3jax.pallas.step"
_log = logging.getLogger("k3jax")
_logged: set[str] = set()


def resolve(implementation: str) -> str:
    """The implementation that ``implementation`` names; "auto" without a model to choose for is "xla".

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a name this version of the library does not hold.
    """
    if implementation == "auto":
        return "xla"
    if implementation not in KNOWN:
        raise ValueError(f"implementation: expected one of {', '.join(KNOWN)}, got {implementation!r}")
    if implementation.startswith("pallas") and importlib.util.find_spec(_PALLAS_STEP) is None:
        raise not_here(implementation, ("k3jax.pallas.step: not part of this version of k3jax",))
    return implementation


def choose(
    implementation: str,
    config: K3Config,
    batch: int = 1,
    params: Mapping[str, Any] | None = None,
    device: Any = None,
    plan: MeshPlan | None = None,
) -> str:
    """The implementation for a batch of a model on a device, or on those of a plan.

    "auto" is "megakernel" where it is supported, else "xla": then one line says why not, once a process
    for each reason (logger "k3jax", level INFO; the first reason, ``k3jax.supports`` has all). A name
    other than "auto" stands if it can run.

    Args:
        params: a parameter tree, looked at for dtype and packed weights; None leaves that out.
        device: a jax device; None is the default one.
        plan: how the model lies on many devices; None is one device. "auto" over one is "xla".

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a name that cannot run here, with every reason.
    """
    from .custom_calls import support  # it knows the kernels' modules; only where it is asked

    if implementation == "auto":
        reason = support.first_reason(config, device, batch, params, plan)
        if reason is None:
            return "megakernel"
        if reason not in _logged:
            _logged.add(reason)
            _log.info("decode steps run as 'xla', not as 'megakernel': %s", reason)
        return "xla"
    name = resolve(implementation)
    if name == "xla" or (name == "megakernel-interpret" and plan is None):
        return name
    reasons = support.supports(config, device, batch, implementation=name, params=params, plan=plan)
    if reasons:
        raise not_here(name, reasons, ALWAYS if plan is None else ALWAYS[:2])
    return name


def choose_on(implementation: str, config: K3Config, mesh: Any) -> None:
    """Raise unless a name but "auto" can run over a :class:`k3jax.mesh.MeshPlan`; other meshes pass.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: every reason.
    """
    from .mesh import MeshPlan

    name = resolve(implementation)
    if isinstance(mesh, MeshPlan) and implementation != "auto":
        choose(name, config, plan=mesh)


def of_step(implementation: str, config: K3Config, state: State, params: Mapping[str, Any]) -> str:
    """The implementation of one step; "auto" takes the megakernel only for a state made for it."""
    if implementation == "auto" and state.kernel is not None:
        return choose(implementation, config, state.batch, params)
    return resolve(implementation)


def decode_step_of(name: str) -> Callable[..., Any]:
    """``(params, state, tokens, live, config, tap) -> (logits, state)`` of an implementation but "xla"."""
    if name == "megakernel":
        from .custom_calls.step import decode_step
    elif name == "megakernel-interpret":
        from .custom_calls.interpret import decode_step
    else:
        step = importlib.import_module(_PALLAS_STEP).decode_step
        return functools.partial(_pallas, step, name == "pallas-interpret")
    return decode_step


def planned_step_of(name: str) -> Callable[..., Any]:
    """``(local, params, routing) -> a device's step`` of a Pallas implementation."""
    step = importlib.import_module("k3jax.pallas.planned").planned_step
    return functools.partial(step, interpret=name == "pallas-interpret")


def _pallas(
    step: Any, interpret: bool, params: Any, state: Any, tokens: Any, live: Any, config: Any, tap: Any
) -> Any:
    if tap is not None:
        raise NotImplementedError("tap: implementation 'pallas' shows no intermediate values")
    return step(params, state, tokens, live, config, interpret=interpret)


def step_inputs(model: Any, batch: int) -> tuple[Mapping[str, Any], str]:
    """Parameters and implementation of a decode step of ``batch`` rows of a :class:`k3jax.Model`."""
    name: str = model.implementation
    if name != "megakernel":
        packed = model.mesh is not None and "megakernel" in model.params
        return (
            {n: x for n, x in model.params.items() if n != "megakernel"} if packed else model.params
        ), name
    from .custom_calls.step import MAX_BATCH, operands_only

    if batch > MAX_BATCH and model.auto:
        return model.params, "xla"
    return operands_only(model.params), name


def not_here(
    implementation: str, reasons: Sequence[str], available: Sequence[str] = ALWAYS
) -> NotImplementedError:
    """The error for an implementation that cannot run, with every reason."""
    return NotImplementedError(
        f"implementation {implementation!r} is not available here: {'; '.join(reasons)}; "
        f"available: {', '.join(available)}"
    )


__all__ = [
    "AVAILABLE", "KNOWN", "choose", "choose_on", "decode_step_of", "not_here", "of_step", "planned_step_of",
    "resolve", "step_inputs",
]  # fmt: skip
