"""The streaming loop: weights through a ring of TMA boxes into wgmma, 8 tokens as its columns.

One warpgroup per CTA. Per unit: wait for its boxes, one m64n8k16 chain per block, and once the
chain before it has finished, refill that one's slot. Sums stay in registers until a tile ends, so
every weight is read once and every sum has one fixed order.

Constraints: activations bfloat16 [8, K]; weights bfloat16 [N, K], N a multiple of 8 and at least
64, K a multiple of 64; products of a split launch have N a multiple of 64 x blocks.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import best
from .configs import ROWS, SWIZZLED_COLUMNS, TOKENS, Config
from .partition import Partition

TILED: Any = (
    plgpu.TilingTransform((8, SWIZZLED_COLUMNS)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""Shared memory layout that TMA writes and wgmma reads."""


class Epilogue(enum.Enum):
    """What becomes of a product's float32 sums."""

    ROUND = "rounded once to bfloat16"
    WIDE = "kept in float32"
    BEST = "kept in float32, and the id of the greatest of each row"
    SITU = "SiTU of a gate and an up matrix"
    PARTIAL = "float32 partial sums in slots"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is known when the kernel is traced.

    Attributes:
        config: tile sizes.
        partition: CTA ranges.
        epilogues: of each product.
        inputs: index of each product's activations.
        rows: N of each product, padded.
        ids: N of each product.
        situ: the two constants of SiTU.
        dependent: whether weights are asked for before the launch before has ended.
    """

    config: Config
    partition: Partition
    epilogues: tuple[Epilogue, ...]
    inputs: tuple[int, ...]
    rows: tuple[int, ...]
    ids: tuple[int, ...]
    situ: tuple[float, float]
    dependent: bool

    @property
    def best(self) -> bool:
        """Whether one of the products is BEST."""
        return Epilogue.BEST in self.epilogues


def scratch(plan: Plan) -> dict[str, Any]:
    """The ring and its barriers, a tile per result dtype on its way out, and the best of BEST."""
    config = plan.config
    s, c = config.stages, config.columns
    tile = (config.blocks, TOKENS, ROWS)
    return {
        "w_ring": plgpu.SMEM((s, config.blocks, ROWS, c), jnp.bfloat16, transforms=TILED),
        "x_ring": plgpu.SMEM((s, TOKENS, c), jnp.bfloat16, transforms=TILED),
        "narrow": plgpu.SMEM(tile, jnp.bfloat16),
        "wide": plgpu.SMEM(tile, jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=config.blocks + 1, num_barriers=s),
        **(best.scratch() if plan.best else {}),
    }


@dataclasses.dataclass(frozen=True)
class Refs:
    """A CTA's references: activations, weights (one or two per product), outputs; shared memory.

    With BEST the last two outputs are what every CTA kept of it: keys and ids, [CTAs, 8, 64].
    """

    x: Sequence[Any]
    w: Sequence[Sequence[Any]]
    out: Sequence[Any]
    w_ring: Any
    x_ring: Any
    narrow: Any
    wide: Any
    arrived: Any
    best_key: Any = None
    best_id: Any = None


def body(plan: Plan, refs: Refs) -> None:
    """What one CTA does."""
    part, stages = plan.partition, plan.config.stages
    cta = lax.axis_index("cta")
    begin, end = part.start(cta), part.start(cta + 1)
    if plan.dependent:
        plgpu.griddepcontrol_launch_dependents()
    if plan.best:
        best.start(refs.best_key, refs.best_id)

    def fill(step: jax.Array, _: None) -> None:
        _issue_weights(plan, refs, begin + step, step)
        if not plan.dependent:
            _issue_activations(plan, refs, begin + step, step)

    filled = jnp.minimum(stages, end - begin)
    lax.fori_loop(0, filled, fill, None)
    if plan.dependent:
        # Weights are constant; activations are the previous launch's, and only now complete.
        plgpu.griddepcontrol_wait()
        lax.fori_loop(0, filled, lambda step, _: _issue_activations(plan, refs, begin + step, step), None)

    first, last = _tile_of(part, begin), _tile_of(part, end - 1)

    def one_tile(tile: jax.Array, _: None) -> None:
        _tile(plan, refs, tile, begin, end)

    lax.fori_loop(first, jnp.where(end > begin, last + 1, first), one_tile, None)
    if plan.best:
        plgpu.commit_smem()
        for kept, out in zip((refs.best_key, refs.best_id), refs.out[-2:], strict=True):
            plgpu.copy_smem_to_gmem(kept, out.at[cta])
    plgpu.wait_smem_to_gmem(0)


def _tile(plan: Plan, refs: Refs, tile: jax.Array, begin: jax.Array, end: jax.Array) -> None:
    """Accumulate the CTA's units of one tile, and hand its sums to the epilogue."""
    part = plan.partition
    tile_begin = _unit_of(part, tile)
    tile_end = _unit_of(part, tile + 1)
    low, high = jnp.maximum(tile_begin, begin), jnp.minimum(tile_end, end)

    def accumulate(*accs: Any) -> tuple[jax.Array, ...]:
        lax.fori_loop(low, high, lambda unit, _: _step(plan, refs, unit, begin, end, accs), None)
        return tuple(acc[...] for acc in accs)

    shape = plgpu.WGMMAAccumulatorRef((ROWS, TOKENS), jnp.float32)
    sums = pl.run_scoped(accumulate, *[shape] * plan.config.blocks)
    for p in range(len(plan.rows)):
        first = part.tile_starts[p]

        @pl.when((tile >= first) & (tile < part.tile_starts[p + 1]))
        def _(p: int = p, first: int = first) -> None:
            if plan.epilogues[p] is Epilogue.PARTIAL:
                slot = lax.axis_index("cta") - part.owner(tile_begin)
                _store_partial(plan, refs, p, tile - first, sums, slot, high == tile_end)
            else:
                _store(plan, refs, p, tile - first, sums)


