"""A decode step over a :class:`k3jax.mesh.MeshPlan`: the megakernel by segments, collectives between them.

Every rank runs its share's segments (:mod:`.decode_megakernel.segments`), each as one custom call of the
one kernel compiled for the share, or by interpretation. Between two calls XLA exchanges what the ranks
gave: float32 sums of [B, D] and [B, L], and a gather of the latent rows, where :mod:`k3jax.sharded_step`
has them. All rows are on every rank (``data`` 1). With :class:`.mailboxes.Mailboxes` the kernel exchanges by
itself, and a step is one custom call.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from k3jax import sharded_step
from k3jax.config import K3Config
from k3jax.implementations import not_here
from k3jax.mesh.layout import match_specs, param_specs
from k3jax.mesh.plan import TENSOR_PARALLEL, MeshPlan, spec
from k3jax.mesh.states import check_planned, join_conv, split_conv, state_specs
from k3jax.state import STATUS_BAD_TOKEN, STATUS_FULL, State

from . import ffi
from .compile import obtain
from .decode_megakernel import operands as _operands
from .decode_megakernel.instructions import Exchange
from .decode_megakernel.interpreter import share as _share
from .decode_megakernel.interpreter.step import INTERPRETED_SMS
from .decode_megakernel.segments import Segment
from .decode_megakernel.shapes import Plan, Target
from .decode_megakernel.stages import exchange_columns
from .fit import device_problems
from .pack import PACKED
from .planned import (
    KERNEL_SPECS,
    check_planned_kernel,
    place_table,
    plan_of_share,
    planned_problems,
    target_of_plan,
)
from .step import Step, call
from .tables import launch_tables

Launch = Callable[[int, Segment, jax.Array], jax.Array]
"""(number of a segment, the segment, what the exchange before it left) -> what the rank gives."""


def exchange(p: Plan, kind: Exchange, give: jax.Array, dtype: Any) -> jax.Array:
    """What an exchange leaves, float32 [B, columns], of what each rank gives; under ``shard_map``.

    Args:
        give: float32 [B, columns]; numbers of the compute dtype where latent rows are gathered.
        dtype: the compute dtype.
    """
    mine = give[:, : exchange_columns(p, kind)[0]]
    if kind == Exchange.LATENT:
        taken = lax.all_gather(mine.astype(dtype), TENSOR_PARALLEL, axis=1, tiled=True).astype(jnp.float32)
    else:
        taken = lax.psum(mine, TENSOR_PARALLEL)
    return _wide(p, taken)


def _wide(p: Plan, taken: jax.Array) -> jax.Array:
    """[B, n] with zero columns up to the width of the operand."""
    return jnp.pad(taken, ((0, 0), (0, p.exchanged - taken.shape[1])))


def run_segments(p: Plan, embed: Callable[[], jax.Array], launch: Launch, dtype: Any) -> None:
    """All segments of a share and the exchanges between them, on one rank; under ``shard_map``.

    Args:
        embed: gives [B, D], the rows of the embedding; a whole model looks them up itself.
    """
    give = jnp.zeros((p.B, 1), jnp.float32)
    for number, part in enumerate(_share.share(p).segments):
        if part.kind is None:
            take = give
        elif part.kind == Exchange.EMBEDDING:
            take = _wide(p, embed().astype(jnp.float32))
        else:
            with jax.named_scope(f"layer_{part.layer}.{part.kind.name.lower()}"):
                take = exchange(p, part.kind, give, dtype)
        give = launch(number, part, take)


@dataclasses.dataclass(frozen=True)
class _Local:
    """What a rank knows: the architecture, the mesh, its share's plan."""

    config: K3Config
    mesh: MeshPlan
    plan: Plan

    @property
    def heads(self) -> K3Config:
        return self.mesh.local_config(self.config)


def _masks(state: State, tokens: jax.Array, active: jax.Array, config: K3Config) -> tuple[jax.Array, ...]:
    """(rows that run, rows that are full, rows with a token outside the whole vocabulary)."""
    full = state.lengths >= state.max_length
    bad = (tokens < 0) | (tokens >= config.vocab_size)
    return active & ~full & ~bad, full, bad


