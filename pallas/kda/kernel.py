"""KDA between its projections, one launch: a CTA per (row, head).

Everything a head needs comes by TMA at once; the state, 64 KiB, arrives while the convolutions,
norms, decay and step size are computed. The state is then updated in shared memory and written
back over itself, together with the window of the convolution, unless the row is not running.

Constraints: K = V = 128, four taps, float32 state [B, N, V, K], bfloat16 activations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .configs import HEAD, ROWS, TAPS

TILE = plgpu.Layout.WGMMA
KEYS = TILE.reduce(0)
"""Layout of a vector along the state's columns."""
VALUES = TILE.reduce(1)
"""Layout of a vector along the state's rows."""
WINDOW = plgpu.Layout.TILED(
    plgpu.Tiling(((HEAD, TAPS), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)
"""Layout of [channels, taps]: a channel per lane, its taps in registers."""
CHANNELS = WINDOW.reduce(1)
"""Layout of a vector of 128 channels, one per lane."""


def kda_body(
    q: Any, k: Any, v: Any, gate: Any, beta: Any, low: Any, active: Any,
    q_taps: Any, k_taps: Any, v_taps: Any, f_b: Any, a_log: Any, dt_bias: Any, o_norm: Any,
    state: Any, conv: Any, out: Any,
    *, heads: int, bound: float, eps: float, s_state: Any, s_f_b: Any, s_low: Any, s_window: Any,
    s_taps: Any, s_gate: Any, s_channel: Any, s_vector: Any, s_out: Any, here: Any, state_here: Any,
) -> None:  # fmt: skip
    """One head of one row; refs as in :func:`k3jax.pallas.kda.kda`, those in shared memory ``s_``."""
    cta = lax.axis_index("cta")
    b, n = lax.div(cta, heads), lax.rem(cta, heads)
    head = pl.ds(n * HEAD, HEAD)
    channels = [pl.ds(part * heads * HEAD + n * HEAD, HEAD) for part in range(3)]

    plgpu.copy_gmem_to_smem(state.at[b, n], s_state, state_here)
    for part, (raw, taps) in enumerate(((q, q_taps), (k, k_taps), (v, v_taps))):
        plgpu.copy_gmem_to_smem(conv.at[b, :, channels[part]], s_window.at[part, pl.ds(0, TAPS - 1)], here)
        plgpu.copy_gmem_to_smem(raw.at[b, head], s_window.at[part, TAPS - 1], here)
        plgpu.copy_gmem_to_smem(taps.at[head], s_taps.at[part], here)
    plgpu.copy_gmem_to_smem(f_b.at[head], s_f_b, here)
    plgpu.copy_gmem_to_smem(low.at[b], s_low, here)
    plgpu.copy_gmem_to_smem(gate.at[b, head], s_gate, here)
    plgpu.copy_gmem_to_smem(dt_bias.at[head], s_channel.at[0], here)
    plgpu.copy_gmem_to_smem(o_norm, s_channel.at[1], here)
    plgpu.barrier_wait(here)

    def along_keys(vector: Any) -> jax.Array:
        return lax.broadcast_in_dim(plgpu.load(vector, layout=KEYS).astype(jnp.float32), (ROWS, HEAD), (1,))

    # Log decay: f_b's head times the low-rank input, rounded as the projection it is.
    x = along_keys(s_low)
    for r in range(0, HEAD, ROWS):
        weight = plgpu.load(s_f_b.at[pl.ds(r, ROWS)], layout=TILE).astype(jnp.float32)
        z = jnp.sum(weight * x, axis=1).astype(jnp.bfloat16).astype(jnp.float32)
        s_vector.at[3, pl.ds(r, ROWS)][...] = z
    z = plgpu.load(s_vector.at[3], layout=CHANNELS) + plgpu.load(s_channel.at[0], layout=CHANNELS)
    g = bound * jax.nn.sigmoid(jnp.exp(a_log[n]) * z)
    s_vector.at[3][...] = jnp.exp(g)

    for part in range(3):
        window = plgpu.load(s_window.at[part].T, layout=WINDOW, optimized=False).astype(jnp.float32)
        y = jnp.sum(window * plgpu.load(s_taps.at[part], layout=WINDOW, optimized=False), axis=1)
        y = (y * jax.nn.sigmoid(y)).astype(jnp.bfloat16).astype(jnp.float32)
        if part < 2:  # L2 norm of q and k, q scaled
            y = y * lax.rsqrt(jnp.sum(y * y) + 1e-6)
            y = y * HEAD**-0.5 if part == 0 else y
        s_vector.at[part][...] = y

    step = jax.nn.sigmoid(beta[b, n].astype(jnp.float32))
    plgpu.barrier_wait(state_here)
    query, key, decay = (along_keys(s_vector.at[i]) for i in (0, 1, 3))
    for r in range(0, HEAD, ROWS):
        rows = pl.ds(r, ROWS)
        S = plgpu.load(s_state.at[rows], layout=TILE) * decay
        u = step * (plgpu.load(s_vector.at[2, rows], layout=VALUES) - jnp.sum(S * key, axis=1))
        S = S + lax.broadcast_in_dim(u, (ROWS, HEAD), (0,)) * key
        s_vector.at[4, rows][...] = jnp.sum(S * query, axis=1)
        s_state.at[rows][...] = S

    o = plgpu.load(s_vector.at[4], layout=CHANNELS).astype(jnp.bfloat16).astype(jnp.float32)
    o = o * lax.rsqrt(jnp.sum(o * o) / HEAD + eps) * plgpu.load(s_channel.at[1], layout=CHANNELS)
    g = plgpu.load(s_gate, layout=CHANNELS).astype(jnp.float32)
    s_out[...] = (o * jax.nn.sigmoid(g)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s_out, out.at[b, head])

    @pl.when(active[b] != 0)
    def _() -> None:
        plgpu.copy_smem_to_gmem(s_state, state.at[b, n])
        for part in range(3):
            plgpu.copy_smem_to_gmem(s_window.at[part, pl.ds(1, TAPS - 1)], conv.at[b, :, channels[part]])

    plgpu.wait_smem_to_gmem(0)


def scratch_types() -> dict[str, Any]:
    """Shared memory and barriers of :func:`kda_body`."""
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    state = (plgpu.TilingTransform((8, 32)), swizzle)  # pyright: ignore[reportAbstractUsage]
    weight = (plgpu.TilingTransform((8, 64)), swizzle)  # pyright: ignore[reportAbstractUsage]
    return {
        "s_state": plgpu.SMEM((HEAD, HEAD), jnp.float32, transforms=state),
        "s_f_b": plgpu.SMEM((HEAD, HEAD), jnp.bfloat16, transforms=weight),
        "s_low": plgpu.SMEM((HEAD,), jnp.bfloat16),
        "s_window": plgpu.SMEM((3, TAPS, HEAD), jnp.bfloat16),
        "s_taps": plgpu.SMEM((3, HEAD, TAPS), jnp.float32),
        "s_gate": plgpu.SMEM((HEAD,), jnp.bfloat16),
        "s_channel": plgpu.SMEM((2, HEAD), jnp.float32),
        "s_vector": plgpu.SMEM((5, HEAD), jnp.float32),
        "s_out": plgpu.SMEM((HEAD,), jnp.bfloat16),
        "here": plgpu.Barrier(num_arrivals=14),
        "state_here": plgpu.Barrier(),
    }
