"""Kimi Delta Attention (KDA): a gated delta rule with one decay per key channel.

Per head, with decay ``a = exp(g)`` in (e^-5, 1) per key channel and step size ``beta`` in (0, 1)::

    S ← diag(a) S;   u = beta (v − Sᵀ k);   S ← S + k uᵀ;   o = Sᵀ q

The state is kept with values first, ``S[v, k]``. :func:`kda_step` is this recurrence,
:func:`kda_prefill` its chunked form.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..config import K3Config
from .linear import Project, einsum, linear
from .norm import l2_norm

CHUNK = 16
"""Tokens per chunk. Within a chunk every pair's decay is a sum of its own log decays: no
difference of large cumulative sums, and no exponential of a positive number."""


def short_conv(
    window: Float[Array, "batch window channels"], weight: Float[Array, "channels 1 taps"]
) -> Float[Array, "batch tokens channels"]:
    """Depthwise causal convolution of width 4, no bias, then SiLU; float32 inside.

    ``y_t[c] = silu( sum_i w[c, 0, i] x_{t-3+i}[c] )``: the last tap meets the current token.

    Args:
        window: [B, 3 + T, channels], the three inputs before the tokens, then the tokens.
        weight: float32 [channels, 1, 4].

    Returns:
        [B, T, channels] in window's dtype.
    """
    taps = weight.shape[-1]
    tokens = window.shape[1] - taps + 1
    x = window.astype(jnp.float32)
    y = sum(x[:, i : i + tokens] * weight[:, 0, i] for i in range(taps))
    return jax.nn.silu(jnp.asarray(y)).astype(window.dtype)


def log_decay(
    z: Float[Array, "*rows heads k"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " channels"],
    bound: float,
) -> Float[Array, "*rows heads k"]:
    """``g = bound * sigmoid(exp(A_log) * (z + dt_bias))`` in float32; A_log is per head.

    Args:
        z: [..., N, K] decay logits.
        a_log: float32 [N].
        dt_bias: float32 [N * K].
        bound: the lower bound of g, -5 in the release.
    """
    heads, k = z.shape[-2:]
    logits = z.astype(jnp.float32) + dt_bias.reshape(heads, k)
    return bound * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * logits)


def recurrent_step(
    S: Float[Array, "batch heads v k"],
    q: Float[Array, "batch heads k"],
    k: Float[Array, "batch heads k"],
    v: Float[Array, "batch heads v"],
    g: Float[Array, "batch heads k"],
    beta: Float[Array, "batch heads"],
) -> tuple[Float[Array, "batch heads v"], Float[Array, "batch heads v k"]]:
    """One token of the delta rule in float32: (o, new S). q and k are normalised and scaled."""
    S = S * jnp.exp(g)[:, :, None, :]
    u = beta[..., None] * (v - einsum("bnvk,bnk->bnv", S, k))
    S = S + u[..., :, None] * k[..., None, :]
    return einsum("bnvk,bnk->bnv", S, q), S


def chunk_scan(
    S: Float[Array, "batch heads v k"],
    q: Float[Array, "batch tokens heads k"],
    k: Float[Array, "batch tokens heads k"],
    v: Float[Array, "batch tokens heads v"],
    g: Float[Array, "batch tokens heads k"],
    beta: Float[Array, "batch tokens heads"],
) -> tuple[Float[Array, "batch tokens heads v"], Float[Array, "batch heads v k"]]:
    """The delta rule over T tokens (a multiple of CHUNK) in chunks, float32: (o, final S).

    With G the inclusive sums of g in a chunk and ``A[i,j] = beta_i <k_i e^(G_i-G_j), k_j>`` for
    j < i, ``T = (I + A)^-1 diag(beta)``, ``w = T (k e^G)``, ``u = T v``::

        v'  = u - w S
        o_i = (q_i e^(G_i)) S + sum_(j<=i) <q_i e^(G_i-G_j), k_j> v'_j
        S   ← diag(e^(G_C)) S + sum_j (k_j e^(G_C-G_j)) v'_jᵀ
    """
    batch, tokens, heads, _ = q.shape

    def chunked(x: jax.Array) -> jax.Array:  # [B, T, N, ...] -> [B, N, chunks, CHUNK, ...]
        x = x.reshape(batch, tokens // CHUNK, CHUNK, heads, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1)

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    row, col = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]
    # pair[i, j] = g_(j+1) + ... + g_i, summed as such (0 for i <= j): never positive. A product with
    # zeros and ones, since a GPU runs a cumulative sum of small arrays many times slower.
    between = (row[..., None] >= jnp.arange(CHUNK)) & (col[..., None] < jnp.arange(CHUNK))
    pair = einsum("ijm,...mk->...ijk", between.astype(jnp.float32), g)
    pair_decay = jnp.exp(pair)
    decay = jnp.exp(jnp.cumsum(g, axis=-2))  # e^G
    attend = jnp.where(
        row >= col, jnp.sum(q[..., :, None, :] * k[..., None, :, :] * pair_decay, axis=-1), 0.0
    )
    A = jnp.where(row > col, jnp.sum(k[..., :, None, :] * k[..., None, :, :] * pair_decay, axis=-1), 0.0)
    inverse = unit_lower_inverse(beta[..., None] * A)
    w = einsum("...ij,...jk->...ik", inverse, beta[..., None] * k * decay)
    u = einsum("...ij,...jv->...iv", inverse, beta[..., None] * v)
    k_end = k * pair_decay[..., -1, :, :]  # k_j e^(G_C - G_j)

    def step(S: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_out, w, u, end = chunk
        fresh = u - einsum("bnik,bnvk->bniv", w, S)
        return S * end[:, :, None, :] + einsum("bnjv,bnjk->bnvk", fresh, k_out), (S, fresh)

    def chunks_first(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 2, 0)

    # Only what the next chunk waits for is in the loop; outputs follow for all chunks at once.
    S, (before, fresh) = lax.scan(step, S, tuple(map(chunks_first, (k_end, w, u, decay[..., -1, :]))))
    o = einsum("cbnik,cbnvk->cbniv", chunks_first(q * decay), before)
    o = o + einsum("cbnij,cbnjv->cbniv", chunks_first(attend), fresh)
    o = jnp.transpose(o, (1, 0, 3, 2, 4))  # [chunks, B, N, CHUNK, V] -> [B, chunks, CHUNK, N, V]
    return o.reshape(batch, tokens, heads, -1), S


def unit_lower_inverse(strictly_lower: Float[Array, "*rows c c"]) -> Float[Array, "*rows c c"]:
    """``(I + A)^-1`` of a strictly lower triangular A by forward substitution, row after row.

    Substitution keeps every intermediate at the size of the result; products of powers of A
    cancel catastrophically when decay is slow (keys alike, g near 0).
    """
    size = strictly_lower.shape[-1]
    eye = jnp.eye(size, dtype=strictly_lower.dtype)
    rows = [jnp.broadcast_to(eye[0], (*strictly_lower.shape[:-2], size))]
    for i in range(1, size):
        known = jnp.stack(rows, axis=-2)
        rows.append(eye[i] - jnp.sum(strictly_lower[..., i, :i, None] * known, axis=-2))
    return jnp.stack(rows, axis=-2)


def _project(p: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """The convolution's raw inputs, q | k | v channels."""
    return jnp.concatenate([linear(x, p[name]) for name in ("q_proj", "k_proj", "v_proj")], axis=-1)


