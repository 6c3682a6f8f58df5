"""The runtime library that launches compiled kernels, and its registration with XLA.

A compiled kernel reaches the GPU through a call target of ``libcute_dsl_runtime.so``, which is all that
a host needs to run one: no compiler, no cutlass. The library is looked for in this order: the path given
to :func:`register` or :func:`runtime_library`, the environment variable ``K3JAX_CUDA_RUNTIME``, an
installed nvidia-cutlass-dsl (found by its files; nothing of it is imported).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import jax

RUNTIME_VARIABLE = "K3JAX_CUDA_RUNTIME"
"""Environment variable with the path of the runtime library."""
LIBRARY = "libcute_dsl_runtime.so"

# The target that XLA may record into a command buffer; its sibling "...NoCudaGraph_v2" may not be.
_NAME = "CuteDSLRT_NvJaxCutlassCall"
TARGET = f"{_NAME}_v2"

_lock = threading.Lock()
_registered: Path | None = None


def runtime_library(path: str | os.PathLike[str] | None = None) -> Path:
    """Where the runtime library is.

    Args:
        path: of the library or of the folder that holds it; None looks in the places named above.

    Raises:
        FileNotFoundError: it is not there; says where it was looked for.
    """
    for source, given in (("path", path), (RUNTIME_VARIABLE, os.environ.get(RUNTIME_VARIABLE))):
        if given:
            file = Path(given) / LIBRARY if Path(given).is_dir() else Path(given)
            if not file.is_file():
                raise FileNotFoundError(f"{source}: expected {LIBRARY} or its folder, got {os.fspath(given)}")
            return file.resolve()
    folders = _installed()
    for folder in folders:
        if (folder / LIBRARY).is_file():
            return (folder / LIBRARY).resolve()
    looked = ", ".join(map(str, folders)) or "no nvidia-cutlass-dsl is installed"
    raise FileNotFoundError(
        f"CUDA runtime library: {LIBRARY} not found ({looked}); install nvidia-cutlass-dsl "
        f"or set {RUNTIME_VARIABLE} to the library's path"
    )


def _installed() -> list[Path]:
    """Library folders of an installed nvidia-cutlass-dsl: those for the newest CUDA first."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec is not None else []
    return [lib for root in roots for lib in sorted(root.glob("cu*/lib"), reverse=True)]


def register(path: str | os.PathLike[str] | None = None) -> Path:
    """Register the call target with XLA, once a process; returns the library's path.

    Raises:
        FileNotFoundError: there is no runtime library.
        OSError: it cannot be loaded, or is not one that this version of k3jax knows.
        RuntimeError: another library was registered before.
    """
    global _registered
    with _lock:
        library = runtime_library(path)
        if _registered is None:
            _load(library)
            _registered = library
        elif path is not None and library != _registered:
            raise RuntimeError(f"path: {library} asked for, but {_registered} is registered in this process")
        return _registered


def _load(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))

    def capsule(symbol: str, call: bool = False) -> Any:
        try:
            function = getattr(loaded, f"{_NAME}{symbol}_v2")
        except AttributeError as error:
            raise OSError(
                f"{library}: no symbol {_NAME}{symbol}_v2: not a runtime library of CuTe DSL 4.8"
            ) from error
        function.restype = ctypes.c_void_p
        return jax.ffi.pycapsule(function() if call else function)

    types: Any = {"type_id": capsule("StateTypeId", True), "type_info": capsule("StateTypeInfo", True)}
    stages = {stage.lower(): capsule(stage) for stage in ("Instantiate", "Prepare", "Execute")}
    jax.ffi.register_ffi_type(f"{_NAME}Types_v2", types, platform="CUDA")
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")


__all__ = ["LIBRARY", "RUNTIME_VARIABLE", "TARGET", "register", "runtime_library"]
