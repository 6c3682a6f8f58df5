"""The library with one thing wrong at a time, each a mistake that other K3 implementations made.

A mutation either changes what the library is given (parameters, configuration) or replaces one of
its functions by a version with the mistake in it. Those versions are written out here with the
right choice as a parameter, so that a test can show the rewritten function itself to be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from k3jax.config import K3Config
from k3jax.layers import attn_res, ffn, kda, mla, moe
from k3jax.layers.linear import linear
from k3jax.quant import MXFP4

Params = Mapping[str, Any]
# (params, config, patch) -> (params, config) with the mistake.
Apply = Callable[[Params, K3Config, pytest.MonkeyPatch], tuple[Params, K3Config]]


# -- functions with a choice in them ----------------------------------------------------


def recurrence(order: str = "right") -> Callable[..., Any]:
    """``recurrent_step`` with its parts in another order."""

    def step(S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
        factor = jnp.exp(g)[:, :, None, :]
        base = S if order == "delta before decay" else S * factor
        against = S if order == "error of the undecayed state" else base
        u = beta[..., None] * (v - jnp.sum(against * k[:, :, None, :], -1))
        new = base + u[..., None] * k[:, :, None, :]
        if order == "delta before decay":
            new = new * factor
        return jnp.sum((base if order == "read before update" else new) * q[:, :, None, :], -1), new

    return step


def scan_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """``chunk_scan`` as a plain loop over tokens of ``step``."""

    def scan(S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
        def body(S: Any, xs: Any) -> tuple[Any, Any]:
            o, S = step(S, *xs)
            return S, o

        S, o = lax.scan(body, S, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
        return jnp.moveaxis(o, 0, 1), S

    return scan


def decay(kind: str = "bounded") -> Callable[..., Any]:
    """``log_decay`` with another gate."""

    def log_decay(z: Any, a_log: Any, dt_bias: Any, bound: float) -> Any:
        heads, k = z.shape[-2:]
        bias = dt_bias.reshape(heads, k)
        a = jnp.exp(a_log)[:, None]
        z = z.astype(jnp.float32)
        if kind == "per channel":
            # The stored array, zero padded to twice the heads, repeated to the length of a head.
            a = jnp.exp(jnp.resize(jnp.pad(a_log, (0, heads)), (k,)))
        if kind in ("softplus", "clamped softplus"):
            g = -a * jax.nn.softplus(z + bias)
            return jnp.maximum(g, bound) if kind == "clamped softplus" else g
        return bound * jax.nn.sigmoid(a * z + bias if kind == "bias after scale" else a * (z + bias))

    return log_decay


def kda_output(gate: Callable[[Any], Any] = jax.nn.sigmoid) -> Callable[..., Any]:
    """KDA's gated output norm with another gate."""

    def output(p: Any, x: Any, o: Any, config: K3Config, project: Any = linear) -> Any:
        o32 = o.astype(x.dtype).astype(jnp.float32)
        y = o32 * lax.rsqrt(jnp.mean(o32 * o32, -1, keepdims=True) + config.rms_norm_eps) * p["o_norm"]
        y = y * gate(linear(x, p["g_proj"]).astype(jnp.float32)).reshape(o.shape)
        return project(y.astype(x.dtype).reshape(*x.shape[:-1], -1), p["o_proj"])

    return output


def mla_output(gate: Callable[[Any], Any] = jax.nn.sigmoid) -> Callable[..., Any]:
    """MLA's gated output with another gate."""

    def output(p: Any, x: Any, o: Any, project: Any = linear) -> Any:
        g = gate(linear(x, p["g_proj"]).astype(jnp.float32))
        return project(
            (o.reshape(g.shape).astype(x.dtype).astype(jnp.float32) * g).astype(x.dtype), p["o_proj"]
        )

    return output


def situ(kind: str = "situ") -> Callable[..., Any]:
    """The activation, or a simpler one."""

    def activation(gate: Any, up: Any, config: K3Config) -> Any:
        g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
        b, c = config.activation_situ_beta, config.activation_situ_linear_beta
        left = g if kind == "SwiGLU" else b * jnp.tanh(g / b)
        right = c * jnp.tanh(u / c) if kind == "situ" else u
        return (left * jax.nn.sigmoid(g) * right).astype(gate.dtype)

    return activation


def router(bias_in_weights: bool = False) -> Callable[..., Any]:
    """``route`` that may take the correction bias into the weights."""

    def route(p: Any, x: Any, config: K3Config, ids: Any = None) -> tuple[Any, Any]:
        score = jax.nn.sigmoid(moe.router_logits(p, x))
        biased = score + p["e_score_correction_bias"]
        if ids is None:
            ids = lax.top_k(biased, config.num_experts_per_token)[1].astype(jnp.int32)
        w = jnp.take_along_axis(biased if bias_in_weights else score, ids, axis=-1)
        if config.moe_renormalize:
            w = w / (jnp.sum(w, axis=-1, keepdims=True) + 1e-20)
        return ids, w * config.routed_scaling_factor

    return route


