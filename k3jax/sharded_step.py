"""Decode step and prefill over a :class:`k3jax.mesh.MeshPlan`: the model under ``jax.shard_map``.

Every device runs :mod:`k3jax.model`'s layers on its heads, widths and rows; what crosses devices is
written here, nothing is left for the compiler to find. Per layer, over the tensor ranks: one sum
after attention, one after the feed-forward network, a gather of the latent; over all ranks the
dispatch of :mod:`k3jax.dispatch`, whose sum ends before the latent norm. The Pallas path has its launches
between the same collectives, see :mod:`k3jax.pallas.planned`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from . import dispatch, implementations
from .config import K3Config
from .layers.ffn import dense_ffn
from .layers.kda import kda_prefill, kda_step
from .layers.linear import einsum, linear
from .layers.mla import mla_prefill, mla_step
from .layers.moe import experts_by_block, route
from .layers.norm import rms_norm
from .mesh.layout import match_specs, param_specs
from .mesh.plan import TENSOR_PARALLEL, MeshPlan, spec
from .mesh.split_cache import mla_split_step
from .mesh.states import check_planned, join_conv, split_conv, state_specs
from .model import LayerState, LayerType, lm_head, run_layers
from .state import CACHE_BLOCK, STATUS_BAD_TOKEN, STATUS_FULL, State


def row_parallel(x: Float[Array, "*rows i"], weight: Float[Array, "o i"]) -> Float[Array, "*rows o"]:
    """``y = x Wᵀ`` where each tensor rank holds some of the inputs: summed in float32, rounded once."""
    return lax.psum(einsum("...i,oi->...o", x, weight), TENSOR_PARALLEL).astype(x.dtype)


def embed(table: Float[Array, "w d"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
    """Rows of an embedding table cut by vocabulary; exact, as one rank's row is added to zeros."""
    index = tokens - lax.axis_index(TENSOR_PARALLEL) * table.shape[0]
    mine = (index >= 0) & (index < table.shape[0])
    rows = jnp.where(mine[..., None], table[jnp.where(mine, index, 0)], 0)
    return lax.psum(rows, TENSOR_PARALLEL)


def whole_latent(part: Float[Array, "rows part"]) -> Float[Array, "rows l"]:
    """The latent of which each tensor rank has computed some columns."""
    return lax.all_gather(part, TENSOR_PARALLEL, axis=-1, tiled=True)


def own_latent(latent: Float[Array, "rows l"], width: int) -> Float[Array, "rows part"]:
    """The ``width`` columns that this tensor rank's output matrix reads."""
    first = lax.axis_index(TENSOR_PARALLEL) * width
    return lax.dynamic_slice_in_dim(latent, first, width, axis=-1)


@dataclasses.dataclass(frozen=True)
class Local:
    """What a device knows of its share.

    Attributes:
        config: of the whole model.
        rows: rows of the whole batch.
    """

    config: K3Config
    plan: MeshPlan
    rows: int

    @property
    def heads(self) -> K3Config:
        """The architecture with this device's heads only."""
        return self.plan.local_config(self.config)

    def latent_moe(self, p: Mapping[str, Any], x: jax.Array, live: jax.Array, tap: Any) -> jax.Array:
        """The LatentMoE of this data group's rows x [..., D]; rows that are not live choose no expert."""
        c, shape = self.config, x.shape
        x = x.reshape(-1, shape[-1])
        ids, weights = route(p, x, c)
        part = linear(x, p["routed_expert_down_proj"])
        per_rank = _per_rank(p)
        local = dataclasses.replace(
            c,
            num_experts=per_rank,
            num_experts_per_token=min(per_rank, c.num_experts_per_token),
            moe_intermediate_size=c.moe_intermediate_size // self.plan.expert_width,
        )

        def compute(rows: jax.Array, expert: jax.Array, weights: jax.Array) -> jax.Array:
            return experts_by_block(p["experts"], rows, expert, weights, local)

        total = self.dispatch(p, whole_latent(part), ids, weights, live.reshape(-1), compute)
        normed = rms_norm(total.astype(x.dtype), p["routed_expert_norm"], c.rms_norm_eps)
        # One sum for both: the shared expert needs nothing of the exchange and runs beside it.
        partial_sum = partial(einsum, "...i,oi->...o")
        out = partial_sum(own_latent(normed, part.shape[-1]), p["routed_expert_up_proj"])
        out = out + dense_ffn(p["shared_experts"], x, c, project=partial_sum)
        if tap is not None:
            tap("topk_ids", ids.reshape(*shape[:-1], -1))
            tap("topk_w", weights.reshape(*shape[:-1], -1))
        return lax.psum(out, TENSOR_PARALLEL).astype(x.dtype).reshape(shape)

    def dispatch(
        self,
        p: Mapping[str, Any],
        latent: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        live: jax.Array,
        compute: dispatch.Compute,
    ) -> jax.Array:
        """float32 [rows, L]: what ``compute`` gives for each (row, choice) where the choice lies, summed.

        Args:
            p: the layer's ``block_sparse_moe`` parameters.
            latent: [rows, L] of this data group; ids, weights: [rows, A]; live: bool [rows].
            compute: this rank's experts.
        """
        count = ids.shape[0]
        first = lax.axis_index("data") * count
        slots = dispatch.chosen_slots(p["placement"], ids, live, first)
        weights = jnp.where(live[:, None], weights, 0.0)
        per_rank = _per_rank(p)
        choice = self.plan.choice(self.config, count * self.plan.data)
        if choice.kind == "gather":
            return dispatch.gather(latent, slots, weights, compute, per_rank)
        if choice.kind == "ragged":
            return dispatch.ragged(latent, slots, weights, compute, per_rank)
        return dispatch.all_to_all(latent, slots, weights, compute, per_rank, choice.capacity)

    def run(
        self, params: Any, x: jax.Array, state: State, live: jax.Array, attention: Any, tap: Any = None
    ) -> tuple[jax.Array, tuple[LayerState, ...]]:
        """All layers on this device's share, see :func:`k3jax.model.run_layers`."""

        def ffn(p: Any, x: jax.Array, config: K3Config, see: Any) -> jax.Array:
            if "mlp" in p:
                return dense_ffn(p["mlp"], x, config, project=row_parallel)
            return self.latent_moe(p["block_sparse_moe"], x, live, see)

        return run_layers(params, self.config, x, state.layers, attention, ffn=ffn, tap=tap)

    def kda(self, step: Any, p: Any, x: jax.Array, layer: LayerState, which: jax.Array) -> Any:
        out, new = step(p, x, join_conv(layer), which, self.heads, project=row_parallel)
        return out, split_conv(new, self.heads)


