"""The Pallas step over a :class:`k3jax.mesh.MeshPlan`: its launches between a plan's collectives.

Which collectives, and where, :mod:`k3jax.sharded_step` says. The partial sums of a sublayer are added
in float32, over its slots, its two output matrices and then its devices, and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import lax

from ..config import K3Config
from ..mesh.plan import TENSOR_PARALLEL
from ..mesh.states import join_conv, split_conv
from ..sharded_step import Local, embed, own_latent, whole_latent
from ..state import State
from ._launch import Interpret, require
from .experts.rank import experts_of_rank
from .fit import supports
from .router import Routing
from .share import Deltas, Whole
from .step import step


@dataclasses.dataclass(frozen=True)
class Planned(Whole):
    """The share of a device of a plan, under ``jax.shard_map``; see :class:`k3jax.pallas.share.Whole`."""

    local: Local

    def heads(self, config: K3Config) -> K3Config:
        return self.local.heads

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        return embed(table, tokens)

    def taken(self, layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return join_conv(layer) if "conv_q" in layer else dict(layer)

    def kept(self, layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return split_conv(layer, self.local.heads) if "conv" in layer else dict(layer)

    def total(self, deltas: Deltas) -> Deltas:
        if self.local.plan.tensor == 1:
            # Nothing to add: every delta keeps its slots and its own rounding, as without a mesh.
            return [lax.psum(delta, TENSOR_PARALLEL) for delta in deltas]
        first, *others = (slot for delta in deltas for slot in delta)
        for slot in others:
            first = first + slot
        return [lax.psum(first, TENSOR_PARALLEL)[None]]

    def whole_latent(self, part: jax.Array) -> jax.Array:
        return whole_latent(part)

    def own_latent(self, latent: jax.Array, width: int) -> jax.Array:
        return own_latent(latent, width)

    def experts(
        self,
        p: Mapping[str, Any],
        latent: jax.Array,
        routing: Routing,
        live: jax.Array,
        config: K3Config,
        interpret: Interpret,
    ) -> jax.Array:
        compute = partial(experts_of_rank, p["experts"], config=config, interpret=interpret)
        rows = latent[: live.shape[0]]
        return self.local.dispatch(p, rows, routing.ids, routing.weights, live, compute)


def planned_step(
    local: Local, params: Mapping[str, Any], routing: bool, *, interpret: bool
) -> Callable[..., tuple[jax.Array, State, dict[str, jax.Array]]]:
    """``(params, state, tokens, active) -> (logits, state, routing)`` of one device, for ``jax.shard_map``.

    Args:
        params: those of the plan, looked at for dtype and packed experts.
        routing: whether to return it; else {}.

    Raises:
        NotImplementedError: with all reasons of :func:`k3jax.pallas.fit.supports`.
    """
    reasons = supports(local.config, batch=local.rows, interpret=interpret, params=params, plan=local.plan)
    require("pallas", reasons)

    def body(params: Any, state: State, tokens: jax.Array, active: jax.Array) -> Any:
        seen: dict[str, jax.Array] = {}
        logits, state = step(
            params, state, tokens, active, local.config,
            interpret=interpret, share=Planned(local), tap=seen.__setitem__ if routing else None,
        )  # fmt: skip
        return logits, state, seen

    return body


__all__ = ["Planned", "planned_step"]
