"""The four sublayers of K3 on eight token rows, between two launches of :mod:`.attn_res`.

Each takes the normed input, bfloat16 [8, D], and returns what is to be added to the running sum as
a list of float32 partial sums [slots, 8, D]; :func:`attn_res` rounds each sum once and adds them in
their order, which are the rounding points of :mod:`k3jax.layers`. Rows past the batch are computed
like any other and have no meaning. A device of a mesh computes with its heads, widths and experts;
what it exchanges with others stands between launches, in its ``share``, see :mod:`.share`.

All are jitted, so that layers of one kind are traced and lowered once, not once each: Mosaic takes
a quarter of a second per kernel. Inside another program XLA inlines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..config import K3Config
from ._launch import Interpret
from .attn_res import attn_res
from .kda import kda
from .mla import mla
from .router import Routing, route
from .share import WHOLE, Deltas, Whole
from .skinny_gemm import Epilogue, Product, skinny_gemm

ROWS = 8
"""Token rows of every launch: batches are padded to it."""

KDA_INPUTS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_a_proj")
MLA_INPUTS = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")


class Rows(NamedTuple):
    """What a step knows of its rows.

    Attributes:
        run: int32 [B], 1 for rows that take their token.
        lengths: int32 [B], tokens cached before.
    """

    run: jax.Array
    lengths: jax.Array


def rounded(p: Mapping[str, Any], names: Sequence[str]) -> list[Product]:
    """Products of named matrices with one input, each rounded once to bfloat16."""
    return [Product((p[name],)) for name in names]


def partial_sums(*weights: Any) -> list[Product]:
    """Products of the i-th input with the i-th matrix, left as partial sums."""
    return [Product((weight,), Epilogue.PARTIAL, i) for i, weight in enumerate(weights)]


def gated(p: Mapping[str, Any]) -> Product:
    """SiTU of a feed-forward network's gate and up matrices."""
    return Product((p["gate_proj"], p["up_proj"]), Epilogue.SITU)


def moe_inputs(p: Mapping[str, Any]) -> list[Product]:
    """Router logits, latent and the shared expert's hidden values, all of one input."""
    logits = Product((p["gate"],), Epilogue.WIDE)
    return [logits, Product((p["routed_expert_down_proj"],)), gated(p["shared_experts"])]


@partial(jax.jit, static_argnames=("eps", "interpret"))
def residual(
    pre: jax.Array | None,
    deltas: Deltas,
    snapshots: Sequence[jax.Array],
    norm: jax.Array | None,
    proj: jax.Array | None,
    gain: jax.Array,
    eps: float,
    interpret: Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """:func:`attn_res`, one launch."""
    return attn_res(pre, deltas, snapshots, norm, proj, gain, eps, interpret=interpret)


def situ_constants(config: K3Config) -> tuple[float, float]:
    return config.activation_situ_beta, config.activation_situ_linear_beta


@partial(jax.jit, static_argnames=("config", "interpret", "share"))
def kda_sublayer(
    p: Mapping[str, Any],
    x: jax.Array,
    state: Mapping[str, jax.Array],
    rows: Rows,
    config: K3Config,
    interpret: Interpret = False,
    share: Whole = WHOLE,
) -> tuple[Deltas, dict[str, jax.Array]]:
    """KDA as three launches: its six inputs, the recurrence, the output projection.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: bfloat16 [8, D].
        state: ``S`` and ``conv`` of B rows.
        config: with the heads that are here.
        share: what this device holds.
    """
    q, k, v, gate, beta, low = skinny_gemm([x], rounded(p, KDA_INPUTS), interpret=interpret)
    y, S, conv = kda(
        p, q, k, v, gate, beta, low, state["S"], state["conv"], rows.run, config, interpret=interpret
    )
    deltas = skinny_gemm([y], partial_sums(p["o_proj"]), interpret=interpret)
    return share.total(list(deltas)), {"S": S, "conv": conv}


@partial(jax.jit, static_argnames=("config", "interpret", "share"))
def mla_sublayer(
    p: Mapping[str, Any],
    x: jax.Array,
    state: Mapping[str, jax.Array],
    rows: Rows,
    config: K3Config,
    interpret: Interpret = False,
    share: Whole = WHOLE,
) -> tuple[Deltas, dict[str, jax.Array]]:
    """MLA as seven launches: inputs, query norm, queries, three of attention, the output projection.

    Args:
        p: the layer's ``self_attn`` parameters.
        x: bfloat16 [8, D].
        state: ``cache`` of B rows.
        config: with the heads that are here.
        share: what this device holds.
    """
    low, kv, gate = skinny_gemm([x], rounded(p, MLA_INPUTS), interpret=interpret)
    # Without deltas and snapshots it is the norm alone.
    low, _ = residual(low, [], [], None, None, p["q_a_layernorm"], config.latent_norm_eps, interpret)
    (q,) = skinny_gemm([low], rounded(p, ["q_b_proj"]), interpret=interpret)
    y, cache = mla(p, q, kv, gate, state["cache"], rows.lengths, rows.run, config, interpret=interpret)
    deltas = skinny_gemm([y], partial_sums(p["o_proj"]), interpret=interpret)
    return share.total(list(deltas)), {"cache": cache}


@partial(jax.jit, static_argnames=("config", "interpret", "share"))
def dense_sublayer(
    p: Mapping[str, Any],
    x: jax.Array,
    config: K3Config,
    interpret: Interpret = False,
    share: Whole = WHOLE,
) -> Deltas:
    """The dense feed-forward network as two launches.

    Args:
        p: the layer's ``mlp`` parameters.
        x: bfloat16 [8, D].
    """
    (hidden,) = skinny_gemm([x], [gated(p)], situ_constants(config), interpret=interpret)
    return share.total(list(skinny_gemm([hidden], partial_sums(p["down_proj"]), interpret=interpret)))


@partial(jax.jit, static_argnames=("config", "interpret", "share"))
def moe_sublayer(
    p: Mapping[str, Any],
    x: jax.Array,
    rows: Rows,
    config: K3Config,
    interpret: Interpret = False,
    share: Whole = WHOLE,
) -> tuple[Deltas, Routing]:
    """LatentMoE as six launches: inputs, routing, two of the experts, latent norm, outputs.

    Experts of rows that do not run are not read, and their latent sums are zero.

    Args:
        p: the layer's ``block_sparse_moe`` parameters.
        x: bfloat16 [8, D].
        share: what this device holds.
    """
    logits, part, shared = skinny_gemm([x], moe_inputs(p), situ_constants(config), interpret=interpret)
    routing = route(
        logits, p["e_score_correction_bias"], rows.run, config.num_experts_per_token,
        config.moe_renormalize, config.routed_scaling_factor, interpret=interpret,
    )  # fmt: skip
    total = share.experts(p, share.whole_latent(part), routing, rows.run != 0, config, interpret)
    total = jnp.pad(total, ((0, ROWS - total.shape[0]), (0, 0)))[None]
    normed, _ = residual(
        None, [total], [], None, None, p["routed_expert_norm"], config.rms_norm_eps, interpret
    )
    own = share.own_latent(normed, part.shape[-1])
    outputs = partial_sums(p["routed_expert_up_proj"], p["shared_experts"]["down_proj"])
    return share.total(list(skinny_gemm([own, shared], outputs, interpret=interpret))), routing


__all__ = [
    "KDA_INPUTS", "MLA_INPUTS", "ROWS", "Rows", "dense_sublayer", "gated", "kda_sublayer",
    "mla_sublayer", "moe_inputs", "moe_sublayer", "partial_sums", "residual", "rounded", "situ_constants",
]  # fmt: skip
