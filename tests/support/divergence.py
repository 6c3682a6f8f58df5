"""Reading kernel sources for exchanges that not all lanes of a warp, or not all warps, reach.

A shuffle, a sum over a warp, a matrix instruction, or a word of a record (which is a shuffle) under a
branch or in a loop that depends on the lane or the thread hangs or is undefined; so does a barrier of
the block under one that depends on the warp as well. :func:`findings` follows ``t.lane``, ``t.tid``,
``t.warp`` through assignments, loops and the arguments of functions, and names every such place.

It errs on the strict side: a value computed from ``t.tid`` counts as different in every lane.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

UNIFORM, WARP, LANE = 0, 1, 2
"""A value is the same in the block; in a warp; or may differ from lane to lane."""

_LEVEL_OF = {"lane": LANE, "tid": LANE, "warp": WARP}
_OF_WARP = {
    "from_lane", "from_other", "warp_sum", "warp_max", "shuffle_sync", "shuffle_sync_bfly", "warp_redux_sync",
    "sync_warp", "mma_tokens", "mma_bf16", "mma_f16",
}  # fmt: skip
"""Exchanges that all lanes of a warp must reach."""
_OF_BLOCK = {"sync", "barrier"}
"""Barriers that all consumer warps must reach; ``t.sync()`` and ``cute.arch.barrier(...)``."""
_SAME_IN_WARP = {"warp_sum", "warp_max", "warp_redux_sync", "make_warp_uniform"}
"""Calls whose result is the same in all lanes, whatever goes in."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """An exchange where not everyone who must take part is sure to come by."""

    function: str
    line: int
    what: str
    under: str

    def __str__(self) -> str:
        return f"{self.function}, line {self.line}: {self.what} under {self.under}"


@dataclasses.dataclass
class _Function:
    node: ast.FunctionDef
    params: list[str]
    levels: dict[str, int] = dataclasses.field(default_factory=dict)
    """What is known of its parameters, from the calls seen."""
    exchanges: int = UNIFORM
    """WARP or LANE if it holds an exchange: LANE-dependent branches forbid it, and from LANE on WARP too."""


def _name(call: ast.Call) -> str:
    f = call.func
    return f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""


def _functions(sources: Mapping[str, str]) -> dict[str, list[_Function]]:
    found: dict[str, list[_Function]] = {}
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                params = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found.setdefault(node.name, []).append(_Function(node, params))
    return found


def _is_record_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "record"


def _static(test: ast.AST) -> bool:
    """A test or a range that the compiler decides."""
    return isinstance(test, ast.Call) and _name(test) in ("const_expr", "range_constexpr", "range", "enumerate", "zip")


class _Reader:
    """One pass over a function: levels of its names, calls it makes, exchanges under what."""

    def __init__(self, functions: Mapping[str, list[_Function]], function: _Function):
        self.functions, self.function = functions, function
        self.names = dict(function.levels)
        self.findings: list[Finding] = []
        self.changed = False

    def level(self, node: ast.AST | None) -> int:
        """How a value may differ."""
        if node is None or isinstance(node, (ast.Constant, ast.Lambda)):
            return UNIFORM
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "t":
            return _LEVEL_OF.get(node.attr, UNIFORM)
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNIFORM)
        if _is_record_word(node):
            return UNIFORM
        if isinstance(node, ast.Call) and _name(node) in _SAME_IN_WARP:
            return min(self._of_children(node), WARP)
        if isinstance(node, ast.Call) and _name(node) == "from_lane":
            # The value of one lane: as different as the lane's number.
            return max(min(self.level(node.args[0]), WARP), self.level(node.args[1]))
        if isinstance(node, ast.Call) and _name(node) == "lane_idx":
            return LANE
        return self._of_children(node)

    def _of_children(self, node: ast.AST) -> int:
        return max((self.level(child) for child in ast.iter_child_nodes(node)), default=UNIFORM)

    def run(self) -> None:
        for _ in range(2):  # a name may be set behind its first use in a loop
            self.findings.clear()
            self.block(self.function.node.body, UNIFORM, "")

    def block(self, body: list[ast.stmt], depth: int, under: str) -> None:
        for statement in body:
            self.statement(statement, depth, under)

    def statement(self, s: ast.stmt, depth: int, under: str) -> None:
        if isinstance(s, (ast.FunctionDef, ast.ClassDef)):
            return
        if isinstance(s, (ast.If, ast.While)):
            self.expression(s.test, depth, under)
            inner, why = self._inside(s.test, depth, under)
            self.block(s.body, inner, why)
            self.block(s.orelse, inner, why)
        elif isinstance(s, ast.For):
            self.expression(s.iter, depth, under)
            plain = isinstance(s.iter, ast.Call) and not isinstance(s.iter.func, ast.Name)
            arguments = s.iter if plain and _name(s.iter) == "range" else None
            inner, why = self._inside(arguments, depth, under) if arguments is not None else (depth, under)
            self.assign(s.target, max(self.level(s.iter), inner))
            self.block(s.body, inner, why)
        else:
            for node in ast.iter_child_nodes(s):
                self.expression(node, depth, under)
            if isinstance(s, ast.Assign):
                for target in s.targets:
                    self.assign(target, max(self.level(s.value), depth))
            elif isinstance(s, ast.AugAssign):
                self.assign(s.target, max(self.level(s.value), self.level(s.target), depth))
            elif isinstance(s, ast.With):
                self.block(s.body, depth, under)

    def _inside(self, test: ast.AST, depth: int, under: str) -> tuple[int, str]:
        if _static(test) and _name(test) == "const_expr":  # type: ignore[arg-type]
            return depth, under
        level = self.level(test)
        return (level, f"`{ast.unparse(test)}`") if level > depth else (depth, under)

    def assign(self, target: ast.AST, level: int) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and not isinstance(target, ast.Attribute):
                self.names[node.id] = max(self.names.get(node.id, UNIFORM), level)

    def expression(self, node: ast.AST, depth: int, under: str) -> None:
        for child in ast.walk(node):
            if _is_record_word(child) and depth == LANE:
                self.find(child, f"`{ast.unparse(child)}`, an exchange of the warp,", under)
            if isinstance(child, ast.Call):
                self.call(child, depth, under)

    def call(self, call: ast.Call, depth: int, under: str) -> None:
        name = _name(call)
        if name in _OF_WARP:
            self.function.exchanges = max(self.function.exchanges, WARP)
            if depth == LANE:
                self.find(call, f"`{name}`", under)
        if name in _OF_BLOCK and isinstance(call.func, ast.Attribute):
            self.function.exchanges = LANE
            if depth >= WARP:
                self.find(call, f"the barrier `{ast.unparse(call.func)}`", under)
            return
        plain = isinstance(call.func, ast.Name)
        for other in self.functions.get(name, ()) if plain else ():
            self._into(other, call)
            self.function.exchanges = max(self.function.exchanges, other.exchanges)
            if depth == LANE and other.exchanges >= WARP:
                self.find(call, f"`{name}`, which holds an exchange,", under)
            elif depth == WARP and other.exchanges == LANE:
                self.find(call, f"`{name}`, which holds a barrier of the block,", under)

    def _into(self, other: _Function, call: ast.Call) -> None:
        """Levels of the arguments to the parameters of the function called."""
        pairs = [*zip(other.params, call.args, strict=False)]
        pairs += [(k.arg, k.value) for k in call.keywords if k.arg in other.params]
        for param, value in pairs:
            level = self.level(value)
            if param and param not in ("t", "record") and level > other.levels.get(param, UNIFORM):
                other.levels[param] = level
                self.changed = True

    def find(self, node: ast.AST, what: str, under: str) -> None:
        self.findings.append(Finding(self.function.node.name, getattr(node, "lineno", 0), what, under))


def findings(sources: Mapping[str, str]) -> list[Finding]:
    """Every exchange that not all who must take part are sure to reach.

    Args:
        sources: texts of the kernel's modules by name; functions are told apart by name alone.
    """
    functions = _functions(sources)
    every = [f for same in functions.values() for f in same if f.node.name not in _OF_WARP]
    while True:
        readers = [_Reader(functions, f) for f in every]
        before = [f.exchanges for f in every]
        for reader in readers:
            reader.run()
        if not any(reader.changed for reader in readers) and before == [f.exchanges for f in every]:
            return sorted({f for reader in readers for f in reader.findings}, key=str)


def kernel_sources(folder: Path) -> dict[str, str]:
    """The kernel's modules that hold code of the device."""
    return dict(_read(folder))


def _read(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        if not name.startswith("constraints") and name not in ("geometry.py", "tables.py", "ptx.py", "call.py"):
            yield name, path.read_text()


__all__ = ["Finding", "findings", "kernel_sources"]