def _heads(
    p: Mapping[str, jax.Array], x: jax.Array, conv: jax.Array, config: K3Config
) -> tuple[jax.Array, ...]:
    """float32 q, k, v, g [..., N, K or V] and beta [..., N] from x and the convolved channels."""
    n, k_dim, p_k = config.kda_num_heads, config.kda_head_dim, config.kda_key_size
    q, k, v = (part.reshape(*x.shape[:-1], n, -1) for part in jnp.split(conv, [p_k, 2 * p_k], axis=-1))
    q = l2_norm(q) * (k_dim**-0.5)
    z = linear(linear(x, p["f_a_proj"]), p["f_b_proj"]).reshape(*x.shape[:-1], n, k_dim)
    g = log_decay(z, p["A_log"], p["dt_bias"], config.kda_gate_lower_bound)
    beta = jax.nn.sigmoid(linear(x, p["b_proj"]).astype(jnp.float32))
    return q, l2_norm(k), v.astype(jnp.float32), g, beta


def _output(
    p: Mapping[str, jax.Array], x: jax.Array, o: jax.Array, config: K3Config, project: Project = linear
) -> jax.Array:
    """``W_o [ rms(o) * sigmoid(W_g x) ]``, the norm per head; o is rounded before the norm."""
    o32 = o.astype(x.dtype).astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(o32 * o32, axis=-1, keepdims=True) + config.rms_norm_eps)
    gate = jax.nn.sigmoid(linear(x, p["g_proj"]).astype(jnp.float32)).reshape(o.shape)
    y = (o32 * scale * p["o_norm"] * gate).astype(x.dtype)
    return project(y.reshape(*x.shape[:-1], -1), p["o_proj"])


