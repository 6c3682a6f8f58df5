"""The decode state of a plan: KDA by heads and rows, the latent cache by rows (and positions).

A KDA layer's convolution taps are three arrays, ``conv_q``, ``conv_k`` and ``conv_v``, where the
model has one: each is cut by heads, and a state of one kind can never be taken for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..config import K3Config
from ..state import State, abstract_state
from .plan import MeshPlan, spec
from .transfer import host, put

CONV = ("conv_q", "conv_k", "conv_v")


def _edges(config: K3Config) -> list[int]:
    return [config.kda_key_size, 2 * config.kda_key_size]


def split_conv(layer: Mapping[str, Any], config: K3Config) -> dict[str, Any]:
    """A KDA layer's state with its taps as three arrays."""
    parts = jnp.split(layer["conv"], _edges(config), axis=-1)
    return {"S": layer["S"], **dict(zip(CONV, parts, strict=True))}


def join_conv(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`split_conv`."""
    return {"S": layer["S"], "conv": jnp.concatenate([layer[name] for name in CONV], axis=-1)}


def planned_shapes(config: K3Config, plan: MeshPlan, rows: int, max_length: int, dtype: Any) -> State:
    """Shapes and dtypes of a state of ``rows`` rows, padded to a multiple of the data axis.

    Args:
        dtype: the model's compute dtype.

    Raises:
        ValueError: rows or max_length out of range.
    """
    plain = abstract_state(config, plan.padded(rows), max_length, dtype)

    def layer(node: Mapping[str, Any]) -> Mapping[str, Any]:
        return jax.eval_shape(lambda x: split_conv(x, config), node) if "conv" in node else node

    return State(tuple(map(layer, plain.layers)), plain.lengths, plain.status, max_length)


def state_specs(config: K3Config, plan: MeshPlan, max_length: int) -> State:
    """A state with a ``PartitionSpec`` for each array."""
    cache = spec("batch", "sequence" if plan.split_sequence else None, None)

    def layer(kind: str) -> dict[str, Any]:
        if kind == "mla":
            return {"cache": cache}
        taps = dict.fromkeys(CONV, spec("batch", None, "kda_heads"))
        return {"S": spec("batch", "kda_heads", None, None), **taps}

    vector: Any = spec("batch")
    return State(tuple(layer(kind) for kind in config.layer_types), vector, vector, max_length)


def state_shardings(config: K3Config, plan: MeshPlan, max_length: int) -> State:
    """A state with a ``NamedSharding`` for each array."""
    return jax.tree.map(
        lambda s: NamedSharding(plan.mesh, s),
        state_specs(config, plan, max_length),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def planned_state(config: K3Config, plan: MeshPlan, rows: int, max_length: int, dtype: Any) -> State:
    """A state of empty rows on the plan's devices, all zeros."""
    shapes = planned_shapes(config, plan, rows, max_length, dtype)
    return _made(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), config, plan, shapes
    )


def _made(make: Any, config: K3Config, plan: MeshPlan, like: State, *args: Any) -> State:
    """The state that ``make`` returns, made on the plan's devices."""
    shardings = jax.tree.leaves(state_shardings(config, plan, like.max_length))
    leaves = jax.jit(lambda *args: jax.tree.leaves(make(*args)), out_shardings=shardings)(*args)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check_planned(config: K3Config, plan: MeshPlan, state: State, dtype: Any, kernel: bool = False) -> None:
    """Raise ValueError unless ``state`` is one of this plan: its layers, shapes and dtypes.

    Args:
        kernel: the step carries the kernel's leaves along.
    """
    if state.batch < 1 or state.batch % plan.data:
        raise ValueError(f"state: expected a multiple of data={plan.data} rows, got {state.batch}")
    if state.kernel is not None and not kernel:
        raise ValueError(
            "state.kernel: expected None, as this step under a plan runs without the kernel; "
            "drop it with dataclasses.replace(state, kernel=None)"
        )
    want = planned_shapes(config, plan, state.batch, state.max_length, dtype)
    if len(state.layers) != len(want.layers):
        raise ValueError(f"state: expected {len(want.layers)} layers, got {len(state.layers)}")
    for i, (have, expected) in enumerate(zip(state.layers, want.layers, strict=True)):
        if set(have) != set(expected):
            raise ValueError(
                f"state: layer {i}: expected {sorted(expected)}, as a plan's state has it, got {sorted(have)}"
            )
        for name, leaf in expected.items():
            if have[name].shape != leaf.shape or have[name].dtype != leaf.dtype:
                raise ValueError(
                    f"state: layer {i}, {name}: expected {leaf.dtype} {list(leaf.shape)}, "
                    f"got {have[name].dtype} {list(have[name].shape)}"
                )


def to_plan(state: State, config: K3Config, plan: MeshPlan) -> State:
    """A state of one device, laid out by ``plan``; rows are padded with empty ones."""
    state.ensure_usable()
    extra = plan.padded(state.batch) - state.batch

    def padded(array: Any) -> np.ndarray:
        host = np.asarray(array)
        return np.pad(host, [(0, extra)] + [(0, 0)] * (host.ndim - 1))

    layers = tuple(split_conv(x, config) if "conv" in x else dict(x) for x in state.layers)
    tree = State(layers, state.lengths, state.status, state.max_length)
    shardings = state_shardings(config, plan, state.max_length)
    return jax.tree.map(lambda leaf, s: put(padded(leaf), s), tree, shardings)


def from_plan(state: State, rows: int | None = None) -> State:
    """A plan's state as one of the model's on the default device: its first ``rows`` rows, or all."""
    state.ensure_usable()
    count = state.batch if rows is None else rows
    if not 1 <= count <= state.batch:
        raise ValueError(f"rows: expected 1..{state.batch}, got {rows}")
    layers = tuple(join_conv(x) if "conv_q" in x else dict(x) for x in state.layers)
    tree = State(layers, state.lengths, state.status, state.max_length)
    return jax.tree.map(lambda leaf: jnp.asarray(host(leaf)[:count]), tree)


def fit_rows(state: State, rows: int, config: K3Config, plan: MeshPlan) -> State:
    """A plan's state for ``rows`` rows: itself, or with padding where rows had been selected.

    Raises:
        ValueError: a state of another number of rows.
    """
    wanted = plan.padded(rows)
    if state.batch == wanted:
        return state
    if state.batch != rows:
        raise ValueError(
            f"tokens: expected as many rows as the state has, {state.batch} (data={plan.data} pads), "
            f"got {rows}"
        )

    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, wanted - rows)] + [(0, 0)] * (array.ndim - 1))

    return _made(lambda tree: jax.tree.map(pad, tree), config, plan, state, state)


__all__ = [
    "CONV", "check_planned", "fit_rows", "from_plan", "join_conv", "planned_shapes", "planned_state",
    "split_conv", "state_shardings", "state_specs", "to_plan",
]  # fmt: skip