def _joined(layers: Any) -> tuple[dict[str, Any], ...]:
    return tuple(join_conv(layer) if "S" in layer else dict(layer) for layer in layers)


def _advanced(
    state: State, layers: Any, masks: tuple[jax.Array, ...], active: jax.Array, kernel: Any, faulted: Any
) -> State:
    """The state after the step; a step that a rank gave up advances no row."""
    run, full, bad = masks
    moved = run if faulted is None else run & ~faulted
    status = state.status | jnp.where(active & full, STATUS_FULL, 0)
    status = status | jnp.where(active & bad, STATUS_BAD_TOKEN, 0)
    lengths = state.lengths + moved.astype(jnp.int32)
    return State(tuple(layers), lengths, status, state.max_length, kernel)


def best_token(logits: jax.Array) -> jax.Array:
    """int32 [B], the largest logit of the whole vocabulary, the lowest id on ties; under ``shard_map``."""
    mine = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(logits, mine[:, None], axis=-1)[:, 0]
    first = lax.axis_index(TENSOR_PARALLEL).astype(jnp.int32) * logits.shape[-1]
    values, ids = (lax.all_gather(x, TENSOR_PARALLEL) for x in (value, mine + first))
    at = jnp.argmax(values, axis=0)  # ids ascend with the rank
    return jnp.take_along_axis(ids, at[None], axis=0)[0]


# -- by interpretation --------------------------------------------------------------------------


def _with_places(params: Mapping[str, Any], p: Plan) -> dict[str, Any]:
    """A share's tree with ``place``, which of the rank's experts serves a row, in every LatentMoE."""
    rank = lax.axis_index(TENSOR_PARALLEL) // p.expert_width
    layers = []
    for layer in params["layers"]:
        if moe := layer.get("block_sparse_moe"):
            table = place_table(moe["placement"], rank, p)
            layer = {**layer, "block_sparse_moe": {**moe, "place": table}}
        layers.append(layer)
    return {**params, "layers": layers}


def _interpreted(params: Any, state: State, tokens: jax.Array, active: jax.Array, *, local: _Local) -> Any:
    p, dtype = local.plan, params["embed_tokens"].dtype
    masks = _masks(state, tokens, active, local.config)
    embed = partial(sharded_step.embed, params["embed_tokens"], jnp.where(masks[0], tokens, 0))
    if p.ways > 1:
        params = _with_places(params, p)
    rank = lax.axis_index(TENSOR_PARALLEL)
    layers = list(_joined(state.layers))
    values: Any = jax.tree.map(jnp.asarray, _share.carried(p))

    def launch(number: int, part: Segment, take: jax.Array) -> jax.Array:
        nonlocal values
        mine = _share.share(p).stateful_layers(part)
        of_layers = {i: layers[i] for i in mine}

        def host(rank: Any, tree: Any, values: Any, take: Any, held: Any, *rest: Any) -> Any:
            tree, values, held, (lengths, status, tokens, active) = jax.tree.map(
                np.asarray, (tree, values, held, rest)
            )
            every = tuple(held.get(i, {}) for i in range(p.layers))
            now = State(every, lengths, status, state.max_length)
            out, give, new = _share.run_segment(
                p, number, int(rank), tree, values, np.asarray(take), now, tokens, active, dtype
            )
            return out, give[:, : give_shape.shape[1]], new

        give_shape = jax.ShapeDtypeStruct((p.B, p.exchanged if p.ways > 1 else 1), jnp.float32)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (values, of_layers))
        values, give, new = jax.pure_callback(
            host, (shapes[0], give_shape, shapes[1]),
            rank, _share.params_of(params, p, part), values, take, of_layers,
            state.lengths, state.status, tokens, active,
        )  # fmt: skip
        for i in mine:
            layers[i] = new[i]
        return give

    run_segments(p, embed, launch, dtype)
    logits = values["logits"].T
    out = [split_conv(x, local.heads) if "S" in x else x for x in layers]
    return logits, best_token(logits), _advanced(state, out, masks, active, state.kernel, None)


