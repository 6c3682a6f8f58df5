"""The read ceiling: how fast one kernel can bring bytes from memory into shared memory, computing nothing.

A CTA per SM keeps a ring of 32 KiB TMA boxes full. Boxes are dealt to the CTAs in turn.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._launch import Interpret, launch, require, sm_count

ROWS, COLUMNS = 32, 256
"""int32 of a box: 32 KiB, the widest rows that TMA takes."""

STAGES = 6
"""Boxes in shared memory: 192 KiB."""

PROBED = 128
"""Numbers of a box that are added up, one per CUDA thread: proof that it came."""


def supports(x: Any) -> tuple[str, ...]:
    """Why the kernel does not read this array or shape; () if it does."""
    if x.ndim != 2 or x.dtype != jnp.int32 or x.shape[1] != COLUMNS or x.shape[0] % ROWS:
        return (f"x: expected int32 [multiple of {ROWS}, {COLUMNS}], got {x.dtype} {tuple(x.shape)}",)
    return ()


def reference(x: jax.Array) -> jax.Array:
    """What :func:`read` returns, its CTAs summed: int32 [128], a box's first 128 numbers added up."""
    return jnp.sum(x.reshape(-1, ROWS, COLUMNS)[:, 0, :PROBED], axis=0)


def read(x: jax.Array, *, interpret: Interpret = False, sms: int | None = None) -> jax.Array:
    """int32 [CTAs, 128]: sums of the first 128 numbers of the boxes that each CTA read.

    Args:
        x: int32 [multiple of 32, 256].

    Raises:
        NotImplementedError: :func:`supports` has reasons.
    """
    require("read", supports(x))
    boxes, ctas = x.shape[0] // ROWS, sm_count(interpret, sms)

    def body(source: Any, out: Any, ring: Any, sums: Any, here: Any) -> None:
        cta = lax.axis_index("cta")
        mine = lax.div(boxes - cta + (ctas - 1), ctas)  # boxes cta, cta + ctas, ...

        def fetch(step: jax.Array) -> None:
            rows = pl.ds(pl.multiple_of((cta + step * ctas) * ROWS, ROWS), ROWS)
            slot = lax.rem(step, STAGES)
            plgpu.copy_gmem_to_smem(source.at[rows], ring.at[slot], here.at[slot])

        def one(step: jax.Array, total: jax.Array) -> jax.Array:
            slot = lax.rem(step, STAGES)
            plgpu.barrier_wait(here.at[slot])
            total = total + ring[slot, 0, pl.ds(0, PROBED)]

            @pl.when(step + STAGES < mine)
            def _() -> None:
                plgpu.commit_smem()  # what was read by loads is about to be overwritten by TMA
                fetch(step + STAGES)

            return total

        lax.fori_loop(0, jnp.minimum(mine, STAGES), lambda step, _: fetch(step), None)
        sums[...] = lax.fori_loop(0, mine, one, jnp.zeros((PROBED,), jnp.int32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums, out.at[cta])
        plgpu.wait_smem_to_gmem(0)

    return launch(
        body,
        (x,),
        out_type=jax.ShapeDtypeStruct((ctas, PROBED), jnp.int32),
        scratch_types={
            "ring": plgpu.SMEM((STAGES, ROWS, COLUMNS), jnp.int32),
            "sums": plgpu.SMEM((PROBED,), jnp.int32),
            "here": plgpu.Barrier(num_barriers=STAGES),
        },
        ctas=ctas,
        interpret=interpret,
        name="k3_read",
    )


__all__ = ["read", "reference", "supports"]