def _step(
    plan: Plan, refs: Refs, unit: jax.Array, begin: jax.Array, end: jax.Array, accs: Sequence[Any]
) -> None:
    """Multiply one arrived unit, then refill the slot of the one before."""
    stages = plan.config.stages
    step = unit - begin
    slot = lax.rem(step, stages)
    plgpu.barrier_wait(refs.arrived.at[slot])
    for block, acc in enumerate(accs):
        plgpu.wgmma(acc, refs.w_ring.at[slot, block], refs.x_ring.at[slot].T)
    plgpu.wgmma_wait(len(accs))  # the unit before is multiplied
    refill = unit - 1 + stages

    @pl.when((step > 0) & (refill < end))
    def _() -> None:
        freed = lax.rem(step + stages - 1, stages)
        _issue_weights(plan, refs, refill, freed)
        _issue_activations(plan, refs, refill, freed)


def _issue_weights(plan: Plan, refs: Refs, unit: jax.Array, slot: jax.Array) -> None:
    """Start the copies of a unit's weight boxes into a ring slot."""
    config = plan.config

    def of_product(p: int, tile: jax.Array, chunk: jax.Array) -> None:
        for block in range(config.blocks):
            w, row = _block(plan, refs.w[p], p, tile, block)
            box = w.at[pl.ds(row, ROWS), pl.ds(chunk * config.columns, config.columns)]
            plgpu.copy_gmem_to_smem(box, refs.w_ring.at[slot, block], refs.arrived.at[slot])

    _for_product(plan, unit, of_product)


def _issue_activations(plan: Plan, refs: Refs, unit: jax.Array, slot: jax.Array) -> None:
    """Start the copy of a unit's activation box into a ring slot."""
    config = plan.config

    def of_product(p: int, tile: jax.Array, chunk: jax.Array) -> None:
        box = refs.x[plan.inputs[p]].at[:, pl.ds(chunk * config.columns, config.columns)]
        plgpu.copy_gmem_to_smem(box, refs.x_ring.at[slot], refs.arrived.at[slot])

    _for_product(plan, unit, of_product)


