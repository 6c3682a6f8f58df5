"""Shares of a model without a mesh: every rank's tree and state as numpy arrays, and steps of all ranks.

The ranks run by turns in this process, segment by segment; what they exchange is summed here in the order
of the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from k3jax.config import K3Config
from k3jax.custom_calls.decode_megakernel.instructions import Exchange
from k3jax.custom_calls.decode_megakernel.interpreter import share as shares
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target
from k3jax.custom_calls.planned import place_table, plan_of_share
from k3jax.mesh import MeshPlan
from k3jax.mesh.layout import match_specs, param_specs, placement_leaves
from k3jax.mesh.states import join_conv, split_conv, state_specs
from k3jax.state import State


def cut(tree: Any, specs: Any, plan: MeshPlan, rank: int) -> Any:
    """A rank's part of a tree of host arrays."""
    sizes: dict[str, int] = dict(zip(("data", "tensor", "inner"), plan.shape, strict=True))
    at: dict[str, int] = {"data": 0, "tensor": rank // plan.expert_width, "inner": rank % plan.expert_width}

    def one(where: PartitionSpec, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        for dim, entry in enumerate(where):
            axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
            pieces = math.prod(sizes[axis] for axis in axes)
            index = functools.reduce(lambda n, axis: n * sizes[axis] + at[axis], axes, 0)
            each = array.shape[dim] // pieces
            array = np.take(array, range(index * each, (index + 1) * each), axis=dim) if pieces > 1 else array
        return array

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def local_params(params: Mapping[str, Any], config: K3Config, plan: MeshPlan, rank: int) -> dict[str, Any]:
    """A rank's tree: its part of what :func:`k3jax.mesh.arrange` makes, and ``place`` in a LatentMoE."""
    places, tables = plan.placements(config), placement_leaves(config, plan)
    share = plan_of_share(config, plan, 1, Target())
    layers = []
    for i, layer in enumerate(params["layers"]):
        if moe := layer.get("block_sparse_moe"):
            index = i - config.first_k_dense_replace
            order = np.asarray(places[index].experts)
            experts = jax.tree.map(lambda leaf, order=order: np.asarray(leaf)[order], moe["experts"])
            layer = {**layer, "block_sparse_moe": {**moe, "experts": experts, "placement": tables[index]}}
        layers.append(layer)
    tree = {**params, "layers": layers}
    mine = cut(tree, match_specs(param_specs(config), tree), plan, rank)
    for layer in mine["layers"] if plan.tensor > 1 else ():
        if moe := layer.get("block_sparse_moe"):
            moe["place"] = np.asarray(place_table(moe["placement"], rank // plan.expert_width, share))
    return mine


def local_state(state: State, config: K3Config, plan: MeshPlan, rank: int) -> State:
    """A rank's part of a state of one device, convolution windows joined."""
    specs = state_specs(config, plan, state.max_length)
    host = jax.tree.map(np.asarray, dataclasses.replace(state, kernel=None))
    layers = []
    for layer, where in zip(host.layers, specs.layers, strict=True):
        split = jax.tree.map(np.asarray, split_conv(layer, config)) if "conv" in layer else dict(layer)
        part = cut(split, where, plan, rank)
        layers.append(jax.tree.map(np.asarray, join_conv(part)) if "S" in part else part)
    return State(tuple(layers), host.lengths, host.status, host.max_length)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step of all ranks leaves.

    Attributes:
        logits: float32 [B, W]; layers: every rank's new state; values: every rank's buffers at the end.
        routes: ids that ROUTE chose and places on each rank, int [B, A], by layer: a list over ranks.
    """

    logits: np.ndarray
    layers: list[dict[int, dict[str, np.ndarray]]]
    values: list[dict[str, np.ndarray]]
    routes: dict[int, list[tuple[np.ndarray, np.ndarray]]]


def run_ranks(
    params: Mapping[str, Any], config: K3Config, plan: MeshPlan, state: State, tokens: np.ndarray,
    active: np.ndarray, sms: int = 3, seed: int | None = None,
) -> Run:  # fmt: skip
    """A step of all ranks by interpretation."""
    p = plan_of_share(config, plan, len(tokens), Target(f"{sms} SMs", sms))
    of, dtype = shares.share(p), np.asarray(params["embed_tokens"]).dtype
    ranks = range(plan.tensor)
    trees = [local_params(params, config, plan, rank) for rank in ranks]
    states = [local_state(state, config, plan, rank) for rank in ranks]
    values: list[Any] = [shares.carried(p) for _ in ranks]
    layers: list[dict[int, Any]] = [{} for _ in ranks]
    gives: list[np.ndarray] = []
    routes: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for number, part in enumerate(of.segments):
        take = taken(p, part.kind, gives, params, tokens, dtype) if part.kind is not None else None
        gives = []
        for rank in ranks:
            tree = shares.params_of(trees[rank], p, part)
            values[rank], give, new = shares.run_segment(
                p, number, rank, tree, values[rank], take, states[rank], tokens, active, dtype, seed
            )
            gives.append(give)
            layers[rank] |= new
            if part.kind == Exchange.LATENT:
                route = values[rank]["route"][0, :, : p.A]
                routes.setdefault(part.layer, []).append(
                    (route[..., 0].astype(int), route[..., 2].astype(int))
                )
    logits = np.concatenate([v["logits"] for v in values]).T
    return Run(logits, layers, values, routes)


def taken(
    p: Plan,
    kind: Exchange,
    gives: list[np.ndarray],
    params: Mapping[str, Any],
    tokens: np.ndarray,
    dtype: Any,
) -> np.ndarray:
    """What an exchange leaves; the embedding's is looked up whole."""
    if kind != Exchange.EMBEDDING:
        return shares.exchange(p, kind, gives, dtype)
    table = np.asarray(params["embed_tokens"]).astype(np.float32)
    known = (tokens >= 0) & (tokens < len(table))
    out = np.full((p.B, p.exchanged), np.nan, np.float32)
    out[:, : p.D] = table[np.where(known, tokens, 0)]
    return out


def whole_layers(run: Run, config: K3Config, plan: MeshPlan, i: int, name: str) -> np.ndarray:
    """A layer's new state of one device, from the ranks' parts."""
    parts = [layers[i][name] for layers in run.layers]
    if name == "cache":
        for other in parts[1:]:
            np.testing.assert_array_equal(parts[0], other)
        return parts[0]
    if name == "S":
        return np.concatenate(parts, axis=1)
    widths = [config.kda_key_size // plan.tensor] * 2
    pieces = [np.split(part, np.cumsum(widths), axis=-1) for part in parts]
    return np.concatenate([np.concatenate(kind, axis=-1) for kind in zip(*pieces, strict=True)], axis=-1)


__all__ = ["Run", "cut", "local_params", "local_state", "run_ranks", "taken", "whole_layers"]
