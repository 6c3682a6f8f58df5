"""The parameter tree of a plan: what it holds, how each array is cut, and how to make it.

It is the model's tree with two changes in every MoE layer: ``experts`` has physical slots where
the model has experts, and ``placement`` holds the map from experts to slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..axes import Axes
from ..config import K3Config
from ..nnx_model import abstract_params, param_axes
from ..quant import MXFP4
from .placement import Placement
from .plan import EVERY, MeshPlan, spec
from .transfer import put

MOE = "block_sparse_moe"
# Which dimension of an expert weight is F: its rows for gate and up, its columns for down.
_EXPERT_AXES = {
    "w1": ("expert", "expert_width", None),
    "w3": ("expert", "expert_width", None),
    "w2": ("expert", None, "expert_width"),
}


def expert_axes(name: str) -> tuple[str | None, ...]:
    """Logical axes of the expert weight ``name`` under a plan."""
    return _EXPERT_AXES[name]


def param_specs(config: K3Config) -> dict[str, Any]:
    """The plan's parameter tree with a ``PartitionSpec`` for each array."""
    tree = jax.tree.map(lambda axes: spec(*axes.names), param_axes(config), is_leaf=_is_axes)

    def experts(node: dict[str, Any], layer: int) -> dict[str, Any]:
        packed = {name: spec(*expert_axes(name)) for name in node["experts"]}
        tables = {"slots": PartitionSpec(), "copies": PartitionSpec()}
        return node | {"experts": {n: MXFP4(s, s) for n, s in packed.items()}, "placement": tables}

    return _map_moe(tree, experts)


def match_specs(specs: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """``specs`` for a tree whose experts may be float arrays instead of packed ones."""
    return jax.tree.map(
        lambda s, p: s.codes if isinstance(s, MXFP4) and not isinstance(p, MXFP4) else s,
        specs, params, is_leaf=lambda x: isinstance(x, (MXFP4, PartitionSpec)),
    )  # fmt: skip


def planned_params(config: K3Config, plan: MeshPlan, dtype: str | None = None) -> dict[str, Any]:
    """The plan's parameter tree as ``jax.ShapeDtypeStruct`` with shardings: nothing is allocated."""
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(plan.mesh, s)
        ),
        _shapes(config, plan, dtype), param_specs(config),
    )  # fmt: skip


def device_params(config: K3Config, plan: MeshPlan) -> dict[str, Any]:
    """One device's part of the plan's parameter tree as ``jax.ShapeDtypeStruct``; no device is needed."""
    extents: dict[Any, int] = dict(zip(EVERY, plan.shape, strict=True))

    def part(leaf: jax.ShapeDtypeStruct, where: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        for i, entry in enumerate(where):
            shape[i] //= math.prod(extents[a] for a in ((entry,) if isinstance(entry, str) else entry or ()))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.map(part, _shapes(config, plan, None), param_specs(config))


def _shapes(config: K3Config, plan: MeshPlan, dtype: str | None) -> dict[str, Any]:
    places = plan.placements(config)
    width = table_width(places)

    def experts(node: dict[str, Any], layer: int) -> dict[str, Any]:
        slots = len(places[layer - config.first_k_dense_replace].experts)
        resized = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((slots, *leaf.shape[1:]), leaf.dtype), node["experts"]
        )
        tables = {
            "slots": jax.ShapeDtypeStruct((config.num_experts, width), jnp.int32),
            "copies": jax.ShapeDtypeStruct((config.num_experts,), jnp.int32),
        }
        return node | {"experts": resized, "placement": tables}

    return _map_moe(abstract_params(config, dtype), experts)


def table_width(places: tuple[Placement, ...]) -> int:
    """Columns of the slot tables: one width for all layers, so that they share compiled code."""
    return max((int(place.copies.max()) for place in places), default=1)


def placement_leaves(config: K3Config, plan: MeshPlan) -> list[dict[str, np.ndarray]]:
    """The ``placement`` leaves of each MoE layer, on the host."""
    places = plan.placements(config)
    width = table_width(places)
    return [{"slots": place.slot_table(width), "copies": place.copies} for place in places]


def arrange(params: Mapping[str, Any], config: K3Config, plan: MeshPlan) -> dict[str, Any]:
    """The model's parameter tree, held by one host, laid out by ``plan``.

    Args:
        params: see :func:`k3jax.prefill`; experts packed or float.

    Raises:
        ValueError: the plan does not fit ``config``.
    """
    plan.check(config)
    places, tables = plan.placements(config), placement_leaves(config, plan)

    def experts(node: dict[str, Any], layer: int) -> dict[str, Any]:
        index = layer - config.first_k_dense_replace
        order = np.asarray(places[index].experts)
        moved = jax.tree.map(lambda leaf: np.asarray(leaf)[order], node["experts"])
        return node | {"experts": moved, "placement": tables[index]}

    tree = _map_moe(dict(params), experts)
    specs = match_specs(param_specs(config), tree)
    return jax.tree.map(lambda leaf, s: put(np.asarray(leaf), NamedSharding(plan.mesh, s)), tree, specs)


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)


def _map_moe(tree: Mapping[str, Any], change: Callable[[dict[str, Any], int], Any]) -> dict[str, Any]:
    """``tree`` with ``change(node, layer)`` for the LatentMoE node of each layer that has one."""
    layers = [
        {**layer, MOE: change(dict(layer[MOE]), i)} if MOE in layer else layer
        for i, layer in enumerate(tree["layers"])
    ]
    return {**tree, "layers": layers}


__all__ = [
    "arrange", "device_params", "expert_axes", "match_specs", "param_specs", "placement_leaves",
    "planned_params", "table_width",
]  # fmt: skip
