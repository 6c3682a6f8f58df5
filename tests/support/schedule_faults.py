"""Kinds of faults in a decode schedule, each planted at a random place of its kind.

A fault that changes what an instruction covers derives its accesses anew: the list is then
consistent in itself, as it would be if the scheduler were wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from k3jax.custom_calls.decode_megakernel.instructions import Access, Exchange, Instruction, Op, Wait
from k3jax.custom_calls.decode_megakernel.order import arrivals
from k3jax.custom_calls.decode_megakernel.schedule import Schedule
from k3jax.custom_calls.decode_megakernel.segments import launched, segments
from k3jax.custom_calls.decode_megakernel.shapes import Plan
from k3jax.custom_calls.decode_megakernel.stages import Work, accesses, stage_groups

Fault = Callable[[Schedule, np.random.Generator], Schedule]
NEEDED = (
    Op.MIX,
    Op.KDA_OUT,
    Op.MLA_OUT,
    Op.KDA_DECAY,
    Op.MLA_QUERY,
    Op.MLA_ABSORB,
    Op.MLA_VALUE,
    Op.ROUTE,
    Op.DENSE_DOWN,
    Op.COMBINE,
    Op.LATENT_UP,
    Op.LM_HEAD,
    Op.FINISH,
)
"""Stages that depend on what other SMs do and learn it from their waits alone."""


def rederive(p: Plan, ins: Instruction, **changes: Any) -> Instruction:
    """``ins`` with changes, and the accesses that go with them."""
    ins = dataclasses.replace(ins, **changes)
    work = Work(ins.op, ins.layer, ins.g0, ins.g1, ins.c0, ins.c1, ins.sm0, ins.sm1)
    reads, writes = accesses(p, work)
    return dataclasses.replace(ins, reads=reads, writes=writes)


def pick(s: Schedule, rng: np.random.Generator, suits: Callable[[Instruction], bool]) -> int:
    found = [at for at, ins in enumerate(s.instructions) if suits(ins)]
    if not found:
        raise AssertionError("the schedule has no instruction for this fault")
    return found[int(rng.integers(len(found)))]


def put(s: Schedule, at: int, *new: Instruction) -> Schedule:
    instructions = (*s.instructions[:at], *new, *s.instructions[at + 1 :])
    return dataclasses.replace(s, instructions=instructions)


def changed(suits: Callable[[Instruction], bool], **how: Callable[[Instruction], Any]) -> Fault:
    """One instruction with fields changed as they stand: declared accesses stay."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, suits)
        ins = s.instructions[at]
        return put(s, at, dataclasses.replace(ins, **{k: f(ins) for k, f in how.items()}))

    return fault


def covering(suits: Callable[[Instruction], bool], **how: Callable[[Instruction], Any]) -> Fault:
    """One instruction that covers something else, with the accesses that go with it."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, suits)
        ins = s.instructions[at]
        return put(s, at, rederive(s.plan, ins, **{k: f(ins) for k, f in how.items()}))

    return fault


def needed(ins: Instruction) -> bool:
    return ins.op in NEEDED


def anything(ins: Instruction) -> bool:
    return True


def waits(ins: Instruction) -> bool:
    return bool(ins.waits)


def static_matrix(ins: Instruction) -> bool:
    return ins.op in (Op.KDA_IN, Op.MLA_IN, Op.GATE_UP, Op.LATENT_DOWN, Op.LM_HEAD, Op.MLA_QUERY)


def expert(ins: Instruction) -> bool:
    return ins.op in (Op.EXPERT_IN, Op.EXPERT_OUT)


def per_sm(ins: Instruction) -> int:
    return (ins.g1 - ins.g0) // (ins.sm1 - ins.sm0)


def retarget(by: int) -> Callable[[Instruction], tuple[Wait, ...]]:
    return lambda ins: (Wait(ins.waits[0].counter, ins.waits[0].target + by), *ins.waits[1:])


def _earlier_counter(s: Schedule, rng: np.random.Generator) -> Schedule:
    """Wait for a stage two hand-offs earlier, with that counter's own target."""
    at = pick(s, rng, lambda i: i.op in NEEDED and i.waits[0].counter >= 2)
    total = arrivals(s.instructions)
    counter = s.instructions[at].waits[0].counter - 2
    return put(s, at, dataclasses.replace(s.instructions[at], waits=(Wait(counter, total[counter]),)))