def mixture(kind: str = "attn_res") -> Callable[..., Any]:
    """``attn_res.mix`` with another score or another sum."""
    right = attn_res.mix

    def mix(sources: Sequence[Any], norm: Any, proj: Any, eps: float) -> Any:
        if kind == "plain sum":
            return sum(sources[1:], start=sources[0])
        if kind == "no gamma":
            norm = jnp.ones_like(norm)
        if kind == "normalised values":
            sources = [v * lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps) for v in sources]
        return right(sources, norm, proj, eps)

    return mix


# -- mutations --------------------------------------------------------------------------


def patched(*changes: tuple[Any, str, Any]) -> Apply:
    """Replace functions: (module, name, new function)."""

    def apply(params: Params, config: K3Config, patch: pytest.MonkeyPatch) -> tuple[Params, K3Config]:
        for module, name, new in changes:
            patch.setattr(module, name, new)
        return params, config

    return apply


def configured(**fields: Any) -> Apply:
    """Change fields of the configuration."""
    return lambda params, config, patch: (params, dataclasses.replace(config, **fields))


def reweighted(change: Callable[[str, Any], Any]) -> Apply:
    """Change parameter leaves: ``change(name, leaf)``; an MXFP4 leaf is one leaf."""

    def apply(params: Params, config: K3Config, patch: pytest.MonkeyPatch) -> tuple[Params, K3Config]:
        def leaf(path: Any, value: Any) -> Any:
            return change(str(getattr(path[-1], "key", path[-1])), value)

        is_leaf = lambda value: isinstance(value, MXFP4)  # noqa: E731
        return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_leaf), config

    return apply


def _swap_nibbles(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, MXFP4):
        return leaf
    return MXFP4((leaf.codes >> 4) | (leaf.codes << 4), leaf.scales)


def _reverse_taps(name: str, leaf: Any) -> Any:
    return leaf[..., ::-1] if name.endswith("_conv1d") else leaf


def _drop_bias(name: str, leaf: Any) -> Any:
    return jnp.zeros_like(leaf) if name == "e_score_correction_bias" else leaf


def _recurrence(order: str) -> Apply:
    step = recurrence(order)
    return patched((kda, "recurrent_step", step), (kda, "chunk_scan", scan_of(step)))


def _unscaled_heads(*args: Any) -> tuple[Any, ...]:
    q, *others = _HEADS(*args)
    return (q * q.shape[-1] ** 0.5, *others)


_HEADS = kda._heads
_WITHOUT_SCALE = patched((kda, "_heads", _unscaled_heads))


def _activation(kind: str) -> Apply:
    return patched((ffn, "situ", situ(kind)), (moe, "situ", situ(kind)))


MUTATIONS: dict[str, Apply] = {
    "nibble swap": reweighted(_swap_nibbles),
    "softplus gate": patched((kda, "log_decay", decay("softplus"))),
    "clamp gate": patched((kda, "log_decay", decay("clamped softplus"))),
    "bias after scale": patched((kda, "log_decay", decay("bias after scale"))),
    "A_log per channel": patched((kda, "log_decay", decay("per channel"))),
    "read before update": _recurrence("read before update"),
    "delta before decay": _recurrence("delta before decay"),
    "error of the undecayed state": _recurrence("error of the undecayed state"),
    "no q scale": _WITHOUT_SCALE,
    "no l2norm": patched((kda, "l2_norm", lambda x: x.astype(jnp.float32))),
    "silu gate": patched((kda, "_output", kda_output(jax.nn.silu))),
    "reversed conv taps": reweighted(_reverse_taps),
    "no linear_beta": _activation("no linear beta"),
    "SwiGLU": _activation("SwiGLU"),
    "AttnRes without gamma": patched((attn_res, "mix", mixture("no gamma"))),
    "normalised values mixed": patched((attn_res, "mix", mixture("normalised values"))),
    "plain residual sum": patched((attn_res, "mix", mixture("plain sum"))),
    "router bias in weights": patched((moe, "route", router(bias_in_weights=True))),
    "bias ignored": reweighted(_drop_bias),
    "no latent norm": patched((moe, "rms_norm", lambda x, weight, eps: x)),
    "no MLA gate": patched((mla, "_output", mla_output(jnp.ones_like))),
    "MLA scale of the nope part": patched((mla, "_scale", lambda config: config.qk_nope_head_dim**-0.5)),
    "no renormalisation": configured(moe_renormalize=False),
    "latent eps 1e-5": configured(latent_norm_eps=1e-5),
}

# Each rewritten function with the right choice: the library must still pass.
CONTROLS: dict[str, Apply] = {
    "recurrence": _recurrence("right"),
    "decay": patched((kda, "log_decay", decay())),
    "KDA output": patched((kda, "_output", kda_output())),
    "MLA output": patched((mla, "_output", mla_output())),
    "SiTU": _activation("situ"),
    "router": patched((moe, "route", router())),
    "mixture": patched((attn_res, "mix", mixture())),
}
