"""The three launches of absorbed MLA decode.

* ``absorb``: a CTA per (head, part of the latent) multiplies all rows' queries with W_UK and
  places the shared piece beside; one more CTA per row norms and writes its cache row.
* ``attend``: a CTA per (row, work item, 64 heads) runs the softmax over its tokens in tiles of 64
  and leaves unnormalised context, peak and mass. Each of two warpgroups has half of the latent.
* ``merge``: a CTA per (row, head) weighs the items' contexts, applies W_UV and the gate.

A row's items and tiles depend on its own length alone, and items past it end at once. Caches are
addressed by TMA coordinates (row, token), so no offset can wrap.

Constraints: K = V = 128; latent C a multiple of 128, shared piece R = 64; bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .configs import BUFFERS, CHUNK, HEAD, HEADS, ITEMS, ROWS, SPLIT, TOKENS, absorb_columns

SWIZZLE: Any = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
TILED: Any = (plgpu.TilingTransform((8, 64)), SWIZZLE)  # pyright: ignore[reportAbstractUsage]
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)
COLUMN = TILE.reduce(0)
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
BOX = 256
"""Elements of a TMA box along a dimension at most."""


def tokens_of(lengths: Any, b: Any, capacity: int) -> jax.Array:
    """Tokens that row b attends to: those cached and the new one."""
    return jnp.minimum(lengths[b] + 1, capacity)


def item_tokens(tokens: jax.Array) -> jax.Array:
    """Tokens of each work item of a row, a multiple of SPLIT."""
    return lax.div(tokens + (SPLIT * ITEMS - 1), SPLIT * ITEMS) * SPLIT


def absorb_body(
    q: Any, kv: Any, w_kv: Any, norm: Any, lengths: Any, active: Any, cache: Any, out: Any,
    *, heads: int, latent: int, shared: int, capacity: int, eps: float,
    s_q: Any, s_r: Any, s_w: Any, s_out: Any, s_row: Any, s_norm: Any, here: Any, row_here: Any,
) -> None:  # fmt: skip
    """``out[b, n] = [W_UK[n]ᵀ q_nope[b, n] | q_shared[b, n]]``, rounded; and the new cache rows."""
    cta = lax.axis_index("cta")
    width = absorb_columns(latent)
    parts = latent // width

    @pl.when(cta < heads * parts)
    def _() -> None:
        n, part = lax.div(cta, parts), lax.rem(cta, parts)
        column = pl.multiple_of(part * width, width)
        query = pl.multiple_of(n * (HEAD + shared), 64)
        plgpu.copy_gmem_to_smem(w_kv.at[pl.ds(n * 2 * HEAD, HEAD), pl.ds(column, width)], s_w, here)
        plgpu.copy_gmem_to_smem(q.at[:, pl.ds(query, HEAD)], s_q, here)
        plgpu.copy_gmem_to_smem(q.at[:, pl.ds(query + HEAD, shared)], s_r, here)
        plgpu.barrier_wait(here)
        for c in range(0, width, 64):

            def product(acc: Any, c: int = c) -> jax.Array:
                plgpu.wgmma(acc, s_w.at[:, pl.ds(c, 64)].T, s_q.T)
                plgpu.wgmma_wait(0)
                return acc[...]

            sums = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((64, ROWS), jnp.float32))
            s_out.at[:, pl.ds(c, 64)].T[...] = plgpu.layout_cast(sums.astype(jnp.bfloat16), TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s_out, out.at[:, n, pl.ds(column, width)])

        @pl.when(part == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(s_r, out.at[:, n, pl.ds(latent, shared)])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(cta >= heads * parts)
    def _() -> None:
        b = cta - heads * parts
        for c in range(0, latent + shared, BOX):
            piece = pl.ds(c, min(BOX, latent + shared - c))
            plgpu.copy_gmem_to_smem(kv.at[b, piece], s_row.at[piece], row_here)
        for c in range(0, latent, BOX):
            piece = pl.ds(c, min(BOX, latent - c))
            plgpu.copy_gmem_to_smem(norm.at[piece], s_norm.at[piece], row_here)
        plgpu.barrier_wait(row_here)
        vector = plgpu.Layout.WG_STRIDED((latent,), vec_size=latent // 128)
        x = plgpu.load(s_row.at[pl.ds(0, latent)], layout=vector).astype(jnp.float32)
        x = x * lax.rsqrt(jnp.sum(x * x) / latent + eps)
        x = x.astype(jnp.bfloat16).astype(jnp.float32)
        weight = plgpu.load(s_norm, layout=vector).astype(jnp.float32)
        s_row.at[pl.ds(0, latent)][...] = (x * weight).astype(jnp.bfloat16)
        plgpu.commit_smem()

        @pl.when((active[b] != 0) & (lengths[b] < capacity))
        def _() -> None:
            for c in range(0, latent + shared, BOX):
                piece = pl.ds(c, min(BOX, latent + shared - c))
                plgpu.copy_smem_to_gmem(s_row.at[piece], cache.at[b, lengths[b], piece])

        plgpu.wait_smem_to_gmem(0)


def absorb_scratch(latent: int, shared: int) -> dict[str, Any]:
    copies = -(-(latent + shared) // BOX) + -(-latent // BOX)
    return {
        "s_q": plgpu.SMEM((ROWS, HEAD), jnp.bfloat16, transforms=TILED),
        "s_r": plgpu.SMEM((ROWS, shared), jnp.bfloat16),
        "s_w": plgpu.SMEM((HEAD, absorb_columns(latent)), jnp.bfloat16, transforms=TILED),
        "s_out": plgpu.SMEM((ROWS, absorb_columns(latent)), jnp.bfloat16),
        "s_row": plgpu.SMEM((latent + shared,), jnp.bfloat16),
        "s_norm": plgpu.SMEM((latent,), jnp.bfloat16),
        "here": plgpu.Barrier(num_arrivals=3),
        "row_here": plgpu.Barrier(num_arrivals=copies),
    }


def attend_body(
    q: Any, lengths: Any, cache: Any, context: Any, peak_out: Any, mass_out: Any,
    *, items: int, groups: int, latent: int, capacity: int, scale: float,
    s_q: Any, s_rows: Any, s_stats: Any, q_here: Any, here: Any, read: Any, s_p: Any = None,
) -> None:  # fmt: skip
    """Softmax over one item's tokens for 64 heads: context, peak and mass, not normalised."""
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    group = lax.rem(cta, groups)
    item = lax.rem(lax.div(cta, groups), items)
    b = lax.div(cta, groups * items)
    tokens = tokens_of(lengths, b, capacity)
    start = item * item_tokens(tokens)
    tiles = lax.div(jnp.minimum(item_tokens(tokens), tokens - start) + (TOKENS - 1), TOKENS)
    heads = pl.ds(pl.multiple_of(group * HEADS, HEADS), HEADS)
    half = latent // 2
    column = wg * half

    def fetch(tile: jax.Array | int) -> None:
        buffer = lax.rem(jnp.int32(tile), BUFFERS)
        rows = pl.ds(pl.multiple_of(start + tile * TOKENS, TOKENS), TOKENS)
        plgpu.copy_gmem_to_smem(cache.at[b, rows], s_rows.at[buffer], here.at[buffer])

    def step(tile: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        peak, mass, sums = carry
        buffer = lax.rem(tile, BUFFERS)
        plgpu.barrier_wait(here.at[buffer])

        def scores(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, s_q, s_rows.at[buffer].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        score = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((HEADS, TOKENS), jnp.float32)) * scale
        token = start + tile * TOKENS + plgpu.broadcasted_iota(jnp.int32, score.shape, 1, layout=TILE)
        score = jnp.where(token < tokens, score, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(score, axis=1))
        weight = jnp.exp(score - lax.broadcast_in_dim(new_peak, score.shape, (0,)))
        keep = jnp.exp(peak - new_peak)
        mass = mass * keep + jnp.sum(weight, axis=1)
        weight = weight.astype(jnp.bfloat16)
        if s_p is None:
            left = weight
        else:  # the interpreter's products take both operands from shared memory
            left = s_p.at[wg]
            left[...] = weight
            plgpu.commit_smem()
        new_sums = []
        for c, total in enumerate(sums):

            def product(acc: Any, c: int = c) -> jax.Array:
                columns = pl.ds(pl.multiple_of(column + c * CHUNK, CHUNK), CHUNK)
                plgpu.wgmma(acc, left, s_rows.at[buffer, :, columns])
                plgpu.wgmma_wait(0)
                return acc[...]

            value = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((HEADS, CHUNK), jnp.float32))
            new_sums.append(total * lax.broadcast_in_dim(keep, total.shape, (0,)) + value)
        plgpu.barrier_arrive(read.at[buffer])

        @pl.when((wg == 0) & (tile + BUFFERS < tiles))
        def _() -> None:
            plgpu.barrier_wait(read.at[buffer])
            fetch(tile + BUFFERS)

        @pl.when((wg == 0) & (tile + BUFFERS >= tiles))
        def _() -> None:
            plgpu.barrier_wait(read.at[buffer])

        return new_peak, mass, tuple(new_sums)

    @pl.when(start < tokens)
    def _() -> None:
        @pl.when(wg == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q.at[b, heads], s_q, q_here)
            for tile in range(BUFFERS):

                @pl.when(tile < tiles)
                def _(tile: int = tile) -> None:
                    fetch(tile)

        plgpu.barrier_wait(q_here)
        zero = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROW)
        none = plgpu.layout_cast(jnp.full((HEADS,), -1e30, jnp.float32), ROW)
        blank = plgpu.layout_cast(jnp.zeros((HEADS, CHUNK), jnp.float32), TILE)
        peak, mass, sums = lax.fori_loop(0, tiles, step, (none, zero, (blank,) * (half // CHUNK)))
        for c, total in enumerate(sums):
            columns = pl.ds(pl.multiple_of(column + c * CHUNK, CHUNK), CHUNK)
            context.at[b, item, heads, columns][...] = total

        @pl.when(wg == 0)
        def _() -> None:
            s_stats.at[0][...] = peak
            s_stats.at[1][...] = mass
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s_stats.at[0], peak_out.at[b, item, heads])
            plgpu.copy_smem_to_gmem(s_stats.at[1], mass_out.at[b, item, heads])
            plgpu.wait_smem_to_gmem(0)


def attend_scratch(width: int, interpreted: bool) -> dict[str, Any]:
    scratch: dict[str, Any] = {
        "s_q": plgpu.SMEM((HEADS, width), jnp.bfloat16, transforms=TILED),
        "s_rows": plgpu.SMEM((BUFFERS, TOKENS, width), jnp.bfloat16, transforms=TILED),
        "s_stats": plgpu.SMEM((2, HEADS), jnp.float32),
        "q_here": plgpu.Barrier(),
        "here": plgpu.Barrier(num_barriers=BUFFERS),
        "read": plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
    }
    if interpreted:
        scratch["s_p"] = plgpu.SMEM((2, HEADS, TOKENS), jnp.bfloat16, transforms=TILED)
    return scratch


def merge_body(
    context: Any, peak: Any, mass: Any, lengths: Any, w_kv: Any, gate: Any, out: Any,
    *, heads: int, latent: int, capacity: int,
    s_w: Any, s_gate: Any, s_context: Any, s_vector: Any, s_out: Any, here: Any,
) -> None:  # fmt: skip
    """``out[b, n] = (W_UV[n] sum_i e^(peak_i - max) context_i / mass) sigmoid(gate)``."""
    cta = lax.axis_index("cta")
    b, n = lax.div(cta, heads), lax.rem(cta, heads)
    head = pl.ds(n * HEAD, HEAD)
    values = pl.ds(n * 2 * HEAD + HEAD, HEAD)
    plgpu.copy_gmem_to_smem(w_kv.at[values], s_w, here)
    plgpu.copy_gmem_to_smem(gate.at[b, head], s_gate, here)
    tokens = tokens_of(lengths, b, capacity)
    size = item_tokens(tokens)
    used = lax.div(tokens + size - 1, size)

    top = lax.fori_loop(0, used, lambda i, top: jnp.maximum(top, peak[b, i, n]), jnp.float32(-1e30))
    vector = plgpu.Layout.WG_STRIDED((latent,), vec_size=latent // 128)

    def add(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, whole = carry
        for j in range(4):  # four items' loads in flight; those past the last count nothing
            index = jnp.minimum(4 * i + j, used - 1)
            factor = jnp.where(4 * i + j < used, jnp.exp(peak[b, index, n] - top), 0.0)
            total = total + plgpu.load(context.at[b, index, n], layout=vector) * factor
            whole = whole + mass[b, index, n] * factor
        return total, whole

    zero = plgpu.layout_cast(jnp.zeros((latent,), jnp.float32), vector)
    total, whole = lax.fori_loop(0, lax.div(used + 3, 4), add, (zero, jnp.float32(0.0)))
    s_context[...] = (total / whole).astype(jnp.bfloat16)

    plgpu.barrier_wait(here)
    for r in range(0, HEAD, 64):
        sums = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), ROW)
        for c in range(0, latent, 128):
            x = plgpu.load(s_context.at[pl.ds(c, 128)], layout=COLUMN).astype(jnp.float32)
            w = plgpu.load(s_w.at[pl.ds(r, 64), pl.ds(c, 128)], layout=TILE).astype(jnp.float32)
            sums = sums + jnp.sum(w * lax.broadcast_in_dim(x, (64, 128), (1,)), axis=1)
        s_vector.at[pl.ds(r, 64)][...] = sums
    one = plgpu.Layout.WG_STRIDED((HEAD,), vec_size=1)
    o = plgpu.load(s_vector, layout=one).astype(jnp.bfloat16).astype(jnp.float32)
    g = plgpu.load(s_gate, layout=one).astype(jnp.float32)
    s_out[...] = (o * jax.nn.sigmoid(g)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s_out, out.at[b, head])
    plgpu.wait_smem_to_gmem(0)


def merge_scratch(latent: int) -> dict[str, Any]:
    return {
        "s_w": plgpu.SMEM((HEAD, latent), jnp.bfloat16, transforms=TILED),
        "s_gate": plgpu.SMEM((HEAD,), jnp.bfloat16),
        "s_context": plgpu.SMEM((latent,), jnp.bfloat16),
        "s_vector": plgpu.SMEM((HEAD,), jnp.float32),
        "s_out": plgpu.SMEM((HEAD,), jnp.bfloat16),
        "here": plgpu.Barrier(num_arrivals=2),
    }
