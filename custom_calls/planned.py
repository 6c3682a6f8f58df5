"""What the megakernel needs under a :class:`k3jax.mesh.MeshPlan`, and what of a plan it cannot run.

A rank is a device of the plan, in the order of its tensor-parallel axes. Its packed weights are one entry
of ``params["megakernel"]``'s leaves, ``[ranks, ...]``, which lie each on its rank; so do ``work`` and
``epoch`` of ``State.kernel``. The fault record is the same on all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from k3jax import dispatch
from k3jax.config import K3Config
from k3jax.dispatch.gather import local_slots
from k3jax.implementations import not_here
from k3jax.mesh.layout import match_specs, param_specs
from k3jax.mesh.plan import TENSOR_PARALLEL, MeshPlan
from k3jax.state import State

from .decode_megakernel.operands import is_matrix, layers_with, packed_part, packed_shapes, packed_vector
from .decode_megakernel.shapes import MAX_BATCH, Plan, Target, plan_faults
from .fit import kernel_reasons
from .pack import PACKED, check_scales, dense_of_layer, kind_problems
from .step import kernel_shapes, target_of

RANKS = PartitionSpec(TENSOR_PARALLEL)
KERNEL_SPECS = {"work": RANKS, "epoch": RANKS, "fault": PartitionSpec()}
"""How ``State.kernel`` is cut."""


def ways_of(plan: MeshPlan) -> tuple[int, int]:
    """(ranks, those of them with different experts), see :class:`.decode_megakernel.shapes.Plan`."""
    return plan.tensor, plan.tensor // plan.expert_width


def plan_of_share(config: K3Config, plan: MeshPlan, batch: int, target: Target) -> Plan:
    """A rank's plan.

    Raises:
        ValueError: rows or sizes that it cannot have.
    """
    return Plan(config, batch, target, *ways_of(plan))


def target_of_plan(plan: MeshPlan) -> tuple[str, Target]:
    """(architecture, SMs and their resources) of the plan's devices; of an H200 where they are no GPUs.

    Raises:
        NotImplementedError: GPUs of different kinds, or of one that the kernel does not compile for.
    """
    found = {target_of(device) for device in plan.mesh.devices.flat}
    if len(found) > 1:
        kinds = sorted(f"{arch} with {target.sms} SMs" for arch, target in found)
        raise NotImplementedError(f"devices: expected GPUs of one kind, got {', '.join(kinds)}")
    return found.pop()


def place_table(placement: Mapping[str, Any], rank: Any, p: Plan) -> jax.Array:
    """int32 [8, E], which of a rank's experts serves a row's choice of an expert; -1 for another rank's.

    Args:
        placement: a layer's ``slots`` and ``copies``; the replica is that of
            :func:`k3jax.dispatch.chosen_slots`.
        rank: among the ranks that experts are spread over.
    """
    ids = jnp.broadcast_to(jnp.arange(p.E, dtype=jnp.int32), (MAX_BATCH, p.E))
    maps = {name: jnp.asarray(leaf) for name, leaf in placement.items()}
    slots = dispatch.chosen_slots(maps, ids, jnp.ones(MAX_BATCH, bool), 0)
    return local_slots(slots, jnp.asarray(rank), p.held).astype(jnp.int32)


# -- what cannot run ------------------------------------------------------------------------------


def planned_problems(
    config: K3Config, plan: MeshPlan, batch: int, params: Mapping[str, Any] | None, implementation: str
) -> list[str]:
    """Why steps over a plan cannot run by segments; empty if they can.

    Args:
        params: a parameter tree of the plan; None leaves out what depends on it.
        implementation: "megakernel" or "megakernel-interpret".
    """
    found = plan.faults(config)
    cut = not any(fault.startswith(("tensor=", "expert_width=")) for fault in found)
    if plan.data != 1:
        found.append(
            f"mesh: the megakernel's ranks all hold every row: expected data=1 and tensor as many as there "
            f"are devices, got data={plan.data}, tensor={plan.tensor}"
        )
    if plan.split_sequence:
        found.append(
            "split_sequence: the megakernel reads the whole latent cache on every rank: expected False"
        )
    if plan.dispatch not in ("auto", "gather"):
        found.append(
            f"dispatch: every rank of the megakernel sees every row: expected 'auto' or 'gather', "
            f"got {plan.dispatch!r}"
        )
    faults = plan_faults(config, batch, Target(), *ways_of(plan))
    # What the mesh does not divide is among its own, with the sizes that it can.
    found += [fault for fault in faults if cut or not fault.startswith("ways")]
    if implementation != "megakernel":
        return found
    if params is not None:
        found += kind_problems(params)
        if PACKED not in params:
            found.append(f"params[{PACKED!r}]: the weights are not packed; call Model.pack()")
    return [*found, *kernel_reasons(config, batch, Target(), *ways_of(plan))]


# -- packed weights -------------------------------------------------------------------------------


def pack(params: Mapping[str, Any], config: K3Config, plan: MeshPlan) -> dict[str, jax.Array]:
    """Every rank's dense weights in the kernel's layout, each made on its device from what lies there.

    One matrix at a time is written into its stack, in place: a device's extra memory is one matrix.

    Args:
        params: laid out by the plan, bfloat16 with MXFP4 experts.

    Returns:
        ``packed_shapes`` of a share, with the ranks in front: ``[ranks, ...]``.

    Raises:
        NotImplementedError: float32 parameters, float experts.
        ValueError: expert scales outside the exact range, or parameters that are not the plan's.
    """
    if problems := kind_problems(params):
        raise NotImplementedError("; ".join(problems))
    check_scales(params, config)
    p = plan_of_share(config, plan, 1, Target())
    return {
        name: _matrices(params, p, plan, name, dtype, shape)
        if is_matrix(name)
        else _vectors(params, p, plan, name, dtype, shape)
        for name, (dtype, shape) in packed_shapes(p).items()
    }


def with_packed(params: Mapping[str, Any], config: K3Config, plan: MeshPlan) -> dict[str, Any]:
    """The parameter tree with every rank's packed weights, see :func:`pack`."""
    return {**params, PACKED: pack(params, config, plan)}


