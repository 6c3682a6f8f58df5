"""Looking through a jaxpr, the jaxprs inside it included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a (closed) jaxpr and of the jaxprs its equations hold: loops, branches, calls."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                    yield from equations(inner)


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """All equations of ``function`` at these arguments; nothing is run."""
    return list(equations(jax.make_jaxpr(function)(*args, **kwargs)))


def outputs(eqns: list[Any]) -> list[Any]:
    """Shape and dtype of every value the equations produce."""
    return [var.aval for eqn in eqns for var in eqn.outvars if hasattr(var.aval, "shape")]