# -- by the kernel ------------------------------------------------------------------------------


def _first_fault(fault: jax.Array) -> jax.Array:
    """The fault record of the lowest rank that has one; the same on all. Under ``shard_map``."""
    every = lax.all_gather(fault, TENSOR_PARALLEL)
    return every[jnp.argmax(every[:, 0] != 0)]


def _launched(
    params: Any, state: State, tokens: jax.Array, active: jax.Array, peers: jax.Array | None,
    *, local: _Local, artifact: Any,
) -> Any:  # fmt: skip
    p = local.plan
    tables = launch_tables(p)
    masks = _masks(state, tokens, active, local.config)
    embed = partial(sharded_step.embed, params["embed_tokens"], jnp.where(masks[0], tokens, 0))
    fixed = {
        "packed": jax.tree.map(lambda x: x[0], params[PACKED]),
        "experts": tuple(
            _operands.expert_operands(params["layers"][i]["block_sparse_moe"])
            for i in _operands.layers_with(p, "moe.")
        ),
        "tokens": tokens,
        "active": active.astype(jnp.int32),
        "max_length": jnp.asarray(np.array([state.max_length], np.int32)),
        "records": jnp.asarray(tables.records),
        "program": jnp.asarray(tables.program),
    }
    if p.ways > 1:
        fixed["rank"] = lax.axis_index(TENSOR_PARALLEL).astype(jnp.int32)[None]
    else:
        fixed["embed"] = params["embed_tokens"]
    if p.peers:
        fixed["peers"] = peers
    starts = np.atleast_2d(tables.starts)
    kernel: Any = state.kernel
    moving = {
        "state": _joined(state.layers),
        "lengths": state.lengths,
        "status": state.status,
        "work": kernel["work"],
        "fault": kernel["fault"],
    }
    epoch: Any = kernel["epoch"]
    logits: Any = None

    @jax.jit  # one function of the program for all segments: the kernel is in it once
    def one(fixed: Any, moving: Any, epoch: Any, take: Any, starts: Any) -> Any:
        given = {**fixed, **moving, "epoch": epoch, "starts": starts}
        given |= {"take": take} if p.ways > 1 else {}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        return call(artifact, given, _operands.abstract_results(p, like))

    def launch(number: int, part: Segment, take: jax.Array) -> jax.Array:
        nonlocal moving, epoch, logits
        out = one(fixed, moving, epoch, take, jnp.asarray(starts[number]))
        moving, epoch, logits = {name: out[name] for name in moving}, out["epoch"], out["logits"]
        return out.get("give", take)

    with jax.named_scope("megakernel"):
        if p.peers:
            first = _share.share(p).segments[0]
            launch(0, first, _wide(p, embed().astype(jnp.float32)))
        else:
            run_segments(p, embed, launch, jnp.bfloat16)
    fault = _first_fault(moving["fault"])
    out = [split_conv(x, local.heads) if "S" in x else x for x in moving["state"]]
    after = {"work": moving["work"], "epoch": epoch, "fault": fault}
    new = _advanced(state, out, masks, active, after, fault[0] != 0)
    return logits, best_token(logits), new


# -- the step -----------------------------------------------------------------------------------


