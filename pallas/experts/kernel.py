"""The two launches of the routed experts: gate, up and SiTU; then down.

Both stream packed matrices of the chosen experts. A work item is 64 rows of one expert; CTAs
take consecutive items, so a CTA meets one or two experts. Inside a CTA every warpgroup has its
own matrix and its own part of the columns, and a ring of tiles it fills itself by TMA, across
item borders: while an item's sums meet in shared memory the next item's tiles arrive.

Constraints: rows a multiple of 64, columns of 256 (the caller pads), 8 token columns, scale
bytes 0..128. An expert index is a TMA coordinate of its own, so no offset can wrap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class _Stream:
    """One warpgroup of a CTA: its references, and its part of the work.

    Attributes:
        config: matrices, warpgroups, ring and columns.
        row_tiles: items of an expert, 64 rows each.
        slot_x: whether every slot has an input of its own.
        interpret: whether the interpreter runs it.
        x, slots, out, codes, scales: references in global memory; codes and scales one per matrix.
        scratch: shared memory and barriers by the names of :func:`_scratch_types`.
        wg: this warpgroup; matrix and part: which matrix, and which part of its columns, it multiplies.
        first, items: this CTA's first item, and how many it takes.
    """

    config: StreamConfig
    row_tiles: int
    slot_x: bool
    interpret: Interpret
    x: Any
    slots: Any
    out: Any
    codes: Sequence[Any]
    scales: Sequence[Any]
    scratch: Mapping[str, Any]
    wg: jax.Array
    matrix: jax.Array
    part: jax.Array
    first: jax.Array
    items: jax.Array

    def expert_and_row(self, item: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Slot, expert and first row of an item."""
        slot = lax.div(self.first + item, self.row_tiles)
        return slot, self.slots[slot], lax.rem(self.first + item, self.row_tiles) * ROWS

    def ring(self, step: jax.Array) -> jax.Array:
        """Place of a step's tile in the rings of all warpgroups."""
        return self.wg * self.config.slots + lax.rem(step, self.config.slots)

    # -- copies --

    def fetch_codes(self, step: jax.Array) -> None:
        tiles = self.config.tiles
        item, tile = lax.div(step, tiles), lax.rem(step, tiles)
        _slot, expert, row = self.expert_and_row(item)
        column = pl.multiple_of((self.part * tiles + tile) * _TILE_BYTES, _TILE_BYTES)
        ring = self.ring(step)
        for m, source in enumerate(self.codes):

            @pl.when(self.matrix == m)
            def _(source: Any = source) -> None:
                plgpu.copy_gmem_to_smem(
                    source.at[expert, pl.ds(row, ROWS), pl.ds(column, _TILE_BYTES)],
                    self.scratch["codes"].at[ring],
                    self.scratch["codes_here"].at[ring],
                )

    def fetch_scales(self, item: jax.Array) -> None:
        _slot, expert, row = self.expert_and_row(item)
        buffer = self.matrix * 2 + lax.rem(item, 2)
        for m, source in enumerate(self.scales):

            @pl.when(self.wg == m * self.config.split)
            def _(source: Any = source) -> None:
                plgpu.copy_gmem_to_smem(
                    source.at[expert, pl.ds(row, ROWS)],
                    self.scratch["scales"].at[buffer],
                    self.scratch["scales_here"].at[buffer],
                )

    def fetch_x(self, index: jax.Array | int) -> None:
        @pl.when(self.wg == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(self.x.at[index], self.scratch["x"], self.scratch["x_here"])

        plgpu.barrier_wait(self.scratch["x_here"])

    # -- an item --

    def multiply(self, acc: Any, item: jax.Array, buffer: jax.Array) -> jax.Array:
        """This warpgroup's sums of an item; every tile it has read makes room for a later one."""
        scratch, tiles, depth = self.scratch, self.config.tiles, self.config.slots

        def tile(t: jax.Array, carry: None) -> None:
            step = item * tiles + t
            ring = self.ring(step)
            plgpu.barrier_wait(scratch["codes_here"].at[ring])
            column = self.part * tiles + t
            operands = (
                scratch["codes"].at[ring],
                scratch["scales"].at[buffer, :, pl.ds(column * 8, 8)],
                scratch["x"].at[column],
            )
            if self.interpret:
                packed_dot_interpreted(acc, *operands, scratch["decoded"].at[self.wg])
            else:
                packed_dot(acc, *operands)
            # What was read by loads is about to be overwritten by TMA, another proxy.
            plgpu.commit_smem()

            @pl.when(step + depth < self.items * tiles)
            def _() -> None:
                self.fetch_codes(step + depth)

        lax.fori_loop(0, tiles, tile, None)
        return acc[...]

    def store(self, finish: Callable[..., jax.Array], slot: jax.Array, row: jax.Array) -> None:
        """Add up what the warpgroups left, and send the finished tile on its way; one warpgroup."""
        scratch, split = self.scratch, self.config.split
        plgpu.barrier_wait(scratch["sums_here"])
        total = []
        for m in range(self.config.matrices):
            value = plgpu.load(scratch["sums"].at[m * split], layout=plgpu.Layout.WGMMA)
            for p in range(1, split):  # in a fixed order
                value += plgpu.load(scratch["sums"].at[m * split + p], layout=plgpu.Layout.WGMMA)
            total.append(value)
        plgpu.barrier_arrive(scratch["sums_read"])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch["out"].T[...] = plgpu.layout_cast(finish(*total), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["out"], self.out.at[slot, :, pl.ds(row, ROWS)])

    def row_tile(self, item: jax.Array, finish: Callable[..., jax.Array]) -> None:
        scratch = self.scratch
        slot, _expert, row = self.expert_and_row(item)
        if self.slot_x:
            before = lax.div(self.first + item - 1, self.row_tiles)

            @pl.when((item == 0) | (slot != before))
            def _() -> None:
                self.fetch_x(slot)

        @pl.when(item + 1 < self.items)
        def _() -> None:
            self.fetch_scales(item + 1)

        buffer = self.matrix * 2 + lax.rem(item, 2)
        plgpu.barrier_wait(scratch["scales_here"].at[buffer])
        sums = pl.run_scoped(
            lambda acc: self.multiply(acc, item, buffer),
            plgpu.WGMMAAccumulatorRef((ROWS, TOKENS), jnp.float32),
        )
        scratch["sums"].at[self.wg][...] = sums
        plgpu.barrier_arrive(scratch["sums_here"])

        @pl.when(self.wg == 0)
        def _() -> None:
            self.store(finish, slot, row)

        plgpu.barrier_wait(scratch["sums_read"])

    def run(self, finish: Callable[..., jax.Array]) -> None:
        """All items of the CTA."""

        @pl.when(self.items > 0)
        def _() -> None:
            self.fetch_scales(jnp.int32(0))
            for step in range(self.config.slots):

                @pl.when(step < self.items * self.config.tiles)
                def _(step: int = step) -> None:
                    self.fetch_codes(jnp.int32(step))

            if not self.slot_x:
                self.fetch_x(0)
            lax.fori_loop(0, self.items, lambda item, _: self.row_tile(item, finish), None)
            plgpu.wait_smem_to_gmem(0)


def _scratch_types(config: StreamConfig, interpret: Interpret) -> dict[str, Any]:
    groups, depth = config.warpgroups, config.slots
    types: dict[str, Any] = {
        "codes": plgpu.SMEM((groups * depth, ROWS, _TILE_BYTES), jnp.uint8, transforms=_CODE_TILES),
        "x": plgpu.SMEM(
            (config.split * config.tiles, TOKENS, COLUMNS), jnp.bfloat16, transforms=_TOKEN_TILES
        ),
        "scales": plgpu.SMEM((2 * config.matrices, ROWS, scale_width(config.columns)), jnp.uint8),
        "sums": plgpu.SMEM((groups, ROWS, TOKENS), jnp.float32),
        "out": plgpu.SMEM((TOKENS, ROWS), jnp.bfloat16),
        "codes_here": plgpu.Barrier(num_barriers=groups * depth),
        "scales_here": plgpu.Barrier(num_barriers=2 * config.matrices),
        "x_here": plgpu.Barrier(),
        "sums_here": plgpu.Barrier(num_arrivals=groups),
        "sums_read": plgpu.Barrier(),
    }
    if interpret:
        types["decoded"] = plgpu.SMEM((groups, ROWS, COLUMNS), jnp.bfloat16)
    return types


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

    def body(*refs: Any, **scratch: Any) -> None:
        x_ref, slots_ref, count_ref, *weights, out = refs
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        part = lax.rem(wg, config.split)
        matrix = lax.div(wg, config.split)
        total = count_ref[0] * row_tiles
        first = lax.div(cta * total, ctas)
        items = lax.div((cta + 1) * total, ctas) - first
        stream = _Stream(
            config, row_tiles, x.shape[0] > 1, interpret, x_ref, slots_ref, out, weights[0::2], weights[1::2],
            scratch, wg, matrix, part, first, items,
        )  # fmt: skip
        stream.run(finish)

    return launch(
        body,
        (x, slots, count, *(leaf for pair in matrices for leaf in pair)),
        out_type=jax.ShapeDtypeStruct((slots.shape[0], TOKENS, rows), jnp.bfloat16),
        scratch_types=_scratch_types(config, interpret),
        ctas=ctas,
        warpgroups=config.warpgroups,
        interpret=interpret,
        name=name,
    )
