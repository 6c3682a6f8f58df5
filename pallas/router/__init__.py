"""Routing: the A best experts of every row, their weights, and the list of experts to be read.

::

    s   = sigmoid(logits)
    ids = top_A(s + bias)                  ties go to the lowest id
    w   = s[ids] / (sum s[ids] + 1e-20) * factor

There is no ``configs``: the launch has nothing to choose. It is one CTA, since the list of distinct
experts needs all rows' choices; a warpgroup per row (two at most in the interpreter), since a row's
rounds follow one another; and the list takes one CUDA thread per pair, of which 8 rows of 16 choices
make exactly a warpgroup's 128.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._launch import Interpret, batch_reasons, launch, require
from . import kernel
from .kernel import PAIRS, Refs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What the expert kernels need to know, for B rows of A choices.

    Attributes:
        ids: int32 [B, A], best first.
        weights: float32 [B, A]; NaN in a row with a NaN logit.
        slots: int32 [128], the distinct ids that active rows chose, ascending, then -1.
        count: int32 [1], how many they are.
        slot_of: int32 [B, A], where in ``slots`` a choice is; -1 in rows that are not active.
    """

    ids: Any
    weights: Any
    slots: Any
    count: Any
    slot_of: Any


def supports(batch: int, experts: int, choices: int) -> tuple[str, ...]:
    """Why the kernel does not take these numbers; () if it does."""
    reasons = list(batch_reasons(batch))
    if not 1 <= experts <= 1024:
        reasons.append(f"experts: expected 1..1024, got {experts}")
    if not 1 <= choices <= min(16, experts):
        reasons.append(f"choices: expected 1..{min(16, experts)}, got {choices}")
    return tuple(reasons)


def reference(
    logits: jax.Array,
    bias: jax.Array,
    active: jax.Array,
    choices: int,
    renormalize: bool = True,
    factor: float = 1.0,
) -> Routing:
    """The same in plain jnp."""
    batch, experts = active.shape[0], logits.shape[-1]
    score = jax.nn.sigmoid(logits[:batch])
    ids = lax.top_k(score + bias, choices)[1].astype(jnp.int32)
    weight = jnp.take_along_axis(score, ids, axis=-1)
    weight = jnp.where(jnp.isnan(score).any(axis=-1, keepdims=True), jnp.nan, weight)
    if renormalize:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    live = active[:, None] != 0
    used = jnp.zeros((experts,), jnp.int32).at[jnp.where(live, ids, experts)].set(1, mode="drop")
    place = jnp.cumsum(used) - used
    order = jnp.where(used == 1, place, PAIRS)
    slots = jnp.full((PAIRS,), -1, jnp.int32)
    slots = slots.at[order].set(jnp.arange(experts, dtype=jnp.int32), mode="drop")
    slot_of = jnp.where(live, place[ids], -1).astype(jnp.int32)
    return Routing(ids, weight * factor, slots, jnp.sum(used, dtype=jnp.int32)[None], slot_of)


def route(
    logits: jax.Array,
    bias: jax.Array,
    active: jax.Array,
    choices: int,
    renormalize: bool = True,
    factor: float = 1.0,
    *,
    interpret: Interpret = False,
) -> Routing:
    """Route B rows in one launch.

    Args:
        logits: float32 [B or more, E]; rows past B are not read.
        bias: float32 [E], added for the choice only.
        active: int32 [B]; experts of rows with 0 are not listed.
        choices: A.
        renormalize: divide the weights by their sum.
        factor: times every weight.

    Raises:
        NotImplementedError: :func:`supports` has reasons.
        TypeError: logits or bias that are not float32, or active that is not int32.
    """
    batch, experts = active.shape[0], logits.shape[-1]
    require("router", supports(batch, experts, choices))
    for name, array, dtype in (
        ("logits", logits, jnp.float32),
        ("bias", bias, jnp.float32),
        ("active", active, jnp.int32),
    ):
        if array.dtype != dtype:
            raise TypeError(f"{name}: expected {jnp.dtype(dtype).name}, got {array.dtype}")
    extra = -experts % 128
    if extra:  # small models only: K3's 896 experts are 7 x 128
        logits = jnp.pad(logits, ((0, 0), (0, extra)))
        bias = jnp.pad(bias, (0, extra))

    # The interpreter can hang with many threads on few cores.
    warpgroups = min(batch, 2) if interpret else batch

    def run(*refs: Any, **shared: Any) -> None:
        kernel.body(batch, warpgroups, experts, choices, renormalize, factor, Refs(*refs, **shared))

    ints = jax.ShapeDtypeStruct((PAIRS,), jnp.int32)
    ids, weights, slot_of, slots, count = launch(
        run,
        (logits, bias, active),
        out_type=(ints, jax.ShapeDtypeStruct((PAIRS,), jnp.float32), ints, ints, ints),
        scratch_types=kernel.scratch(batch, warpgroups, experts + extra),
        ctas=1,
        warpgroups=warpgroups,
        interpret=interpret,
        name="k3_router",
    )

    def pairs(flat: jax.Array) -> jax.Array:
        return flat[: batch * choices].reshape(batch, choices)

    return Routing(pairs(ids), pairs(weights), slots, count[:1], pairs(slot_of))


__all__ = ["Routing", "reference", "route", "supports"]
