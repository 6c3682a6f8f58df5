"""What stands between two matrices: residual sum, AttnRes mixture over depth, RMS norm, one launch.

::

    pre' = pre + sum_i round(sum_slots delta_i)         (without pre where a block restarts)
    h    = softmax mixture of the snapshots and pre'    (pre' itself without snapshots)
    x    = rms(h) * gain

Without snapshots and with one delta it is the plain norm of a split product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...layers.attn_res import mix
from ...layers.norm import rms_norm
from .._launch import Interpret, launch, require
from . import configs, kernel
from .kernel import Refs

ROWS = 8


def supports(pre: Any | None, deltas: Sequence[Any], snapshots: Sequence[Any], gain: Any) -> tuple[str, ...]:
    """Why the kernel does not take these arrays or shapes; () if it does."""
    reasons = []
    width = gain.shape[0]
    if configs.choose(width) is None:
        reasons.append(f"gain: expected a width in multiples of 128, got {width}")
    if len(snapshots) >= kernel.MAX_SOURCES:
        reasons.append(f"snapshots: expected at most {kernel.MAX_SOURCES - 1}, got {len(snapshots)}")
    if pre is None and not deltas:
        reasons.append("pre, deltas: expected one of them, got neither")
    named = [("gain", gain, (width,)), *(("snapshot", s, (ROWS, width)) for s in snapshots)]
    if pre is not None:
        named.append(("pre", pre, (ROWS, width)))
    for name, array, shape in named:
        if array.dtype != jnp.bfloat16 or array.shape != shape:
            reasons.append(f"{name}: expected bfloat16 {shape}, got {array.dtype} {tuple(array.shape)}")
    for delta in deltas:
        if delta.dtype != jnp.float32 or delta.ndim != 3 or delta.shape[1:] != (ROWS, width):
            reasons.append(
                f"delta: expected float32 [slots, {ROWS}, {width}], got {delta.dtype} {delta.shape}"
            )
    return tuple(reasons)


def reference(
    pre: jax.Array | None,
    deltas: Sequence[jax.Array],
    snapshots: Sequence[jax.Array],
    norm: jax.Array | None,
    proj: jax.Array | None,
    gain: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp, on the library's own mixture and norm."""
    total = None
    for delta in deltas:
        slots = delta[0]
        for slot in delta[1:]:
            slots = slots + slot
        rounded = slots.astype(jnp.bfloat16)
        total = rounded if total is None else total + rounded
    if total is None:
        assert pre is not None
        after = pre
    else:
        after = total if pre is None else pre + total
    if not snapshots:
        return rms_norm(after, gain, eps), after
    assert norm is not None
    assert proj is not None
    return rms_norm(mix((*snapshots, after), norm, proj, eps), gain, eps), after


def attn_res(
    pre: jax.Array | None,
    deltas: Sequence[jax.Array],
    snapshots: Sequence[jax.Array],
    norm: jax.Array | None,
    proj: jax.Array | None,
    gain: jax.Array,
    eps: float,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """(x, pre'), both bfloat16 [8, D].

    Args:
        pre: running sum, bfloat16 [8, D]; None starts it anew.
        deltas: outputs of sublayers to add, float32 partial sums [slots, 8, D] each; may be empty.
        snapshots: bfloat16 [8, D] each, oldest first.
        norm, proj: bfloat16 [D] and [1, D], the mixture's query; None without snapshots.
        gain: bfloat16 [D] of the norm that follows.
        eps: of both norms.

    Raises:
        NotImplementedError: :func:`supports` has reasons.
    """
    require("attn_res", supports(pre, deltas, snapshots, gain))
    config = configs.choose(gain.shape[0])
    assert config is not None  # supports said so
    mixed = [] if not snapshots else [norm, proj]
    given = [*([] if pre is None else [pre]), *deltas, *snapshots, *mixed, gain]

    def run(*refs: Any, **shared: Any) -> None:
        flat = list(refs)
        kernel.body(
            config,
            eps,
            Refs(
                pre=None if pre is None else flat.pop(0),
                deltas=[flat.pop(0) for _ in deltas],
                snapshots=[flat.pop(0) for _ in snapshots],
                norm=flat.pop(0) if snapshots else None,
                proj=flat.pop(0) if snapshots else None,
                gain=flat.pop(0),
                out=flat.pop(0),
                pre_out=flat.pop(0),
                **shared,
            ),
        )

    shape = jax.ShapeDtypeStruct((ROWS, gain.shape[0]), jnp.bfloat16)
    return launch(
        run,
        given,
        out_type=(shape, shape),
        scratch_types=kernel.scratch(config),
        ctas=ROWS,
        warpgroups=config.warpgroups,
        interpret=interpret,
        name="k3_attn_res",
    )


__all__ = ["attn_res", "reference", "supports"]
