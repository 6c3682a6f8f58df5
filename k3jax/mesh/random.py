"""Random weights laid out by a plan: those that the seed gives on one device."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..config import K3Config
from ..nnx_model import abstract_params
from ..random_params import _draw, _key, _kind, _maker
from ..sampling import seed_data
from .layout import MOE, param_specs, placement_leaves
from .plan import EXPERT_PARALLEL, INNER, MeshPlan
from .transfer import put


def random_planned(config: K3Config, plan: MeshPlan, seed: int = 0, dtype: str | None = None) -> Any:
    """As :func:`k3jax.random_params.random_params`, laid out by ``plan``; replicas are equal.

    A device draws the codes of its own experts only.

    Raises:
        ValueError: the plan does not fit ``config``.
    """
    plan.check(config)
    places, tables = plan.placements(config), placement_leaves(config, plan)
    root = jax.random.wrap_key_data(seed_data(seed, 1)[0], impl="threefry2x32")

    def leaf(path: Any, shape: jax.ShapeDtypeStruct, where: PartitionSpec) -> jax.Array:
        names = [_key(k) for k in path]
        key = jax.random.fold_in(root, zlib.crc32("/".join(names).encode()))
        kind, dtype = _kind(names), jnp.dtype(shape.dtype).name
        if "experts" not in names:
            return _maker(kind, shape.shape, dtype, NamedSharding(plan.mesh, where))(key)
        place = places[int(names[1]) - config.first_k_dense_replace]
        make = _expert_maker(kind, shape.shape, dtype, plan, where)
        return make(key, np.asarray(place.experts, np.int32))

    specs = param_specs(config)
    for layer in specs["layers"]:
        layer.get(MOE, {}).pop("placement", None)
    tree = jax.tree_util.tree_map_with_path(leaf, abstract_params(config, dtype), specs)
    whole = NamedSharding(plan.mesh, PartitionSpec())
    for i, table in enumerate(tables):
        node = tree["layers"][config.first_k_dense_replace + i][MOE]
        node["placement"] = {name: put(np.asarray(value), whole) for name, value in table.items()}
    return tree


@functools.lru_cache(maxsize=64)
def _expert_maker(
    kind: str, shape: tuple[int, ...], dtype: str, plan: MeshPlan, where: PartitionSpec
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """A compiled function from a key and the expert in each slot to one expert leaf.

    Args:
        shape: of the leaf with all experts, once each.
    """
    if kind == "codes":
        draw = jax.shard_map(
            functools.partial(_codes, shape=shape, where=where, ways=plan.expert_width),
            mesh=plan.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(EXPERT_PARALLEL)),
            out_specs=where,
        )
        return jax.jit(draw)
    target = NamedSharding(plan.mesh, where)
    return jax.jit(lambda key, order: _draw(key, kind, shape, dtype)[order], out_shardings=target)


def _codes(
    key: jax.Array, order: jax.Array, *, shape: tuple[int, ...], where: PartitionSpec, ways: int
) -> jax.Array:
    """Code bytes of this device's part of the experts in ``order``."""
    cut = next(i for i, axes in enumerate(where) if axes and INNER in axes)  # the dimension of F
    part = shape[cut] // ways
    first = lax.axis_index(INNER) * part

    def expert(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, shape[1:], jnp.uint8)
        return lax.dynamic_slice_in_dim(bits, first, part, axis=cut - 1)

    return lax.map(expert, jax.random.split(key, shape[0])[order])


__all__ = ["random_planned"]
