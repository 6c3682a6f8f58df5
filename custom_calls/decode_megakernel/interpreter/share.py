"""A rank's share of a decode step on the CPU, one segment after another; who exchanges is the caller.

Between segments a share is a dict of arrays, every buffer but the state's, the numbers that lie in the
kernel's workspace. What the segment gives to the exchange behind it, and takes from the one before, are
float32 [B, columns], as in the kernel's call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from k3jax.state import State

from ..buffers import Kind
from ..instructions import Exchange, Instruction, Op
from ..layout import matrix_name, pack_stages
from ..schedule import Schedule, build
from ..segments import Segment, launched, segments
from ..shapes import Plan
from ..stages import exchange_columns
from .machine import Machine, Weights
from .memory import Memory
from .step import load_layer, new_layer, rows_of

Values = dict[str, np.ndarray]
_ELSEWHERE = ("give", "take", "lengths", "status")
_STATE_STAGES = (Op.KDA_STEP, Op.MLA_ATTEND)


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """A rank's schedule cut into segments.

    Attributes:
        listed: the instructions as launched.
        versions: lifetimes that the buffers hold when a segment begins, by segment.
    """

    schedule: Schedule
    segments: tuple[Segment, ...]
    listed: tuple[Instruction, ...]
    versions: tuple[dict[str, int], ...]

    def instructions(self, part: Segment) -> tuple[Instruction, ...]:
        return self.listed[part.first : part.last]

    def stateful_layers(self, part: Segment) -> tuple[int, ...]:
        """Layers whose state a segment updates."""
        return tuple(dict.fromkeys(i.layer for i in self.instructions(part) if i.op in _STATE_STAGES))


@functools.lru_cache(maxsize=16)
def share(plan: Plan) -> Share:
    """The segments of a plan; a whole model's is one."""
    schedule = build(plan)
    parts, listed = segments(schedule), launched(schedule)
    versions, held, at = [], dict[str, int](), 0
    for part in parts:
        for ins in listed[at : part.first]:
            held |= {a.buffer: a.version for a in ins.writes}
        at = part.first
        versions.append(dict(held))
    return Share(schedule, parts, listed, tuple(versions))


def carried(plan: Plan) -> Values:
    """What passes between segments, before the first: nothing is written yet, all NaN."""
    of = share(plan)
    memory, table = Memory(of.schedule), of.schedule.buffers
    return {
        name: value
        for name, value in memory.values.items()
        if name not in _ELSEWHERE and table[name].kind is not Kind.STATE and not name.startswith("cache.")
    }


def needs(plan: Plan, part: Segment) -> dict[int, frozenset[str]]:
    """Matrices that a segment streams, by layer, for :func:`..layout.pack_stages`."""
    found: dict[int, set[str]] = {}
    for ins in share(plan).instructions(part):
        if (name := matrix_name(plan, ins.op, ins.layer)) is not None:
            found.setdefault(ins.layer, set()).add(name)
    return {layer: frozenset(names) for layer, names in found.items()}


def params_of(params: Mapping[str, Any], plan: Plan, part: Segment) -> dict[str, Any]:
    """What a segment reads of a share's parameter tree; layers by number."""
    ops: dict[int, set[Op]] = {}
    for ins in share(plan).instructions(part):
        ops.setdefault(ins.layer, set()).add(ins.op)
        if ins.op == Op.RESIDUAL and ins.c0 == 1:  # it scores the mixture of the next layer
            ops.setdefault(ins.layer + 1, set())
    layers: dict[int, Any] = {}
    for i, of in ops.items():
        if i == plan.layers:
            continue
        layer = params["layers"][i]
        heavy = ("self_attn", "mlp", "block_sparse_moe")
        layers[i] = {name: leaf for name, leaf in layer.items() if name not in heavy}
        if any(op.name.startswith(("KDA", "MLA")) for op in of):
            layers[i]["self_attn"] = layer["self_attn"]
        if any(Op.ROUTER <= op <= Op.DENSE_DOWN for op in of):
            name = "block_sparse_moe" if "block_sparse_moe" in layer else "mlp"
            block = dict(layer[name])
            if Op.EXPERT_IN not in of:
                block.pop("experts", None)
            block.pop("placement", None)
            layers[i][name] = block
    top = ["norm", "output_attn_res_norm", "output_attn_res_proj", "lm_head"] if plan.layers in ops else []
    top += ["embed_tokens"] if plan.ways == 1 else []
    return {"layers": layers, **{name: params[name] for name in top}}


def run_segment(
    plan: Plan,
    number: int,
    rank: int,
    params: Mapping[str, Any],
    values: Mapping[str, Any],
    take: np.ndarray | None,
    state: State,
    tokens: np.ndarray,
    active: np.ndarray,
    dtype: Any,
    seed: int | None = None,
) -> tuple[Values, np.ndarray, dict[int, dict[str, np.ndarray]]]:
    """One segment of a rank's share.

    Args:
        number: which segment.
        params: :func:`params_of` of the rank's tree, numpy; in a LatentMoE also ``place``, int32 [8, E],
            which of the rank's experts serves a row, -1 for none.
        values: :func:`carried`, as the segment before left it.
        take: float32 [B, columns], what the exchange before left; None for a whole model.
        state: the rank's, before the step; of other layers than this segment's nothing is read.
        tokens: int [B]; active: bool [B].
        dtype: the compute dtype.
        seed: which legal order, see :class:`.machine.Machine`.

    Returns:
        values, what it gives, float32 [B, columns], NaN where nothing was written, and the new state of
        the layers that it updates.
    """
    of = share(plan)
    part = of.segments[number]
    rows = rows_of(state, np.asarray(tokens), np.asarray(active), plan.config)
    weights = Weights(params, pack_stages(params, plan, needs(plan, part)), dtype)
    machine = Machine(of.schedule, weights, rows, seed, rank)
    memory = machine.memory
    for name, value in values.items():
        memory.values[name] = np.array(value)
    memory.version.update(of.versions[number])
    if take is not None and part.kind is not None:
        memory.values["take"][: take.shape[1]] = np.asarray(take).T
    stateful = of.stateful_layers(part)
    for i in stateful:
        load_layer(machine, i, state.layers[i])
    memory.load_state("lengths", state.lengths)
    memory.load_state("status", state.status)
    machine.execute(of.instructions(part))
    lengths = np.asarray(state.lengths)
    layers = {i: new_layer(machine, i, state.layers[i], lengths) for i in stateful}
    after = {name: memory.values[name] for name in values}
    return after, given(machine), layers


def given(machine: Machine) -> np.ndarray:
    """float32 [B, columns] of what a segment gives."""
    plan = machine.schedule.plan
    if plan.ways == 1:
        return np.full((plan.B, 1), np.nan, np.float32)
    return machine.memory.values["give"].T.copy()


def exchange(plan: Plan, kind: Exchange, gives: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """What an exchange leaves on every rank, from what each gives: float32, sums in the order of rank."""
    width = exchange_columns(plan, kind)[0]
    parts = [np.asarray(give)[:, :width] for give in gives]
    out = np.full((plan.B, plan.exchanged), np.nan, np.float32)
    if kind == Exchange.LATENT:
        total = np.concatenate([part.astype(dtype).astype(np.float32) for part in parts], axis=1)
    else:
        total = functools.reduce(np.add, parts)
    out[:, : total.shape[1]] = total
    return out


__all__ = ["Share", "carried", "exchange", "needs", "params_of", "run_segment", "share"]
