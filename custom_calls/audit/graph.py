"""Control flow of a kernel: basic blocks, their order, loops.

Calls are taken to return to the next instruction, and what they run is not part of the graph: it is what
:attr:`Graph.unreached` holds (the compiler's division routines, say).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from .sass import INSTRUCTION_BYTES, Function, Instruction

_TABLE_JUMPS = ("BRX", "BRXU")
_UNKNOWN_JUMPS = ("JMX", "JMXU", "JMP")


def target(ins: Instruction) -> int | None:
    """Index of the instruction that a branch goes to; also of the end of a collective or a convergence."""
    if ins.base not in ("BRA", "BSSY", "WARPSYNC") or not ins.operands:
        return None
    last = ins.operands[-1]
    return int(last, 16) // INSTRUCTION_BYTES if last.startswith("0x") else None


def _falls_through(ins: Instruction) -> bool:
    if ins.base == "EXIT":
        return bool(ins.predicate)
    if ins.base == "BRA":  # BRA.DIV and BRA.U.ANY and the form with a second predicate are conditional
        return bool(ins.predicate) or len(ins.operands) > 1 or len(ins.parts) > 1
    if ins.base in _TABLE_JUMPS:
        return bool(ins.predicate)
    return ins.base not in ("RET", "KILL", "BPT")


@dataclasses.dataclass(frozen=True)
class Graph:
    """Control flow between instructions, which are numbered from 0."""

    function: Function

    @classmethod
    def of(cls, function: Function) -> Graph:
        """The graph of a kernel.

        Raises:
            NotImplementedError: a jump whose targets the image does not tell.
        """
        for ins in function.instructions:
            unlisted = ins.base in _TABLE_JUMPS and ins.address not in function.jumps
            if unlisted or ins.base in _UNKNOWN_JUMPS:
                raise NotImplementedError(
                    f"{function.name}: {ins} at {ins.address:#x}: a jump to unknown places"
                )
        return cls(function)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return self.function.instructions

    @cached_property
    def _convergence(self) -> dict[str, set[int]]:
        """Where the threads that meet at BSYNC of a register may go on."""
        ends: dict[str, set[int]] = {}
        for ins in self.instructions:
            if ins.base == "BSSY" and (to := target(ins)) is not None:
                ends.setdefault(ins.operands[0], set()).add(to)
        return ends

    def _ends_collective(self, at: int, to: int) -> bool:
        """Whether what WARPSYNC gathers the warp for runs straight on to where it then continues."""
        between = self.instructions[at + 1 : to]
        return bool(between) and between[-1].base == "ENDCOLLECTIVE"

    def following(self, at: int) -> list[int]:
        """Instructions that may run after one."""
        ins = self.instructions[at]
        out = [at + 1] if _falls_through(ins) and at + 1 < len(self.instructions) else []
        out += [to // INSTRUCTION_BYTES for to in self.function.jumps.get(ins.address, ())]
        if ins.base == "BRA" and (to := target(ins)) is not None:
            out.append(to)
        if ins.base == "WARPSYNC" and (to := target(ins)) is not None and not self._ends_collective(at, to):
            out.append(to)
        if ins.base == "BSYNC":
            ends = self._convergence.get(ins.operands[0], set())
            # Nearly always the next instruction; otherwise it may be any.
            out = [at + 1] if at + 1 in ends else sorted(ends)
        return out

    @cached_property
    def starts(self) -> list[int]:
        """First instruction of each block that is reached from the kernel's entry."""
        leaders, seen, todo = {0}, {0}, [0]
        while todo:
            at = todo.pop()
            after = self.following(at)
            if after != [at + 1]:
                leaders.update(after)
            for n in after:
                if n not in seen:
                    seen.add(n)
                    todo.append(n)
        return sorted(leaders)

    @cached_property
    def blocks(self) -> list[range]:
        """Instructions of each block."""
        first = set(self.starts)
        out = []
        for start in self.starts:
            end = start + 1
            while end not in first and self.following(end - 1) == [end]:
                end += 1
            out.append(range(start, end))
        return out

    @cached_property
    def block_of(self) -> dict[int, int]:
        """Number of the block that begins with an instruction."""
        return {block.start: i for i, block in enumerate(self.blocks)}

    @cached_property
    def after(self) -> list[list[int]]:
        """Blocks that may run after each block."""
        return [[self.block_of[n] for n in self.following(block[-1])] for block in self.blocks]

    @cached_property
    def before(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.blocks]
        for i, later in enumerate(self.after):
            for j in later:
                out[j].append(i)
        return out

    @cached_property
    def unreached(self) -> list[Instruction]:
        """Instructions that no path from the entry reaches without a call."""
        reached = {at for block in self.blocks for at in block}
        return [ins for at, ins in enumerate(self.instructions) if at not in reached]

    # -- search --

    def reach(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """Instructions that some path from behind a start meets; a path ends with the first ``stop``."""
        return self._search([n for at in starts for n in self.following(at)], self.following, stop)

    def reach_back(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """The same against the direction of time."""
        return self._search([n for at in starts for n in self._preceding(at)], self._preceding, stop)

    def _preceding(self, at: int) -> list[int]:
        if at not in self.block_of:
            return [at - 1]
        return [self.blocks[i][-1] for i in self.before[self.block_of[at]]]

    @staticmethod
    def _search(todo: list[int], step: Callable[[int], list[int]], stop: Callable[[int], bool]) -> set[int]:
        seen = set(todo)
        while todo:
            at = todo.pop()
            if stop(at):
                continue
            for n in step(at):
                if n not in seen:
                    seen.add(n)
                    todo.append(n)
        return seen

    # -- loops --

    def loops(self, wanted: Callable[[Instruction], str | None]) -> list[list[int]]:
        """Blocks of the innermost loops that hold every kind of instruction wanted.

        A loop is a strongly connected set of blocks; those inside it are the ones that are left when the
        blocks through which it is entered are taken away.

        Args:
            wanted: names the kind of an instruction, or None; there are two kinds or more.
        """
        kinds = [{kind for at in block if (kind := wanted(self.instructions[at]))} for block in self.blocks]
        every = set().union(*kinds)
        return list(self._innermost(range(len(self.blocks)), kinds, every))

    def _innermost(self, nodes: Sequence[int], kinds: list[set[str]], every: set[str]) -> Iterator[list[int]]:
        for part in components(nodes, self.after):
            if set().union(*(kinds[i] for i in part)) != every or not every:
                continue
            inside = set(part)
            # Block 0 is entered from outside the kernel.
            entries = {i for i in part if i == 0 or any(j not in inside for j in self.before[i])}
            inner = list(self._innermost([i for i in part if i not in entries], kinds, every))
            yield from inner or [part]


def components(nodes: Sequence[int], after: list[list[int]]) -> list[list[int]]:
    """Strongly connected sets with a cycle, of a part of a graph."""
    inside = set(nodes)
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    out: list[list[int]] = []
    for root in nodes:
        if root in number:
            continue
        path = [(root, iter(after[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        held.add(root)
        while path:
            node, rest = path[-1]
            for n in rest:
                if n not in inside:
                    continue
                if n not in number:
                    number[n] = low[n] = len(number)
                    stack.append(n)
                    held.add(n)
                    path.append((n, iter(after[n])))
                    break
                if n in held:
                    low[node] = min(low[node], number[n])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    at = stack.index(node)
                    part = stack[at:]
                    del stack[at:]
                    held.difference_update(part)
                    if len(part) > 1 or node in after[node]:
                        out.append(part)
    return out


__all__ = ["Graph", "components", "target"]