def _conv_weight(p: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([p["q_conv1d"], p["k_conv1d"], p["v_conv1d"]], axis=0)


def kda_prefill(
    p: Mapping[str, jax.Array],
    x: Float[Array, "batch tokens d"],
    state: Mapping[str, jax.Array],
    counts: Int[Array, " batch"],
    config: K3Config,
    project: Project = linear,
) -> tuple[Float[Array, "batch tokens d"], dict[str, jax.Array]]:
    """KDA over T new tokens of each row; row b's first ``counts[b]`` are real, the rest padding.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: [B, T, D] normed input.
        state: ``S`` and ``conv`` before the tokens.
        counts: int32 [B], 0..T; a row with 0 keeps its state bit for bit.
        project: the output product; a device that holds a part of the heads sums over the others here.

    Returns:
        output [B, T, D] (padding positions hold numbers without meaning) and the new state.
    """
    tokens = x.shape[1]
    pad = -tokens % CHUNK
    valid = (jnp.arange(tokens) < counts[:, None])[..., None]
    # Also where padding holds NaN or infinity, none of it reaches the state.
    x = jnp.where(valid, x, 0)
    raw = _project(p, x)
    window = jnp.concatenate([state["conv"], raw], axis=1)
    conv = short_conv(window, _conv_weight(p))
    q, k, v, g, beta = _heads(p, x, conv, config)
    # A padding token is the identity: no decay, no write.
    g, beta = jnp.where(valid[..., None], g, 0.0), jnp.where(valid, beta, 0.0)
    padded = (jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2)) for a in (q, k, v, g, beta))
    o, S = chunk_scan(state["S"], *padded)
    taps = state["conv"].shape[1]
    last = counts[:, None] + jnp.arange(taps)  # window index of the last three real inputs
    new_conv = jnp.take_along_axis(window, last[..., None], axis=1)
    moved = counts > 0
    new_state = {"S": jnp.where(moved[:, None, None, None], S, state["S"]), "conv": new_conv}
    return _output(p, x, o[:, :tokens], config, project), new_state


def kda_step(
    p: Mapping[str, jax.Array],
    x: Float[Array, "batch d"],
    state: Mapping[str, jax.Array],
    active: Bool[Array, " batch"],
    config: K3Config,
    project: Project = linear,
) -> tuple[Float[Array, "batch d"], dict[str, jax.Array]]:
    """KDA for one token of each row; a row that is not active keeps its state bit for bit.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: [B, D] normed input.
        state: ``S`` and ``conv``.
        active: bool [B].
        project: as in :func:`kda_prefill`.
    """
    window = jnp.concatenate([state["conv"], _project(p, x)[:, None]], axis=1)
    conv = short_conv(window, _conv_weight(p))[:, 0]
    q, k, v, g, beta = _heads(p, x, conv, config)
    o, S = recurrent_step(state["S"], q, k, v, g, beta)
    new_state = {
        "S": jnp.where(active[:, None, None, None], S, state["S"]),
        "conv": jnp.where(active[:, None, None], window[:, 1:], state["conv"]),
    }
    return _output(p, x, o, config, project), new_state