def step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    active: jax.Array,
    *,
    config: K3Config,
    plan: MeshPlan,
    implementation: str,
    artifact: Any = None,
    mailboxes: jax.Array | np.ndarray | None = None,
) -> Step:
    """One token per row over the plan's devices.

    Args:
        params: laid out by the plan; for the kernel with packed weights
            (:func:`k3jax.custom_calls.planned.with_packed`).
        state: of the plan; for the kernel with its leaves (:func:`k3jax.custom_calls.planned.with_kernel`).
        tokens: int32 [B]; active: bool [B].
        implementation: "megakernel" or "megakernel-interpret".
        artifact: the share's compiled kernel; default the one for the plan's devices.
        mailboxes: int32 [ranks, 2], :attr:`.mailboxes.Mailboxes.addresses` of these rows, alive until the
            step is over: the kernel then exchanges by itself.

    Returns:
        float32 logits [B, W] cut by vocabulary, the greedy token int32 [B], and the new state.

    Raises:
        NotImplementedError: what the plan, the parameters or the devices have that cannot run, all of it;
            a GPU that cannot hold the compiled kernel.
        ValueError: params or state of another plan.
    """
    plan.check(config)
    if reasons := planned_problems(config, plan, state.batch, params, implementation):
        raise not_here(implementation, reasons)
    check_planned(config, plan, state, params["embed_tokens"].dtype, kernel=True)
    plan.check_devices()
    by_kernel = implementation == "megakernel"
    if mailboxes is not None and not by_kernel:
        raise ValueError(f"mailboxes: only with implementation 'megakernel', got {implementation!r}")
    arch, target = target_of_plan(plan) if by_kernel else ("", _interpreted_target())
    share = plan_of_share(config, plan, state.batch, target)
    local = _Local(config, plan, dataclasses.replace(share, peers=mailboxes is not None))
    states = dataclasses.replace(
        state_specs(config, plan, state.max_length), kernel=None if state.kernel is None else KERNEL_SPECS
    )
    body: Any = partial(_interpreted, local=local)
    kept = {name: leaf for name, leaf in params.items() if name != PACKED}
    specs = match_specs(_like(param_specs(config), kept), kept)
    rows = spec("batch")
    inputs: list[Any] = [state, tokens, active]
    cuts: list[Any] = [states, rows, rows]
    if by_kernel:
        from .artifacts import Key

        check_planned_kernel(state, local.plan, 0 if artifact is None else artifact.trace)
        if artifact is None:
            artifact = obtain(Key(local.plan, arch))
        if plan.platform == "gpu":
            held = (device_problems(artifact, local.plan, arch, d) for d in plan.mesh.devices.flat)
            if reasons := list(dict.fromkeys(itertools.chain(*held))):
                raise not_here(implementation, reasons)
            ffi.register()
        body = partial(_launched, local=local, artifact=artifact)
        kept = dict(params)
        specs = {**specs, PACKED: dict.fromkeys(params[PACKED], PartitionSpec(TENSOR_PARALLEL))}
        inputs.append(None if mailboxes is None else jnp.asarray(mailboxes))
        cuts.append(PartitionSpec())
    logits, token, new = jax.shard_map(
        body,
        mesh=plan.mesh,
        in_specs=(specs, *cuts),
        out_specs=(spec("batch", "vocab"), PartitionSpec(), states),
        check_vma=False,  # a cache that every rank writes alike is typed as varying
    )(kept, *inputs)
    return Step(logits, token, new)


def _like(specs: Any, params: Any) -> Any:
    """``specs`` of the arrays that a part of the parameter tree has."""
    if isinstance(params, Mapping):
        return {name: _like(specs[name], leaf) for name, leaf in params.items()}
    if isinstance(params, (list, tuple)):
        return [_like(s, leaf) for s, leaf in zip(specs, params, strict=True)]
    return specs


def _interpreted_target() -> Target:
    return Target(f"{INTERPRETED_SMS} interpreted SMs", INTERPRETED_SMS)


def decode_step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    active: jax.Array,
    *,
    config: K3Config,
    plan: MeshPlan,
    implementation: str,
    routing: bool = False,
) -> tuple[jax.Array, State]:
    """As :func:`k3jax.sharded_step.decode_step`, see :func:`step`.

    Raises:
        NotImplementedError: routing: neither shows intermediate values.
    """
    if routing:
        raise NotImplementedError(f"routing: implementation {implementation!r} shows no intermediate values")
    out = step(params, state, tokens, active, config=config, plan=plan, implementation=implementation)
    return out.logits, out.state


__all__ = ["best_token", "decode_step", "exchange", "run_segments", "step"]