def _other_counter(s: Schedule, rng: np.random.Generator) -> Schedule:
    """The right target on a counter that gets another number of arrivals."""
    at = pick(s, rng, needed)
    wait = s.instructions[at].waits[0]
    other = next(c for c, n in arrivals(s.instructions).items() if n != wait.target)
    return put(s, at, dataclasses.replace(s.instructions[at], waits=(Wait(other, wait.target),)))


def _swap(field: str, apart: Callable[[Instruction, Instruction], bool]) -> Fault:
    """Exchange a field of two instructions of one operation, accesses following."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        pairs = [
            (a, b)
            for a, x in enumerate(s.instructions)
            for b, y in enumerate(s.instructions)
            if a < b and x.op == y.op and apart(x, y)
        ]
        a, b = pairs[int(rng.integers(len(pairs)))]
        x, y = s.instructions[a], s.instructions[b]
        s = put(s, a, rederive(s.plan, x, **{field: getattr(y, field)}))
        return put(s, b, rederive(s.plan, y, **{field: getattr(x, field)}))

    return fault


def _moved_before_its_producer(s: Schedule, rng: np.random.Generator) -> Schedule:
    at = pick(s, rng, needed)
    ins = s.instructions[at]
    producer = next(i for i, x in enumerate(s.instructions) if x.signal == ins.waits[0].counter)
    rest = (*s.instructions[:at], *s.instructions[at + 1 :])
    return dataclasses.replace(s, instructions=(*rest[:producer], ins, *rest[producer:]))


def _first_waits_for_last(s: Schedule, rng: np.random.Generator) -> Schedule:
    last = s.instructions[-1]
    wait = Wait(last.signal, last.sm1 - last.sm0)
    return put(s, 0, dataclasses.replace(s.instructions[0], waits=(wait,)))


def _dropped(suits: Callable[[Instruction], bool] = anything, keep_targets: bool = False) -> Fault:
    """An instruction left out; other instructions' targets follow unless ``keep_targets``."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, suits)
        s = dataclasses.replace(s, instructions=(*s.instructions[:at], *s.instructions[at + 1 :]))
        return s if keep_targets else refit(s)

    return fault


def refit(s: Schedule) -> Schedule:
    """Targets set to what the counters get, and waits for counters without arrivals removed."""
    total = arrivals(s.instructions)
    instructions = tuple(
        dataclasses.replace(
            ins, waits=tuple(Wait(w.counter, total[w.counter]) for w in ins.waits if w.counter in total)
        )
        for ins in s.instructions
    )
    return dataclasses.replace(s, instructions=instructions)


def _doubled(s: Schedule, rng: np.random.Generator) -> Schedule:
    at = pick(s, rng, anything)
    return refit(put(s, at, s.instructions[at], s.instructions[at]))


def _without_layer(s: Schedule, rng: np.random.Generator) -> Schedule:
    layer = int(rng.integers(1, s.plan.layers))
    kept = tuple(ins for ins in s.instructions if ins.layer != layer)
    return refit(dataclasses.replace(s, instructions=kept))


def _layers_in_wrong_order(s: Schedule, rng: np.random.Generator) -> Schedule:
    """Two layers' instructions change places in the list; waits go along."""
    key = {1: 2, 2: 1}
    order = sorted(
        range(len(s.instructions)), key=lambda at: key.get(s.instructions[at].layer, s.instructions[at].layer)
    )
    return dataclasses.replace(s, instructions=tuple(s.instructions[at] for at in order))


def _boundary_shifted(s: Schedule, rng: np.random.Generator) -> Schedule:
    """Every SM of an instruction takes one more group, from what its neighbour does already."""
    at = pick(s, rng, lambda i: static_matrix(i) and i.g0 >= i.sm1 - i.sm0)
    ins = s.instructions[at]
    return put(s, at, rederive(s.plan, ins, g0=ins.g0 - (ins.sm1 - ins.sm0)))


def _expert_slots(by: int) -> Fault:
    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, expert)
        ins = s.instructions[at]
        slot = stage_groups(s.plan, ins.op, ins.layer) // s.plan.slots
        return put(s, at, rederive(s.plan, ins, g1=ins.g1 + by * slot))

    return fault