def _per_rank(p: Mapping[str, Any]) -> int:
    """Physical expert slots of a rank."""
    return jax.tree.leaves(p["experts"])[0].shape[0]


def _decode_local(
    params: Any, state: State, tokens: jax.Array, active: jax.Array, *, local: Local, taps: bool
) -> tuple[jax.Array, State, dict[str, jax.Array]]:
    plan, vocab = local.plan, local.config.vocab_size
    full = state.lengths >= state.max_length
    bad = (tokens < 0) | (tokens >= vocab)
    run = active & ~full & ~bad

    def attention(kind: LayerType, p: Any, x: jax.Array, layer: LayerState) -> tuple[jax.Array, LayerState]:
        if kind == "kda":
            return local.kda(kda_step, p, x, layer, run)
        step = partial(mla_split_step, axes=TENSOR_PARALLEL) if plan.split_sequence else mla_step
        out, cache = step(p, x, layer["cache"], state.lengths, run, local.heads, project=row_parallel)
        return out, {"cache": cache}

    seen: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> None:
        if name.endswith(("topk_ids", "topk_w")):
            seen[name] = value

    x = embed(params["embed_tokens"], jnp.where(run, tokens, 0))
    x, layers = local.run(params, x, state, run, attention, tap if taps else None)
    logits = lm_head(params, x)
    refused = active & ~run
    logits = jnp.where(run[:, None], logits, jnp.where(refused[:, None], jnp.nan, 0.0))
    status = state.status | jnp.where(active & full, STATUS_FULL, 0)
    status = status | jnp.where(active & bad, STATUS_BAD_TOKEN, 0)
    return logits, State(layers, state.lengths + run.astype(jnp.int32), status, state.max_length), seen