def _for_product(plan: Plan, unit: jax.Array, do: Any) -> None:
    """``do(product, tile, chunk)`` for the product that ``unit`` belongs to."""
    part = plan.partition
    for p in range(len(plan.rows)):
        first = part.unit_starts[p]

        @pl.when((unit >= first) & (unit < part.unit_starts[p + 1]))
        def _(p: int = p, first: int = first) -> None:
            local = unit - first
            do(p, lax.div(local, part.chunks[p]), lax.rem(local, part.chunks[p]))


def _block(plan: Plan, weights: Sequence[Any], p: int, tile: jax.Array, block: int) -> tuple[Any, jax.Array]:
    """The matrix and first row of one block of a tile.

    The last block of a matrix whose rows are no multiple of 64 is moved up to end with it: some
    rows are computed twice, to the same bits.
    """
    if len(weights) == 2:
        w, row = weights[block], tile * ROWS
    else:
        w, row = weights[0], (tile * plan.config.blocks + block) * ROWS
    return w, jnp.minimum(row, plan.rows[p] - ROWS)


def _unit_of(part: Partition, tile: jax.Array) -> jax.Array:
    """First unit of a tile."""
    unit = jnp.int32(part.unit_starts[-1])
    for p in reversed(range(len(part.tiles))):
        mine = part.unit_starts[p] + (tile - part.tile_starts[p]) * part.chunks[p]
        unit = jnp.where(tile < part.tile_starts[p + 1], mine, unit)
    return unit


def _tile_of(part: Partition, unit: jax.Array) -> jax.Array:
    """The tile of a unit."""
    tile = jnp.int32(part.tile_starts[-1])
    for p in reversed(range(len(part.tiles))):
        mine = part.tile_starts[p] + lax.div(unit - part.unit_starts[p], part.chunks[p])
        tile = jnp.where(unit < part.unit_starts[p + 1], mine, tile)
    return tile


def _put(refs: Refs, block: int, out: Any, row: jax.Array, value: jax.Array) -> None:
    """Start storing [64 rows, 8 tokens] as ``out[:, row : row + 64]``, by way of shared memory."""
    tile = (refs.narrow if out.dtype == jnp.bfloat16 else refs.wide).at[block]
    tile.T[...] = plgpu.layout_cast(value.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out.at[:, pl.ds(row, ROWS)])


def _store(plan: Plan, refs: Refs, p: int, tile: jax.Array, sums: Sequence[jax.Array]) -> None:
    """Store a whole tile's results."""
    if plan.epilogues[p] is Epilogue.SITU:
        sums = [_situ(sums[0], sums[1], plan.situ)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
    for block, value in enumerate(sums):
        _, row = _block(plan, refs.w[p], p, tile, block)
        if plan.epilogues[p] is Epilogue.BEST:
            best.compete(refs.best_key, refs.best_id, row, value, plan.ids[p])
        _put(refs, block, refs.out[p], row, value)


def _situ(gate: jax.Array, up: jax.Array, constants: tuple[float, float]) -> jax.Array:
    """SiTU in float32 of a gate and an up product that are rounded to bfloat16 first."""
    b, c = constants
    g = gate.astype(jnp.bfloat16).astype(jnp.float32)
    u = up.astype(jnp.bfloat16).astype(jnp.float32)
    return b * jnp.tanh(g / b) * (1.0 / (1.0 + jnp.exp(-g))) * (c * jnp.tanh(u / c))


def _store_partial(
    plan: Plan,
    refs: Refs,
    p: int,
    tile: jax.Array,
    sums: Sequence[jax.Array],
    slot: jax.Array,
    ends_tile: jax.Array,
) -> None:
    """Store sums in this CTA's slot; whoever ends a tile zeroes the slots that nobody fills."""
    out = refs.out[p]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for block, value in enumerate(sums):
        _, row = _block(plan, refs.w[p], p, tile, block)
        _put(refs, block, out.at[slot], row, value)
    for unused in range(1, out.shape[0]):

        @pl.when(ends_tile & (unused > slot))
        def _(unused: int = unused) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for block, value in enumerate(sums):
                _, row = _block(plan, refs.w[p], p, tile, block)
                _put(refs, block, out.at[unused], row, jnp.zeros_like(value))
