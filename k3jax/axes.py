"""The one table of axis names: letters in the code, logical axes, and the mesh axes they map to.

Letters used in einsum strings, jaxtyping annotations and comments::

    B batch      T new tokens   S cached tokens  D hidden       W vocabulary
    N heads      K key dim      V value dim      Q q-lora rank  C kv-lora rank  R shared key piece
    E experts    A active       F expert width   L latent       J AttnRes sources

Every parameter carries one logical axis name per dimension (:class:`Axes`); a mesh axis takes
the logical axes of its role. The roles follow from the mesh axis' name, see ``ROLES``. This is for a
mesh that you made, where the compiler places the communication; :mod:`k3jax.mesh` plans one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from .config import K3Config
    from .state import State

ROLES: dict[str, str] = {
    "data": "data", "dp": "data", "batch": "data",
    "expert": "expert", "experts": "expert", "ep": "expert",
    "tensor": "tensor", "tp": "tensor", "model": "tensor",
}  # fmt: skip
"""Mesh axis name -> role. A mesh axis of any other name serves as "expert" and "tensor" both."""

# Which roles may split a logical axis. What is not listed is whole on every device.
_SPLIT_BY: dict[str, tuple[str, ...]] = {
    "batch": ("data",),
    "expert": ("expert", "any"),
    "kda_heads": ("tensor", "any"),
    "mla_heads": ("tensor", "any"),
    "width": ("tensor", "any"),
    "latent": ("tensor", "any"),
    "vocab": ("tensor", "any"),
}


@dataclasses.dataclass(frozen=True)
class Axes:
    """Logical axis names of one array, a leaf of the tree of ``param_axes``; None is unnamed."""

    names: tuple[str | None, ...]


def auto_mesh(mesh: Mesh) -> Mesh:
    """``mesh`` with every axis of type Auto: the compiler propagates our shardings.

    Raises:
        TypeError: not a ``jax.sharding.Mesh``.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh: expected a k3jax.mesh.MeshPlan, a jax.sharding.Mesh or None, got {type(mesh).__name__}"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _units(config: K3Config, name: str, size: int) -> int:
    """Pieces into which a dimension may be cut: whole heads, not channels inside a head."""
    return {"kda_heads": config.kda_num_heads, "mla_heads": config.num_attention_heads}.get(name, size)


def partition_spec(config: K3Config, mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    """Where ``mesh`` cuts an array of ``shape``: each mesh axis at most once, only even cuts."""
    taken: set[str] = set()
    entries: list[Any] = []
    for name, size in zip(axes.names, shape, strict=True):
        chosen: list[str] = []
        pieces = 1
        for mesh_axis, extent in mesh.shape.items():
            role = ROLES.get(mesh_axis, "any")
            if name is None or mesh_axis in taken or extent == 1 or role not in _SPLIT_BY.get(name, ()):
                continue
            units = _units(config, name, size)
            if units % (pieces * extent) or size % (pieces * extent):
                continue
            chosen.append(mesh_axis)
            pieces *= extent
        taken.update(chosen)
        entries.append(tuple(chosen) if len(chosen) > 1 else (chosen[0] if chosen else None))
    return PartitionSpec(*entries)


def param_shardings(config: K3Config, mesh: Mesh) -> Any:
    """The parameter tree with a ``NamedSharding`` for each array.

    A dimension that a mesh axis does not divide is whole on each device of that axis.
    """
    from .model import abstract_params, param_axes

    mesh = auto_mesh(mesh)
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(mesh, partition_spec(config, mesh, axes, leaf.shape)),
        abstract_params(config),
        param_axes(config),
    )


def state_shardings(config: K3Config, mesh: Mesh, state: State) -> State:
    """``state`` (arrays or shapes) with a ``NamedSharding`` for each: by batch and by KDA heads."""
    from .state import state_axes

    mesh = auto_mesh(mesh)
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(mesh, partition_spec(config, mesh, axes, leaf.shape)),
        state,
        state_axes(config, state.max_length),
    )


__all__ = ["ROLES", "Axes", "auto_mesh", "param_shardings", "partition_spec", "state_shardings"]
