"""A rule on the kernel's sources that machine code cannot show: no load in inline assembly.

The compiler takes inline assembly without side effects for arithmetic. It may merge a load in it with an
earlier one of the same address, across any wait, and then there is no instruction left to find.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_LOAD = re.compile(r"(?<![\w.])(ld|ldu|tex|surf|suld|tld4|ldmatrix)(\.\w+)+")


def _docstrings(tree: ast.AST) -> set[int]:
    """Strings that stand as a statement."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def inline_loads(folder: Path) -> Iterator[str]:
    """``file:line: text`` of every string in the sources of a folder that holds a PTX load."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        statements = _docstrings(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in statements:
                continue
            if isinstance(node.value, str) and _LOAD.search(node.value):
                yield f"{path.relative_to(folder)}:{node.lineno}: {node.value}"


__all__ = ["inline_loads"]
