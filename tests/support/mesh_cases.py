"""A small K3 over a plan against the same K3 on one device, and where tokens go.

Everything runs in the process that imports it: tests with more devices than ``conftest`` gives start
one, see :mod:`support.mesh_worker`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np

from support.compare import relative_rms
from support.random_k3 import params_from_tensors, random_config, random_tensors

ROUTINGS = ("as scored", "one expert", "one rank", "a rank without tokens")


@functools.cache
def config(num_experts: int = 20, width: int = 64) -> Any:
    """Four layers, both attentions, three LatentMoEs; all that a tensor axis cuts divides by 8.

    Args:
        width: of an expert, in blocks of 32.
    """
    return random_config(
        31, layer_types=("kda", "mla", "kda", "mla"), first_k_dense_replace=1, attn_res_block_size=3,
        num_experts=num_experts, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=width,
        routed_expert_hidden_size=32, vocab_size=64, hidden_size=32, intermediate_size=48,
        kda_num_heads=8, kda_head_dim=8, kda_v_head_dim=12, num_attention_heads=8,
    )  # fmt: skip


@functools.cache
def params(num_experts: int = 20, width: int = 64, dtype: str | None = "float32") -> Any:
    """Parameters on one device."""
    c = config(num_experts, width)
    return params_from_tensors(c, random_tensors(c, 31), dtype)


def pretend_installed(monkeypatch: Any, versions: Mapping[str, str]) -> None:
    """What ``k3jax.dispatch.guard`` finds installed: ``versions`` by distribution, and nothing else."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, batch])
    return rng.integers(0, 64, (batch, length)).astype(np.int32)


def routed(tree: Any, c: Any, plan: Any, routing: str) -> Any:
    """``tree`` whose correction bias sends every token as ``routing`` says, by the plan's placement."""
    if routing in ("as scored", "even"):
        return tree
    place = plan.placements(c)[0]
    alone = [np.flatnonzero(np.asarray(place.copies)[list(mine)] == 1) for mine in _ranks(place)]
    bias = np.zeros(c.num_experts, np.float32)
    if routing == "one expert":
        bias[7] = 5.0
    elif routing == "one rank":  # whole ranks of experts that lie nowhere else
        rank = next(r for r, which in enumerate(alone) if len(which) == place.slots_per_rank)
        mine = _ranks(place)[rank]
        bias[list(mine)] = 5.0
    else:
        rank = next(r for r, which in enumerate(alone) if len(which) == place.slots_per_rank)
        bias[list(_ranks(place)[rank])] = -5.0
    layers = []
    for layer in tree["layers"]:
        if moe := layer.get("block_sparse_moe"):
            old = moe["e_score_correction_bias"]
            layer = {**layer, "block_sparse_moe": {**moe, "e_score_correction_bias": old + bias}}
        layers.append(layer)
    return {**tree, "layers": layers}


def evenly(tree: Any, c: Any, state: Any, ids: np.ndarray) -> Any:
    """``tree`` whose router, in a step of tokens ``ids`` from ``state``, chooses every expert as often.

    Row b's first choice in each LatentMoE is expert b A, its second the next, and so on. A router is solved
    for the inputs that the layers before it give: at most as many rows as the hidden size.
    """
    rows, slots = len(ids), c.num_experts_per_token
    if rows > c.hidden_size:
        raise ValueError(f"evenly: expected at most {c.hidden_size} rows, got {rows}")
    wanted = routing_ids("even", rows, slots, c.num_experts, 1)
    logits = np.full((rows, c.num_experts), -2.0)
    np.put_along_axis(logits, wanted, 3.0 - np.arange(slots), axis=1)
    for i in [i for i in range(c.num_hidden_layers) if c.is_moe(i)]:
        _, _, seen = _alone()(tree, state, ids, config=c)
        x = np.asarray(seen[f"layers.{i}.mlp_in"], np.float64)
        moe = tree["layers"][i]["block_sparse_moe"]
        gate = (np.linalg.pinv(x) @ logits).T.astype(moe["gate"].dtype)
        none = np.zeros_like(moe["e_score_correction_bias"])
        layer = {
            **tree["layers"][i],
            "block_sparse_moe": {**moe, "gate": gate, "e_score_correction_bias": none},
        }
        tree = {**tree, "layers": [*tree["layers"][:i], layer, *tree["layers"][i + 1 :]]}
    return tree


