"""Every stage of a sublayer at full width, from the kernel's own fields, in jax.numpy on the device.

What :mod:`support.megakernel_replay` does with the interpreter for small models: each value is computed
from the kernel's values that the stage read, by the library's own functions and with their rounding
points; and the sublayer as a whole by the float32 model from the kernel's normed input.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import K3Config
from k3jax.layers.attn_res import mix
from k3jax.layers.ffn import dense_ffn, situ
from k3jax.layers.kda import kda_step, log_decay, recurrent_step, short_conv
from k3jax.layers.linear import einsum, linear
from k3jax.layers.mla import mla_step
from k3jax.layers.moe import latent_moe, router_logits, select_experts
from k3jax.layers.norm import l2_norm, rms_norm

F32 = jnp.float32
Fields = Mapping[str, jax.Array]
_EXACT_ROUNDING: Any = {"xla_allow_excess_precision": False}
"""XLA otherwise leaves out a rounding to bfloat16 between two operations that it fuses."""
Pairs = dict[str, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Bound:
    """Largest relative RMS error, largest single error over its value or, if larger, their RMS, and why."""

    rms: float
    worst: float
    why: str


_ROUNDED = Bound(2e-3, 0.06, "one rounding to bfloat16; sums in another order turn a few of them")
_FROM_ROUNDED = Bound(
    1e-4,
    2e-2,
    "float32 sums over q, k and v that the stage rounds itself: one that turns moves a row or column of the "
    "state by 2^-8 of a term, and terms are up to some ten times the RMS",
)
_FROM_NORMED = Bound(
    5e-4,
    5e-3,
    "float32 sums over a vector that the stage norms itself: an approximate square root turns some of its "
    "roundings to bfloat16 (2^-9 of a term)",
)
_SUMS = Bound(2e-5, 1e-3, "float32 sums in another order, and approximate exponentials of 2^-22")
_SUBLAYER = Bound(
    2e-2,
    0.25,
    "bfloat16 rounds at 2^-9 at each of a sublayer's four to eight rounding points, and where the result is "
    "added to the running sum",
)
BOUNDS: dict[str, Bound] = {
    "S": _FROM_ROUNDED,
    "rlogit": _FROM_NORMED,
    "shared": _SUMS,
    "logits": _FROM_NORMED,
    "ids": Bound(0.0, 0.0, "a choice"),
    "slots": Bound(0.0, 0.0, "a choice"),
    "conv": Bound(0.0, 0.0, "copied"),
    "block": Bound(0.0, 0.0, "copied"),
    "weight": Bound(1e-5, 1e-4, "approximate exponentials"),
    "context": Bound(
        5e-3, 0.1, "attention weights are rounded to bfloat16 relative to the running peak, here not at all"
    ),
    "float32": _SUBLAYER,
    "float32.mla": _SUBLAYER,
    "float32.mla_row": _SUBLAYER,
}
"""By name; what is not here is rounded once. ``float32`` is a whole sublayer by the float32 model, of MLA
``float32.mla``, and ``float32.mla_row`` with the kernel's latent row in the cache in place of its own."""


def bound(name: str) -> Bound:
    return BOUNDS.get(name, _ROUNDED)


# -- measuring -----------------------------------------------------------------------------------


