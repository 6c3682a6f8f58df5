"""Buffers of an interpreted step: poisoned until written, one lifetime at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..buffers import Kind
from ..schedule import Schedule
from ..shapes import ROW_GROUP, Plan


class ForbiddenAccessError(RuntimeError):
    """An instruction touched what it did not declare, or a lifetime that is over."""


def _inner_shapes(p: Plan) -> dict[str, tuple[int, ...]]:
    """Shape of one unit of every buffer that the interpreter holds; a column of all rows if not named."""
    taps = p.config.short_conv_kernel_size - 1
    return {
        "score": (p.B, p.max_sources, 2),
        "kda.y": (p.V,),
        "mla.row": (p.C + p.R,),
        "mla.part": (p.mla_heads // p.head_groups, p.C + 2),
        "hid": (ROW_GROUP, p.B),
        "ey": (ROW_GROUP, p.B),
        "shared.0": (ROW_GROUP, p.B),
        "shared.1": (ROW_GROUP, p.B),
        "best": (p.B, 2),
        "token": (),
        "lengths": (),
        "status": (),
        "S": (p.V, p.K),
        "conv": (taps, 2 * p.K + p.V),
        "cache": (p.C + p.R,),
        "route": (p.B, p.A + 1, 2 if p.ways == 1 else 3),
    }


class Memory:
    """Values of all buffers but the weights, with the lifetime each holds.

    Numbers are float32, already rounded to what the buffer stores; NaN is "not written". ``route``
    holds (expert id, weight) per row and rank and, at rank A, how many slots are in use; in a share also
    the expert's place on the rank, -1 for an expert that another rank serves.
    """

    def __init__(self, schedule: Schedule):
        plan = schedule.plan
        inner = _inner_shapes(plan)
        self.version: dict[str, int] = {}
        self.state: set[str] = set()
        self.values: dict[str, np.ndarray] = {}
        for name, buffer in schedule.buffers.items():
            if name.startswith(("w.", "old.")):
                continue
            shape = inner.get(name, inner.get(name.split(".", 1)[0], (plan.B,)))
            self.values[name] = np.full((buffer.units, *shape), np.nan, np.float32)
            if buffer.kind is Kind.STATE:
                self.state.add(name)

    def load_state(self, name: str, value: Any) -> None:
        """Set a state buffer to what it holds when the step begins."""
        value = np.asarray(value, dtype=np.float64 if name in ("lengths", "status") else np.float32)
        if value.shape != self.values[name].shape:
            raise ValueError(f"{name}: expected {self.values[name].shape}, got {value.shape}")
        self.values[name] = value.copy()
        self.version[name] = 0

    def read(self, name: str, version: int, lo: int, hi: int) -> np.ndarray:
        """A copy of units ``lo .. hi``.

        Raises:
            ForbiddenAccessError: the buffer does not hold this lifetime.
        """
        if name not in self.state and self.version.get(name) != version:
            raise ForbiddenAccessError(f"{name}: holds v{self.version.get(name)}, v{version} was to be read")
        return self.values[name][lo:hi].copy()

    def write(self, name: str, version: int, lo: int, value: np.ndarray) -> None:
        """Store units from ``lo`` on; the first write of a lifetime poisons the rest of the buffer."""
        held = self.version.get(name, -1)
        if version < held:
            raise ForbiddenAccessError(f"{name}: holds v{held}, v{version} was to be written")
        if version > held:
            if name not in self.state:
                self.values[name].fill(np.nan)
            self.version[name] = version
        self.values[name][lo : lo + len(value)] = value


__all__ = ["ForbiddenAccessError", "Memory"]
