"""Routed experts of LatentMoE from packed MXFP4 weights, for the few tokens of a decode step.

::

    y[b] = sum_a weights[b, a] w2_e SiTU(w1_e l[b], w3_e l[b]),   e = ids[b, a]

Every distinct expert is streamed once, in the checkpoint's layout, for all tokens: its two
launches compute all eight token columns, and the sum takes those that chose it, in order of
rank. Rounding points are those of :func:`k3jax.layers.moe.experts_by_pair`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...config import K3Config
from ...layers.moe import experts_by_pair
from ...quant import BLOCK, MXFP4
from .._launch import Interpret, batch_reasons, require, sm_count
from .configs import COLUMNS, INTERPRETED_WARPGROUPS, ROWS, SCALE_BYTES, TOKENS, WARPGROUPS, pick, scale_width
from .kernel import situ_tile, stream_experts
from .packed_dot import permute_columns

PADDED_LIMIT = 1 << 26
"""Bytes of a weight that may be copied into whole tiles at every call: small models only."""


def reference(
    experts: Mapping[str, Any],
    latent: Float[Array, "batch l"],
    ids: Int[Array, "batch a"],
    weights: Float[Array, "batch a"],
    config: K3Config,
) -> Float[Array, "batch l"]:
    """The weighted sum in plain jnp, pair by pair: float32 [B, L]."""
    return experts_by_pair(experts, latent, ids, weights, config)


def supports(experts: Mapping[str, Any], batch: int, dtype: Any) -> tuple[str, ...]:
    """Every reason why the kernels do not take these experts; () if they do.

    Args:
        experts: w1, w3 [E, F, L] and w2 [E, L, F], MXFP4 or float, arrays or shapes.
        batch: rows.
        dtype: of the latent.
    """
    reasons = list(batch_reasons(batch))
    if jnp.dtype(dtype) != jnp.bfloat16:
        reasons.append(f"latent: expected bfloat16, got {jnp.dtype(dtype)}")
    for name in ("w1", "w3", "w2"):
        leaf = experts[name]
        if not isinstance(leaf, MXFP4):
            reasons.append(f"{name}: expected packed MXFP4, got {leaf.dtype} (use 'xla' for float experts)")
            continue
        _, rows, columns = leaf.shape
        if rows % ROWS:
            reasons.append(f"{name}: expected a multiple of {ROWS} rows, got {rows}")
        if columns % COLUMNS or columns // BLOCK % 16:
            copied = leaf.nbytes * _padded(columns) // columns
            if copied > PADDED_LIMIT:
                reasons.append(
                    f"{name}: expected a multiple of 512 columns, got {columns}; "
                    f"padding would copy {copied} bytes at every call"
                )
        try:
            pick(1 if name == "w2" else 2, _padded(columns))
        except NotImplementedError as error:
            reasons.append(str(error))
    return tuple(reasons)


def check_scales(experts: Mapping[str, Any]) -> None:
    """Raise unless every scale byte is one the kernels decode exactly: 0..128, that is up to 2**1.

    Reads every scale; meant for the time of loading.

    Raises:
        NotImplementedError: names the weight, expert, row and block of the first byte outside.
    """
    for name in ("w1", "w3", "w2"):
        leaf = experts[name]
        if isinstance(leaf, MXFP4) and int(jnp.max(leaf.scales)) > SCALE_BYTES.stop - 1:
            e, row, block = np.argwhere(np.asarray(leaf.scales) >= SCALE_BYTES.stop)[0]
            raise NotImplementedError(
                f"experts: {name} scale bytes: expected 0..{SCALE_BYTES.stop - 1} (up to 2**1), got "
                f"{int(leaf.scales[e, row, block])} at expert {e}, row {row}, block {block}"
            )


def _padded(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS


def _whole_tiles(leaf: MXFP4) -> tuple[jax.Array, jax.Array]:
    """Codes and scales with columns padded by zero codes to whole tiles; full sizes pass unchanged."""
    columns = leaf.shape[-1]
    padded = _padded(columns)
    codes, scales = leaf.codes, leaf.scales
    if padded != columns:
        codes = jnp.pad(codes, ((0, 0), (0, 0), (0, (padded - columns) // 2)))
    if scale_width(padded) != columns // BLOCK:
        scales = jnp.pad(scales, ((0, 0), (0, 0), (0, scale_width(padded) - columns // BLOCK)))
    return codes, scales


def _token_tiles(x: jax.Array) -> jax.Array:
    """[X, tokens, columns] to the kernels' operand [X, tiles, 8, 256]: padded, permuted, tiled."""
    _, tokens, columns = x.shape
    x = jnp.pad(x, ((0, 0), (0, TOKENS - tokens), (0, _padded(columns) - columns)))
    return jnp.swapaxes(permute_columns(x), 1, 2)


def experts(
    experts: Mapping[str, Any],
    latent: Float[Array, "rows l"],
    weights: Float[Array, "batch a"],
    slots: Int[Array, " s"],
    count: Int[Array, " 1"],
    slot_of: Int[Array, "batch a"],
    config: K3Config,
    *,
    interpret: Interpret = False,
    sms: int | None = None,
) -> Float[Array, "batch l"]:
    """float32 weighted sum of the chosen experts' outputs.

    Args:
        experts: w1, w3 [E, F, L] and w2 [E, L, F], packed MXFP4; see :func:`check_scales`.
        latent: bfloat16 [B or more, L], B <= 8.
        weights: float32 [B, A].
        slots: int32 [min(A B, E) or more], the distinct chosen experts, ascending, then -1.
        count: int32 [1], how many there are.
        slot_of: int32 [B, A], index into ``slots`` of every choice; -1 counts nothing.

    Raises:
        NotImplementedError: with all reasons of :func:`supports`.
    """
    batch, choices = weights.shape
    require("experts", supports(experts, batch, latent.dtype))
    slots = slots[: min(batch * choices, experts["w1"].shape[0])]
    run = partial(stream_experts, ctas=sm_count(interpret, sms), interpret=interpret)
    most = INTERPRETED_WARPGROUPS if interpret else WARPGROUPS
    gate, up, down = (_whole_tiles(experts[name]) for name in ("w1", "w3", "w2"))
    finish = partial(
        situ_tile, beta=config.activation_situ_beta, linear_beta=config.activation_situ_linear_beta
    )
    hidden = run(
        _token_tiles(latent[None, :TOKENS]), slots, count, [gate, up],
        pick(2, 2 * gate[0].shape[-1], most), finish, name="experts_gate_up",
    )  # fmt: skip
    y = run(
        _token_tiles(hidden), slots, count, [down], pick(1, 2 * down[0].shape[-1], most),
        lambda total: total.astype(jnp.bfloat16), name="experts_down",
    )  # fmt: skip
    chosen = y[slot_of, jnp.arange(batch)[:, None]].astype(jnp.float32)
    chosen = jnp.where((slot_of >= 0)[..., None], weights[..., None] * chosen, 0.0)
    return jnp.sum(chosen, axis=1)


__all__ = ["check_scales", "experts", "reference", "supports"]
