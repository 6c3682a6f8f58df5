"""Where the runtime library is looked for, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3jax.custom_calls import ffi
from support.megakernel import needs_compiler


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ffi.RUNTIME_VARIABLE, raising=False)
    monkeypatch.setattr(ffi, "_registered", None)


def library(folder: Path, name: str = ffi.LIBRARY) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    return (folder / name).resolve()


def test_a_path_goes_before_the_variable_and_that_before_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, set_, installed = (library(tmp_path / name) for name in ("given", "set", "installed"))
    monkeypatch.setattr(ffi, "_installed", lambda: [tmp_path / "absent", installed.parent])
    assert ffi.runtime_library() == installed
    monkeypatch.setenv(ffi.RUNTIME_VARIABLE, str(set_))
    assert ffi.runtime_library() == set_
    assert ffi.runtime_library(given) == given
    assert ffi.runtime_library(given.parent) == given


def test_a_missing_library_is_said_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffi, "_installed", lambda: [tmp_path / "lib"])
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'lib'}.*set {ffi.RUNTIME_VARIABLE}"):
        ffi.runtime_library()
    with pytest.raises(FileNotFoundError, match=f"path: expected {ffi.LIBRARY} or its folder, got .*absent"):
        ffi.runtime_library(tmp_path / "absent")
    monkeypatch.setenv(ffi.RUNTIME_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{ffi.RUNTIME_VARIABLE}: expected"):
        ffi.register()


@needs_compiler
def test_the_installed_library_registers_once_and_no_other_after_it(tmp_path: Path) -> None:
    first = ffi.register()
    assert first.name == ffi.LIBRARY
    assert ffi.register() == first
    with pytest.raises(RuntimeError, match=f"{first} is registered in this process"):
        ffi.register(library(tmp_path / "other"))


def test_a_library_without_the_symbols_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(np._core._multiarray_umath.__file__)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OSError, match="no symbol CuteDSLRT_NvJaxCutlassCallStateTypeId_v2"):
        ffi.register(other)
    assert ffi._registered is None