def _prefill_local(
    params: Any, state: State, last: jax.Array, tokens: jax.Array, counts: jax.Array,
    *, local: Local, every: bool,
) -> tuple[jax.Array | None, jax.Array, State]:  # fmt: skip
    plan = local.plan
    longest = jnp.max(state.lengths + counts, initial=0)
    num_blocks = lax.pmax((longest + CACHE_BLOCK - 1) // CACHE_BLOCK, "data")
    real = jnp.arange(tokens.shape[1]) < counts[:, None]

    def attention(kind: LayerType, p: Any, x: jax.Array, layer: LayerState) -> tuple[jax.Array, LayerState]:
        if kind == "kda":
            return local.kda(kda_prefill, p, x, layer, counts)
        cache = layer["cache"]
        own = cache.shape[1]
        if plan.split_sequence:
            cache = lax.all_gather(cache, TENSOR_PARALLEL, axis=1, tiled=True)
        out, cache = mla_prefill(
            p, x, cache, state.lengths, counts, local.heads, num_blocks, project=row_parallel
        )
        if plan.split_sequence:
            first = lax.axis_index(TENSOR_PARALLEL) * own
            cache = lax.dynamic_slice_in_dim(cache, first, own, axis=1)
        return out, {"cache": cache}

    x = embed(params["embed_tokens"], tokens)
    x, layers = local.run(params, x, state, real, attention)
    index = jnp.maximum(counts - 1, 0)
    mine = jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
    last = jnp.where((counts > 0)[:, None], mine, last)
    state = State(layers, state.lengths + counts, state.status, state.max_length)
    logits = jnp.where(real[..., None], lm_head(params, x), 0.0) if every else None
    return logits, last, state


def _specs(config: K3Config, plan: MeshPlan, params: Any, state: State) -> tuple[Any, State]:
    return match_specs(param_specs(config), params), state_specs(config, plan, state.max_length)


def decode_step(
    params: Any,
    state: State,
    tokens: Int[Array, " batch"],
    active: Bool[Array, " batch"],
    *,
    config: K3Config,
    plan: MeshPlan,
    implementation: str = "xla",
    routing: bool = False,
) -> Any:
    """As :func:`k3jax.model.decode_step`, over the plan's devices.

    Args:
        params: laid out by the plan, see :func:`k3jax.mesh.arrange`.
        state: of the plan, see :func:`k3jax.mesh.planned_state`; B a multiple of ``plan.data``.
        tokens: int32 [B].
        active: bool [B]; padding rows are not active.
        implementation: "xla", "pallas", "pallas-interpret", or "megakernel", "megakernel-interpret": for
            these see :mod:`k3jax.custom_calls.planned_step`.
        routing: also return ``{"layers.i.topk_ids": [B, A], "layers.i.topk_w": [B, A], ...}``; not by the
            megakernel.

    Returns:
        float32 logits [B, W], cut by rows and vocabulary, the new state, and routing if asked for.

    Raises:
        ValueError: params or state of another plan; NotImplementedError: the dispatch, or an
            implementation that cannot run over this plan, with every reason.
    """
    name = implementations.resolve(implementation)
    if name.startswith("megakernel"):
        from .custom_calls import planned_step  # it knows the kernel's modules; only where it is asked

        return planned_step.decode_step(
            params, state, tokens, active, config=config, plan=plan, implementation=name, routing=routing
        )
    plan.check(config)
    check_planned(config, plan, state, params["embed_tokens"].dtype)
    plan.check_devices()
    specs, states = _specs(config, plan, params, state)
    rows = spec("batch")
    local = Local(config, plan, state.batch)
    if name == "xla":
        body = partial(_decode_local, local=local, taps=routing)
    else:
        body = implementations.planned_step_of(name)(local, params, routing)
    logits, state, seen = jax.shard_map(
        body,
        mesh=plan.mesh,
        in_specs=(specs, states, rows, rows),
        out_specs=(spec("batch", "vocab"), states, rows),
        # A compiled Pallas kernel updates states in place through refs, which JAX refuses to type by
        # devices. Interpreted, the same program is checked.
        check_vma=name != "pallas",
    )(params, state, tokens, active)
    return (logits, state, seen) if routing else (logits, state)


def prefill_chunk(
    params: Any,
    state: State,
    last: Float[Array, "batch d"],
    tokens: Int[Array, "batch chunk"],
    counts: Int[Array, " batch"],
    *,
    config: K3Config,
    plan: MeshPlan,
    logits: str | None,
) -> tuple[jax.Array | None, Float[Array, "batch d"], State]:
    """As :func:`k3jax.model.prefill_chunk`, over the plan's devices; arguments as :func:`decode_step`.

    Args:
        logits: "all" returns float32 [B, chunk, W], anything else None.
    """
    plan.check(config)
    check_planned(config, plan, state, params["embed_tokens"].dtype)
    plan.check_devices()
    specs, states = _specs(config, plan, params, state)
    rows = spec("batch")
    every = logits == "all"
    body = partial(_prefill_local, local=Local(config, plan, state.batch), every=every)
    return jax.shard_map(
        body,
        mesh=plan.mesh,
        in_specs=(specs, states, rows, rows, rows),
        out_specs=(spec("batch", None, "vocab") if every else PartitionSpec(), rows, states),
    )(params, state, last, tokens, counts)


def head(params: Any, x: Float[Array, "batch d"], *, plan: MeshPlan) -> Float[Array, "batch w"]:
    """float32 logits [B, W] of final hidden states, cut by rows and vocabulary."""
    where = spec("vocab", None), spec("batch")
    return jax.shard_map(
        lambda weight, x: lm_head({"lm_head": weight}, x),
        mesh=plan.mesh, in_specs=where, out_specs=spec("batch", "vocab"),
    )(params["lm_head"], x)  # fmt: skip


__all__ = [
    "Local", "decode_step", "embed", "head", "own_latent", "prefill_chunk", "row_parallel", "whole_latent",
]  # fmt: skip
