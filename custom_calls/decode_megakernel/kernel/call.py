"""The kernel as one XLA custom call on JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutlass.jax import cutlass_call

from ..operands import ALIASED, abstract_results
from .entry import launch
from .geometry import Geometry


def call(geometry: Geometry, operands: Mapping[str, Any]) -> dict[str, Any]:
    """One decode step: the tree of ``operands.abstract_operands`` to that of ``abstract_results``."""
    results = abstract_results(geometry.plan, operands)
    moving = {name: operands[name] for name in ALIASED}
    fixed = {name: operands[name] for name in operands if name not in ALIASED}
    fresh = {name: leaf for name, leaf in results.items() if name not in ALIASED}
    run = cutlass_call(
        launch,
        output_shape_dtype=({name: results[name] for name in ALIASED}, fresh),
        input_output_aliases={1: 0},
        use_static_tensors=True,
        geo=geometry,
    )
    updated, new = run(fixed, moving)
    return updated | new


__all__ = ["call"]
