"""Top-A routing of a row per warpgroup, then the list of distinct experts, in one CTA.

The choice is exact: sums of score and bias are compared as order-preserving integers, the largest
first and among equals the lowest id, in A rounds of a maximum and a minimum. The list is built by
comparing the at most 128 chosen ids with each other, one per CUDA thread.

Constraints: 1..8 rows, A in 1..16, inputs in multiples of 128 (the public function pads).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import per_warpgroup

PAIRS = 128
"""(row, choice) pairs at most: one per CUDA thread of a warpgroup."""

TAKEN = -(2**31)
"""Below the key of every number and of NaN: an expert that is chosen already, or padding."""

NO_EXPERT = 1 << 20
"""Above every id: a pair that is not there."""


@dataclasses.dataclass(frozen=True)
class Refs:
    """References of the CTA.

    Attributes:
        logits: float32 [8, columns].
        bias: float32 [columns].
        active: int32 [rows].
        ids, weights, slot_of, slots: outputs, [128] each, pair (b, a) at b A + a.
        count: int32 [128], the number of distinct experts in every place.
        score_of: shared, float32 [rows, columns].
        chosen: shared, int32 [128], ids with NO_EXPERT for pairs that are not listed.
        all_ids: shared, int32 [128].
        weight_of, scale_of: shared, float32 [128]; the weight is their product.
        flags: shared, int32 [128]: whether a pair is its expert's first.
        places: shared, int32 [128]: slots.
        met: barriers of all warpgroups.
    """

    logits: Any
    bias: Any
    active: Any
    ids: Any
    weights: Any
    slot_of: Any
    slots: Any
    count: Any
    score_of: Any
    chosen: Any
    all_ids: Any
    weight_of: Any
    scale_of: Any
    flags: Any
    places: Any
    met: Any


def scratch(rows: int, warpgroups: int, experts: int) -> dict[str, Any]:
    """Shared memory of the CTA."""
    pairs = plgpu.SMEM((PAIRS,), jnp.int32)
    return {
        "score_of": plgpu.SMEM((rows, experts), jnp.float32),
        "chosen": pairs,
        "all_ids": pairs,
        "weight_of": plgpu.SMEM((PAIRS,), jnp.float32),
        "scale_of": plgpu.SMEM((PAIRS,), jnp.float32),
        "flags": pairs,
        "places": pairs,
        "met": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
    }


def body(
    rows: int, warpgroups: int, experts: int, choices: int, renormalize: bool, factor: float, refs: Refs
) -> None:
    """What the CTA does; its warpgroups take rows in turn. Columns past ``experts`` are padding."""
    choose = partial(_choose, experts=experts, choices=choices, renormalize=renormalize, factor=factor)
    per_warpgroup(warpgroups, partial(_warpgroup, rows, warpgroups, choices, choose, refs))


def _warpgroup(rows: int, warpgroups: int, choices: int, choose: Any, refs: Refs, wg: int) -> None:
    """What one warpgroup does: its rows, and the first one all the rest."""
    if wg == 0:
        for ref, value in ((refs.chosen, NO_EXPERT), (refs.all_ids, 0)):
            ref[...] = jnp.full((PAIRS,), value, jnp.int32)
        for ref in (refs.weight_of, refs.scale_of):
            ref[...] = jnp.zeros((PAIRS,), jnp.float32)
    _meet(refs, 0)
    for row in range(wg, rows, warpgroups):
        choose(row, refs)
    _meet(refs, 1)
    if wg == 0:
        refs.ids[...] = refs.all_ids[...]
        refs.weights[...] = refs.weight_of[...] * refs.scale_of[...]
        _list_distinct(rows * choices, refs)


def _meet(refs: Refs, which: int) -> None:
    plgpu.barrier_arrive(refs.met.at[which])
    plgpu.barrier_wait(refs.met.at[which])


def _order(x: jax.Array) -> jax.Array:
    """int32 that order as the float32 do; NaN just above TAKEN, so that it is chosen last."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(x == x, key, TAKEN + 1)


def _choose(row: int, refs: Refs, *, experts: int, choices: int, renormalize: bool, factor: float) -> None:
    """The row's ids and weights, into shared memory."""
    logits = refs.logits[row]
    columns = logits.shape[0]
    score = 1.0 / (1.0 + jnp.exp(-logits))
    refs.score_of[row] = score
    # A NaN makes the row's weights NaN, whichever experts it chose.
    lost = jnp.max(jnp.where(score == score, 0, 1)) > 0
    lane = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=plgpu.Layout.WG_STRIDED((columns,), 1))
    key = _order(score + refs.bias[...])
    if experts < columns:
        # Whatever its bias: -inf would be chosen before NaN, an expert that does not exist.
        key = jnp.where(lane < experts, key, TAKEN)
    live = refs.active[row] != 0

    def one(a: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, total = carry
        best = jnp.max(key)
        first = -jnp.max(jnp.where(key == best, -lane, -columns))
        value = refs.score_of[row, first]
        at = row * choices + a
        refs.all_ids[at] = first
        refs.chosen[at] = jnp.where(live, first, NO_EXPERT)
        refs.weight_of[at] = value
        return jnp.where(lane == first, TAKEN, key), total + value

    _, total = lax.fori_loop(0, choices, one, (key, jnp.float32(0)))
    scale = factor / (total + 1e-20) if renormalize else jnp.float32(factor)
    scale = jnp.where(lost, jnp.float32(jnp.nan), scale)

    def keep(a: jax.Array, _: None) -> None:
        refs.scale_of[row * choices + a] = scale

    lax.fori_loop(0, choices, keep, None)


def _list_distinct(pairs: int, refs: Refs) -> None:
    """Ascending distinct ids, their number, and every pair's place among them."""
    mine = refs.chosen[...]
    lane = plgpu.broadcasted_iota(jnp.int32, (PAIRS,), 0, layout=plgpu.Layout.WG_STRIDED((PAIRS,), 1))
    zero = jnp.zeros((PAIRS,), jnp.int32)

    def over_pairs(add: Any, start: jax.Array) -> jax.Array:
        return lax.fori_loop(0, pairs, lambda q, total: add(q, total), start)

    def earlier(q: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.where((refs.chosen[q] == mine) & (q < lane), 1, 0)

    first = jnp.where((over_pairs(earlier, zero) == 0) & (mine < NO_EXPERT), 1, 0)
    refs.flags[...] = first
    refs.count[...] = zero + jnp.sum(first)

    def below(q: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.where(refs.chosen[q] < mine, refs.flags[q], 0)

    place = jnp.where(mine < NO_EXPERT, over_pairs(below, zero), -1)
    refs.places[...] = place
    refs.slot_of[...] = place

    def pick(q: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.where(lane == refs.places[q], refs.chosen[q], ids)

    refs.slots[...] = over_pairs(pick, zero - 1)
