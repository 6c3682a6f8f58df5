"""Where addresses come from: which kernel parameters flow into the registers at each instruction.

A forward dataflow over registers, uniform registers and stack slots. The origin of a value is a set, kept
as the bits of an integer: a bit per kernel parameter (8 bytes of constant bank 0), and bits for values
read from shared memory, from global memory, or in a way that is not understood. Results take the union of
their sources; an instruction under a predicate, or one that is not known, adds to what was there and
erases nothing. So an origin may name too many parameters, never too few.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cached_property

from .graph import Graph
from .sass import Instruction

SHARED, MEMORY, UNKNOWN = 1, 2, 4
_FIRST_PARAMETER = 3
_STACK = "R1"

_REGISTER = re.compile(r"(?<![A-Za-z0-9_])(U?R)(\d+)")
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_COMPUTED_CONSTANT = re.compile(r"c\[[^\]]*\]\[[^\]]*R\d|c\[U?R|cx\[")
_DESCRIPTOR = re.compile(r"desc\[[^\]]*\]")
_SLOT = re.compile(r"^\[R1(\+-?0x[0-9a-f]+)?\]$")

_STORES = {"STG", "ST", "RED", "REDG", "ATOM", "ATOMG", "STL", "STS", "STAS", "UBLKCP", "UBLKRED"}
_NO_RESULT = _STORES - {"ATOM", "ATOMG"} | {
    "ACQBULK", "BAR", "BPT", "BRA", "BREAK", "BRX", "BRXU", "BSSY", "BSYNC", "CALL", "CCTL", "CCTLL",
    "CGAERRBAR", "DEPBAR", "DSETP", "ELECT", "ENDCOLLECTIVE", "ERRBAR", "EXIT", "FCHK", "FENCE",
    "FSETP", "HSETP2", "ISETP", "KILL", "LDGDEPBAR", "MEMBAR", "NANOSLEEP", "NOP", "PLOP3", "PREEXIT",
    "R2P", "RET", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT", "UFSETP", "UISETP", "UPLOP3", "UTMALDG",
    "WARPSYNC", "YIELD",
}  # fmt: skip
"""Instructions that write no register that counts."""
_RESULT = {
    "BREV", "CREDUX", "CS2R", "F2F", "F2FP", "F2I", "FADD", "FADD2", "FFMA", "FFMA2", "FLO", "FMNMX",
    "FMNMX3", "FMUL", "FMUL2", "FSEL", "HADD2", "HFMA2", "HMMA", "HMUL2", "I2F", "I2FP", "IABS", "IADD",
    "IADD3", "IMAD", "IMNMX", "ISCADD", "LDC", "LDCU", "LDG", "LDL", "LDS", "LDSM", "LEA", "LOP3",
    "MOV", "MUFU", "P2R", "POPC", "PRMT", "R2UR", "REDUX", "S2R", "S2UR", "SEL", "SGXT", "SHF", "SHFL",
    "UFLO", "UIADD3", "UIMAD", "ULDC", "ULEA", "ULOP3", "UMOV", "UPOPC", "UPRMT", "USEL", "USHF",
    "UVIADD", "UVIMNMX", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "VOTE", "VOTEU",
}  # fmt: skip
"""Instructions that are known to write the first register named."""


def _width(ins: Instruction) -> int:
    """Registers that the result takes."""
    parts = ins.parts
    if ins.base == "HMMA" or "128" in parts:
        return 4
    if "256" in parts:
        return 8
    wide = "64" in parts or "WIDE" in parts or (ins.base == "CS2R" and "32" not in parts)
    return 2 if wide else 1


def memory_operand(ins: Instruction, which: int = 0) -> str:
    """The ``which``-th operand in brackets, without its memory descriptor."""
    found = [_DESCRIPTOR.sub("", text) for text in ins.operands if "[" in text and not text.startswith("c[")]
    found = [text for text in found if text]
    return found[which] if which < len(found) else ""


def _registers(text: str) -> Iterator[tuple[str, int]]:
    for kind, number in _REGISTER.findall(_DESCRIPTOR.sub("", text)):
        yield kind, int(number)


@dataclasses.dataclass(frozen=True)
class _Step:
    """An instruction, as far as origins go: results take the union of sources and ``fixed``."""

    results: tuple[int, ...]
    sources: tuple[int, ...]
    fixed: int
    erases: bool


class Origins:
    """Origins of the addresses of a graph's instructions.

    Args:
        latest: let a write under a predicate erase what earlier blocks left in its register. Right where
            the value is used under the same condition, as the operands of a bulk copy by an elected lane
            are; elsewhere an origin may then name too few parameters.
    """

    def __init__(self, graph: Graph, latest: bool = False):
        self.graph = graph
        self._latest = latest
        self._place: dict[str, int] = {}
        self._parameters: dict[int, int] = {}
        self._steps = {at: self._step(graph.instructions[at]) for block in graph.blocks for at in block}

    # -- names to numbers --

    def _number(self, name: str) -> int:
        return self._place.setdefault(name, len(self._place))

    def _parameter(self, offset: int) -> int:
        number = self._parameters.setdefault(offset & ~7, len(self._parameters))
        return 1 << (_FIRST_PARAMETER + number)

    def parameters(self, origin: int) -> int:
        """An origin without what is no parameter."""
        return origin & ~(SHARED | MEMORY | UNKNOWN)

    def offsets(self, origin: int) -> list[int]:
        """Constant bank offsets of the parameters in an origin."""
        return [
            offset for offset, number in self._parameters.items() if origin >> (_FIRST_PARAMETER + number) & 1
        ]

    def of_offsets(self, offsets: list[int]) -> int:
        """The origin of parameters at constant bank offsets."""
        out = 0
        for offset in offsets:
            out |= self._parameter(offset)
        return out

    # -- one instruction --

    def _step(self, ins: Instruction) -> list[_Step]:
        if ins.base == "STL":
            return self._stack_store(ins)
        if ins.base in _NO_RESULT:
            return []
        at = next((i for i, text in enumerate(ins.operands) if _REGISTER.match(text)), None)
        if at is None:
            return []
        kind, first = next(_registers(ins.operands[at]))
        results = tuple(self._number(f"{kind}{first + i}") for i in range(_width(ins)))
        erases = not ins.predicate and ins.base in _RESULT
        if ins.base == "LDL":
            slots = self._slots(ins, len(results))
            return [_Step((to,), (slot,), 0, erases) for to, slot in zip(results, slots, strict=True)]
        operands = ins.operands[at + 1 :]
        if ins.base in ("LDC", "ULDC", "LDCU") and (match := _CONSTANT.fullmatch(operands[0])):
            offset = int(match[1], 16)
            return [_Step((to,), (), self._parameter(offset + 4 * i), erases) for i, to in enumerate(results)]
        fixed = {"LDG": MEMORY, "LD": MEMORY, "LDS": SHARED, "LDSM": SHARED}.get(ins.base)
        if fixed is not None:
            return [_Step(results, (), fixed, erases)]
        sources, fixed = self._sources(ins, operands)
        return [_Step(results, sources, fixed, erases)]

    def _sources(self, ins: Instruction, operands: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
        out, fixed = [], 0
        for i, text in enumerate(operands):
            wide = "64" in ins.parts or ".64" in text or ("WIDE" in ins.parts and i == len(operands) - 1)
            for kind, number in _registers(text):
                out += [self._number(f"{kind}{number + k}") for k in range(1 + wide)]
            for offset in _CONSTANT.findall(text):
                fixed |= self._parameter(int(offset, 16))
            if _COMPUTED_CONSTANT.search(text):
                fixed |= UNKNOWN
        return tuple(out), fixed

    def _slots(self, ins: Instruction, count: int) -> list[int]:
        match = _SLOT.match(memory_operand(ins))
        if match is None:
            raise NotImplementedError(f"{ins} at {ins.address:#x}: local memory at a computed address")
        offset = int((match[1] or "+0x0")[1:], 16)
        return [self._number(f"[{offset + 4 * i:#x}]") for i in range(count)]

    def _stack_store(self, ins: Instruction) -> list[_Step]:
        slots, value = self._slots(ins, _width(ins)), next(_registers(ins.operands[-1]), None)
        if value is None:
            return [_Step(tuple(slots), (), 0, not ins.predicate)]
        kind, first = value
        sources = [self._number(f"{kind}{first + i}") for i in range(len(slots))]
        return [
            _Step((slot,), (source,), 0, not ins.predicate)
            for slot, source in zip(slots, sources, strict=True)
        ]

    # -- the whole graph --

    @cached_property
    def _entry_states(self) -> list[list[int] | None]:
        """Origins of everything at the start of each block."""
        graph = self.graph
        states: list[list[int] | None] = [None] * len(graph.blocks)
        states[0] = [0] * len(self._place)
        todo = {0}
        while todo:
            i = min(todo)
            todo.discard(i)
            entry = states[i]
            assert entry is not None
            state, written = list(entry), set[int]()
            for at in graph.blocks[i]:
                self._run(at, state, written)
            for j in graph.after[i]:
                old = states[j]
                new = state if old is None else [a | b for a, b in zip(old, state, strict=True)]
                if new != old:
                    states[j] = list(new)
                    todo.add(j)
        return states

    def _run(self, at: int, state: list[int], written: set[int]) -> None:
        for step in self._steps[at]:
            value = step.fixed
            for n in step.sources:
                value |= state[n]
            for n in step.results:
                erases = step.erases or (self._latest and n not in written)
                state[n] = value if erases else state[n] | value
                written.add(n)

    @cached_property
    def _addresses(self) -> dict[int, int]:
        graph, out = self.graph, {}
        for block, entry in zip(graph.blocks, self._entry_states, strict=True):
            state, written = list(entry or [0] * len(self._place)), set[int]()
            for at in block:
                ins = graph.instructions[at]
                if ins.base in _STORES | {"LDG", "LD"}:
                    out[at] = self._address(ins, state)
                self._run(at, state, written)
        return out

    def _address(self, ins: Instruction, state: list[int]) -> int:
        text = memory_operand(ins, 1 if ins.base == "UBLKCP" else 0)
        wide = ".64" in text or ins.base == "UBLKCP"
        out = 0
        for kind, number in _registers(text):
            for k in range(1 + wide):
                place = self._place.get(f"{kind}{number + k}")
                out |= UNKNOWN if place is None else state[place]
        for offset in _CONSTANT.findall(text):
            out |= self._parameter(int(offset, 16))
        return out

    def address(self, at: int) -> int:
        """Origin of the address of a global access, or of the source of a bulk copy."""
        return self._addresses[at]


__all__ = ["MEMORY", "SHARED", "UNKNOWN", "Origins", "memory_operand"]
