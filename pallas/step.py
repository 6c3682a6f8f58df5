"""``implementation="pallas"``: a whole decode step out of the ops of this package.

Launches (kernels) of a layer, in order; what XLA adds are reshapes, paddings and small sums::

    attention, KDA    residual | q k v g b f_a | recurrence | o                              4
    attention, MLA    residual | q_a kv_a g | norm | q_b | absorb, attend, merge | o         8
    feed-forward,     residual | gate up SiTU | down                                         3
      dense
    feed-forward,     residual | gate, latent, shared SiTU | routing | experts gate up,      7
      LatentMoE         experts down | norm | latent up, shared down

"residual" adds the sublayers before it to the running sum, mixes over depth and norms
(:mod:`.attn_res`). A step is the layers, one more residual and the head: 7 launches for a KDA layer
with the dense FFN, 11 for one with a LatentMoE, 15 for an MLA layer with a LatentMoE.

Under a mesh the same launches run on each device's share, with a sum after "o" and after "down", a
gather of the latent, and the exchange of tokens around the experts, whose two launches are then made
once per eight rows: see :mod:`.share`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..config import K3Config
from ..state import STATUS_BAD_TOKEN, STATUS_FULL, State
from ._launch import Interpret, require
from .fit import default_device, supports
from .head import logits_of
from .share import WHOLE, Deltas, Whole
from .sublayers import (
    ROWS,
    Rows,
    dense_sublayer,
    kda_sublayer,
    mla_sublayer,
    moe_sublayer,
    residual,
)


def decode_step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    live: jax.Array,
    config: K3Config,
    *,
    interpret: Interpret = False,
) -> tuple[jax.Array, State]:
    """As :func:`k3jax.decode_step`: float32 logits [B, W] and the new state.

    Args:
        params: bfloat16 parameters with packed experts.
        state: of 1..8 rows; donate it to update it in place.
        tokens: int32 [B]; live: bool [B].
        interpret: run the kernels in Pallas's interpreter, on any device.

    Raises:
        NotImplementedError: with all reasons of :func:`supports`.
    """
    device = None if interpret else default_device()
    require("pallas", supports(config, device, state.batch, interpret=bool(interpret), params=params))
    return step(params, state, tokens, live, config, interpret=interpret)


def step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    live: jax.Array,
    config: K3Config,
    *,
    interpret: Interpret = False,
    share: Whole = WHOLE,
    tap: Callable[[str, jax.Array], None] | None = None,
) -> tuple[jax.Array, State]:
    """:func:`decode_step` without its checks: also to be lowered for a GPU where there is none.

    Args:
        share: what this device holds; logits are those of its part of the vocabulary.
        tap: called with ``layers.i.topk_ids`` int32 [B, A] and ``layers.i.topk_w`` float32 [B, A].
    """
    full = state.lengths >= state.max_length
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    run = live & ~full & ~bad
    tokens = jnp.where(run, tokens, 0)
    x, layers = hidden_states(params, state, tokens, run, config, interpret, share, tap)
    with jax.named_scope("lm_head"):
        logits = logits_of(x, params["lm_head"], interpret=interpret)[: state.batch]
    refused = live & ~run
    logits = jnp.where(run[:, None], logits, jnp.where(refused[:, None], jnp.nan, 0.0))
    status = state.status | jnp.where(live & full, STATUS_FULL, 0)
    status = status | jnp.where(live & bad, STATUS_BAD_TOKEN, 0)
    lengths = state.lengths + run.astype(jnp.int32)
    return logits, State(layers, lengths, status, state.max_length, state.kernel)


def hidden_states(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    run: jax.Array,
    config: K3Config,
    interpret: Interpret = False,
    share: Whole = WHOLE,
    tap: Callable[[str, jax.Array], None] | None = None,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], ...]]:
    """Final normed hidden states, bfloat16 [8, D], and every layer's new state.

    Args:
        tokens: int32 [B], in range.
        run: bool [B].
        share, tap: as in :func:`step`.
    """
    eps, heads = config.rms_norm_eps, share.heads(config)
    rows = Rows(run.astype(jnp.int32), state.lengths)
    padded = jnp.pad(tokens, (0, ROWS - state.batch))
    pre: jax.Array | None = share.embed(params["embed_tokens"], padded)
    deltas: Deltas = []
    snapshots: list[jax.Array] = []
    states = []
    for i, (p, before) in enumerate(zip(params["layers"], state.layers, strict=True)):
        kind = config.layer_types[i]
        with jax.named_scope(f"layer{i}_{kind}"):
            x, total = residual(
                pre, deltas, snapshots, p["self_attention_res_norm"], p["self_attention_res_proj"],
                p["input_layernorm"], eps, interpret,
            )  # fmt: skip
            if config.starts_block(i):
                snapshots = [*snapshots, total]
            pre = None if config.starts_block(i) else total
            attention = kda_sublayer if kind == "kda" else mla_sublayer
            deltas, after = attention(p["self_attn"], x, share.taken(before), rows, heads, interpret, share)
            states.append(share.kept(after))
            x, pre = residual(
                pre, deltas, snapshots, p["mlp_res_norm"], p["mlp_res_proj"],
                p["post_attention_layernorm"], eps, interpret,
            )  # fmt: skip
            if "mlp" in p:
                deltas = dense_sublayer(p["mlp"], x, config, interpret, share)
            else:
                deltas, routing = moe_sublayer(p["block_sparse_moe"], x, rows, config, interpret, share)
                if tap is not None:
                    tap(f"layers.{i}.topk_ids", routing.ids)
                    tap(f"layers.{i}.topk_w", routing.weights)
    with jax.named_scope("output"):
        x, _ = residual(
            pre, deltas, snapshots, params["output_attn_res_norm"], params["output_attn_res_proj"],
            params["norm"], eps, interpret,
        )  # fmt: skip
    return x, tuple(states)


__all__ = ["decode_step", "hidden_states", "step", "supports"]
