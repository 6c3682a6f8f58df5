"""Dispatch by exchange: a token goes once to every rank that holds one of its experts, and back.

The tensor ranks of a data group hold the same rows and share them out. A rank queues its rows for
each peer; a queue that is longer than a round's capacity goes on in the next round, and all ranks
make as many rounds as the longest queue anywhere needs. Nothing is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .gather import Compute

_RANKS = ("data", "tensor")


class _Queues(NamedTuple):
    """This rank's m rows in line for each of n peers."""

    peer: jax.Array  # int32 [m, A], the rank of each choice; n for none
    joined: jax.Array  # bool [m, n], whether a row is in a peer's queue
    place: jax.Array  # int32 [m, n], its place there
    first: jax.Array  # bool [m, A], the first of a row's choices that goes to its peer


def _queues(slots: jax.Array, per_rank: int, ranks: int) -> _Queues:
    peer = jnp.where(slots < 0, ranks, slots // per_rank)
    goes = peer[..., None] == jnp.arange(ranks)  # [m, A, n]
    joined = goes.any(axis=1)
    place = jnp.cumsum(joined, axis=0, dtype=jnp.int32) - 1
    nth = jnp.cumsum(goes, axis=1, dtype=jnp.int32)
    first = (goes & (nth == 1)).any(axis=-1)
    return _Queues(peer, joined, place, first)


def _share(x: jax.Array, lanes: int, fill: int = 0) -> jax.Array:
    """This tensor rank's part of rows that all of them hold: [ceil(rows / lanes), ...]."""
    own = -(-x.shape[0] // lanes)
    padding = [(0, own * lanes - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    padded = jnp.pad(x, padding, constant_values=fill)
    return lax.dynamic_slice_in_dim(padded, lax.axis_index("tensor") * own, own, axis=0)


def _together(total: jax.Array, rows: int) -> jax.Array:
    """The tensor ranks' parts as the rows of the data group again."""
    return lax.all_gather(lax.psum(total, "inner"), "tensor", axis=0, tiled=True)[:rows]


class _Parcel(NamedTuple):
    """Rows for each of n peers, c places each."""

    latent: jax.Array  # [n, c, L]
    expert: jax.Array  # int32 [n, c, A], the receiver's experts, -1 for those of others and empty places
    weights: jax.Array  # float32 [n, c, A]


def _pack(
    queues: _Queues, latent: jax.Array, slots: jax.Array, weights: jax.Array, start: jax.Array | int,
    capacity: int, per_rank: int,
) -> _Parcel:  # fmt: skip
    """Places ``start`` .. ``start + capacity - 1`` of every queue."""
    ranks = queues.joined.shape[1]
    here = queues.place[..., None] - start == jnp.arange(capacity)  # [m, n, c]
    here &= queues.joined[..., None]
    row, taken = jnp.argmax(here, axis=0), here.any(axis=0)  # [n, c]
    theirs = taken[..., None] & (queues.peer[row] == jnp.arange(ranks)[:, None, None])
    expert = slots[row] - (jnp.arange(ranks, dtype=jnp.int32) * per_rank)[:, None, None]
    return _Parcel(
        jnp.where(taken[..., None], latent[row], 0),
        jnp.where(theirs, expert, -1),
        jnp.where(theirs, weights[row], 0.0),
    )


def _unpack(queues: _Queues, back: jax.Array, start: jax.Array | int) -> jax.Array:
    """float32 [m, L]: each row's outputs from its peers, summed in the order of its choices."""
    ranks, capacity, _ = back.shape
    peer = jnp.minimum(queues.peer, ranks - 1)
    place = jnp.take_along_axis(queues.place, peer, axis=1) - start  # [m, A]
    came = queues.first & (place >= 0) & (place < capacity)
    part = back[peer, jnp.clip(place, 0, capacity - 1)]  # [m, A, L]
    return jnp.sum(jnp.where(came[..., None], part, 0.0), axis=1)


def all_to_all(
    latent: Float[Array, "rows l"],
    slots: Int[Array, "rows a"],
    weights: Float[Array, "rows a"],
    compute: Compute,
    per_rank: int,
    capacity: int,
) -> Float[Array, "rows l"]:
    """As :func:`k3jax.dispatch.gather.gather`, by exchanges of ``capacity`` rows per pair of ranks.

    Args:
        capacity: rows a rank sends each peer in one round, at least 1.
    """
    lanes, ranks = lax.axis_size("tensor"), lax.axis_size(_RANKS)
    rows = latent.shape[0]
    latent, weights = _share(latent, lanes), _share(weights, lanes)
    slots = _share(slots, lanes, -1)
    queues = _queues(slots, per_rank, ranks)
    longest = jnp.max(jnp.sum(queues.joined, axis=0, dtype=jnp.int32))
    # The same number on every rank: each waits for the others in every round.
    rounds = lax.pmax((longest + capacity - 1) // capacity, _RANKS)

    def swap(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, _RANKS, split_axis=0, concat_axis=0, tiled=True)

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, total = carry
        start = done * capacity
        parcel = _pack(queues, latent, slots, weights, start, capacity, per_rank)
        flat = [swap(x).reshape(ranks * capacity, -1) for x in parcel]
        out = compute(flat[0], flat[1], flat[2])
        back = swap(out.reshape(ranks, capacity, -1))
        return done + 1, total + _unpack(queues, back, start)

    zero = jnp.zeros_like(latent, jnp.float32)
    _, total = lax.while_loop(lambda carry: carry[0] < rounds, turn, (jnp.int32(0), zero))
    return _together(total, rows)


def ragged(
    latent: Float[Array, "rows l"],
    slots: Int[Array, "rows a"],
    weights: Float[Array, "rows a"],
    compute: Compute,
    per_rank: int,
) -> Float[Array, "rows l"]:
    """As :func:`all_to_all` in one round that sends only the rows that there are.

    Only where :func:`k3jax.dispatch.guard.ragged_faults` finds nothing.
    """
    lanes, ranks = lax.axis_size("tensor"), lax.axis_size(_RANKS)
    rows = latent.shape[0]
    latent, weights = _share(latent, lanes), _share(weights, lanes)
    slots = _share(slots, lanes, -1)
    queues = _queues(slots, per_rank, ranks)
    own = latent.shape[0]
    parcel = _pack(queues, latent, slots, weights, 0, own, per_rank)
    sent = jnp.sum(queues.joined, axis=0, dtype=jnp.int32)
    got = lax.all_to_all(sent, _RANKS, split_axis=0, concat_axis=0, tiled=True)
    # Sender r's rows start at place r * own with every receiver, and come back to where they were.
    theirs = jnp.arange(ranks, dtype=jnp.int32) * own
    mine = jnp.broadcast_to(lax.axis_index(_RANKS).astype(jnp.int32) * own, (ranks,))

    def swap(x: jax.Array, fill: int, out: jax.Array, into: jax.Array) -> jax.Array:
        flat = x.reshape(ranks * own, -1)
        empty = jnp.full_like(flat, fill)
        return lax.ragged_all_to_all(flat, empty, theirs, out, mine, into, axis_name=_RANKS)

    flat = [swap(x, fill, sent, got) for x, fill in zip(parcel, (0, -1, 0), strict=True)]
    back = swap(compute(flat[0], flat[1], flat[2]), 0, got, sent)
    return _together(_unpack(queues, back.reshape(ranks, own, -1), 0), rows)


__all__ = ["all_to_all", "ragged"]
