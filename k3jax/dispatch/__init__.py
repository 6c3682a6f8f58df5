"""How tokens reach their experts and come back, between the devices of a mesh.

Three ways with one result: :func:`~k3jax.dispatch.gather.gather` (every rank sees every token),
:func:`~k3jax.dispatch.exchange.all_to_all` (each rank gets only its tokens, in rounds) and
:func:`~k3jax.dispatch.exchange.ragged` (the same in one round of uneven sizes). They run inside
``jax.shard_map`` over a :class:`k3jax.mesh.MeshPlan`.
"""

from .choice import Choice, choose
from .exchange import all_to_all, ragged
from .gather import Compute, gather
from .guard import ragged_faults
from .routing import chosen_slots

__all__ = ["Choice", "Compute", "all_to_all", "choose", "chosen_slots", "gather", "ragged", "ragged_faults"]
