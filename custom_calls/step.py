"""A decode step as one custom call of the megakernel: ``implementation="megakernel"``.

Everything passes as operands and results: packed weights from ``params["megakernel"]``, experts in the
checkpoint's layout, the state's arrays, updated in place where the caller donates them, the kernel's own
leaves of the state (``State.kernel``), and the schedule's tables as constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.custom_batching import custom_vmap

from k3jax.config import K3Config
from k3jax.implementations import not_here
from k3jax.state import State

from . import ffi
from .artifacts import Artifact, Key, check_leaves, leaves_of
from .compile import obtain
from .decode_megakernel import operands as _operands
from .decode_megakernel.shapes import MAX_BATCH, Plan, Target
from .fit import device_problems
from .pack import PACKED, packing_problems
from .tables import launch_tables

_KERNEL_DTYPE = jnp.int32


class Step(NamedTuple):
    """What a step returns: float32 logits [B, W], the greedy token int32 [B], and the new state."""

    logits: jax.Array
    token: jax.Array
    state: State


# -- the target ---------------------------------------------------------------------------------

_ARCH_OF = {"9.0": "sm_90a", "10.0": "sm_100a", "10.3": "sm_103a"}


def target_of(device: Any = None) -> tuple[str, Target]:
    """(architecture, SMs and their resources) of a device; without a GPU those of an H200.

    Args:
        device: a jax device; None is the first one of the default backend.

    Raises:
        NotImplementedError: a GPU that the kernel does not compile for.
    """
    if device is None and jax.default_backend() != "gpu":
        return "sm_90a", Target()
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return "sm_90a", Target()
    capability = str(device.compute_capability)
    if capability not in _ARCH_OF:
        raise NotImplementedError(
            f"device: the megakernel is compiled for compute capability {', '.join(_ARCH_OF)}, "
            f"{device.device_kind} has {capability}"
        )
    arch = _ARCH_OF[capability]
    return arch, Target(arch, sms=int(device.core_count))


def plan_for(config: K3Config, batch: int, target: Target) -> Plan:
    """The plan of a step.

    Raises:
        NotImplementedError: more rows than the kernel takes.
    """
    if not 1 <= batch <= MAX_BATCH:
        raise NotImplementedError(f"implementation 'megakernel': expected 1..{MAX_BATCH} rows, got {batch}")
    return Plan(config, batch, target)


# -- the kernel's leaves of a state --------------------------------------------------------------


def kernel_shapes(plan: Plan, trace: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
    """``State.kernel`` of a plan: ``work``, ``epoch`` and ``fault``, int32.

    Args:
        trace: as :attr:`k3jax.custom_calls.artifacts.Key.trace`.
    """
    words = _operands.workspace_bytes(plan, launch_tables(plan).counters, trace) // 4
    sizes = {"work": words, "epoch": 1, "fault": _operands.FAULT_WORDS}
    return {name: jax.ShapeDtypeStruct((size,), _KERNEL_DTYPE) for name, size in sizes.items()}


def with_kernel(state: State, config: K3Config, target: Target | None = None, trace: int = 0) -> State:
    """``state`` with fresh kernel leaves, which a step by the megakernel needs.

    Args:
        state: of 1..8 rows, made by any implementation; its arrays are shared, not copied.
        target: what it will run on; default the default device.
        trace: as :attr:`k3jax.custom_calls.artifacts.Key.trace`.

    Raises:
        ConsumedStateError: the state was donated; NotImplementedError: more rows, or rows cut over devices.
    """
    state.ensure_usable()
    plan = plan_for(config, state.batch, target_of()[1] if target is None else target)
    kernel = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in kernel_shapes(plan, trace).items()}
    lengths = state.lengths
    if isinstance(lengths, jax.Array) and not isinstance(lengths, core.Tracer) and lengths.committed:
        # Where the others are, for good: else the step after the first would be another program.
        if not lengths.sharding.is_fully_replicated:
            raise NotImplementedError(
                f"state: expected on one device, got rows cut over {len(lengths.sharding.device_set)}"
            )
        kernel = jax.device_put(kernel, lengths.sharding)
    return dataclasses.replace(state, kernel=kernel)


def _check_kernel(state: State, plan: Plan, trace: int) -> Mapping[str, Any]:
    if state.kernel is None:
        raise ValueError(
            "state.kernel: absent; make the state with init_state(..., implementation='megakernel') or add "
            "it with k3jax.custom_calls.step.with_kernel(state, config)"
        )
    want = kernel_shapes(plan, trace)
    for name, leaf in want.items():
        have = state.kernel.get(name)
        if have is None or have.shape != leaf.shape or have.dtype != leaf.dtype:
            got = "nothing" if have is None else f"{have.dtype} {list(have.shape)}"
            raise ValueError(
                f"state.kernel[{name!r}]: expected {leaf.dtype} {list(leaf.shape)} for {plan.B} rows on "
                f"{plan.sms} SMs, got {got}"
            )
    return state.kernel


# -- the call -----------------------------------------------------------------------------------


def call(artifact: Artifact, operands: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """One custom call of a compiled kernel.

    Args:
        operands: the tree of ``operands.abstract_operands``; results: shapes of its results.

    Raises:
        ArtifactError: other operands than the kernel was compiled for.
        NotImplementedError: under vmap.
    """
    takes, gives = leaves_of(operands), leaves_of(results)
    check_leaves("operands", takes, artifact.operands)
    check_leaves("results", gives, artifact.results)
    arrays = dict(zip((leaf.path for leaf in takes), jax.tree.leaves(operands), strict=True))
    shapes = dict(zip((leaf.path for leaf in gives), jax.tree.leaves(results), strict=True))
    ordered = tuple(shapes[leaf.path] for leaf in artifact.results)

    @custom_vmap
    def launch(*inputs: Any) -> Any:
        launched = jax.ffi.ffi_call(artifact.target, ordered, input_output_aliases=dict(artifact.aliases))
        return launched(*inputs, module=artifact.module, key=artifact.fingerprint)

    @launch.def_vmap
    def refuse(axis_size: int, in_batched: Any, *inputs: Any) -> Any:
        raise NotImplementedError(
            "vmap: implementation 'megakernel' has no batching rule; give it the rows as a batch (1..8)"
        )

    out = launch(*(arrays[leaf.path] for leaf in artifact.operands))
    named = dict(zip((leaf.path for leaf in artifact.results), out, strict=True))
    return jax.tree.unflatten(jax.tree.structure(results), [named[leaf.path] for leaf in gives])


def assemble(
    params: Mapping[str, Any], state: State, tokens: jax.Array, live: jax.Array, plan: Plan, trace: int = 0
) -> dict[str, Any]:
    """The operands of a step, see ``operands.abstract_operands``.

    Raises:
        ValueError: packed weights or kernel leaves that are absent or of other shapes.
    """
    kernel = _check_kernel(state, plan, trace)
    tables = launch_tables(plan)
    experts = tuple(
        _operands.expert_operands(params["layers"][i]["block_sparse_moe"])
        for i in _operands.layers_with(plan, "moe.")
    )
    return {
        "packed": _packed(params, plan),
        "experts": experts,
        "embed": params["embed_tokens"],
        "state": tuple(dict(layer) for layer in state.layers),
        "lengths": state.lengths,
        "status": state.status,
        "work": kernel["work"],
        "fault": kernel["fault"],
        "epoch": kernel["epoch"],
        "tokens": tokens,
        "active": live.astype(jnp.int32),
        "max_length": jnp.asarray(np.array([state.max_length], np.int32)),
        "records": jnp.asarray(tables.records),
        "program": jnp.asarray(tables.program),
        "starts": jnp.asarray(tables.starts),
    }


def _packed(params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    packed = params[PACKED]
    want = _operands.packed_shapes(plan)
    if set(packed) != set(want):
        raise ValueError(f"params[{PACKED!r}]: expected {sorted(want)}, got {sorted(packed)}")
    for name, (dtype, shape) in want.items():
        leaf = packed[name]
        if leaf.shape != shape or leaf.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"params[{PACKED!r}][{name!r}]: expected {dtype} {list(shape)}, "
                f"got {leaf.dtype} {list(leaf.shape)}"
            )
    return dict(packed)


def step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    live: jax.Array,
    config: K3Config,
    artifact: Artifact | None = None,
) -> Step:
    """One token per row, as one custom call.

    Args:
        params: with packed weights; nothing else of it is read but the embedding and the experts.
        state: of 1..8 rows, with kernel leaves; donate it to update it in place.
        tokens: int32 [B]; live: bool [B], rows that are active.
        artifact: the compiled kernel; default the one for the default device, or for an H200 where the
            default device is no GPU (to lower a program for one).

    Raises:
        NotImplementedError: rows, parameters or a device that the kernel does not take; a GPU that cannot
            hold it.
        ValueError: kernel leaves that are absent or another plan's.
        ArtifactError: there is no compiled kernel, and no compiler.
    """
    if reasons := _refusals(params, state.batch):
        raise not_here("megakernel", reasons)
    device = _device()
    arch, target = target_of(device)
    plan = plan_for(config, state.batch, target)
    operands = assemble(params, state, tokens, live, plan, 0 if artifact is None else artifact.trace)
    if artifact is None:
        artifact = obtain(Key(plan, arch))
    if device.platform == "gpu":
        if reasons := list(device_problems(artifact, plan, arch, device)):
            raise not_here("megakernel", reasons)
        ffi.register()
    with jax.named_scope("megakernel"):
        out = call(artifact, operands, _operands.abstract_results(plan, _shapes(operands)))
    kernel = {name: out[name] for name in ("work", "epoch", "fault")}
    new = State(out["state"], out["lengths"], out["status"], state.max_length, kernel)
    return Step(out["logits"], out["token"], new)


def _device() -> Any:
    """What a step runs on."""
    return jax.devices()[0]


def _refusals(params: Mapping[str, Any], batch: int) -> list[str]:
    """Why parameters or rows are not what the kernel takes, whatever the device."""
    found = [] if 1 <= batch <= MAX_BATCH else [f"batch: expected 1..{MAX_BATCH}, got {batch}"]
    found += packing_problems(params)
    if PACKED not in params:
        found.append(f"params[{PACKED!r}]: the weights are not packed; call Model.pack()")
    return found


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def decode_step(
    params: Mapping[str, Any],
    state: State,
    tokens: jax.Array,
    live: jax.Array,
    config: K3Config,
    tap: Any = None,
) -> tuple[jax.Array, State]:
    """As :func:`k3jax.decode_step`, see :func:`step`.

    Raises:
        NotImplementedError: a tap: the kernel shows no intermediate values.
    """
    if tap is not None:
        raise NotImplementedError("tap: implementation 'megakernel' shows no intermediate values")
    logits, _, new = step(params, state, tokens, live, config)
    return logits, new


def operands_only(params: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a packed parameter tree that a step reads: fewer arrays to hand over at each call."""
    layers = [
        {"block_sparse_moe": {"experts": layer["block_sparse_moe"]["experts"]}}
        if "block_sparse_moe" in layer
        else {}
        for layer in params["layers"]
    ]
    return {"embed_tokens": params["embed_tokens"], PACKED: params[PACKED], "layers": layers}


__all__ = [
    "MAX_BATCH",
    "Step",
    "assemble",
    "call",
    "decode_step",
    "kernel_shapes",
    "operands_only",
    "plan_for",
    "step",
    "target_of",
    "with_kernel",
]
