"""Every op of ``k3jax.pallas`` as the megakernel computes it: its stages, on the op's arguments.

One function an op, with the op's arguments and results. A function makes a model of the case's sizes, sets
what the stages read, runs them and reads what they wrote; the arithmetic is the interpreter's. Where a result
is visible in no buffer, a product with the identity shows it: float32 sums of one number and zeros are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from k3jax import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Op
from k3jax.custom_calls.decode_megakernel.interpreter import step
from k3jax.custom_calls.decode_megakernel.shapes import ROW_GROUP
from k3jax.custom_calls.decode_megakernel.stages import shared_pieces
from k3jax.pallas.router import Routing
from support.megakernel_stage import (
    BF16,
    OutsideThePlanError,
    Stages,
    bfloat16,
    small_config,
    three_bfloat16,
)

# -- attn_res ----------------------------------------------------------------------------------


def attn_res(
    pre: Any, deltas: Sequence[Any], snapshots: Sequence[Any], norm: Any, proj: Any, gain: Any, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """The end of a sublayer (residual sum, partial scores), MIX, and the norm of the stage that follows.

    Which sublayer depends on what is added: nothing at the first mixture; one output without a running sum
    where a block starts; one with it of an attention layer inside a block, and of a dense FFN, which must
    agree; two of a LatentMoE (routed and shared experts). A norm of one sum alone is that of the experts'
    latent sum. A delta's slots are the Pallas product's partial sums; a stage of the megakernel ends with
    their sum.
    """
    a = _Arguments(pre, [_added(delta) for delta in deltas], snapshots, norm, proj, gain, eps)
    outputs, mixed, adds = len(deltas), len(snapshots) > 0, pre is not None
    match outputs, mixed, adds:
        case 0, False, True:
            return _first_mixture(a)
        case 1, False, False:
            return _latent_norm(a)
        case 1, True, False:
            return _block_start(a)
        case 1, True, True:
            results = _inside_block(a), _after_dense(a)
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other, err_msg="after attention, and after a dense FFN")
            return results[0]
        case 2, True, True:
            return _after_experts(a)
        case _:
            start = "with" if adds else "without"
            raise OutsideThePlanError(
                f"attn_res: no sublayer ends with {outputs} outputs {start} a running sum before a mixture "
                f"of {len(snapshots)} snapshots"
            )


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The op's, with every delta's slots added."""

    pre: Any
    sums: Sequence[np.ndarray]
    snapshots: Sequence[Any]
    norm: Any
    proj: Any
    gain: Any
    eps: float

    @property
    def width(self) -> int:
        return self.gain.shape[0]

    def config(self, **fields: Any) -> K3Config:
        return small_config(hidden_size=self.width, rms_norm_eps=self.eps, **fields)


def _added(delta: Any) -> np.ndarray:
    slots = np.asarray(delta, np.float32)
    total = slots[0]
    for slot in slots[1:]:
        total = total + slot
    return total


def _identity(width: int, copies: int = 1) -> np.ndarray:
    """[width, copies x width]: a product with it adds the copies."""
    return np.tile(np.eye(width), (1, copies)).astype(BF16)


def _parts(total: np.ndarray) -> np.ndarray:
    """[rows, 3 D] of bfloat16, whose product with three identities is ``total``."""
    return np.concatenate(three_bfloat16(total), axis=1)


