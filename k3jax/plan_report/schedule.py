"""What a compiled step exchanges, read from its optimised and scheduled HLO text.

A collective that XLA starts and ends apart (``…-start``, ``…-done``) runs beside the kernels that the
schedule has between the two; any other is waited for where it stands.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
_KERNELS = (
    "fusion",
    "custom-call",
    "dot",
    "convolution",
    "while",
    "conditional",
    "sort",
    "scatter",
    "gather",
)
_VIEWS = ("bitcast", "get-tuple-element", "copy", "tuple", "reshape", "transpose")

_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_LAYER = re.compile(r"/layer(\d+)_")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, as one device sees it.

    Attributes:
        kind: one of :data:`KINDS`.
        group: the devices that take part, those of the first group.
        payload: bytes of the whole: the sum's array, the gathered or the unscattered one.
        layer: of the model; None outside the layers.
        asynchronous: whether it starts and ends apart.
        kernels: kernels that the schedule has between the two.
        beside: weights that they read, without their layer, each once.
        loop: whether it stands in a loop, and counts once per round.
        fused: whether XLA runs it in a kernel of its own, not by NCCL.
    """

    kind: str
    group: tuple[int, ...]
    payload: int
    layer: int | None
    asynchronous: bool
    kernels: int
    beside: tuple[str, ...]
    loop: bool
    fused: bool = False

    @property
    def wire(self) -> float:
        """Bytes that a device sends, as a ring does it: 2 (n - 1) / n of a sum, (n - 1) / n of others."""
        n = len(self.group)
        if self.kind == "collective-permute":
            return float(self.payload)
        return (2 if self.kind == "all-reduce" else 1) * self.payload * (n - 1) / n


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel or a collective in the order of the schedule.

    Attributes:
        start, end: positions; a kernel's are equal.
        what: "kernel" or a collective's kind.
        detail: the weights that a kernel reads.
    """

    start: int
    end: int
    what: str
    detail: str


@dataclasses.dataclass(frozen=True)
class _Line:
    name: str
    shape: str
    op: str
    rest: str

    @property
    def scope(self) -> str:
        found = re.search(r'op_name="(.*?[^\\])"', self.rest)
        return found[1].replace("\\", "") if found else ""

    @property
    def layer(self) -> int | None:
        found = _LAYER.search(self.scope)
        return int(found[1]) if found else None

    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,(){}]+)", self.rest.split("metadata=")[0])


def array_bytes(shape: str) -> int:
    """Bytes of the arrays in a shape as HLO writes it, tuples included."""
    total = 0.0
    for dtype, dims in _ARRAY.findall(shape):
        count = math.prod(int(n) for n in dims.split(",") if n)
        bits = re.search(r"\d+", dtype)
        total += count * (8 if bits is None else int(bits[0])) / 8
    return int(total)


def first_group(text: str) -> tuple[int, ...]:
    """The first of an instruction's ``replica_groups``, in any of the three forms that XLA prints.

    Raises:
        ValueError: another form.
    """
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        over = re.findall(r"'(\w+)'", found[2])
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return tuple(ids[tuple(slice(None) if name in over else 0 for name in sizes)].ravel().tolist())
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(n) for n in found[3].split(",")]
        ids = np.arange(math.prod(shape)).reshape(shape)
        if found[4]:
            ids = ids.transpose([int(n) for n in found[4].split(",")])
        return tuple(ids.reshape(int(found[1]), int(found[2]))[0].tolist())
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", text):
        return tuple(int(n) for n in found[1].split(",") if n)
    raise ValueError(f"replica groups: expected a form that XLA prints, got {text[:200]!r}")


def _computations(text: str) -> tuple[str, dict[str, list[_Line]]]:
    """The entry's name and every computation's instructions in order."""
    entry, found = "", {}
    lines: list[_Line] = []
    for row in text.splitlines():
        if header := _HEADER.match(row):
            lines = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif match := _LINE.match(row):
            lines.append(_Line(*match.groups()))
    if not entry:
        raise ValueError("hlo: expected the text of a compiled module, found no ENTRY")
    return entry, found


def _kind(op: str) -> tuple[str, bool]:
    """The collective that an opcode is, or "", and whether it is a start."""
    base = op.removesuffix("-start")
    return (base, base != op) if base in KINDS else ("", False)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    kind: str
    starts: bool
    group: tuple[int, ...]
    fused: bool


def _exchange(line: _Line, bodies: Mapping[str, list[_Line]]) -> _Exchange | None:
    """The collective that an instruction is, or that XLA made into a kernel of its own."""
    kind, starts = _kind(line.op)
    if kind:
        return _Exchange(kind, starts, first_group(line.rest), False)
    if line.op.removesuffix("-start") not in ("fusion", "async"):
        return None
    for name in re.findall(r"calls=%([^\s,]+)", line.rest):
        for inner in bodies.get(name, ()):
            if kind := _kind(inner.op)[0]:
                starts = line.op.endswith("-start")
                return _Exchange(kind, starts, first_group(inner.rest), line.op.startswith("fusion"))
    return None


class _Weights:
    """Names of the parameters behind the operands of a computation's instructions."""

    def __init__(self, lines: Sequence[_Line]):
        self.lines = {line.name: line for line in lines}

    def _behind(self, name: str) -> str:
        line = self.lines.get(name)
        if line is None:
            return ""
        if line.op == "parameter":
            keys = re.findall(r"\['?(\w+)'?\]", line.scope)
            return ".".join(key for key in keys if not key.isdigit() and key != "layers")
        if line.op in _VIEWS and (operands := line.operands()):
            return self._behind(operands[0]) if line.op != "tuple" else ""
        return ""

    def read_by(self, line: _Line) -> list[str]:
        names = line.operands()
        for name in list(names):  # a loop's operands come in one tuple
            if name in self.lines and self.lines[name].op == "tuple":
                names += self.lines[name].operands()
        return sorted({weight for name in names if (weight := self._behind(name))})


