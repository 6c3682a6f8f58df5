"""Residual sum, mixture over depth and norm of one row per CTA, see :mod:`k3jax.pallas.attn_res`.

Three passes with a barrier between: (1) every warpgroup adds up chunks of the new running sum;
(2) every warpgroup scores whole sources, and all leave their scores in shared memory; (3) every
warpgroup mixes chunks, and after the sum of squares has met in shared memory, norms them.

Constraints: 8 rows; width a multiple of 128; at most 15 snapshots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import per_warpgroup
from .configs import Config

MAX_SOURCES = 16


@dataclasses.dataclass(frozen=True)
class Refs:
    """A CTA's references: inputs and outputs in GMEM, then shared memory.

    Attributes:
        pre: the running sum [8, D], or None if it starts anew.
        deltas: partial sums [slots, 8, D] each.
        snapshots: [8, D] each.
        norm, proj: [D], [1, D], or None without snapshots.
        gain: [D].
        out, pre_out: [8, D].
        row: the new running sum of this row, [D].
        scores: a number per source.
        squares: a number per warpgroup.
        met: barriers where all warpgroups meet.
    """

    pre: Any
    deltas: Sequence[Any]
    snapshots: Sequence[Any]
    norm: Any
    proj: Any
    gain: Any
    out: Any
    pre_out: Any
    row: Any
    scores: Any
    squares: Any
    met: Any


def scratch(config: Config) -> dict[str, Any]:
    """Shared memory of a CTA."""
    return {
        "row": plgpu.SMEM((config.width,), jnp.bfloat16),
        "scores": plgpu.SMEM((MAX_SOURCES,), jnp.float32),
        "squares": plgpu.SMEM((config.warpgroups,), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=3),
    }


def body(config: Config, eps: float, refs: Refs) -> None:
    """What one CTA does for its row."""
    b, wg = lax.axis_index("cta"), lax.axis_index("wg")
    chunks = [wg + i * config.warpgroups for i in range(config.chunks // config.warpgroups)]
    for c in chunks:
        value = _running_sum(config, refs, b, c)
        refs.row[_columns(config, c)] = value
        refs.pre_out[b, _columns(config, c)] = value
    _meet(refs, 0)
    weights = None
    if refs.snapshots:
        per_warpgroup(config.warpgroups, partial(_scores, config, eps, refs, b))
        _meet(refs, 1)
        sources = len(refs.snapshots) + 1
        weights = _softmax(config, [refs.scores[j] for j in range(sources)])
    mixed = [_mixture(config, refs, b, c, weights) for c in chunks]
    squares = _everywhere(config, jnp.float32(0))
    for chunk in mixed:
        wide = chunk.astype(jnp.float32)
        squares = squares + wide * wide

    def leave(i: int) -> None:
        refs.squares[i] = jnp.sum(squares)

    per_warpgroup(config.warpgroups, leave)
    _meet(refs, 2)
    total = refs.squares[0]
    for i in range(1, config.warpgroups):
        total = total + refs.squares[i]
    scale = lax.rsqrt(_everywhere(config, total / config.width + eps))
    for c, chunk in zip(chunks, mixed, strict=True):
        at = _columns(config, c)
        normed = (chunk.astype(jnp.float32) * scale).astype(jnp.bfloat16)
        refs.out[b, at] = normed * _spread(config, refs.gain[at])


def _meet(refs: Refs, which: int) -> None:
    """Wait for all warpgroups of the CTA."""
    plgpu.barrier_arrive(refs.met.at[which])
    plgpu.barrier_wait(refs.met.at[which])


def _columns(config: Config, c: jax.Array) -> Any:
    return pl.ds(c * config.columns, config.columns)


def _spread(config: Config, x: jax.Array) -> jax.Array:
    """``x`` [n], its layout named: runs of neighbours per thread, as long as a chunk's.

    Left to infer all layouts, the compiler searches for minutes.
    """
    layout = plgpu.Layout.WG_STRIDED((x.shape[0],), config.columns // 128)
    return plgpu.layout_cast(x, layout)


def _everywhere(config: Config, number: jax.Array) -> jax.Array:
    """A number as a vector [columns]: the GPU lowering takes exp and rsqrt of vectors only."""
    return _spread(config, jnp.broadcast_to(number, (config.columns,)))


def _running_sum(config: Config, refs: Refs, b: jax.Array, c: jax.Array) -> jax.Array:
    """bfloat16 chunk of the new running sum: every delta rounded, then added in turn, as XLA's are."""
    at = _columns(config, c)
    added = None
    for delta in refs.deltas:
        total = _spread(config, delta[0, b, at])
        for slot in range(1, delta.shape[0]):
            total = total + _spread(config, delta[slot, b, at])
        rounded = total.astype(jnp.bfloat16)
        added = rounded if added is None else added + rounded
    if refs.pre is None:
        assert added is not None  # the public function refuses a sum of nothing
        return added
    pre = _spread(config, refs.pre[b, at])
    return pre if added is None else pre + added


def _source(refs: Refs, b: jax.Array, j: int, at: Any) -> jax.Array:
    """Part of source j: the snapshots, then the running sum."""
    return refs.row[at] if j == len(refs.snapshots) else refs.snapshots[j][b, at]


def _scores(config: Config, eps: float, refs: Refs, b: jax.Array, wg: int) -> None:
    """The scores of warpgroup ``wg``'s sources, each over the whole row."""
    whole = pl.ds(0, config.width)
    for j in range(wg, len(refs.snapshots) + 1, config.warpgroups):
        v = _spread(config, _source(refs, b, j, whole)).astype(jnp.float32)
        norm = _spread(config, refs.norm[whole]).astype(jnp.float32)
        proj = _spread(config, refs.proj[0, whole]).astype(jnp.float32)
        mean = jnp.sum(v * v) / config.width
        refs.scores[j] = jnp.sum(v * (norm * proj)) * lax.rsqrt(mean + eps)


def _softmax(config: Config, scores: Sequence[jax.Array]) -> list[jax.Array]:
    """Softmax of numbers, each as a constant vector."""
    vectors = [_everywhere(config, score) for score in scores]
    peak = vectors[0]
    for vector in vectors[1:]:
        peak = jnp.maximum(peak, vector)
    exps = [jnp.exp(vector - peak) for vector in vectors]
    total = exps[0]
    for e in exps[1:]:
        total = total + e
    return [e / total for e in exps]


def _mixture(
    config: Config, refs: Refs, b: jax.Array, c: jax.Array, weights: Sequence[jax.Array] | None
) -> jax.Array:
    """bfloat16 chunk of the mixture, which without snapshots is the running sum."""
    at = _columns(config, c)
    if weights is None:
        return _spread(config, refs.row[at])
    parts = [
        weight * _spread(config, _source(refs, b, j, at)).astype(jnp.float32)
        for j, weight in enumerate(weights)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.astype(jnp.bfloat16)