def _access(kind: str, how: Callable[[Access], Access | None], suits: Callable[[Access], bool]) -> Fault:
    """One declared access changed (None removes it)."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, lambda i: any(suits(a) for a in getattr(i, kind)))
        ins = s.instructions[at]
        all_of = list(getattr(ins, kind))
        where = next(n for n, a in enumerate(all_of) if suits(a))
        new = how(all_of[where])
        all_of[where : where + 1] = [] if new is None else [new]
        return put(s, at, dataclasses.replace(ins, **{kind: tuple(all_of)}))

    return fault


def any_access(a: Access) -> bool:
    return True


def _work(a: Access) -> bool:
    return not a.buffer.startswith(("w.", "S.", "conv.", "old.", "cache.", "lengths", "status"))


def _other_split(s: Schedule, rng: np.random.Generator) -> Schedule:
    """Columns of the shared expert's sum rotated by one SM against those that add to it."""
    at = pick(s, rng, lambda i: i.op == Op.SHARED_DOWN and i.c0 > 0 and i.sm1 - i.sm0 > 1)
    ins = s.instructions[at]
    last, each = ins.sm1 - 1, per_sm(ins)
    most = rederive(s.plan, ins, sm1=last, g0=ins.g0 + each)
    first = rederive(s.plan, ins, sm0=last, g1=ins.g0 + each)
    return put(s, at, most, first)


def _replanned(**changes: Any) -> Fault:
    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        target = dataclasses.replace(s.plan.target, **changes)
        return dataclasses.replace(s, plan=dataclasses.replace(s.plan, target=target))

    return fault


def _unawaited(op: Op, producer: Op) -> Fault:
    """``op`` no longer waits for ``producer``, but for all else."""

    def fault(s: Schedule, rng: np.random.Generator) -> Schedule:
        at = pick(s, rng, lambda i: i.op == op)
        ins = s.instructions[at]
        of = {i.signal for i in s.instructions if i.op == producer and i.layer == ins.layer}
        left = tuple(w for w in ins.waits if w.counter not in of)
        if len(left) == len(ins.waits):
            raise AssertionError(f"{op.name} does not wait for {producer.name}")
        return put(s, at, dataclasses.replace(ins, waits=left))

    return fault


