"""Whether a plan fits the kernel's tiles and an SM's resources."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from .decode_megakernel.resources import resource_problems
from .decode_megakernel.schedule import build
from .decode_megakernel.shapes import Plan

_CONSTRAINTS = "k3jax.custom_calls.decode_megakernel.kernel.constraints"
_MOST = 5


@functools.lru_cache(maxsize=32)
def plan_reasons(plan: Plan) -> tuple[str, ...]:
    """Why the megakernel cannot be compiled for a plan; empty if it can."""
    found: list[str] = []
    if importlib.util.find_spec(_CONSTRAINTS) is not None:
        found += importlib.import_module(_CONSTRAINTS).reasons(plan)
    if not found:
        found += list(resource_problems(build(plan)))[:_MOST]
    return tuple(found)


__all__ = ["plan_reasons"]