def _block(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The part of a layer that a matrix is made of, without experts."""
    attention = name.startswith(("kda", "mla"))
    kinds = ("self_attn",) if attention else ("mlp", "block_sparse_moe")
    return {kind: leaf for kind, leaf in dense_of_layer(layer).items() if kind in kinds}


@functools.partial(jax.jit, static_argnames=("p", "plan", "name", "layer"), donate_argnames="stack")
def _put(
    stack: jax.Array, source: Any, place: jax.Array, *, p: Plan, plan: MeshPlan, name: str, layer: int | None
) -> jax.Array:
    """``stack`` with a layer's matrix at ``place`` on every rank; all layers of a stack are one program."""

    def local(stack: jax.Array, source: Any, place: jax.Array) -> jax.Array:
        tree = {"lm_head": source} if layer is None else {"layers": {layer: source}}
        part = packed_part(tree, p, name, 0)
        at = (jnp.int32(0), place, *[jnp.int32(0)] * part.ndim)
        return lax.dynamic_update_slice(stack, part[None, None].astype(stack.dtype), at)

    specs = param_specs(p.config)
    where = specs["lm_head"] if layer is None else match_specs(_block(specs["layers"][layer], name), source)
    run = jax.shard_map(
        local, mesh=plan.mesh, in_specs=(RANKS, where, PartitionSpec()), out_specs=RANKS, check_vma=False
    )
    return run(stack, source, place)


def _matrices(
    params: Mapping[str, Any], p: Plan, plan: MeshPlan, name: str, dtype: str, shape: tuple[int, ...]
) -> jax.Array:
    make = functools.partial(jnp.zeros, (plan.tensor, *shape), jnp.dtype(dtype))
    stack = jax.jit(make, out_shardings=NamedSharding(plan.mesh, RANKS))()
    first = None if name == "lm_head" else layers_with(p, name)[0]
    for place, layer in enumerate([None] if first is None else layers_with(p, name)):
        source = params["lm_head"] if layer is None else _block(params["layers"][layer], name)
        stack = _put(stack, source, jnp.int32(place), p=p, plan=plan, name=name, layer=first)
    return stack


def _vectors(
    params: Mapping[str, Any], p: Plan, plan: MeshPlan, name: str, dtype: str, shape: tuple[int, ...]
) -> jax.Array:
    every = list(range(shape[0])) if name in ("gain", "direction") else layers_with(p, name)
    dense = {n: leaf for n, leaf in params.items() if n != PACKED}
    dense["layers"] = [dense_of_layer(layer) for layer in params["layers"]]
    specs = dict(param_specs(p.config))
    specs["layers"] = [
        match_specs(dense_of_layer(of), layer)
        for of, layer in zip(specs["layers"], dense["layers"], strict=True)
    ]

    def local(tree: Any) -> jax.Array:
        rank = lax.axis_index(TENSOR_PARALLEL) // p.expert_width
        layers = [_with_place(layer, rank, p) for layer in tree["layers"]]
        parts = [packed_vector({**tree, "layers": layers}, p, name, i) for i in every]
        stacked = jnp.stack(parts)
        if stacked.shape != shape or stacked.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"params: {name}: expected {dtype} {list(shape)}, got {stacked.dtype} {list(stacked.shape)}"
            )
        return stacked[None]

    return jax.jit(jax.shard_map(local, mesh=plan.mesh, in_specs=(specs,), out_specs=RANKS, check_vma=False))(
        dense
    )


