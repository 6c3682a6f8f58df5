"""The read ceiling of this machine, measured in the same run as the steps.

A reduction compiled by XLA reads at 75 to 90 % of it, so a kernel that does nothing but read is timed:
the one in a file that ``jax.export`` wrote, or :mod:`k3jax.pallas.read`.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

READ_BYTES = 2 << 30
"""Read per call of the Pallas kernel: 40 times the L2 cache."""
CALLS, ROUNDS = 10, 7
"""In flight in a round, 20 GB and more: the time of a dispatch is nothing beside it."""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Bytes per second, None if there is none to compare with; where it is from; how to measure it again."""

    rate: float | None
    source: str
    again: Callable[[], float] | None = None

    def after(self) -> Ceiling:
        """The higher of this and a second measurement, where there was one: one has come out 5 % low."""
        if self.rate is None or self.again is None:
            return self
        before = f"{self.rate * 1e-12:.3f} before the steps"
        try:
            second = self.again()
        except RuntimeError as error:  # the weights are there now; what was measured must not be lost
            reason = str(error).partition("\n")[0]
            return Ceiling(self.rate, f"{self.source}: {before}, not measured after them: {reason}")
        found = f"{before}, {second * 1e-12:.3f} after them"
        return Ceiling(max(self.rate, second), f"{self.source}: {found}")


def ceiling_of(wanted: str, read_kernel: str | os.PathLike[str] | None = None) -> Ceiling:
    """The ceiling that the command line asks for.

    Args:
        wanted: "measured", or a number in TB/s.
        read_kernel: file of a program exported by ``jax.export`` that reads its one array.

    Raises:
        ValueError: neither, or a number and a file; FileNotFoundError: no such file.
    """
    if wanted != "measured":
        try:
            rate = float(wanted)
        except ValueError:
            rate = float("nan")
        if not 0 < rate < float("inf"):
            raise ValueError(f"ceiling: expected 'measured' or a rate in TB/s, got {wanted!r}")
        if read_kernel is not None:
            raise ValueError(f"read_kernel: only where the ceiling is measured, got the ceiling {wanted}")
        return Ceiling(rate * 1e12, "given")
    if read_kernel is not None:
        return _exported(Path(read_kernel))
    from ..pallas._launch import device_reasons

    if reasons := device_reasons():
        return Ceiling(None, f"not measured: {'; '.join(reasons)}")
    from ..pallas.read import COLUMNS, read

    shape, kernel = (READ_BYTES // 4 // COLUMNS, COLUMNS), jax.jit(read)
    return _measured(lambda: _rate(kernel, _random(shape)), "Pallas TMA read kernel")


def _measured(measure: Callable[[], float], kernel: str) -> Ceiling:
    return Ceiling(measure(), f"measured in this run, {kernel}", measure)


def _exported(path: Path) -> Ceiling:
    if not path.is_file():
        raise FileNotFoundError(f"read_kernel: no file {path}")
    if jax.default_backend() != "gpu":
        return Ceiling(None, f"not measured: {path.name} runs on a GPU, jax has {jax.default_backend()}")
    from jax import export

    from ..custom_calls import ffi

    ffi.register()
    program = export.deserialize(bytearray(path.read_bytes()))
    (operand,) = program.in_avals
    kernel = jax.jit(program.call)
    return _measured(lambda: _rate(kernel, _random(operand.shape)), f"exported read kernel {path.name}")


@partial(jax.jit, static_argnums=0)
def _random(shape: tuple[int, ...]) -> jax.Array:
    """int32 of random bits: what a memory full of weights looks like."""
    return jax.random.bits(jax.random.key(1), shape, jnp.uint32).view(jnp.int32)


def _rate(read: Callable[[jax.Array], Any], numbers: jax.Array) -> float:
    """Bytes per second, the median of rounds of several calls in flight."""
    jax.block_until_ready(read(numbers))
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([read(numbers) for _ in range(CALLS)])
        rates.append(CALLS * numbers.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


__all__ = ["Ceiling", "ceiling_of"]
