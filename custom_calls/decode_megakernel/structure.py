"""Checks of single instructions and of the set of them: shape, declared accesses, nothing left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .instructions import MAX_WAITS, Exchange, Instruction, Op
from .order import arrivals
from .schedule import Schedule
from .shapes import Plan
from .stages import Work, accesses, stage_chunks, stage_groups


def required_stages(p: Plan) -> set[tuple[Op, int, int]]:
    """Every (operation, layer, column chunk) of a step.

    MIX and RESIDUAL have their half of the layer as chunk, EXCHANGE its kind.
    """
    c = p.config
    end = p.layers
    out: set[tuple[Op, int, int]] = {(Op.EMBED, 0, 0), (Op.MIX, end, 0), (Op.FINISH, end, 0)}
    ops: list[tuple[Op, int]] = [(Op.LM_HEAD, end)]
    for layer, kind in enumerate(c.layer_types):
        out |= {(Op.MIX, layer, 0), (Op.MIX, layer, 1)}
        names = "IN DECAY STEP OUT" if kind == "kda" else "IN QUERY ROW ABSORB ATTEND VALUE OUT"
        ops += [(Op[f"{kind.upper()}_{name}"], layer) for name in names.split()]
        if c.is_moe(layer):
            names = "ROUTER ROUTE LATENT_DOWN GATE_UP SHARED_DOWN EXPERT_IN EXPERT_OUT COMBINE LATENT_UP"
            ops += [(Op[name], layer) for name in names.split()]
        else:
            ops += [(Op.GATE_UP, layer), (Op.DENSE_DOWN, layer)]
    if p.ways > 1:
        out |= _exchanges(p)
    return out | {(op, layer, chunk) for op, layer in ops for chunk in range(stage_chunks(p, op, layer))}


def _exchanges(p: Plan) -> set[tuple[Op, int, int]]:
    """Every exchange of a share, and the ends of sublayers behind them."""
    out: set[tuple[Op, int, int]] = {(Op.EXCHANGE, 0, Exchange.EMBEDDING)}
    for layer in range(p.layers):
        kinds = [Exchange.ATTENTION, Exchange.FFN]
        kinds += [Exchange.LATENT, Exchange.ROUTED] if p.config.is_moe(layer) else []
        out |= {(Op.EXCHANGE, layer, int(kind)) for kind in kinds}
        out |= {(Op.RESIDUAL, layer, half) for half in (0, 1)}
    return out


def instruction_problems(s: Schedule) -> Iterator[str]:
    """What is wrong with instructions one by one."""
    total = arrivals(s.instructions)
    known = required_stages(s.plan)
    for at, ins in enumerate(s.instructions):
        name = f"instruction {at} ({ins.op.name}, layer {ins.layer})"
        if not 0 <= ins.sm0 < ins.sm1 <= s.plan.sms:
            yield f"{name}: SMs {ins.sm0}..{ins.sm1} are not within 0..{s.plan.sms}"
            continue
        if not all((ins.op, ins.layer, chunk) in known for chunk in range(ins.c0, ins.c1)):
            yield f"{name}: this model has no such stage with chunks {ins.c0}..{ins.c1}"
            continue
        if ins.c0 >= ins.c1 or not 0 <= ins.g0 < ins.g1 <= stage_groups(s.plan, ins.op, ins.layer, ins.c0):
            yield f"{name}: groups {ins.g0}..{ins.g1}, chunks {ins.c0}..{ins.c1} are not within the stage"
            continue
        yield from _split_problems(s.plan, ins, name)
        yield from _wait_problems(s, ins, name, total)
        work = Work(ins.op, ins.layer, ins.g0, ins.g1, ins.c0, ins.c1, ins.sm0, ins.sm1)
        for kind, declared, right in zip(
            ("reads", "writes"), (ins.reads, ins.writes), accesses(s.plan, work), strict=True
        ):
            if sorted(declared) != sorted(right):
                wrong = sorted(set(declared) ^ set(right)) or sorted(declared)
                yield f"{name}: declared {kind} are not those of the operation: {wrong[0]}"


def _split_problems(p: Plan, ins: Instruction, name: str) -> Iterator[str]:
    dynamic = ins.op in (Op.EXPERT_IN, Op.EXPERT_OUT)
    if ins.dynamic != dynamic:
        yield f"{name}: dynamic is {ins.dynamic}"
        return
    if not dynamic:
        if (ins.g1 - ins.g0) % (ins.sm1 - ins.sm0):
            yield f"{name}: {ins.g1 - ins.g0} groups do not split evenly over {ins.sm1 - ins.sm0} SMs"
        return
    per_slot = stage_groups(p, ins.op, ins.layer) // p.slots
    for used in {1, min(p.A, p.slots), p.slots}:
        at = ins.g0
        for sm in range(ins.sm0, ins.sm1):
            lo, hi = ins.piece(sm, used, p.slots)
            if lo != at or hi < lo:
                yield f"{name}: with {used} experts SM {sm} takes {lo}..{hi}, not from {at}"
            at = hi
        if (at, ins.g0) != (used * per_slot, 0):
            yield f"{name}: with {used} experts groups {ins.g0}..{at} are covered, not 0..{used * per_slot}"


def _wait_problems(s: Schedule, ins: Instruction, name: str, total: dict[int, int]) -> Iterator[str]:
    if len(ins.waits) > MAX_WAITS:
        yield f"{name}: {len(ins.waits)} waits, at most {MAX_WAITS}"
    if not 0 <= ins.signal < s.counters:
        yield f"{name}: signals counter {ins.signal}, there are {s.counters}"
    for wait in ins.waits:
        if not 0 <= wait.counter < s.counters:
            yield f"{name}: waits for counter {wait.counter}, there are {s.counters}"
        elif wait.target != total.get(wait.counter, 0):
            yield (
                f"{name}: waits for {wait.target} arrivals of counter {wait.counter}, "
                f"which gets {total.get(wait.counter, 0)}"
            )


def coverage_problems(s: Schedule) -> Iterator[str]:
    """Stages that are missing, incomplete or done twice."""
    parts: dict[tuple[Op, int, int], list[tuple[int, int]]] = defaultdict(list)
    for ins in s.instructions:
        for chunk in range(ins.c0, ins.c1):
            parts[ins.op, ins.layer, chunk].append((ins.g0, ins.g1))
    for key in sorted(required_stages(s.plan)):
        op, layer, chunk = key
        name = f"{op.name}, layer {layer}, chunk {chunk}"
        want, at = stage_groups(s.plan, op, layer, chunk), 0
        if key not in parts:
            yield f"{name}: missing"
            continue
        for lo, hi in sorted(parts[key]):
            if lo != at:
                what = "left out" if lo > at else "done twice"
                yield f"{name}: groups {min(lo, at)}..{max(lo, at)} are {what}"
            at = max(at, hi)
        if at != want:
            yield f"{name}: groups end at {at}, not {want}"


__all__ = ["coverage_problems", "instruction_problems", "required_stages"]
