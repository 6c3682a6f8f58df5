"""The schedule of a decode step: from a plan to the list of instructions.

Stages follow one another as in the model; a stage's instructions stand side by side. Within a phase
(stages between which no SM has to wait for the others) the bytes of every SM are levelled, so small
stages ride on the SMs that a large one leaves short.
"""

from __future__ import annotations

import dataclasses

from .buffers import Buffer, buffer_table
from .instructions import Exchange, Instruction, Op, Wait
from .layout import matrix_name, tiling
from .partition import deal, runs
from .shapes import Plan
from .stages import Work, accesses, shared_pieces, stage_chunks, stage_groups


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A decode step as data.

    Attributes:
        plan: what it was made for.
        instructions: in the order in which every SM runs its own.
        counters: hand-off counters used, 0 .. counters - 1, all zero when a step begins.
    """

    plan: Plan
    instructions: tuple[Instruction, ...]
    counters: int

    @property
    def buffers(self) -> dict[str, Buffer]:
        return buffer_table(self.plan)


class _Builder:
    def __init__(self, plan: Plan):
        self.plan = plan
        self.instructions: list[Instruction] = []
        self.counters = 0
        self.loads = [0] * plan.sms

    def phase(self) -> None:
        """From here on every SM waits for all others first: bytes are levelled anew."""
        self.loads = [0] * self.plan.sms

    def stage(
        self,
        op: Op,
        layer: int,
        *waits: Wait,
        groups: tuple[int, int] | None = None,
        chunks: tuple[int, int] | None = None,
        level: bool = True,
        last: bool = False,
    ) -> Wait:
        """Add a stage; returns the wait for all of it.

        Args:
            groups: part of its groups; default all.
            chunks: part of its column chunks (MIX, RESIDUAL: the half of the layer, EXCHANGE: its kind);
                default all.
            level: deal by the bytes SMs have in this phase, or (False) as if they had none.
            last: a one-group stage goes to the last SM with the least bytes.
        """
        p = self.plan
        c0, c1 = chunks or (0, stage_chunks(p, op, layer))
        g0, g1 = groups or (0, stage_groups(p, op, layer, c0))
        each = self._group_bytes(op, layer, c1 - c0)
        dynamic = op in (Op.EXPERT_IN, Op.EXPERT_OUT)
        if dynamic:
            parts = [(0, p.sms, g0, g1)]
        elif last:
            least = min(self.loads)
            sm = max(s for s in range(p.sms) if self.loads[s] == least)
            parts = [(sm, sm + 1, g0, g1)]
        else:
            counts = deal(g1 - g0, each, self.loads if level else [0] * p.sms)
            parts = runs(counts, g0)
        counter, arrivals = self.counters, 0
        self.counters += 1
        for sm0, sm1, a, b in parts:
            reads, writes = accesses(p, Work(op, layer, a, b, c0, c1, sm0, sm1))
            self.instructions.append(
                Instruction(op, layer, sm0, sm1, a, b, c0, c1, dynamic, waits, counter, reads, writes)
            )
            arrivals += sm1 - sm0
            for sm in range(sm0, sm1):
                self.loads[sm] += (b - a) * each // (sm1 - sm0)
        return Wait(counter, arrivals)

    def _group_bytes(self, op: Op, layer: int, chunks: int) -> int:
        p = self.plan
        name = matrix_name(p, op, layer)
        if name is not None:
            return tiling(p, name).tile_bytes * chunks
        if op == Op.KDA_STEP:
            return 8 * p.K * p.V
        return 16  # column stages move next to nothing


def build(plan: Plan) -> Schedule:
    """The schedule of one decode step."""
    b = _Builder(plan)
    embedded = (_exchange(b, 0, Exchange.EMBEDDING),) if plan.ways > 1 else ()
    ready = b.stage(Op.EMBED, 0, *embedded)
    for layer, kind in enumerate(plan.config.layer_types):
        ready = _kda(b, layer, ready) if kind == "kda" else _mla(b, layer, ready)
        ready = _moe(b, layer, ready) if plan.config.is_moe(layer) else _dense(b, layer, ready)
    b.phase()
    mixed = b.stage(Op.MIX, plan.layers, ready, chunks=(0, 1))
    b.phase()
    head = b.stage(Op.LM_HEAD, plan.layers, mixed)
    b.phase()
    b.stage(Op.FINISH, plan.layers, head, last=True)
    return Schedule(plan, tuple(b.instructions), b.counters)


def _exchange(b: _Builder, layer: int, kind: Exchange, *ready: Wait) -> Wait:
    return b.stage(Op.EXCHANGE, layer, *ready, chunks=(kind, kind + 1))


def _end(b: _Builder, layer: int, half: int, ready: Wait) -> Wait:
    """After the last matrix of a sublayer: in a share the sum over the ranks, and what ends the sublayer."""
    if b.plan.ways == 1:
        return ready
    b.phase()
    summed = _exchange(b, layer, Exchange.FFN if half else Exchange.ATTENTION, ready)
    b.phase()
    return b.stage(Op.RESIDUAL, layer, summed, chunks=(half, half + 1))


def _mix(b: _Builder, layer: int, half: int, ready: Wait) -> Wait:
    b.phase()
    mixed = b.stage(Op.MIX, layer, ready, chunks=(half, half + 1))
    b.phase()
    return mixed


def _kda(b: _Builder, layer: int, ready: Wait) -> Wait:
    p = b.plan
    mixed = _mix(b, layer, 0, ready)
    total = stage_groups(p, Op.KDA_IN, layer)
    # The decay's low-rank input first, so that its hand-off is over long before the other rows are.
    first = b.stage(Op.KDA_IN, layer, mixed, groups=(0, p.kda_first))
    waits = [first]
    if p.kda_first < total:
        waits.append(b.stage(Op.KDA_IN, layer, mixed, groups=(p.kda_first, total)))
    decay = b.stage(Op.KDA_DECAY, layer, first)
    b.phase()
    stepped = b.stage(Op.KDA_STEP, layer, *waits, decay)
    b.phase()
    return _end(b, layer, 0, b.stage(Op.KDA_OUT, layer, stepped))


def _mla(b: _Builder, layer: int, ready: Wait) -> Wait:
    mixed = _mix(b, layer, 0, ready)
    projected = b.stage(Op.MLA_IN, layer, mixed)
    b.phase()
    query = b.stage(Op.MLA_QUERY, layer, projected)
    row = b.stage(Op.MLA_ROW, layer, projected)
    b.phase()
    absorbed = b.stage(Op.MLA_ABSORB, layer, query)
    b.phase()
    attended = b.stage(Op.MLA_ATTEND, layer, query, absorbed, row)
    b.phase()
    values = b.stage(Op.MLA_VALUE, layer, attended, projected)
    b.phase()
    return _end(b, layer, 0, b.stage(Op.MLA_OUT, layer, values))


def _dense(b: _Builder, layer: int, ready: Wait) -> Wait:
    mixed = _mix(b, layer, 1, ready)
    hidden = b.stage(Op.GATE_UP, layer, mixed)
    b.phase()
    return _end(b, layer, 1, b.stage(Op.DENSE_DOWN, layer, hidden))


def _moe(b: _Builder, layer: int, ready: Wait) -> Wait:
    p = b.plan
    mixed = _mix(b, layer, 1, ready)
    scored = b.stage(Op.ROUTER, layer, mixed)
    latent = b.stage(Op.LATENT_DOWN, layer, mixed)
    if p.ways > 1:
        latent = _exchange(b, layer, Exchange.LATENT, latent)
    routed = b.stage(Op.ROUTE, layer, scored, last=True)
    # The shared expert's first matrices hide the choice of experts and the latent's hand-off ...
    hidden = b.stage(Op.GATE_UP, layer, mixed)
    inner = b.stage(Op.EXPERT_IN, layer, routed, latent)
    # ... and the two halves of its last one the hand-offs between and after the experts' matrices.
    chunks = stage_chunks(p, Op.SHARED_DOWN, layer)
    middle = -(-chunks // 2)
    b.stage(Op.SHARED_DOWN, layer, hidden, chunks=(0, middle), level=False)
    outer = b.stage(Op.EXPERT_OUT, layer, inner, routed)
    if shared_pieces(p) == 2:
        b.stage(Op.SHARED_DOWN, layer, hidden, chunks=(middle, chunks), level=False)
    combined = b.stage(Op.COMBINE, layer, outer, routed, level=False)
    if p.ways > 1:
        combined = _exchange(b, layer, Exchange.ROUTED, combined)
    return _end(b, layer, 1, b.stage(Op.LATENT_UP, layer, combined, level=False))


__all__ = ["Schedule", "build"]
