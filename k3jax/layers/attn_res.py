"""Block attention residuals (AttnRes): a layer's input is a softmax mixture over depth.

There is no ordinary residual stream. A token keeps a snapshot of the running sum from the start
of every block, and the running sum itself; each sublayer reads a mixture of them::

    k_j = v_j / sqrt(mean(v_j²) + eps)
    p   = softmax_j( sum_d k_j[d] * norm[d] * proj[d] )
    out = sum_j p_j v_j                     (the raw v_j, not the k_j)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def source_score(v: jax.Array, direction: jax.Array, eps: float) -> jax.Array:
    """float32 [...]: the score of one source v [..., D]; it does not depend on v's scale."""
    v = v.astype(jnp.float32)
    return jnp.sum(v * direction, axis=-1) * lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)


def mix(
    sources: Sequence[Float[Array, "*rows d"]],
    norm: Float[Array, " d"],
    proj: Float[Array, "1 d"],
    eps: float,
    count: jax.Array | None = None,
) -> Float[Array, "*rows d"]:
    """Mixture of block snapshots and the running sum, in float32, rounded once to their dtype.

    Args:
        sources: the snapshots, oldest first, then the running sum; each [..., D].
        norm: [D], the gain of the (gain-free) key norm.
        proj: [1, D], the query shared by all tokens.
        count: int32 scalar, how many of the snapshots are taken; None is all.
    """
    # The gain times the projection, once per layer: float32 product of two bf16 vectors.
    direction = norm.astype(jnp.float32) * proj[0].astype(jnp.float32)
    scores = jnp.stack([source_score(v, direction, eps) for v in sources], axis=-1)
    if count is not None:
        position = jnp.arange(len(sources))
        scores = jnp.where((position < count) | (position == len(sources) - 1), scores, -jnp.inf)
    # The barrier keeps XLA from holding a float32 copy of every source between the scores and the mix.
    weights, held = lax.optimization_barrier((jax.nn.softmax(scores, axis=-1), tuple(sources)))
    total = weights[..., 0, None] * held[0].astype(jnp.float32)
    for j, v in enumerate(held[1:], 1):
        total = total + weights[..., j, None] * v.astype(jnp.float32)
    return total.astype(sources[0].dtype)


@runtime_checkable  # the tests check argument types
class Snapshots(Protocol):
    """The running sum at the start of every block so far."""

    def push(self, pre: jax.Array, starts_block: bool | jax.Array) -> Snapshots:
        """With ``pre`` added as the newest snapshot, if a block starts."""
        ...

    def mix(self, pre: jax.Array, norm: jax.Array, proj: jax.Array, eps: float) -> jax.Array:
        """The mixture of the snapshots and ``pre``, see :func:`mix`."""
        ...


@dataclasses.dataclass(frozen=True)
class SnapshotList:
    """Snapshots as a tuple of arrays: their number is known when the step is traced."""

    blocks: tuple[jax.Array, ...]

    def push(self, pre: jax.Array, starts_block: bool | jax.Array) -> SnapshotList:
        return SnapshotList((*self.blocks, pre)) if starts_block else self

    def mix(self, pre: jax.Array, norm: jax.Array, proj: jax.Array, eps: float) -> jax.Array:
        # Layer 0 has a single source, and skips its mixture: its two vectors are never read.
        return mix((*self.blocks, pre), norm, proj, eps) if self.blocks else pre


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SnapshotBank:
    """Snapshots in an array of fixed size, for a loop over layers.

    Attributes:
        bank: [J, ..., D]; the first ``count`` are taken, the others zero.
        count: int32 scalar.
    """

    bank: jax.Array
    count: jax.Array

    def push(self, pre: jax.Array, starts_block: bool | jax.Array) -> SnapshotBank:
        pushed = lax.dynamic_update_index_in_dim(self.bank, pre, self.count, axis=0)
        bank = choose(starts_block, pushed, self.bank)
        return SnapshotBank(bank, self.count + jnp.asarray(starts_block).astype(jnp.int32))

    def mix(self, pre: jax.Array, norm: jax.Array, proj: jax.Array, eps: float) -> jax.Array:
        return mix((*self.bank, pre), norm, proj, eps, self.count)


def choose(condition: bool | jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """``yes if condition else no``, decided now if the condition is known now."""
    if isinstance(condition, bool):
        return yes if condition else no
    return jnp.where(condition, yes, no)