def _walk(name: str, bodies: Mapping[str, list[_Line]], loop: bool) -> Iterator[Collective]:
    lines = bodies[name]
    weights, done = _Weights(lines), _ends(lines)
    for i, line in enumerate(lines):
        if line.op in ("while", "conditional", "call"):
            for inner in line.operands():
                if inner in bodies:
                    yield from _walk(inner, bodies, loop or line.op == "while")
            continue
        found = _exchange(line, bodies)
        if found is None:
            continue
        end = done[line.name] if found.starts else i
        between = [x for x in lines[i + 1 : end] if x.op in _KERNELS and _exchange(x, bodies) is None]
        payload = array_bytes(lines[end].shape) * (len(found.group) if found.kind == "reduce-scatter" else 1)
        beside = sorted({weight for x in between for weight in weights.read_by(x)})
        yield Collective(
            found.kind, found.group, payload, line.layer, found.starts, len(between), tuple(beside), loop,
            found.fused,
        )  # fmt: skip


def _ends(lines: Sequence[_Line]) -> dict[str, int]:
    """Where each start among ``lines`` ends."""
    return {name: i for i, line in enumerate(lines) if line.op.endswith("-done") for name in line.operands()}


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled module in the order of its schedule.

    Args:
        text: ``compiled.as_text()``.

    Raises:
        ValueError: no such text, or a collective in a computation that the entry does not reach.
    """
    entry, lines = _computations(text)
    found = list(_walk(entry, lines, False))
    there = sum(bool(_kind(line.op)[0]) for body in lines.values() for line in body)
    if there != len(found):
        raise ValueError(f"hlo: {there} collectives, of which {len(found)} are reached from the entry")
    return found


def layer_events(text: str, layer: int) -> list[Event]:
    """Kernels and collectives of one layer of the model, in the order of the schedule."""
    entry, bodies = _computations(text)
    lines = bodies[entry]
    weights, done = _Weights(lines), _ends(lines)
    exchanges = {i: found for i, line in enumerate(lines) if (found := _exchange(line, bodies))}
    named = [
        i for i, line in enumerate(lines) if line.layer == layer and (i in exchanges or line.op in _KERNELS)
    ]
    mine = [i for i in named if i in exchanges]
    if not mine:
        raise ValueError(f"layer: expected one whose collectives the module names, got {layer}")
    ends = {i: done[lines[i].name] if found.starts else i for i, found in exchanges.items()}
    # Kernels fused across layers keep one layer's name: a layer ends with its last exchange.
    span = range(named[0], ends[mine[-1]] + 1)
    shown = [i for i in span if i in exchanges or i in ends.values() or lines[i].op in _KERNELS]
    place = {i: n for n, i in enumerate(shown)}
    events = []
    for i in shown:
        if i in exchanges:
            events.append(Event(place[i], place.get(ends[i], len(shown)), exchanges[i].kind, ""))
        elif lines[i].op in _KERNELS:
            events.append(Event(place[i], place[i], "kernel", ", ".join(weights.read_by(lines[i]))))
    return events


__all__ = ["KINDS", "Collective", "Event", "array_bytes", "collectives", "first_group", "layer_events"]
