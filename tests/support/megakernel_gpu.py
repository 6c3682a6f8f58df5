"""Launching the decode megakernel on an NVIDIA GPU: whole steps, parts of a step, and what they leave.

A launch takes a state, and leaves the given one alone. Its workspace and its new results begin as NaN, so
nothing is right by what lay there before. A step can be stopped after a sublayer: every SM's program is
cut there, and the workspace then shows that sublayer's fields.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import K3Config
from k3jax.custom_calls import ffi, step
from k3jax.custom_calls.compile import obtain
from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.operands import FAULT_FIELDS, abstract_results, workspace_bytes
from k3jax.custom_calls.decode_megakernel.schedule import Schedule
from k3jax.custom_calls.decode_megakernel.stages import sublayer
from k3jax.custom_calls.tables import LaunchTables, launch_tables
from k3jax.state import CACHE_BLOCK, State, abstract_state

from .megakernel_cases import KernelCase

NAN_BITS = 0x7FC07FC0
"""A word that is NaN as float32 and as two bfloat16, and a large number as int32."""
REPORT: list[str] = []
"""Lines that tests/gpu/conftest.py prints at the end."""


def report(line: str) -> None:
    """Show a figure at the end of the run."""
    REPORT.append(line)


@dataclasses.dataclass(frozen=True)
class Launched:
    """What a launch leaves.

    Attributes:
        logits: float32 [B, W]; token: int32 [B]; NaN and NAN_BITS where FINISH was not reached.
        state: the new state, with the kernel's leaves.
        fields: the workspace by field, device arrays.
    """

    logits: jax.Array
    token: jax.Array
    state: State
    fields: Mapping[str, jax.Array]

    @property
    def fault(self) -> dict[str, int] | None:
        """The fault record, or None."""
        kernel: Any = self.state.kernel
        words = np.asarray(kernel["fault"]).tolist()
        return dict(zip(FAULT_FIELDS, words, strict=False)) if words[0] else None


class Launcher:
    """A compiled kernel on a model's weights.

    Args:
        params: parameter tree with packed weights (``k3jax.custom_calls.pack.with_packed``).
        case: which kernel.
    """

    def __init__(self, params: Mapping[str, Any], case: KernelCase):
        ffi.register()
        self.case, self.plan = case, case.plan
        self.config: K3Config = self.plan.config
        self.artifact = obtain(case.key)
        self.tables: LaunchTables = launch_tables(self.plan)
        self.schedule: Schedule = self.tables.schedule
        self.geometry = Geometry(self.schedule, **dict(case.options))
        self.whole = params
        self._programs: dict[Any, Any] = {}
        self._params = step.operands_only(params)
        self._call = jax.jit(self._launch, donate_argnames=("state", "logits", "token"), keep_unused=True)
        self._fields = jax.jit(functools.partial(_cut, self.geometry.fields))

    def with_params(self, params: Mapping[str, Any]) -> Launcher:
        """The same compiled program on other weights of the same shapes."""
        other = object.__new__(Launcher)
        other.__dict__ = self.__dict__ | {"whole": params, "_params": step.operands_only(params)}
        return other

    def _launch(
        self,
        params: Any,
        state: State,
        logits: jax.Array,
        token: jax.Array,
        tokens: jax.Array,
        live: jax.Array,
        program: jax.Array,
        starts: jax.Array,
    ) -> tuple[State, jax.Array, jax.Array]:
        """``logits`` and ``token`` are only there to be overwritten by the results of their names."""
        operands = step.assemble(params, state, tokens, live, self.plan)
        operands |= {"program": program, "starts": starts}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        out = step.call(self.artifact, operands, abstract_results(self.plan, shapes))
        kernel = {name: out[name] for name in ("work", "epoch", "fault")}
        new = State(out["state"], out["lengths"], out["status"], state.max_length, kernel)
        return new, out["logits"], out["token"]

    # -- inputs --

    def kernel_leaves(self, epoch: int = 0) -> dict[str, jax.Array]:
        """``State.kernel`` whose workspace is NaN but for the hand-off counters, which are 0."""
        words = workspace_bytes(self.plan, self.schedule.counters) // 4
        counters = self.geometry.fields["counters"]
        at = counters.offset // 4
        work = jnp.full(words, NAN_BITS, jnp.int32).at[at : at + counters.nbytes // 4].set(0)
        return {
            "work": work,
            "epoch": jnp.full(1, epoch, jnp.int32),
            "fault": jnp.zeros(16, jnp.int32),
        }

    def results(self) -> tuple[jax.Array, jax.Array]:
        """Buffers for the new results, NaN."""
        logits = jnp.full((self.plan.B, self.plan.W), jnp.nan, jnp.float32)
        return logits, jnp.full(self.plan.B, NAN_BITS, jnp.int32)

    def program(self, until: int | None, without: Collection[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The SMs' programs up to and with a sublayer, empty for the SMs in ``without``.

        Sublayer 2 l is layer l's attention, 2 l + 1 its feed-forward network, 2 layers the output.
        """
        tables = self.tables
        if until is None and not without:
            return tables.program, tables.starts
        last = 2 * self.plan.layers if until is None else until
        kept = np.array([sublayer(i.op, i.layer, i.c0) <= last for i in self.schedule.instructions])
        of_sm = np.repeat(np.arange(self.plan.sms), np.diff(tables.starts))
        here = kept[tables.program] & ~np.isin(of_sm, list(without))
        if here.all():
            raise ValueError(f"until, without: nothing is left out (until {until}, without {without})")
        # One entry before the first program: an SM without instructions reads the entry before its own.
        program = np.zeros_like(tables.program)
        program[1 : 1 + here.sum()] = tables.program[here]
        counts = np.bincount(of_sm[here], minlength=self.plan.sms)
        return program, np.concatenate([[1], 1 + np.cumsum(counts)]).astype(np.int32)

    # -- launches --

    def __call__(
        self,
        state: State,
        tokens: Sequence[int] | np.ndarray,
        active: Sequence[bool] | np.ndarray | None = None,
        *,
        until: int | None = None,
        without: Collection[int] = (),
        fields: bool = True,
    ) -> Launched:
        """A step of ``state``, which stays valid; kernel leaves are made where it has none."""
        kernel = self.kernel_leaves() if state.kernel is None else state.kernel
        own = dataclasses.replace(state, kernel=kernel)
        own = jax.tree.map(lambda x: jnp.array(x, copy=True), own)
        new, logits, token = self.launch(own, tokens, active, until=until, without=without)
        kernel_after: Any = new.kernel
        cut = self._fields(kernel_after["work"]) if fields else {}
        return Launched(logits, token, new, cut)

    def launch(
        self,
        own: State,
        tokens: Any,
        active: Any = None,
        *,
        until: int | None = None,
        without: Collection[int] = (),
        into: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[State, jax.Array, jax.Array]:
        """As a call, but takes ``own``'s buffers, and returns (state, logits, token).

        Args:
            into: buffers that become logits and token.
        """
        live = np.ones(self.plan.B, bool) if active is None else np.asarray(active, bool)
        which = (until, tuple(without))
        if which not in self._programs:
            self._programs[which] = jax.tree.map(jnp.asarray, self.program(until, without))
        logits, token = self.results() if into is None else into
        return self._call(
            self._params,
            own,
            logits,
            token,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(live),
            *self._programs[which],
        )


def _cut(fields: Mapping[str, Any], work: jax.Array) -> dict[str, jax.Array]:
    """The workspace's fields as arrays."""
    out = {}
    for name, field in fields.items():
        words = work[field.offset // 4 : field.offset // 4 + -(-field.nbytes // 4)]
        cast = lax.bitcast_convert_type(words, jnp.dtype(field.dtype)).reshape(-1)
        out[name] = cast[: int(np.prod(field.shape))].reshape(field.shape)
    return out


def host(tree: Any) -> Any:
    """A copy in numpy arrays."""
    return jax.tree.map(np.asarray, tree)


def last_sublayer(launcher: Launcher) -> int:
    """The sublayer of the output: final mixture, logits, token."""
    return 2 * launcher.plan.layers


def random_state(
    config: K3Config, lengths: Sequence[int], capacity: int, seed: int = 0, scale: float = 1.0
) -> State:
    """A state whose rows hold ``lengths`` tokens: normal numbers, cache rows past the end NaN.

    Args:
        capacity: most tokens of a row, rounded up to whole blocks of the cache.
    """
    capacity = -(-capacity // CACHE_BLOCK) * CACHE_BLOCK
    rng = np.random.default_rng(seed)
    layers = []
    for shapes in abstract_state(config, len(lengths), capacity, jnp.bfloat16).layers:
        layer = {}
        for name, leaf in shapes.items():
            value = scale * rng.standard_normal(leaf.shape, np.float32)
            if name == "cache":
                for b, length in enumerate(lengths):
                    value[b, length:] = np.nan
            layer[name] = jnp.asarray(value.astype(leaf.dtype))
        layers.append(layer)
    zero = jnp.zeros(len(lengths), jnp.int32)
    return State(tuple(layers), jnp.asarray(lengths, jnp.int32), zero, capacity)


def stage_names(launcher: Launcher, sub: int) -> list[str]:
    """Operations of a sublayer, in order."""
    named = dict.fromkeys(
        Op(i.op).name for i in launcher.schedule.instructions if sublayer(i.op, i.layer, i.c0) == sub
    )
    return list(named)


__all__ = [
    "NAN_BITS",
    "REPORT",
    "Launched",
    "Launcher",
    "host",
    "last_sublayer",
    "random_state",
    "report",
    "stage_names",
]
