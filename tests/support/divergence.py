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


@dataclasses.dataclass(eq=False)
class _Function:
    """A function, what the calls seen say of its parameters, and the exchanges it holds.

    Attributes:
        levels: of parameters; ``given``: functions that were passed as one.
        exchanges: UNIFORM for none; WARP for one that a branch by lane forbids; LANE for a barrier of the
            block, which a branch by warp forbids too.
    """

    module: str
    node: ast.FunctionDef
    params: list[str]
    levels: dict[str, int] = dataclasses.field(default_factory=dict)
    given: dict[str, set[_Function]] = dataclasses.field(default_factory=dict)
    exchanges: int = UNIFORM


def _name(call: ast.Call) -> str:
    f = call.func
    return f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""


def _functions(sources: Mapping[str, str]) -> dict[str, list[_Function]]:
    found: dict[str, list[_Function]] = {}
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                params = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found.setdefault(node.name, []).append(_Function(module, node, params))
    return found


def _is_block_barrier(call: ast.Call) -> bool:
    """``t.sync()`` or cute's ``barrier(...)`` and ``sync_threads()``; not ``t.barrier``, an address."""
    f = call.func
    if not isinstance(f, ast.Attribute):
        return False
    of_t = isinstance(f.value, ast.Name) and f.value.id == "t"
    return f.attr == "sync" if of_t else f.attr in ("barrier", "sync_threads")


def _is_record_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "record"


class _Reader:
    """One pass over a function: levels of its names, calls it makes, exchanges under what."""

    def __init__(self, functions: Mapping[str, list[_Function]], function: _Function):
        self.functions, self.function = functions, function
        self.names = dict(function.levels)
        self.findings: list[Finding] = []
        self.changed = False

    def level(self, node: ast.AST | None) -> int:
        """How a value may differ."""
        length = isinstance(node, ast.Call) and _name(node) == "len"
        if node is None or length or isinstance(node, (ast.Constant, ast.Lambda)):
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
            # Loops of cutlass.range run as often as its arguments say; others are unrolled.
            at_run_time = (
                isinstance(s.iter, ast.Call)
                and isinstance(s.iter.func, ast.Attribute)
                and _name(s.iter) == "range"
            )
            inner, why = self._inside(s.iter, depth, under) if at_run_time else (depth, under)
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
        if isinstance(test, ast.Call) and _name(test) == "const_expr":
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
        if _is_block_barrier(call):
            self.function.exchanges = LANE
            if depth >= WARP:
                self.find(call, f"the barrier `{ast.unparse(call.func)}`", under)
            return
        for other in self._resolve(name) if isinstance(call.func, ast.Name) else ():
            self._into(other, call)
            self.function.exchanges = max(self.function.exchanges, other.exchanges)
            if depth == LANE and other.exchanges >= WARP:
                self.find(call, f"`{name}`, which holds an exchange,", under)
            elif depth == WARP and other.exchanges == LANE:
                self.find(call, f"`{name}`, which holds a barrier of the block,", under)

    def _resolve(self, name: str) -> list[_Function]:
        """The functions that a name can stand for: one passed in, one of this module, one imported."""
        if name in self.function.params:
            return list(self.function.given.get(name, ()))
        same = self.functions.get(name, [])
        return [f for f in same if f.module == self.function.module] or same

    def _into(self, other: _Function, call: ast.Call) -> None:
        """Levels of the arguments to the parameters of the function called."""
        pairs = [*zip(other.params, call.args, strict=False)]
        pairs += [(k.arg, k.value) for k in call.keywords if k.arg in other.params]
        for param, value in pairs:
            level = self.level(value)
            for passed in self._resolve(value.id) if isinstance(value, ast.Name) else ():
                if passed not in other.given.setdefault(param, set()):
                    other.given[param].add(passed)
                    self.changed = True
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
        if not name.startswith("constraints") and name not in (
            "geometry.py",
            "tables.py",
            "ptx.py",
            "call.py",
        ):
            yield name, path.read_text()


__all__ = ["Finding", "findings", "kernel_sources"]
