"""What is compared: compiled decode steps with the parameters and the state that each takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax

from ..api import Model
from ..custom_calls.support import supports
from ..model import decode_step
from ..state import State

Step = Callable[[Any, State, jax.Array], tuple[jax.Array, State]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One form of an implementation.

    Attributes:
        implementation, form: as in :class:`k3jax.bench.Timing`.
        step: compiled ``(params, state, tokens) -> (logits, state)``; the state is donated.
        params: what it reads.
        adopt: makes its own copy of a state, with what the implementation adds to one.
    """

    implementation: str
    form: str
    step: Step
    params: Any
    adopt: Callable[[State], State]


def contenders(
    model: Model, names: tuple[str, ...], batch: int
) -> Iterator[Contender | tuple[str, tuple[str, ...]]]:
    """The forms of each implementation, or its name and why it cannot run.

    Args:
        model: an "xla" model; it is packed if the megakernel runs.
        batch: rows of a step.
    """
    for name in names:
        reasons = supports(model.config, batch=batch, implementation=name, dtype=model.dtype)
        if not reasons and name == "megakernel":
            model.pack()
            reasons = supports(model.config, batch=batch, implementation=name, params=model.params)
        if reasons:
            yield name, tuple(reasons)
            continue
        yield from _forms(model, name)


def _forms(model: Model, name: str) -> Iterator[Contender]:
    params: Any = {k: v for k, v in model.params.items() if k != "megakernel"}
    adopt: Callable[[State], State] = copy_of
    if name == "megakernel":
        from ..custom_calls.step import operands_only, with_kernel

        params = operands_only(model.params)
        adopt = partial(_copy_with_kernel, with_kernel, model)
    for form, options in _options(name):
        yield Contender(name, form, _compiled(model, name, options), params, adopt)


def _options(name: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Compiler options worth trying: XLA's own matrix products depend on one."""
    if name != "xla" or jax.default_backend() != "gpu":
        return (("", {}),)
    return tuple(
        (f"triton_gemm={'on' if on else 'off'}", {"xla_gpu_enable_triton_gemm": on}) for on in (True, False)
    )


def _compiled(model: Model, name: str, options: Mapping[str, Any]) -> Step:
    def step(params: Any, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        return decode_step(params, state, tokens, config=model.config, implementation=name)

    return jax.jit(step, donate_argnums=1, compiler_options=dict(options) or None)


def copy_of(state: State) -> State:
    """The same numbers in buffers of their own."""
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def _copy_with_kernel(with_kernel: Callable[..., State], model: Model, state: State) -> State:
    return with_kernel(copy_of(state), model.config)


__all__ = ["Contender", "Step", "contenders", "copy_of"]
