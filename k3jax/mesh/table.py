"""Bytes per device of a plan, from shapes and cuts alone: nothing is allocated, no device needed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..config import K3Config
from ..nnx_model import abstract_params
from .layout import param_specs
from .plan import EVERY, MeshPlan
from .states import planned_shapes, state_specs

HBM_BYTES = {"H200": 143_771 << 20, "GB300": 288 * 10**9}
"""Memory of a GPU: as its driver says for the H200, as sold for the GB300."""

_KINDS = (
    ("routed experts", ("experts",)),
    ("placement maps", ("placement",)),
    ("attention", ("self_attn",)),
    ("shared expert, router, latent", ("block_sparse_moe",)),
    ("dense FFN", ("mlp",)),
    ("embedding and head", ("embed_tokens", "lm_head")),
)


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes that one device of a plan holds, by kind.

    Attributes:
        weights: kind -> bytes.
        state: kind -> bytes, for the batch and context asked for.
    """

    weights: dict[str, int]
    state: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + sum(self.state.values())


def _pieces(plan: MeshPlan, where: PartitionSpec) -> int:
    sizes: dict[Any, int] = dict(zip(EVERY, plan.shape, strict=True))
    cut = 1
    for entry in where:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        cut *= math.prod(sizes[axis] for axis in axes)
    return cut


def _kind(path: Any) -> str:
    names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
    return next((kind for kind, of in _KINDS if names & set(of)), "norms and AttnRes")


def device_bytes(plan: MeshPlan, config: K3Config, batch: int, context: int) -> DeviceBytes:
    """Bytes per device for ``batch`` rows that can hold ``context`` tokens each.

    Raises:
        ValueError: the plan does not fit ``config``, or a number is out of range.
    """
    plan.check(config)
    places = plan.placements(config)
    specs = param_specs(config)
    weights: dict[str, int] = {}

    def add(kind: str, size: int) -> None:
        weights[kind] = weights.get(kind, 0) + size

    plain = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    cuts = {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_leaves_with_path(specs)}
    for path, leaf in plain:
        shape, where = leaf.shape, cuts[jax.tree_util.keystr(path)]
        kind = _kind(path)
        if kind == "routed experts":
            shape = (len(places[0].experts), *shape[1:])
        add(kind, math.prod(shape) * np.dtype(leaf.dtype).itemsize // _pieces(plan, where))
    copies = max((int(place.copies.max()) for place in places), default=0)
    add("placement maps", len(places) * config.num_experts * (copies + 1) * 4)
    shapes = planned_shapes(config, plan, batch, context, jnp.bfloat16)
    held = {"KDA states": 0, "latent cache": 0}
    for layer, cut in zip(shapes.layers, state_specs(config, plan, context).layers, strict=True):
        for name, leaf in layer.items():
            size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // _pieces(plan, cut[name])
            held["latent cache" if name == "cache" else "KDA states"] += size
    return DeviceBytes(weights, held)


def table(plan: MeshPlan, config: K3Config, batch: int = 1, context: int = 8192) -> str:
    """The plan in words, bytes per device by kind, how experts are dispatched, and which GPUs it fits."""
    found = device_bytes(plan, config, batch, context)
    place = plan.placements(config)[0] if config.num_moe_layers else None
    lines = [str(plan)]
    if place is not None:
        spare = len(place.experts) - config.num_experts
        lines.append(
            f"experts: {config.num_experts} in {len(place.experts)} slots, {place.slots_per_rank} a rank, "
            f"{spare} of them replicas"
        )
        lines.append(f"dispatch of {plan.padded(batch)} rows: {plan.choice(config, plan.padded(batch))}")
    lines.append(f"bytes per device, {batch} rows of up to {context} tokens:")
    for kind, size in [*found.weights.items(), *found.state.items(), ("total", found.total)]:
        lines.append(f"  {kind:<30} {size:>18,}")
    for gpu, size in HBM_BYTES.items():
        verdict = "fits" if found.total <= size else "does not fit"
        lines.append(f"  {verdict} {gpu} ({size:,} bytes): {found.total / size:.0%}, work space apart")
    return "\n".join(lines)


__all__ = ["HBM_BYTES", "DeviceBytes", "device_bytes", "table"]