def _ranks(place: Any) -> list[tuple[int, ...]]:
    per = place.slots_per_rank
    return [place.experts[r * per : (r + 1) * per] for r in range(place.ranks)]


@functools.cache
def _alone() -> Any:
    """The one-device step with its routing, compiled without a mesh."""
    import jax

    from k3jax.model import decode_step

    def step(params: Any, state: Any, tokens: Any, config: Any) -> Any:
        seen: dict[str, Any] = {}
        logits, state = decode_step(params, state, tokens, config=config, tap=seen.__setitem__)
        return logits, state, {k: v for k, v in seen.items() if k.endswith(("topk_ids", "topk_w", "mlp_in"))}

    return jax.jit(step, static_argnames="config")


@functools.cache
def _planned() -> Any:
    import jax

    from k3jax.sharded_step import decode_step

    return jax.jit(decode_step, static_argnames=("config", "plan", "routing"))


def compare(plan: Any, batch: int, routing: str, num_experts: int = 20, steps: int = 2) -> dict[str, Any]:
    """Decode steps over ``plan`` against one device, from the same state of one device.

    Args:
        routing: one of ROUTINGS, or "even" for one step in which every expert is chosen as often.

    Returns:
        logits, state: relative RMS errors, the largest; routing: whether every row chose the same
        set of experts; weights: the largest difference of a mixing weight; busiest: the largest
        share of the (token, choice) pairs that one rank computed, by the plan's own map; counts: rows of
        the least and of the most chosen expert of a layer.
    """
    import k3jax
    from k3jax import mesh

    c = config(num_experts)
    one = routed(params(num_experts), c, plan, routing)
    _, state = k3jax.Model(one, c).prefill(tokens(batch, 5), max_length=256, logits="none")
    if routing == "even":
        if steps != 1:
            raise ValueError(f"steps: expected 1 with routing 'even', got {steps}")
        one = evenly(one, c, state, tokens(batch, 1, seed=1)[:, 0])
    many = mesh.arrange(one, c, plan)
    spread = mesh.to_plan(state, c, plan)
    rows = plan.padded(batch)
    active = np.arange(rows) < batch
    worst = {"logits": 0.0, "state": 0.0, "weights": 0.0, "busiest": 0.0}
    same, counts = True, []
    for step in range(steps):
        ids = tokens(batch, 1, seed=step + 1)[:, 0]
        want, state, chose = _alone()(one, state, ids, config=c)
        padded = np.pad(ids, (0, rows - batch))
        got, spread, chosen = _planned()(many, spread, padded, active, config=c, plan=plan, routing=True)
        worst["logits"] = max(worst["logits"], relative_rms(np.asarray(got)[:batch], want))
        for name, value in chose.items():
            if name.endswith("mlp_in"):
                continue
            mine, theirs = np.asarray(chosen[name])[:batch], np.asarray(value)
            if name.endswith("topk_w"):
                worst["weights"] = max(worst["weights"], float(np.abs(mine - theirs).max()))
            else:
                same &= bool((np.sort(mine, -1) == np.sort(theirs, -1)).all())
                counts.append(np.bincount(mine.ravel(), minlength=num_experts))
                worst["busiest"] = max(worst["busiest"], _busiest(plan.placements(c)[0], theirs))
    back = mesh.from_plan(spread, batch)
    pairs = [(a[k], b[k]) for a, b in zip(back.layers, state.layers, strict=True) for k in b]
    worst["state"] = max(relative_rms(a, b) for a, b in pairs)
    lengths = bool((np.asarray(back.lengths) == np.asarray(state.lengths)).all())
    return {
        **worst, "routing": same, "lengths": lengths, "counts": [int(np.min(counts)), int(np.max(counts))],
    }  # fmt: skip


def _busiest(place: Any, ids: np.ndarray) -> float:
    """Largest share of pairs in one rank, each row's replica by its number."""
    table, copies = place.slot_table(), place.copies
    row = np.arange(len(ids))[:, None]
    rank = table[ids, row % copies[ids]] // place.slots_per_rank
    return float(np.bincount(rank.ravel(), minlength=place.ranks).max() / rank.size)