def _first_mixture(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    """MIX of layer 0; its snapshot is the running sum."""
    s = Stages(a.config(layer_types=("mla",), q_lora_rank=a.width), len(a.pre))
    s.set(s.layer(), input_layernorm=a.gain)
    s.set(s.layer()["self_attn"], q_a_proj=_identity(a.width))
    s.put_columns("pre.0", a.pre)
    s.execute((Op.MIX, 0), (Op.MLA_IN, 0))
    return bfloat16(s.get("mla.proj")[: a.width].T), bfloat16(s.get("block.0").T)


def _latent_norm(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    """COMBINE adds three experts of weight 1; LATENT_UP norms the sum."""
    (total,) = a.sums
    config = a.config(routed_expert_hidden_size=a.width, num_experts=3, num_experts_per_token=3)
    s = Stages(config, len(total))
    moe = s.layer()["block_sparse_moe"]
    s.set(moe, routed_expert_norm=a.gain, routed_expert_up_proj=_identity(a.width))
    _put_routing(s, np.tile(np.arange(3), (len(total), 1)), np.ones((len(total), 3)), [0, 1, 2])
    s.put("ey", np.concatenate([_row_groups(part) for part in three_bfloat16(total)]))
    zeros = np.zeros_like(total)
    s.put(f"shared.{shared_pieces(s.plan) - 1}", _row_groups(zeros))
    s.put_columns("pre.1", zeros)
    s.put_columns("block.0", zeros)
    s.execute((Op.COMBINE, 1), (Op.LATENT_UP, 1))
    return bfloat16(s.get("pre.0").T), bfloat16(s.get("comb").T)


def _row_groups(x: np.ndarray) -> np.ndarray:
    """[rows, columns] in units of 8 columns, [columns / 8, 8, rows]."""
    return x.T.reshape(-1, ROW_GROUP, len(x))


def _put_snapshots(s: Stages, snapshots: Sequence[Any]) -> None:
    for j, snapshot in enumerate(snapshots):
        s.put_columns(f"block.{j}", snapshot)


def _before_experts(s: Stages, a: _Arguments, end: Op) -> tuple[np.ndarray, np.ndarray]:
    """The end of the last layer's attention, the mixture of its LatentMoE, and the norm in the latent."""
    last = s.plan.layers - 1
    layer = s.layer(last)
    s.set(layer, mlp_res_norm=a.norm, mlp_res_proj=a.proj, post_attention_layernorm=a.gain)
    s.set(layer["self_attn"], o_proj=_identity(a.width, 3))
    s.set(layer["block_sparse_moe"], routed_expert_down_proj=_identity(a.width))
    _put_snapshots(s, a.snapshots)
    s.execute((end, 2 * last), (Op.MIX, 2 * last + 1), (Op.LATENT_DOWN, 2 * last + 1))
    return bfloat16(s.get("latent").T), bfloat16(s.get("pre.1").T)


def _block_start(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    """MLA_OUT where a block starts: every layer is a block."""
    depth = len(a.snapshots)
    config = a.config(
        layer_types=("mla",) * depth, num_attention_heads=3, v_head_dim=a.width,
        first_k_dense_replace=depth - 1, routed_expert_hidden_size=a.width,
    )  # fmt: skip
    s = Stages(config, len(a.sums[0]))
    s.put_columns("mla.y", _parts(a.sums[0]))
    return _before_experts(s, a, Op.MLA_OUT)


def _inside_block(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    """KDA_OUT in the second layer of a block of two."""
    depth = 2 * len(a.snapshots)
    config = a.config(
        layer_types=("kda",) * depth, kda_num_heads=3 * a.width // 128, attn_res_block_size=2,
        first_k_dense_replace=depth - 1, routed_expert_hidden_size=a.width,
    )  # fmt: skip
    s = Stages(config, len(a.pre))
    heads = _parts(a.sums[0]).reshape(len(a.pre), s.plan.kda_heads, s.plan.V)
    s.put("kda.y", heads.transpose(1, 0, 2).reshape(-1, s.plan.V))
    s.put_columns("pre.0", a.pre)
    return _before_experts(s, a, Op.KDA_OUT)


def _before_logits(s: Stages, a: _Arguments, end: Op) -> tuple[np.ndarray, np.ndarray]:
    """The end of the last sublayer, the output's mixture, and its norm in the logits."""
    s.set(s.params, output_attn_res_norm=a.norm, output_attn_res_proj=a.proj, norm=a.gain)
    s.set(s.params, lm_head=_identity(a.width))
    s.put_columns("pre.1", a.pre)
    _put_snapshots(s, a.snapshots)
    out = 2 * s.plan.layers
    s.execute((end, out - 1), (Op.MIX, out), (Op.LM_HEAD, out))
    return bfloat16(s.get("logits").T), bfloat16(s.get("pre.0").T)


def _after_dense(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    depth = len(a.snapshots)
    config = a.config(
        vocab_size=a.width, layer_types=("kda",) * depth, first_k_dense_replace=depth,
        intermediate_size=3 * a.width,
    )  # fmt: skip
    s = Stages(config, len(a.pre))
    s.set(s.layer(depth - 1)["mlp"], down_proj=_identity(a.width, 3))
    s.put_columns("act.dense", _parts(a.sums[0]))
    return _before_logits(s, a, Op.DENSE_DOWN)


def _after_experts(a: _Arguments) -> tuple[np.ndarray, np.ndarray]:
    depth = len(a.snapshots)
    config = a.config(
        vocab_size=a.width, layer_types=("kda",) * depth, first_k_dense_replace=depth - 1,
        routed_expert_hidden_size=3 * a.width,
    )  # fmt: skip
    s = Stages(config, len(a.pre))
    moe = s.layer(depth - 1)["block_sparse_moe"]
    s.set(moe, routed_expert_norm=np.ones(3 * a.width), routed_expert_up_proj=_identity(a.width, 3))
    s.put_latent(_parts(a.sums[0]))
    s.put(f"shared.{shared_pieces(s.plan) - 1}", _row_groups(a.sums[1]))
    return _before_logits(s, a, Op.LATENT_UP)


# -- head --------------------------------------------------------------------------------------


def head(x: Any, weight: Any) -> tuple[np.ndarray, np.ndarray]:
    """LM_HEAD, and FINISH for the tokens."""
    words, width = weight.shape
    s = Stages(small_config(hidden_size=width, vocab_size=words), len(x))
    s.set(s.params, norm=np.ones(width), lm_head=weight)
    s.put_normed(x)
    s.put("lengths", np.zeros(len(x)))
    s.put("status", np.zeros(len(x)))
    s.execute((Op.LM_HEAD, 2), (Op.FINISH, 2))
    return s.get("logits").T, s.get("token").astype(np.int32)


# -- kda ---------------------------------------------------------------------------------------


def kda(
    p: Mapping[str, Any], q: Any, k: Any, v: Any, gate: Any, beta: Any, low: Any, S: Any, conv: Any,
    active: Any, config: K3Config,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """KDA_DECAY and KDA_STEP, both states in place."""
    batch, heads, values, keys = S.shape
    s = Stages(small_config(config, kda_num_heads=heads), batch, run=active)
    s.set(s.layer()["self_attn"], **p)
    s.put_columns("kda.proj", np.concatenate([np.asarray(a) for a in (low, beta, q, k, v, gate)], axis=1))
    s.put("S.0", np.asarray(S).transpose(1, 0, 2, 3).reshape(-1, values, keys))
    s.put("conv.0", step._conv_units(np.asarray(conv), s.plan))
    s.execute((Op.KDA_DECAY, 0), (Op.KDA_STEP, 0))
    y = s.get("kda.y").reshape(heads, batch, values).transpose(1, 0, 2).reshape(batch, -1)
    state = s.get("S.0").reshape(heads, batch, values, keys).transpose(1, 0, 2, 3)
    return bfloat16(y), state, bfloat16(step._conv_channels(s.get("conv.0"), s.plan))


# -- mla ---------------------------------------------------------------------------------------


def mla(
    p: Mapping[str, Any], q: Any, kv: Any, gate: Any, cache: Any, lengths: Any, active: Any, config: K3Config
) -> tuple[np.ndarray, np.ndarray]:
    """MLA_ROW, MLA_ABSORB, MLA_ATTEND and MLA_VALUE: two lanes a row, of which one has several splits."""
    cache, lengths = np.asarray(cache), np.asarray(lengths)
    batch, capacity = cache.shape[:2]
    run = (np.asarray(active) != 0) & (lengths < capacity)
    sizes = {
        name: getattr(config, name)
        for name in (
            "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )
    }  # fmt: skip
    small = small_config(config, layer_types=("mla",), **sizes)
    s = Stages(small, batch, run=run, sms=2 * batch, old={0: cache})
    s.set(s.layer()["self_attn"], **p)
    s.put_columns("mla.q", q)
    s.put_columns("mla.proj", np.concatenate([np.asarray(kv), np.asarray(gate)], axis=1), s.plan.Q)
    s.put("lengths", lengths)
    s.execute(*((op, 0) for op in (Op.MLA_ROW, Op.MLA_ABSORB, Op.MLA_ATTEND, Op.MLA_VALUE)))
    new = cache.copy()
    for b in np.flatnonzero(run):
        new[b, lengths[b]] = bfloat16(s.get("cache.0")[b])
    return bfloat16(s.get("mla.y").T), new


# -- router and experts ------------------------------------------------------------------------


def route(logits: Any, bias: Any, active: Any, choices: int) -> Routing:
    """ROUTE, on logits given."""
    batch, count = active.shape[0], bias.shape[0]
    config = small_config(
        num_experts=count, num_experts_per_token=choices, moe_renormalize=True, routed_scaling_factor=1.0
    )
    live = np.asarray(active) != 0
    s = Stages(config, batch, run=live)
    s.set(s.layer()["block_sparse_moe"], e_score_correction_bias=bias)
    s.put_columns("rlogit", logits)
    s.execute((Op.ROUTE, 1))
    record, numbered = s.get("route")[0], s.machine.slots
    ids = record[:, :choices, 0].astype(np.int32)
    places = [[numbered.index(i) if live[b] else -1 for i in row] for b, row in enumerate(ids.tolist())]
    return Routing(
        ids,
        record[:, :choices, 1],
        np.array(numbered + [-1] * (128 - len(numbered)), np.int32),
        np.unique(record[:, choices, 0]).astype(np.int32),
        np.array(places, np.int32),
    )


def _put_routing(s: Stages, ids: np.ndarray, weights: np.ndarray, slots: list[int]) -> None:
    """What ROUTE leaves: (id, weight) of every row and rank, then how many slots are in use."""
    count = np.full((len(ids), 1, 2), len(slots))
    s.put("route", np.concatenate([np.stack([ids, weights], axis=-1), count], axis=1)[None])
    s.slots = slots


def experts(
    weights: Mapping[str, Any], x: Any, ids: Any, mix: Any, slots: Any, count: Any, slot_of: Any,
    config: K3Config,
) -> np.ndarray:  # fmt: skip
    """EXPERT_IN, EXPERT_OUT and COMBINE; the sum leaves the megakernel's stage in bfloat16."""
    names = (
        "num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size"
    )  # fmt: skip
    small = small_config(config, **{name: getattr(config, name) for name in names})
    s = Stages(small, len(x), run=(np.asarray(slot_of) >= 0).all(axis=1))
    s.layer()["block_sparse_moe"]["experts"] = jax.tree.map(np.asarray, dict(weights))
    s.put_columns("latent", x)
    used = np.asarray(slots)[: int(count[0])].tolist()
    _put_routing(s, np.asarray(ids), np.asarray(mix), used)
    s.execute((Op.EXPERT_IN, 1), (Op.EXPERT_OUT, 1), (Op.COMBINE, 1))
    return s.get("comb").T


__all__ = ["attn_res", "experts", "head", "kda", "mla", "route"]
