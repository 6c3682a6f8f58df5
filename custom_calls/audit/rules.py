"""The rules that the machine code of the decode megakernel must keep, and how far they reach.

*Step data* is what the kernel itself writes: the workspace, states, lengths, the fault record. The
workspace is the kernel parameter that the addresses of all hand-off polls come from; other written
parameters are those that addresses of stores come from (here, and for the sources of bulk copies, the last
value counts of what is set under a predicate); an address that comes from no parameter (the
pointer table in shared memory) counts as step data. Loads whose address comes from other parameters alone
are *fixed*: tables and vectors that no step writes.

1. No ``LDG ... CONSTANT`` at all: weights go through bulk copies, and ptxas moves such loads above waits.
2. Every load of step data is behind its wait: on every path to it the last hand-off event is a *wait*.
   Events are: the start of the kernel, a *poll* (acquire load of the workspace: LDG STRONG with CCTL.IVALL
   behind it), a *wait* (the first block barrier on every path from a poll; within the polling warp the
   first warp barrier does), and a *signal* (the block barrier before a release reduction, and that
   reduction; in code that joins no block barrier, the producer's, an arrival on a shared-memory barrier).
   Written parameters other than the workspace may also be read before the first barrier of the kernel:
   they hold then what the step before left.
3. Bulk copies read neither the workspace nor another written parameter.
4. Every poll is an acquire, every signal has a fence before it, and no barrier is both a wait and a signal.
5. No local memory where data streams: in innermost loops that hold a wait for the ring and a matrix
   instruction, a load of shared memory or a bulk copy, which run once a tile or oftener. Loops around them
   (over splits of the attention, experts, instructions) may keep a register there.

What this proves: no load of step data was moved out of the stage that waits for it, to before its wait or
behind its signal, on any path of the control flow graph. What it does not: that the wait awaits the right
counter (the schedule's proof does), that a load was not moved across a whole stage into the part of an
earlier one that lies between its own wait and signal, or merged with an earlier load of the same address;
those need the compiler to move a load across a barrier and a release, which it does only to non-coherent
loads and to inline assembly without side effects: rule 1 and ``sources.inline_loads`` exclude both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from .. import cubin
from .graph import Graph
from .origins import UNKNOWN, Origins
from .report import Finding, Report, Rule
from .sass import Function, Instruction, disassemble

PRODUCTS, SHARED, COPIES = ("HMMA", "QMMA", "OMMA"), ("LDS",), ("UBLKCP",)
"""What a loop over tiles does besides waiting for the ring: products, element-wise work, copies."""

_START, _CLOSED, _POLLED, _OPEN = 1, 2, 4, 8
_SAID = {
    _START: "from the start of the kernel",
    _CLOSED: "behind a signal, or before the first wait",
    _POLLED: "between a poll and its barrier",
}


def _is_load(ins: Instruction) -> bool:
    return ins.base in ("LDG", "LD")


def _is_block_barrier(ins: Instruction) -> bool:
    return ins.base == "BAR" and "ARV" not in ins.parts


def _is_whole_block(ins: Instruction) -> bool:
    """Barrier 0: all threads, in the prologue."""
    return _is_block_barrier(ins) and ins.operands[:1] == ("0x0",)


def _is_stage_barrier(ins: Instruction) -> bool:
    return _is_block_barrier(ins) and not _is_whole_block(ins)


def _is_warp_barrier(ins: Instruction) -> bool:
    # The compiler leaves a NOP where threads have met already.
    return ins.base in ("WARPSYNC", "NOP")


def _is_strong(ins: Instruction) -> bool:
    return "STRONG" in ins.parts


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One kernel under audit; instructions go by their number."""

    function: Function

    @cached_property
    def graph(self) -> Graph:
        return Graph.of(self.function)

    @cached_property
    def origins(self) -> Origins:
        return Origins(self.graph)

    @cached_property
    def latest_origins(self) -> Origins:
        return Origins(self.graph, latest=True)

    @cached_property
    def reached(self) -> list[int]:
        return [at for block in self.graph.blocks for at in block]

    def ins(self, at: int) -> Instruction:
        return self.graph.instructions[at]

    def all(self, *bases: str) -> list[int]:
        return [at for at in self.reached if self.ins(at).base in bases]

    # -- hand-offs --

    @cached_property
    def loads(self) -> list[int]:
        return [at for at in self.reached if _is_load(self.ins(at))]

    @cached_property
    def acquires(self) -> list[int]:
        out = []
        for at in self.loads:
            behind = self.graph.instructions[at + 1 : at + 2]
            if _is_strong(self.ins(at)) and behind and behind[0].parts[:2] == ("CCTL", "IVALL"):
                out.append(at)
        return out

    @cached_property
    def workspace(self) -> int:
        """The parameters that every poll's address comes from; those of other GPUs' flags apart."""
        common = -1
        for at in self.acquires:
            if "SYS" in self.ins(at).parts:
                continue
            common &= self.origins.parameters(self.origins.address(at))
        return 0 if common == -1 else common

    @cached_property
    def written(self) -> int:
        """The parameters that the kernel stores to."""
        out, latest = self.workspace, self.latest_origins
        for at in self.all("STG", "ST", "RED", "REDG", "ATOM", "ATOMG"):
            out |= self.origins.of_offsets(latest.offsets(latest.address(at)))
        return out

    @cached_property
    def releases(self) -> list[int]:
        return [
            at
            for at in self.all("RED", "REDG")
            if _is_strong(self.ins(at)) and self.origins.address(at) & self.workspace
        ]

    @cached_property
    def waits(self) -> set[int]:
        """Block barriers that end a poll."""
        found = self.graph.reach(self.acquires, lambda at: _is_block_barrier(self.ins(at)))
        return {at for at in found if _is_stage_barrier(self.ins(at))}

    @cached_property
    def warp_waits(self) -> set[int]:
        """Warp barriers that end a poll for the warp that polls."""

        def ends(at: int) -> bool:
            return _is_block_barrier(self.ins(at)) or _is_warp_barrier(self.ins(at))

        found = self.graph.reach(self.acquires, ends)
        return {at for at in found if _is_warp_barrier(self.ins(at))}

    @cached_property
    def signal_barriers(self) -> set[int]:
        found = self.graph.reach_back(self.releases, lambda at: _is_block_barrier(self.ins(at)))
        return {at for at in found if _is_stage_barrier(self.ins(at))}

    @cached_property
    def arrivals(self) -> set[int]:
        """Arrivals on shared-memory barriers in code that joins no block barrier."""
        joins = [at for at in self.reached if _is_stage_barrier(self.ins(at))]
        consumers = self.graph.reach_back(joins, lambda at: False) | set(joins)
        before = self.graph.reach_back(
            [at for at in self.reached if _is_whole_block(self.ins(at))], lambda _: False
        )
        return {
            at for at in self.all("SYNCS") if "ARRIVE" in self.ins(at).parts and at not in consumers | before
        }

    # -- the state of hand-offs --

    def _run(self, at: int, state: int) -> int:
        ins = self.ins(at)
        if at in self._acquired:
            now = _POLLED
        elif at in self.waits or at in self.warp_waits:
            now = _OPEN
        elif at in self._closing or _is_whole_block(ins):
            now = _CLOSED
        else:
            return state
        return now | (state if ins.predicate else 0)

    @cached_property
    def _acquired(self) -> set[int]:
        return set(self.acquires)

    @cached_property
    def _closing(self) -> set[int]:
        return self.signal_barriers | set(self.releases) | self.arrivals

    @cached_property
    def states(self) -> dict[int, int]:
        """What the last hand-off event can be, before each load."""
        graph = self.graph
        entry = [0] * len(graph.blocks)
        entry[0] = _START
        todo = [0]
        while todo:
            i = todo.pop()
            state = entry[i]
            for at in graph.blocks[i]:
                state = self._run(at, state)
            for j in graph.after[i]:
                if entry[j] | state != entry[j]:
                    entry[j] |= state
                    todo.append(j)
        out = {}
        for block, state in zip(graph.blocks, entry, strict=True):
            for at in block:
                if _is_load(self.ins(at)):
                    out[at] = state
                state = self._run(at, state)
        return out

    def is_fixed(self, at: int) -> bool:
        """Whether a load reads what no step writes."""
        origin = self.origins.address(at)
        return bool(self.origins.parameters(origin)) and not origin & (self.written | UNKNOWN)

    # -- findings --

    def finding(self, rule: Rule, at: int, why: str) -> Finding:
        ins = self.ins(at)
        return Finding(rule, ins.address, str(ins), why)

    def non_coherent(self) -> Iterator[Finding]:
        for at in self.loads:
            if "CONSTANT" in self.ins(at).parts:
                yield self.finding(Rule.NON_COHERENT, at, "it may be moved above any wait")

    def unordered_loads(self) -> Iterator[Finding]:
        for at in self.loads:
            if _is_strong(self.ins(at)) or self.is_fixed(at):
                continue
            allowed = _OPEN
            parameters = self.origins.parameters(self.origins.address(at))
            if parameters and not parameters & self.workspace:
                allowed |= _START
            if wrong := self.states[at] & ~allowed:
                said = [text for state, text in _SAID.items() if wrong & state]
                yield self.finding(Rule.UNORDERED_LOAD, at, "it can run " + ", ".join(said))

    def unordered_copies(self) -> Iterator[Finding]:
        written = set(self.origins.offsets(self.written))
        for at in self.all("UBLKCP"):
            origin = self.latest_origins.address(at)
            if origin & UNKNOWN or written.intersection(self.latest_origins.offsets(origin)):
                yield self.finding(Rule.UNORDERED_COPY, at, "its source may be written in the step")

    def waits_out_of_form(self) -> Iterator[Finding]:
        for at in self.loads:
            polls = _is_strong(self.ins(at)) and self.origins.address(at) & self.workspace
            if polls and at not in self._acquired:
                yield self.finding(Rule.WAIT, at, "a poll of the workspace that acquires nothing")
        for at in sorted(self.waits & self.signal_barriers):
            yield self.finding(Rule.WAIT, at, "the barrier of a wait and of a signal at once")

    def signals_out_of_form(self) -> Iterator[Finding]:
        for at in self.releases:
            block = next(block for block in self.graph.blocks if at in block)
            before = [self.ins(i) for i in block if i < at]
            if not any(i.base == "MEMBAR" and "GPU" in i.parts for i in before):
                yield self.finding(Rule.SIGNAL, at, "no fence of GPU scope right before it")

    @cached_property
    def streaming_loops(self) -> list[list[int]]:
        loops: dict[tuple[int, ...], list[int]] = {}
        for work in (PRODUCTS, SHARED, COPIES):

            def kind(ins: Instruction, work: tuple[str, ...] = work) -> str | None:
                if ins.base in work:
                    return "work"
                return "wait" if "TRYWAIT" in ins.parts else None

            for loop in self.graph.loops(kind):
                # The producer's shared loads are lengths and ids, once for many copies.
                if work != SHARED or not self._any(loop, COPIES):
                    loops[tuple(sorted(loop))] = loop
        return list(loops.values())

    def _any(self, loop: list[int], bases: tuple[str, ...]) -> bool:
        return any(self.ins(at).base in bases for i in loop for at in self.graph.blocks[i])

    def spills(self) -> Iterator[Finding]:
        for loop in self.streaming_loops:
            for at in sorted(at for i in loop for at in self.graph.blocks[i]):
                if self.ins(at).base in ("LDL", "STL"):
                    yield self.finding(Rule.SPILL, at, "a register is spilled where weights stream")

    def unreached(self) -> Iterator[Finding]:
        for ins in self.graph.unreached:
            if ins.base in ("LDG", "LD", "STG", "ST", "REDG", "ATOMG", "BAR", "UBLKCP", "LDL", "STL"):
                yield Finding(Rule.UNREACHED, ins.address, str(ins), "it is in no path that was followed")

    def findings(self) -> tuple[Finding, ...]:
        return (
            *self.non_coherent(),
            *self.unordered_loads(),
            *self.unordered_copies(),
            *self.waits_out_of_form(),
            *self.signals_out_of_form(),
            *self.spills(),
            *self.unreached(),
        )