def _numbers(x: jax.Array, run: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(run) * (x.size // x.shape[0]), 1).astype(F32)


def _measure(got: jax.Array, want: jax.Array, run: jax.Array, slack: Any = 0.0) -> jax.Array:
    """[RMS error / RMS, largest error / larger of value and RMS, non-finite numbers]; rows are axis 0.

    Over rows that run.

    Args:
        slack: RMS that is added to that of ``want``, where ``got`` was rounded as part of a larger number.
    """
    rows = run.reshape(-1, *[1] * (want.ndim - 1))
    g, w = (jnp.where(rows, x.astype(F32), 0.0) for x in (got, want))
    count = _numbers(w, run)
    bad = jnp.sum(~jnp.isfinite(g)) + jnp.sum(~jnp.isfinite(w))
    error = jnp.abs(jnp.where(g == w, 0.0, g - w))
    size = jnp.sqrt(jnp.sum(w * w) / count) + slack
    rms = jnp.sqrt(jnp.sum(error * error) / count)
    scale = jnp.where(size == 0, jnp.where(rms == 0, 1.0, 0.0), size)
    largest = jnp.max(error / jnp.maximum(jnp.abs(w), scale))
    return jnp.stack([rms / scale, largest, bad.astype(F32)])


# -- the mixture ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config", compiler_options=_EXACT_ROUNDING)
def mixture(
    config: K3Config, after: Fields, pre: jax.Array, count: jax.Array, starts: jax.Array,
    norm: jax.Array, proj: jax.Array, run: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    """MIX of a sublayer from the snapshots and the running sum before it; ``count`` snapshots are taken."""
    blocks = after["block"]
    there = jnp.arange(len(blocks)) < count
    clean = jnp.where(there[:, None, None], blocks, 0)
    want = mix((*clean, pre), norm, proj, config.rms_norm_eps, count)
    want = jnp.where(count == 0, pre, want)
    snapshot = lax.dynamic_index_in_dim(blocks, jnp.minimum(count, len(blocks) - 1), keepdims=False)
    return {
        "h": _measure(after["h"], want, run),
        "block": _measure(jnp.where(starts, snapshot, pre), pre, run),
    }


# -- sublayers -----------------------------------------------------------------------------------


def _added(pre: jax.Array, starts: jax.Array, out: jax.Array) -> jax.Array:
    return jnp.where(starts, out, pre + out)


def _kda(c: K3Config, p: Any, x: Any, f: Fields, old: Any, new: Any, length: Any) -> Pairs:
    del length
    n, k_dim, keys = c.kda_num_heads, c.kda_head_dim, c.kda_key_size
    proj = f["kda.proj"]
    names = ("f_a_proj", "b_proj", "q_proj", "k_proj", "v_proj", "g_proj")
    want = jnp.concatenate([linear(x, p[name]) for name in names], axis=-1)
    rows = want.shape[-1]
    z = linear(proj[:, :k_dim], p["f_b_proj"])
    raw = proj[:, k_dim + n : rows - c.kda_value_size]
    window = jnp.concatenate([old["conv"], raw[:, None]], axis=1)
    taps = jnp.concatenate([p["q_conv1d"], p["k_conv1d"], p["v_conv1d"]], axis=0)
    conv = short_conv(window, taps)[:, 0]
    q, k, v = (part.reshape(len(x), n, -1) for part in jnp.split(conv, [keys, 2 * keys], axis=-1))
    g = log_decay(f["kda.z"].reshape(len(x), n, k_dim), p["A_log"], p["dt_bias"], c.kda_gate_lower_bound)
    beta = jax.nn.sigmoid(proj[:, k_dim : k_dim + n].astype(F32))
    o, S = recurrent_step(old["S"], l2_norm(q) * k_dim**-0.5, l2_norm(k), v.astype(F32), g, beta)
    o = o.astype(x.dtype).astype(F32)
    scale = lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + c.rms_norm_eps)
    gate = jax.nn.sigmoid(proj[:, rows - c.kda_value_size : rows].astype(F32)).reshape(o.shape)
    y = (o * scale * p["o_norm"] * gate).astype(x.dtype).reshape(len(x), -1)
    return {
        "kda.proj": (proj[:, :rows], want),
        "kda.z": (f["kda.z"], z),
        "kda.y": (f["kda.y"], y),
        "S": (new["S"], S),
        "conv": (new["conv"], window[:, 1:]),
        "out": (linear(f["kda.y"], p["o_proj"]), jnp.zeros(())),
    }


def _merged(c: K3Config, f: Fields, batch: int) -> jax.Array:
    """Contexts [B, N, C] from the attention lanes' sums, peaks and masses."""
    n = c.num_attention_heads
    acc = f["mla.acc"].reshape(batch, -1, n, c.kv_lora_rank)  # units are (row, lane, head group)
    peak, mass = (f["mla.stat"].reshape(batch, -1, n, 2)[..., i] for i in (0, 1))
    full = mass > 0
    factor = jnp.where(full, jnp.exp(peak - peak.max(axis=1, keepdims=True)), 0.0)
    total = jnp.sum(jnp.where(full[..., None], acc, 0.0) * factor[..., None], axis=1)
    return total / jnp.sum(jnp.where(full, mass, 0.0) * factor, axis=1)[..., None]


def _mla(c: K3Config, p: Any, x: Any, f: Fields, old: Any, new: Any, length: Any) -> Pairs:
    proj, batch = f["mla.proj"], len(x)
    n, nope, width = c.num_attention_heads, c.qk_nope_head_dim, c.qk_head_dim
    low, latent = c.q_lora_rank, c.q_lora_rank + c.kv_lora_rank
    rows = latent + c.qk_rope_head_dim + n * c.v_head_dim
    names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
    want = jnp.concatenate([linear(x, p[name]) for name in names], axis=-1)
    q = linear(rms_norm(proj[:, :low], p["q_a_layernorm"], c.latent_norm_eps), p["q_b_proj"])
    row = rms_norm(proj[:, low:latent], p["kv_a_layernorm"], c.latent_norm_eps)
    row = jnp.concatenate([row, proj[:, latent : latent + c.qk_rope_head_dim]], axis=-1)
    w = p["kv_b_proj"].reshape(n, -1, c.kv_lora_rank)
    mine = f["mla.q"].reshape(batch, n, width)
    qt = einsum("bnk,nkc->bnc", mine[..., :nope], w[:, :nope]).astype(x.dtype)
    # The attention itself, in float32 without rounding, over old rows and the kernel's new one.
    at = jnp.arange(old["cache"].shape[1])
    seen = (at <= length[:, None])[..., None]
    here = (at == length[:, None])[..., None]
    keys = jnp.where(seen, jnp.where(here, f["mla.row"][:, None], old["cache"]), 0).astype(F32)
    query = jnp.concatenate([f["mla.qt"].reshape(batch, n, -1), mine[..., nope:]], axis=-1)
    score = einsum("bnc,bsc->bns", query.astype(F32), keys) * width**-0.5
    weight = jax.nn.softmax(jnp.where(seen[:, None, :, 0], score, -jnp.inf), axis=-1)
    context = einsum("bns,bsc->bnc", weight, keys[..., : c.kv_lora_rank])
    merged = _merged(c, f, batch)
    o = einsum("bnc,nvc->bnv", merged.astype(x.dtype), w[:, nope:]).astype(x.dtype)
    gate = jax.nn.sigmoid(proj[:, latent + c.qk_rope_head_dim : rows].astype(F32))
    y = (o.reshape(batch, -1).astype(F32) * gate).astype(x.dtype)
    return {
        "mla.proj": (proj[:, :rows], want),
        "mla.q": (f["mla.q"], q),
        "mla.row": (f["mla.row"], row),
        "cache": (jnp.take_along_axis(new["cache"], length[:, None, None], axis=1)[:, 0], f["mla.row"]),
        "mla.qt": (f["mla.qt"], qt.reshape(batch, -1)),
        "context": (merged, context),
        "mla.y": (f["mla.y"], y),
        "out": (linear(f["mla.y"], p["o_proj"]), jnp.zeros(())),
    }


@functools.partial(jax.jit, static_argnames=("config", "kind"), compiler_options=_EXACT_ROUNDING)
def attention(
    config: K3Config, kind: str, layer: Any, after: Fields, old: Any, new: Any,
    length: jax.Array, starts: jax.Array, run: jax.Array,
) -> dict[str, jax.Array]:  # fmt: skip
    """Errors of an attention sublayer's stages behind MIX, and of the whole against the float32 model.

    Args:
        after: fields of the step stopped behind the sublayer.
        old, new: the layer's state before the step and after it.
        starts: whether a block starts here.
    """
    p = layer["self_attn"]
    x = rms_norm(after["h"], layer["input_layernorm"], config.rms_norm_eps)
    pairs = (_kda if kind == "kda" else _mla)(config, p, x, after, old, new, length)
    pre, result = after["pre"][0], after["pre"][1]
    out, _ = pairs.pop("out")
    pairs["pre"] = (result, _added(pre, starts, out))
    wide, wide_x = _wide(p), x.astype(F32)
    if kind == "kda":
        outs = {"float32": kda_step(wide, wide_x, _wide(old), run, config)[0]}
    else:
        at = jnp.arange(old["cache"].shape[1])
        held = jnp.where((at < length[:, None])[..., None], old["cache"], 0).astype(F32)
        row = after["mla.row"].astype(F32)[:, None]
        given = jnp.where((at == length[:, None])[..., None], row, held)
        outs = {
            "float32.mla": mla_step(wide, wide_x, held, length, run, config)[0],
            # Rows that are not active write no row, and attend to the one that is there.
            "float32.mla_row": mla_step(wide, wide_x, given, length, jnp.zeros_like(run), config)[0],
        }
    wholes = {name: _whole(result, pre, starts, out, run) for name, out in outs.items()}
    return _errors(pairs, run) | wholes


def _errors(pairs: Pairs, run: jax.Array) -> dict[str, jax.Array]:
    return {name: _measure(got, want, run) for name, (got, want) in pairs.items()}


def _whole(result: Any, pre: Any, starts: Any, whole: Any, run: jax.Array) -> jax.Array:
    """Error of what a sublayer added; the sum it was added to was rounded too, which is given as slack."""
    added = jnp.where(starts, result.astype(F32), result.astype(F32) - pre.astype(F32))
    rows = run[:, None]
    rounded = jnp.where(rows & ~starts, result.astype(F32), 0.0) * 2**-9
    slack = jnp.sqrt(jnp.sum(rounded**2) / _numbers(whole, run)) / 2e-2
    return _measure(added, whole, run, slack)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda a: a if a.dtype == jnp.uint8 else a.astype(F32), tree)


def _moe(c: K3Config, p: Any, x: Any, f: Fields, run: Any) -> Pairs:
    shared, experts = p["shared_experts"], p["experts"]
    score = jax.nn.sigmoid(f["rlogit"])
    ids = f["route.ids"]
    weight = jnp.take_along_axis(score, ids, axis=-1)
    if c.moe_renormalize:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    act = situ(linear(x, shared["gate_proj"]), linear(x, shared["up_proj"]), c)
    latent, count = f["latent"], f["route.count"][0]
    taken = jnp.where(run[:, None], ids, c.num_experts)
    chosen = jnp.zeros(c.num_experts, bool).at[taken].set(True, mode="drop")
    slots = f["route.slots"]
    ordered = jnp.nonzero(chosen, size=len(slots), fill_value=0)[0]
    used = jnp.arange(len(slots)) < jnp.sum(chosen)

    def slot(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        def w(name: str) -> jax.Array:
            return experts[name][ordered[i]].decode(x.dtype)

        hid = situ(linear(latent, w("w1")), linear(latent, w("w3")), c)
        return hid, linear(f["hid"][i, :, : c.moe_intermediate_size], w("w2"))

    hid, ey = lax.map(slot, jnp.arange(len(slots)))
    mine = used[:, None] & jnp.any(ids[None] == ordered[:, None, None], axis=-1)  # [slots, B]

    def by_row(value: jax.Array) -> jax.Array:  # rows first, zeros where a row did not choose
        return jnp.moveaxis(jnp.where(mine[..., None], value, 0), 1, 0)

    slot_of = f["route.slot_of"]
    picked = jnp.moveaxis(f["ey"], 0, 1)[jnp.arange(len(x))[:, None], slot_of].astype(F32)
    total = jnp.zeros(latent.shape, F32)
    for a in range(c.num_experts_per_token):
        total = total + f["route.weight"][:, a, None] * picked[:, a]
    comb = f["comb"][:, : c.routed_expert_hidden_size]
    up = linear(rms_norm(comb, p["routed_expert_norm"], c.rms_norm_eps), p["routed_expert_up_proj"])
    width = c.shared_intermediate_size
    numbered = [
        jnp.concatenate([jnp.where(used, which, 0), many[None]])[None] * jnp.ones((len(x), 1), jnp.int32)
        for which, many in ((slots, count), (ordered, jnp.sum(chosen)))
    ]
    return {
        "rlogit": (f["rlogit"], router_logits(p, x)),
        "ids": (ids, select_experts(score, p["e_score_correction_bias"], c)),
        "weight": (f["route.weight"], weight * c.routed_scaling_factor),
        "slots": (numbered[0], numbered[1]),
        "latent": (latent, linear(x, p["routed_expert_down_proj"])),
        "act.shared": (f["act.shared"][:, :width], act),
        "shared": (f["shared"], einsum("bf,df->bd", f["act.shared"][:, :width], shared["down_proj"])),
        "hid": (by_row(f["hid"][..., : c.moe_intermediate_size]), by_row(hid)),
        "ey": (by_row(f["ey"]), by_row(ey)),
        "comb": (comb, total.astype(x.dtype)),
        "out": (up + f["shared"].astype(x.dtype), jnp.zeros(())),
    }


@functools.partial(jax.jit, static_argnames=("config", "moe"), compiler_options=_EXACT_ROUNDING)
def feed_forward(
    config: K3Config, moe: bool, layer: Any, after: Fields, run: jax.Array
) -> dict[str, jax.Array]:
    """As :func:`attention`, of a feed-forward sublayer; expert ids are the kernel's."""
    x = rms_norm(after["h"], layer["post_attention_layernorm"], config.rms_norm_eps)
    pre, result = after["pre"][1], after["pre"][0]
    starts = jnp.zeros((), bool)
    if moe:
        p = layer["block_sparse_moe"]
        pairs = _moe(config, p, x, after, run)
        out, _ = pairs.pop("out")
        whole = latent_moe(_wide(p), x.astype(F32), config, after["route.ids"])
    else:
        p = layer["mlp"]
        act = after["act.dense"][:, : config.intermediate_size]
        want = situ(linear(x, p["gate_proj"]), linear(x, p["up_proj"]), config)
        pairs, out = {"act.dense": (act, want)}, linear(act, p["down_proj"])
        whole = dense_ffn(_wide(p), x.astype(F32), config)
    pairs["pre"] = (result, pre + out)
    return _errors(pairs, run) | {"float32": _whole(result, pre, starts, whole, run)}


@functools.partial(jax.jit, static_argnames="config", compiler_options=_EXACT_ROUNDING)
def output(config: K3Config, params: Any, after: Fields, logits: jax.Array, run: jax.Array) -> Any:
    """LM_HEAD from the kernel's last mixture."""
    x = rms_norm(after["h"], params["norm"], config.rms_norm_eps)
    return {"logits": _measure(logits, einsum("bd,wd->bw", x, params["lm_head"]), run)}


def problems(
    where: str, errors: Mapping[str, Any], worst: dict[str, float], bounds: Mapping[str, Bound] | None = None
) -> list[str]:
    """What is above its bound; keeps the largest RMS errors in ``worst``.

    Args:
        bounds: those that hold in place of :data:`BOUNDS`, by name.
    """
    out = []
    for name, (rms, largest, bad) in jax.tree.map(np.asarray, dict(errors)).items():
        worst[name] = max(worst.get(name, 0.0), float(rms))
        limit = (bounds or {}).get(name) or bound(name)
        if not (rms <= limit.rms and largest <= limit.worst and bad == 0):
            out.append(
                f"{where}, {name}: RMS {rms:.2e} (at most {limit.rms:.0e}), worst {largest:.2e} "
                f"({limit.worst:.0e}), {int(bad)} not finite; {limit.why}"
            )
    return out


__all__ = ["BOUNDS", "Bound", "attention", "bound", "feed_forward", "mixture", "output", "problems"]