FAULTS: Mapping[str, Fault] = {
    "missing wait": changed(needed, waits=lambda i: ()),
    "expert ids not awaited": _unawaited(Op.EXPERT_IN, Op.ROUTE),
    "latent not awaited": _unawaited(Op.EXPERT_IN, Op.LATENT_DOWN),
    "decay not awaited": _unawaited(Op.KDA_STEP, Op.KDA_DECAY),
    "absorbed queries not awaited": _unawaited(Op.MLA_ATTEND, Op.MLA_ABSORB),
    "expert hidden values not awaited": _unawaited(Op.EXPERT_OUT, Op.EXPERT_IN),
    "counter target one too small": changed(waits, waits=retarget(-1)),
    "counter target one too large": changed(waits, waits=retarget(1)),
    "target of another counter": _other_counter,
    "wait for an earlier stage": _earlier_counter,
    "counter that does not exist": changed(waits, waits=lambda i: (Wait(10**6, 1),)),
    "too many waits": changed(waits, waits=lambda i: i.waits * 5),
    "signal to the next counter": changed(lambda i: i.signal >= 0, signal=lambda i: i.signal + 1),
    "signal without counter": changed(anything, signal=lambda i: -1),
    "signals swapped": _swap("signal", lambda x, y: x.signal != y.signal and x.op != Op.SHARED_DOWN),
    "layers swapped": _swap("layer", lambda x, y: x.layer != y.layer),
    "layer past the last": changed(lambda i: i.op == Op.KDA_OUT, layer=lambda i: i.layer + 100),
    "layers in the wrong order": _layers_in_wrong_order,
    "whole layer left out": _without_layer,
    "moved before its producer": _moved_before_its_producer,
    "first waits for last": _first_waits_for_last,
    "instruction left out": _dropped(),
    "instruction left out, targets kept": _dropped(keep_targets=True),
    "instruction twice": _doubled,
    "operation of the other attention": changed(lambda i: i.op == Op.KDA_OUT, op=lambda i: Op.MLA_OUT),
    "mixture of the wrong half": covering(
        lambda i: i.op == Op.MIX and i.layer < 4 and i.c0 == 1, c0=lambda i: 0, c1=lambda i: 1
    ),
    "dropped tile": covering(
        lambda i: static_matrix(i) and per_sm(i) > 1, g1=lambda i: i.g1 - (i.sm1 - i.sm0)
    ),
    "tile past the matrix": covering(
        lambda i: i.op == Op.LM_HEAD, g1=lambda i: i.g1 + 10**6 * (i.sm1 - i.sm0)
    ),
    "boundary between neighbours shifted": _boundary_shifted,
    "uneven split": covering(lambda i: static_matrix(i) and i.sm1 - i.sm0 > 1, g1=lambda i: i.g1 - 1),
    "dropped column chunk": covering(lambda i: i.c1 - i.c0 > 1, c1=lambda i: i.c1 - 1),
    "SM left out": covering(lambda i: static_matrix(i) and i.sm1 - i.sm0 > 1, sm1=lambda i: i.sm1 - 1),
    "SM that does not exist": changed(anything, sm1=lambda i: 10**4),
    "one expert slot too few": _expert_slots(-1),
    "one expert slot too many": _expert_slots(1),
    "experts split statically": changed(expert, dynamic=lambda i: False),
    "attention lane left out": covering(lambda i: i.op == Op.MLA_ATTEND, g1=lambda i: i.g1 - (i.sm1 - i.sm0)),
    "shared sum on other SMs": _other_split,
    "read declared too short": _access(
        "reads", lambda a: dataclasses.replace(a, hi=a.hi - 1), lambda a: a.hi - a.lo > 1
    ),
    "read not declared": _access("reads", lambda a: None, any_access),
    "write not declared": _access("writes", lambda a: None, any_access),
    "write declared too wide": _access(
        "writes", lambda a: dataclasses.replace(a, lo=a.lo - 1), lambda a: a.lo > 0
    ),
    "write to another buffer": _access(
        "writes", lambda a: dataclasses.replace(a, buffer="hid" if a.buffer == "ey" else "ey"), _work
    ),
    "lifetime before read": _access("reads", lambda a: dataclasses.replace(a, version=a.version - 1), _work),
    "read called local": _access(
        "reads", lambda a: dataclasses.replace(a, local=True), lambda a: a.buffer == "ey"
    ),
    "state of another layer": _access(
        "writes", lambda a: dataclasses.replace(a, buffer="S.1"), lambda a: a.buffer == "S.2"
    ),
    "block snapshot not written": _access("writes", lambda a: None, lambda a: a.buffer.startswith("block.")),
    "cache row of another layer": _access(
        "writes", lambda a: dataclasses.replace(a, buffer="token"), lambda a: a.buffer.startswith("cache.")
    ),
    "counters miscounted": lambda s, rng: dataclasses.replace(s, counters=s.counters - 1),
    "SM with less shared memory": _replanned(shared_bytes=101_376),
    "SM with shared memory for the ring and not for all else": _replanned(shared_bytes=220_000),
    "SM with fewer registers": _replanned(registers=32_768),
    "target with fewer SMs": _replanned(sms=100),
}


# -- shares -------------------------------------------------------------------------------------


def _exchange(ins: Instruction) -> bool:
    return ins.op == Op.EXCHANGE and ins.layer > 0


def _exchange_left_out(s: Schedule, rng: np.random.Generator) -> Schedule:
    """All instructions of one exchange."""
    at = pick(s, rng, lambda i: i.op == Op.EXCHANGE)
    gone = s.instructions[at].signal
    return refit(dataclasses.replace(s, instructions=tuple(i for i in s.instructions if i.signal != gone)))


def _exchange_too_early(s: Schedule, rng: np.random.Generator) -> Schedule:
    """An exchange before the stage whose results it takes, waits along with it."""
    at = pick(s, rng, _exchange)
    counter = s.instructions[at].signal
    moved = [i for i in s.instructions if i.signal == counter]
    producers = {w.counter for w in moved[0].waits}
    rest = [i for i in s.instructions if i.signal != counter]
    first = next(n for n, i in enumerate(rest) if i.signal in producers)
    return dataclasses.replace(s, instructions=(*rest[:first], *moved, *rest[first:]))


