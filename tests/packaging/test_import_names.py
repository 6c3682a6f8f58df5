"""The linked folders are reached as k3jax.pallas, k3jax.custom_calls and k3jax.checkpoints only."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

from support.repository import LINKED_FOLDERS, ROOT, repository_files, source_files


def bare_imports(source: str) -> list[str]:
    """The modules that a source imports by a linked folder's own name."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.append(node.module)
    return [name for name in names if name.split(".")[0] in LINKED_FOLDERS]


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_the_link_inside_the_package_resolves_to_the_top_level_folder(name: str) -> None:
    link = ROOT / "k3jax" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


def test_the_packaging_root_holds_one_link_to_the_package() -> None:
    committed = [path for path in repository_files() if path.parts[0] == ".dev"]
    assert committed == [Path(".dev/k3jax")]
    assert os.readlink(ROOT / ".dev" / "k3jax") == "../k3jax"


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_a_linked_folder_is_imported_from_its_place(name: str) -> None:
    module = importlib.import_module(f"k3jax.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pallas", ["pallas"]),
        ("def f():\n    from checkpoints.index import Index", ["checkpoints.index"]),
        ("import jax, custom_calls.ffi as ffi", ["custom_calls.ffi"]),
        ("from jax.experimental import pallas\nfrom . import checkpoints\nimport k3jax.pallas", []),
    ],
)
def test_the_check_finds_bare_imports_and_nothing_else(source: str, expected: list[str]) -> None:
    assert bare_imports(source) == expected


def test_no_file_imports_a_linked_folder_by_its_bare_name() -> None:
    sources = [path for path in repository_files() if path.suffix == ".py"]
    found = {str(path): bare for path in sources if (bare := bare_imports((ROOT / path).read_text("utf-8")))}
    assert len(sources) > 10
    assert not found


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in source_files() if path.suffix == ".py"}
    without = [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()]
    assert Path("k3jax") in folders
    assert not without
