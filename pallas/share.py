"""What a device holds of the model, and what crosses devices between the sublayers' launches.

A step is launches without a collective and, between them, the methods of a share. :class:`Whole` is
the share of a device that has the whole model: nothing crosses. That of a device of a mesh,
:class:`k3jax.pallas.planned.Planned`, writes its collectives at the same places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ..config import K3Config
from ._launch import Interpret
from .experts import experts
from .router import Routing

Deltas = list[jax.Array]
"""What sublayers add to the running sum: float32 partial sums [slots, 8, D] each."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """The share that is everything; every method is the identity or the op itself."""

    def heads(self, config: K3Config) -> K3Config:
        """The architecture with the heads that are here."""
        return config

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """bfloat16 [8, D], rows of the embedding table."""
        return table[tokens]

    def taken(self, layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A layer's state as the sublayers read it."""
        return dict(layer)

    def kept(self, layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The inverse of :meth:`taken`."""
        return dict(layer)

    def total(self, deltas: Deltas) -> Deltas:
        """A sublayer's deltas summed over the devices that hold parts of it."""
        return deltas

    def whole_latent(self, part: jax.Array) -> jax.Array:
        """bfloat16 [8, L] of what this device computed of it."""
        return part

    def own_latent(self, latent: jax.Array, width: int) -> jax.Array:
        """The ``width`` columns of [8, L] that this device's output matrix reads."""
        return latent

    def experts(
        self,
        p: Mapping[str, Any],
        latent: jax.Array,
        routing: Routing,
        live: jax.Array,
        config: K3Config,
        interpret: Interpret,
    ) -> jax.Array:
        """float32 [B, L], the weighted sum of the chosen experts' outputs, wherever these are.

        Args:
            p: the layer's ``block_sparse_moe`` parameters.
            latent: bfloat16 [8, L].
            live: bool [B]; rows that are not live choose no expert.
        """
        run = partial(experts, p["experts"], latent, routing.weights)
        return run(routing.slots, routing.count, routing.slot_of, config, interpret=interpret)


WHOLE = Whole()

__all__ = ["WHOLE", "Deltas", "Whole"]