SHARE_FAULTS: Mapping[str, Fault] = {
    "exchange left out": _exchange_left_out,
    "a piece of an exchange left out": _dropped(lambda i: i.op == Op.EXCHANGE),
    "exchange of the wrong layer": covering(_exchange, layer=lambda i: i.layer - 1),
    "exchange of another kind": covering(
        lambda i: _exchange(i) and i.c0 in (Exchange.ATTENTION, Exchange.FFN),
        c0=lambda i: Exchange.ROUTED,
        c1=lambda i: Exchange.ROUTED + 1,
        g1=lambda i: i.g0 + (i.sm1 - i.sm0),
    ),
    "exchange before what it takes": _exchange_too_early,
    "exchange not awaited": _unawaited(Op.RESIDUAL, Op.EXCHANGE),
    "gathered latent not awaited": _unawaited(Op.EXPERT_IN, Op.EXCHANGE),
    "sum of the routed results not awaited": _unawaited(Op.LATENT_UP, Op.EXCHANGE),
    "given results not awaited": changed(_exchange, waits=lambda i: ()),
    "end of a sublayer left out": _dropped(lambda i: i.op == Op.RESIDUAL),
    "end of the wrong half": covering(
        lambda i: i.op == Op.RESIDUAL and i.c0 == 1, c0=lambda i: 0, c1=lambda i: 1
    ),
    "given to the exchange after": _access(
        "writes", lambda a: dataclasses.replace(a, version=a.version + 1), lambda a: a.buffer == "give"
    ),
    "taken from the exchange before": _access(
        "reads", lambda a: dataclasses.replace(a, version=a.version - 1), lambda a: a.buffer == "take"
    ),
    "every expert's place not read": _access(
        "reads", lambda a: None, lambda a: a.buffer.endswith("expert_place")
    ),
}
"""Kinds of faults in the schedule of a rank's share."""

SegmentFault = Callable[[Schedule, np.random.Generator], tuple[Instruction, ...]]


def _listed(
    suits: Callable[[Schedule, Instruction, Instruction], bool],
    how: Callable[[Instruction, Instruction], Instruction],
) -> SegmentFault:
    """One instruction of the launched list changed; both functions get it as scheduled and as launched."""

    def fault(s: Schedule, rng: np.random.Generator) -> tuple[Instruction, ...]:
        out = list(launched(s))
        found = [at for at, ins in enumerate(out) if suits(s, s.instructions[at], ins)]
        at = found[int(rng.integers(len(found)))]
        out[at] = how(s.instructions[at], out[at])
        return tuple(out)

    return fault


def _one_segment_fewer(s: Schedule, rng: np.random.Generator) -> tuple[Instruction, ...]:
    """A segment's instructions among those of the one before: an exchange comes too late."""
    parts = segments(s)
    n = int(rng.integers(1, len(parts)))
    out = list(launched(s))
    part, before = parts[n], parts[n - 1]
    moved = out[before.last : part.first]
    return tuple(out[: before.last] + out[part.first : part.last] + moved + out[part.last :])


SEGMENT_FAULTS: Mapping[str, SegmentFault] = {
    "a wait kept on an earlier segment's counter": _listed(
        lambda s, a, b: a.op != Op.EXCHANGE and len(a.waits) > len(b.waits),
        lambda a, b: dataclasses.replace(b, waits=a.waits),
    ),
    "a wait dropped within a segment": _listed(
        lambda s, a, b: bool(b.waits), lambda a, b: dataclasses.replace(b, waits=b.waits[1:])
    ),
    "a wait for another counter": _listed(
        lambda s, a, b: bool(b.waits),
        lambda a, b: dataclasses.replace(b, waits=(Wait(b.signal, 1),)),
    ),
    "launched as another stage": _listed(
        lambda s, a, b: a.op == Op.RESIDUAL, lambda a, b: dataclasses.replace(b, layer=b.layer + 1)
    ),
    "a segment without its exchange": _one_segment_fewer,
    "an instruction that is not launched": lambda s, rng: launched(s)[:-1],
}
"""Kinds of faults in what the launches of a share run."""
