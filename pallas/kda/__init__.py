"""KDA decode between the projections: convolution, norms, decay, delta rule, gated norm, in place.

Per head, with q, k, v out of a causal convolution of width 4 and SiLU (q, k then L2-normed, q
scaled by K^-1/2), ``g = bound sigmoid(exp(A_log) (W_fb low + dt_bias))``, ``beta = sigmoid(b)``::

    S ← S diag(exp g);   u = beta (v − S k);   S ← S + u kᵀ;   o = S q       S[v, k]
    y = rms(o) o_norm sigmoid(gate)

Rounding points are those of :func:`k3jax.layers.kda.kda_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ...config import K3Config
from ...layers.kda import log_decay, recurrent_step, short_conv
from ...layers.linear import linear
from ...layers.norm import l2_norm
from .._launch import Interpret, batch_reasons, launch, require
from .configs import HEAD, OUT_ROWS, TAPS
from .kernel import kda_body, scratch_types


def reference(
    p: Mapping[str, jax.Array],
    q: Float[Array, "rows p"],
    k: Float[Array, "rows p"],
    v: Float[Array, "rows p"],
    gate: Float[Array, "rows p"],
    beta: Float[Array, "rows n"],
    low: Float[Array, "rows k"],
    S: Float[Array, "batch n v k"],
    conv: Float[Array, "batch taps channels"],
    active: Bool[Array, " batch"] | Int[Array, " batch"],
    config: K3Config,
) -> tuple[Float[Array, "batch p"], Float[Array, "batch n v k"], Float[Array, "batch taps channels"]]:
    """The op in plain jnp; see :func:`kda`."""
    batch, n = S.shape[:2]
    active = active.astype(bool)
    q, k, v, gate, beta, low = (x[:batch] for x in (q, k, v, gate, beta, low))
    window = jnp.concatenate([conv, jnp.concatenate([q, k, v], axis=-1)[:, None]], axis=1)
    taps = jnp.concatenate([p["q_conv1d"], p["k_conv1d"], p["v_conv1d"]], axis=0)
    mixed = jnp.split(short_conv(window, taps)[:, 0], 3, axis=-1)
    q_n, k_n, v_n = (part.reshape(batch, n, -1) for part in mixed)
    z = linear(low, p["f_b_proj"]).reshape(batch, n, -1)
    g = log_decay(z, p["A_log"], p["dt_bias"], config.kda_gate_lower_bound)
    q_n, k_n = l2_norm(q_n) * config.kda_head_dim**-0.5, l2_norm(k_n)
    step = jax.nn.sigmoid(beta.astype(jnp.float32))
    o, new_S = recurrent_step(S, q_n, k_n, v_n.astype(jnp.float32), g, step)
    o = o.astype(q.dtype).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + config.rms_norm_eps)
    sigmoid = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(o.shape)
    y = (o * scale * p["o_norm"] * sigmoid).astype(q.dtype).reshape(q.shape)
    new_S = jnp.where(active[:, None, None, None], new_S, S)
    return y, new_S, jnp.where(active[:, None, None], window[:, 1:], conv)


def supports(config: K3Config, batch: int, dtype: Any) -> tuple[str, ...]:
    """Every reason why the kernel does not take these layers; () if it does."""
    reasons = list(batch_reasons(batch))
    if jnp.dtype(dtype) != jnp.bfloat16:
        reasons.append(f"activations: expected bfloat16, got {jnp.dtype(dtype)}")
    if (config.kda_head_dim, config.kda_v_head_dim) != (HEAD, HEAD):
        reasons.append(
            f"KDA heads: expected K = V = {HEAD}, got {config.kda_head_dim} and {config.kda_v_head_dim}"
        )
    return tuple(reasons)


def kda(
    p: Mapping[str, jax.Array],
    q: Float[Array, "rows p"],
    k: Float[Array, "rows p"],
    v: Float[Array, "rows p"],
    gate: Float[Array, "rows p"],
    beta: Float[Array, "rows n"],
    low: Float[Array, "rows k"],
    S: Float[Array, "batch n v k"],
    conv: Float[Array, "batch taps channels"],
    active: Bool[Array, " batch"] | Int[Array, " batch"],
    config: K3Config,
    *,
    interpret: Interpret = False,
) -> tuple[Float[Array, "out p"], Float[Array, "batch n v k"], Float[Array, "batch taps channels"]]:
    """What o_proj reads, the new S and the new conv; in place where S and conv are donated.

    The output is bfloat16 [8, N V], as the skinny GEMM takes it; rows past B have no meaning.

    Args:
        p: the layer's ``self_attn`` parameters.
        q, k, v, gate: bfloat16 [B or more, N K], W x of q_proj, k_proj, v_proj and g_proj.
        beta: bfloat16 [B or more, N], W_b x.
        low: bfloat16 [B or more, K], W_fa x.
        S: float32 [B, N, V, K]; conv: bfloat16 [B, 3, 3 N K].
        active: bool or int32 [B]; rows with 0 keep S and conv bit for bit.

    Raises:
        NotImplementedError: with all reasons of :func:`supports`.
    """
    batch, heads = S.shape[:2]
    require("kda", supports(config, batch, q.dtype))
    state, window = jax.new_ref(S), jax.new_ref(conv)
    taps = (p[name].reshape(-1, TAPS) for name in ("q_conv1d", "k_conv1d", "v_conv1d"))
    y = launch(
        partial(
            kda_body, heads=heads, bound=config.kda_gate_lower_bound, eps=config.rms_norm_eps
        ),
        (
            q, k, v, gate, beta, low, active.astype(jnp.int32), *taps,
            p["f_b_proj"], p["A_log"], p["dt_bias"], p["o_norm"], state, window,
        ),
        out_type=jax.ShapeDtypeStruct((OUT_ROWS, heads * HEAD), q.dtype),
        scratch_types=scratch_types(),
        ctas=batch * heads,
        interpret=interpret,
        name="kda",
    )  # fmt: skip
    return y, jax.freeze(state), jax.freeze(window)


__all__ = ["kda", "reference", "supports"]