def _with_place(layer: Mapping[str, Any], rank: jax.Array, p: Plan) -> dict[str, Any]:
    moe = layer.get("block_sparse_moe")
    if moe is None or p.ways == 1:
        return dict(layer)
    return {**layer, "block_sparse_moe": {**moe, "place": place_table(moe["placement"], rank, p)}}


# -- the kernel's leaves of a state -----------------------------------------------------------------


def with_kernel(state: State, config: K3Config, plan: MeshPlan, peers: bool = False, trace: int = 0) -> State:
    """A plan's state with fresh kernel leaves on every rank, which a step by the megakernel needs.

    Args:
        peers: for steps that exchange in the kernel (:class:`.mailboxes.Mailboxes`).
        trace: as :attr:`k3jax.custom_calls.artifacts.Key.trace`.
    """
    p = plan_of_share(config, plan, state.batch, target_of_plan(plan)[1])
    p = dataclasses.replace(p, peers=peers)
    return dataclasses.replace(state, kernel=_fresh(p, plan, trace))


def ready(state: State, config: K3Config, plan: MeshPlan, implementation: str) -> State:
    """A plan's state as steps by "megakernel" or "megakernel-interpret" take it.

    Raises:
        NotImplementedError: rows, or a plan, that they do not take.
    """
    if reasons := planned_problems(config, plan, state.batch, None, "megakernel-interpret"):
        raise not_here(implementation, reasons)
    if implementation != "megakernel" or state.kernel is not None:
        return state
    return with_kernel(state, config, plan)


def _kernel_shapes(p: Plan, trace: int) -> dict[str, tuple[int, ...]]:
    sizes = {name: leaf.shape[0] for name, leaf in kernel_shapes(p, trace).items()}
    return {name: (n if name == "fault" else n * p.ways,) for name, n in sizes.items()}


def _fresh(p: Plan, plan: MeshPlan, trace: int) -> dict[str, jax.Array]:
    shapes = _kernel_shapes(p, trace)
    where = {name: NamedSharding(plan.mesh, cut) for name, cut in KERNEL_SPECS.items()}
    make = jax.jit(
        lambda: {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}, out_shardings=where
    )
    return make()


def check_planned_kernel(state: State, p: Plan, trace: int = 0) -> None:
    """Raise ValueError unless a state has the kernel leaves of a plan.

    Args:
        trace: as :attr:`k3jax.custom_calls.artifacts.Key.trace`.
    """
    if state.kernel is None:
        raise ValueError(
            "state.kernel: absent; Model makes states with it, or add it with "
            "k3jax.custom_calls.planned.with_kernel(state, config, plan)"
        )
    for name, shape in _kernel_shapes(p, trace).items():
        have = state.kernel.get(name)
        if have is None or have.shape != shape or have.dtype != jnp.int32:
            got = "nothing" if have is None else f"{have.dtype} {list(have.shape)}"
            raise ValueError(
                f"state.kernel[{name!r}]: expected int32 {list(shape)} for {p.B} rows on {p.ways} ranks of "
                f"{p.sms} SMs, got {got}"
            )


__all__ = [
    "KERNEL_SPECS",
    "check_planned_kernel",
    "pack",
    "place_table",
    "plan_of_share",
    "planned_problems",
    "ready",
    "target_of_plan",
    "ways_of",
    "with_kernel",
    "with_packed",
]