def count_pairs(
    plan: Any, kind: str, ids: np.ndarray, live: np.ndarray, num_experts: int, capacity: int = 1,
    seen_as: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What a dispatch computes with experts that sign their work: (got, want), float32 [rows, E].

    Expert e gives ``weight * (row number + 1)`` in column e and 0 elsewhere, so a pair that is lost,
    doubled, or computed for another row or by another expert shows.

    Args:
        ids: int32 [rows, A], rows a multiple of ``plan.data``.
        live: bool [rows].
        seen_as: what the experts' implementation makes of a rank's choices, int32 [R, A] -> [R, A].
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from k3jax import dispatch
    from k3jax.mesh import place

    where = place(num_experts, plan.expert_ranks)
    tables = {"slots": jnp.asarray(where.slot_table()), "copies": jnp.asarray(where.copies)}
    owner, per = jnp.asarray(where.experts), where.slots_per_rank
    rows, slots = ids.shape
    weights = np.random.default_rng(1).uniform(0.5, 1.0, ids.shape).astype(np.float32)

    def body(latent: Any, ids: Any, weights: Any, live: Any) -> Any:
        rank = jax.lax.axis_index(("data", "tensor"))
        first = jax.lax.axis_index("data") * ids.shape[0]
        chosen = dispatch.chosen_slots(tables, ids, live, first)
        weights = jnp.where(live[:, None], weights, 0.0)
        # As the model's gathered latent: one value, yet varying over the tensor ranks.
        latent = jax.lax.pcast(latent, ("tensor", "inner"), to="varying")

        def compute(x: Any, expert: Any, weights: Any) -> Any:
            expert = expert if seen_as is None else seen_as(expert)
            mine = expert >= 0
            column = owner[jnp.where(mine, expert + rank * per, 0)]
            signed = jax.nn.one_hot(column, num_experts) * jnp.where(mine, weights, 0.0)[..., None]
            share = jnp.where(jax.lax.axis_index("inner") == 0, 1.0, 0.0)  # inner ranks add up
            return signed.sum(axis=1) * x[:, :1] * share

        if kind == "gather":
            return dispatch.gather(latent, chosen, weights, compute, per)
        if kind == "ragged":
            total = dispatch.ragged(latent, chosen, weights, compute, per)
        else:
            total = dispatch.all_to_all(latent, chosen, weights, compute, per, capacity)
        return jax.lax.pmax(total, "tensor")  # equal already: every tensor rank has gathered all rows

    latent = np.zeros((rows, num_experts), np.float32)
    latent[:, 0] = np.arange(rows) + 1
    spec = PartitionSpec("data")
    run = jax.shard_map(body, mesh=plan.mesh, in_specs=(spec,) * 4, out_specs=spec)
    got = np.asarray(jax.jit(run)(latent, ids, weights, live))
    want = np.zeros((rows, num_experts), np.float32)
    for row in range(rows):
        for slot in range(slots):
            want[row, ids[row, slot]] += weights[row, slot] * np.float32(row + 1) * live[row]
    return got, want


def routing_ids(name: str, rows: int, slots: int, num_experts: int, ranks: int) -> np.ndarray:
    """int32 [rows, slots] of distinct experts a row, distributed as ``name`` says."""
    from k3jax.mesh import place

    rng = np.random.default_rng(3)
    where = place(num_experts, ranks)
    held = np.asarray(where.experts).reshape(ranks, -1)
    if name == "even":  # every expert the same count
        if rows * slots % num_experts:
            raise ValueError(f"even: expected rows * {slots} a multiple of {num_experts}, got {rows} rows")
        return (np.arange(rows * slots, dtype=np.int32) % num_experts).reshape(rows, slots)
    if name == "one expert":  # the others of a row go anywhere
        others = [rng.permutation(np.delete(np.arange(num_experts), 3))[: slots - 1] for _ in range(rows)]
        return np.array([[3, *row] for row in others], np.int32)
    if name == "one rank":
        mine = held[int(np.argmax([(where.copies[mine] == 1).sum() for mine in held]))]
        if len(mine) < slots:
            raise ValueError(
                f"one rank: {slots} choices a row need as many experts on a rank, got {len(mine)}"
            )
        return np.tile(mine[:slots], (rows, 1)).astype(np.int32)
    allowed = np.arange(num_experts)
    if name == "a rank without tokens":
        allowed = np.setdiff1d(allowed, held[0])
    weights = 1.0 / np.arange(1, len(allowed) + 1) ** (1.2 if name == "zipf" else 0.0)
    draw = [rng.choice(allowed, slots, replace=False, p=weights / weights.sum()) for _ in range(rows)]
    return np.array(draw, np.int32)
