"""The two launches of the routed experts: gate, up and SiTU; then down.

Both stream packed matrices of the chosen experts. A work item is 64 rows of one expert; CTAs
take consecutive items, so a CTA meets one or two experts. Inside a CTA every warpgroup has its
own matrix and its own part of the columns, and a ring of tiles it fills itself by TMA, across
item borders: while an item's sums meet in shared memory the next item's tiles arrive.

Constraints: rows a multiple of 64, columns of 256 (the caller pads), 8 token columns, scale
bytes 0..128. An expert index is a TMA coordinate of its own, so no offset can wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import Interpret, launch
from .configs import COLUMNS, ROWS, TOKENS, StreamConfig, scale_width
from .packed_dot import packed_dot, packed_dot_interpreted

_SWIZZLE: Any = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
_CODE_TILES: Any = (plgpu.TilingTransform((8, 128)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]
_TOKEN_TILES: Any = (plgpu.TilingTransform((8, 64)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]
_TILE_BYTES = COLUMNS // 2


def situ_tile(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """SiTU-GLU of float32 tiles that were rounded to bfloat16; rounded once."""
    gate, up = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in (gate, up))
    activated = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
    return (activated * (linear_beta * jnp.tanh(up / linear_beta))).astype(jnp.bfloat16)


def stream_experts(
    x: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    matrices: list[tuple[jax.Array, jax.Array]],
    config: StreamConfig,
    finish: Callable[..., jax.Array],
    *,
    ctas: int,
    interpret: Interpret,
    name: str,
) -> jax.Array:
    """``finish(W_1 x, ..)`` for every distinct expert: bfloat16 [slots, 8, rows].

    Args:
        x: bfloat16 [X, tiles, 8, 256], columns permuted; X is 1 (all experts read the same) or
            the number of slots.
        slots: int32 [SL], expert of a slot.
        count: int32 [1], slots in use; the others' results are not written.
        matrices: codes uint8 [E, rows, columns / 2] and scales uint8 [E, rows, W] of each.
        finish: maps the float32 sums [64, 8], one per matrix, to bfloat16 [64, 8].
    """
    rows = matrices[0][0].shape[1]
    row_tiles = rows // ROWS
    slot_x = x.shape[0] > 1
    groups, depth, tiles, split = config.warpgroups, config.slots, config.tiles, config.split
    width = scale_width(config.columns)

    def body(*refs: Any, **scratch: Any) -> None:
        x_ref, slots_ref, count_ref, *weights, out = refs
        codes_of, scales_of = weights[0::2], weights[1::2]
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        part = lax.rem(wg, split)
        matrix = lax.div(wg, split)
        total = count_ref[0] * row_tiles
        first = lax.div(cta * total, ctas)
        items = lax.div((cta + 1) * total, ctas) - first

        def expert_and_row(item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            slot = lax.div(first + item, row_tiles)
            return slot, slots_ref[slot], lax.rem(first + item, row_tiles) * ROWS

        def fetch_codes(step: jax.Array) -> None:
            item, tile = lax.div(step, tiles), lax.rem(step, tiles)
            _slot, expert, row = expert_and_row(item)
            column = pl.multiple_of((part * tiles + tile) * _TILE_BYTES, _TILE_BYTES)
            ring = wg * depth + lax.rem(step, depth)
            for m, source in enumerate(codes_of):

                @pl.when(matrix == m)
                def _(source: Any = source) -> None:
                    plgpu.copy_gmem_to_smem(
                        source.at[expert, pl.ds(row, ROWS), pl.ds(column, _TILE_BYTES)],
                        scratch["codes"].at[ring],
                        scratch["codes_here"].at[ring],
                    )

        def fetch_scales(item: jax.Array) -> None:
            _slot, expert, row = expert_and_row(item)
            buffer = matrix * 2 + lax.rem(item, 2)
            for m, source in enumerate(scales_of):

                @pl.when(wg == m * split)
                def _(source: Any = source) -> None:
                    plgpu.copy_gmem_to_smem(
                        source.at[expert, pl.ds(row, ROWS)],
                        scratch["scales"].at[buffer],
                        scratch["scales_here"].at[buffer],
                    )

        def fetch_x(index: jax.Array | int) -> None:
            @pl.when(wg == 0)
            def _() -> None:
                plgpu.copy_gmem_to_smem(x_ref.at[index], scratch["x"], scratch["x_here"])

            plgpu.barrier_wait(scratch["x_here"])

        def row_tile(item: jax.Array, carry: None) -> None:
            slot, _expert, row = expert_and_row(item)
            if slot_x:
                before = lax.div(first + item - 1, row_tiles)

                @pl.when((item == 0) | (slot != before))
                def _() -> None:
                    fetch_x(slot)

            @pl.when(item + 1 < items)
            def _() -> None:
                fetch_scales(item + 1)

            buffer = matrix * 2 + lax.rem(item, 2)
            plgpu.barrier_wait(scratch["scales_here"].at[buffer])

            def accumulate(acc: Any) -> jax.Array:
                def tile(t: jax.Array, carry: None) -> None:
                    step = item * tiles + t
                    ring = wg * depth + lax.rem(step, depth)
                    plgpu.barrier_wait(scratch["codes_here"].at[ring])
                    column = part * tiles + t
                    operands = (
                        scratch["codes"].at[ring],
                        scratch["scales"].at[buffer, :, pl.ds(column * 8, 8)],
                        scratch["x"].at[column],
                    )
                    if interpret:
                        packed_dot_interpreted(acc, *operands, scratch["decoded"].at[wg])
                    else:
                        packed_dot(acc, *operands)
                    # What was read by loads is about to be overwritten by TMA, another proxy.
                    plgpu.commit_smem()

                    @pl.when(step + depth < items * tiles)
                    def _() -> None:
                        fetch_codes(step + depth)

                lax.fori_loop(0, tiles, tile, None)
                return acc[...]

            sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, TOKENS), jnp.float32))
            scratch["sums"].at[wg][...] = sums
            plgpu.barrier_arrive(scratch["sums_here"])

            @pl.when(wg == 0)
            def _() -> None:
                plgpu.barrier_wait(scratch["sums_here"])
                total = []
                for m in range(config.matrices):
                    value = plgpu.load(scratch["sums"].at[m * split], layout=plgpu.Layout.WGMMA)
                    for p in range(1, split):  # in a fixed order
                        value += plgpu.load(scratch["sums"].at[m * split + p], layout=plgpu.Layout.WGMMA)
                    total.append(value)
                plgpu.barrier_arrive(scratch["sums_read"])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                scratch["out"].T[...] = plgpu.layout_cast(finish(*total), plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(scratch["out"], out.at[slot, :, pl.ds(row, ROWS)])

            plgpu.barrier_wait(scratch["sums_read"])

        @pl.when(items > 0)
        def _() -> None:
            fetch_scales(jnp.int32(0))
            for step in range(depth):

                @pl.when(step < items * tiles)
                def _(step: int = step) -> None:
                    fetch_codes(jnp.int32(step))

            if not slot_x:
                fetch_x(0)
            lax.fori_loop(0, items, row_tile, None)
            plgpu.wait_smem_to_gmem(0)

    scratch_types: dict[str, Any] = {
        "codes": plgpu.SMEM((groups * depth, ROWS, _TILE_BYTES), jnp.uint8, transforms=_CODE_TILES),
        "x": plgpu.SMEM((config.split * tiles, TOKENS, COLUMNS), jnp.bfloat16, transforms=_TOKEN_TILES),
        "scales": plgpu.SMEM((2 * config.matrices, ROWS, width), jnp.uint8),
        "sums": plgpu.SMEM((groups, ROWS, TOKENS), jnp.float32),
        "out": plgpu.SMEM((TOKENS, ROWS), jnp.bfloat16),
        "codes_here": plgpu.Barrier(num_barriers=groups * depth),
        "scales_here": plgpu.Barrier(num_barriers=2 * config.matrices),
        "x_here": plgpu.Barrier(),
        "sums_here": plgpu.Barrier(num_arrivals=groups),
        "sums_read": plgpu.Barrier(),
    }
    if interpret:
        scratch_types["decoded"] = plgpu.SMEM((groups, ROWS, COLUMNS), jnp.bfloat16)
    return launch(
        body,
        (x, slots, count, *(leaf for pair in matrices for leaf in pair)),
        out_type=jax.ShapeDtypeStruct((slots.shape[0], TOKENS, rows), jnp.bfloat16),
        scratch_types=scratch_types,
        ctas=ctas,
        warpgroups=groups,
        interpret=interpret,
        name=name,
    )
