"""Compiling kernels to artifacts, without a GPU, in a process of its own.

The DSL reads its target architecture from the environment when it is imported, and it brings its own
compiler into the process; so the one that compiles imports it, and nobody else does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

from .artifacts import (
    DSL_VERSION,
    KERNEL,
    Artifact,
    ArtifactError,
    Key,
    cache_folder,
    find,
    leaves_of,
    load,
    write,
)
from .call_site import CallSiteError, call_site
from .fit import plan_reasons

_log = logging.getLogger("k3jax")

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
"""What the kernels compile for."""
CAPACITY_ROWS = 256
"""Cache rows of the operands a kernel is traced with. Nothing in it may depend on them: it takes pointers,
and the capacity is an operand (max_length)."""


class CompileError(ArtifactError):
    """The compiler refused a kernel; the message ends with what it said."""


def compiler_problem() -> str | None:
    """Why no kernel can be compiled here, or None."""
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return f"compiler: nvidia-cutlass-dsl {DSL_VERSION} is not installed"
    if version != DSL_VERSION:
        return f"compiler: expected nvidia-cutlass-dsl {DSL_VERSION}, {version} is installed"
    return None


def obtain(key: Key) -> Artifact:
    """The compiled kernel: from a file, or compiled and kept in the cache folder.

    Raises:
        ArtifactError: there is none and no compiler, or its file is damaged or for another runtime library
            and there is no compiler.
        CompileError: the compiler refused.
    """
    path = find(key)
    problem = compiler_problem()
    if path is not None:
        try:
            return load(path)
        except ArtifactError as error:
            if problem is not None:
                raise ArtifactError(f"{error}; delete it or make it again ({problem})") from error
            _log.warning("%s; compiling it again", error)
    if problem is not None:
        raise ArtifactError(
            f"no compiled kernel {key.file_name} in {cache_folder()} or the folders added; {problem}. "
            f"Compile it elsewhere: k3jax compile ... --target {key.arch} --batch {key.plan.batch} "
            f"--ways {key.plan.ways} --expert-width {key.plan.expert_width} --sms {key.plan.sms} "
            f"{'--peers ' if key.plan.peers else ''}--out DIR"
        )
    _log.info("compiling %s", key.file_name)
    return compile_artifact(key, path.parent if path is not None else cache_folder())


def compile_artifact(key: Key, folder: str | os.PathLike[str]) -> Artifact:
    """Compile a kernel and write its artifact to ``folder``.

    Raises:
        ValueError: an architecture it does not compile for.
        ArtifactError: the plan does not fit the kernel, or there is no compiler; CompileError: it refused.
    """
    if key.arch not in ARCHITECTURES:
        raise ValueError(f"target: expected one of {', '.join(ARCHITECTURES)}, got {key.arch!r}")
    if key.entry == KERNEL and (reasons := plan_reasons(key.plan)):  # another entry has its own limits
        raise ArtifactError(f"kernel: {'; '.join(reasons)}")
    if problem := compiler_problem():
        raise ArtifactError(problem)
    out = Path(folder).absolute() / key.file_name
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": key.arch,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    result = subprocess.run(
        command, env=environment, input=pickle.dumps((key, str(out))), capture_output=True, check=False
    )
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise CompileError(f"{key.entry} for {key.arch}: " + "\n".join(said[-30:]))
    return load(out)


# -- in the process that compiles ----------------------------------------------------------------


def build(key: Key, capacity_rows: int = CAPACITY_ROWS) -> Artifact:
    """Compile a kernel in this process, which imports the DSL.

    Args:
        capacity_rows: cache rows of the operands it is traced with.

    Raises:
        CompileError: what was traced is not one custom call with the operands expected.
    """
    import jax

    from . import cubin
    from .decode_megakernel.kernel.geometry import Geometry
    from .decode_megakernel.operands import abstract_operands, abstract_results
    from .tables import launch_tables

    start = time.perf_counter()
    module, name = key.entry.split(":")
    call = getattr(importlib.import_module(module), name)
    tables = launch_tables(key.plan)
    geometry = Geometry(tables.schedule, **dict(key.options))
    operands = abstract_operands(
        key.plan, tables.counters, len(tables.records), len(tables.program), capacity_rows, key.trace
    )
    lowered = jax.jit(lambda tree: call(geometry, tree)).trace(operands).lower(lowering_platforms=("cuda",))
    try:
        site = call_site(lowered)
    except CallSiteError as error:
        raise CompileError(f"{key.entry}: {error}") from error
    if set(site.attributes) != {"module", "key"}:
        raise CompileError(f"{key.entry}: expected attributes key and module, got {sorted(site.attributes)}")
    code = site.attributes["module"]
    used = cubin.usage(code)
    takes = leaves_of(operands, capacity_rows)
    gives = leaves_of(abstract_results(key.plan, operands), capacity_rows)
    if sorted(site.operands) != list(range(len(takes))) or len(site.results) != len(gives):
        raise CompileError(
            f"{key.entry}: expected {len(takes)} operands and {len(gives)} results, each once, "
            f"got {len(site.operands)} and {len(site.results)}"
        )
    about = key.fields() | {
        "registers": used.registers,
        "local_bytes": used.local_bytes,
        "code_bytes": used.code_bytes,
        "compile_seconds": round(time.perf_counter() - start, 2),
        "jax": jax.__version__,
    }
    return Artifact(
        code,
        site.attributes["key"],
        site.target,
        tuple(takes[i] for i in site.operands),
        tuple(gives[i] for i in site.results),
        site.aliases,
        about,
    )


def main() -> None:
    """The compiling process: a pickled (key, path) on stdin, the artifact at the path."""
    key, out = pickle.load(sys.stdin.buffer)
    write(build(key), Path(out))


__all__ = [
    "ARCHITECTURES",
    "CAPACITY_ROWS",
    "CompileError",
    "build",
    "compile_artifact",
    "compiler_problem",
    "main",
    "obtain",
]