def audit(module: bytes) -> Report:
    """Check the one kernel of a compiled module.

    Args:
        module: anything that holds its GPU code verbatim: a cubin, an artifact, a serialized export.

    Raises:
        ValueError: there is not exactly one kernel in it.
        NotImplementedError: no disassembler, or code in a form that the analysis does not follow.
    """
    functions = [function for image in cubin.images(module) for function in disassemble(image)]
    if len(functions) != 1:
        raise ValueError(f"module: expected one kernel, got {len(functions)}")
    kernel, used = _Kernel(functions[0]), cubin.usage(module)
    weak = [at for at in kernel.loads if not _is_strong(kernel.ins(at))]
    fixed = sum(kernel.is_fixed(at) for at in weak)
    return Report(
        kernel=functions[0].name,
        registers=used.registers,
        local_bytes=used.local_bytes,
        code_bytes=used.code_bytes,
        polls=len(kernel.acquires),
        waits=len(kernel.waits),
        signals=len(kernel.releases),
        step_loads=len(weak) - fixed,
        fixed_loads=fixed,
        bulk_copies=len(kernel.all("UBLKCP")),
        streaming_loops=len(kernel.streaming_loops),
        spills=len(kernel.all("LDL", "STL")),
        findings=kernel.findings(),
    )


__all__ = ["audit"]
