"""Compiled kernels as files: found again by what they were made from, made where a compiler is installed.

An artifact is the compiled module of one kernel with the shapes of its operands and results. It runs with
the runtime library alone (:mod:`k3jax.custom_calls.ffi`), under any version of jax that the library takes,
and at any cache capacity: the module takes pointers, and reads the capacity from an operand.

File: 8 bytes magic, uint64 length of the description, the description (JSON), the module, and the SHA-256
of all of it. Its name begins with what is readable of its key and ends with the key's digest. The key is
the source of the kernel, the configuration, the rank's share, the batch, the SMs, the architecture, the
version of the DSL and the host's processor (the module holds the host code that launches the kernel).

The version of jax is not in it, and must not be: an artifact is made on one host and runs on others, with
the jax that they have. jax lends the build its tracing; what comes of that are the module's bytes, the
order of operands and results, and the aliases, and they are the same under jax 0.11.2 and 0.12.0.1
(measured: FACTS.md). The description names the jax that built it (``about["jax"]``). What an artifact
does depend on is checked where it is loaded and called: its call target is the one that the runtime
library registers, operands and results are those of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import platform
import struct
import uuid
from pathlib import Path
from typing import Any

from . import ffi
from .decode_megakernel.shapes import Plan

DSL_VERSION = "4.8.1"
"""The version of nvidia-cutlass-dsl that the kernels are written for; pyproject.toml pins the same."""
KERNEL = "k3jax.custom_calls.decode_megakernel.kernel.call:call"
"""The function that makes the megakernel's custom call."""

_MAGIC = b"K3KERN\x00\x01"
_HEAD = struct.Struct("<8sQ")
_HASH_BYTES = hashlib.sha256().digest_size
_SOURCE = Path(__file__).resolve().parent / "decode_megakernel"
_NOT_SOURCE = ("interpreter", "__pycache__")
_ANY = -1


class ArtifactError(NotImplementedError):
    """A compiled kernel that is not there, is damaged, or is not what it is used for."""


@dataclasses.dataclass(frozen=True)
class Key:
    """What a compiled kernel was made from.

    Attributes:
        plan: configuration, batch, SMs and share.
        arch: the DSL's name of the architecture, such as "sm_90a".
        entry: "module:function" that makes the custom call.
        options: (name, value) pairs of ``kernel.geometry.Geometry``, other than its defaults.
    """

    plan: Plan
    arch: str
    entry: str = dataclasses.field(default_factory=lambda: KERNEL)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def trace(self) -> int:
        """Entries of the trace in the workspace of a build that keeps time, else 0."""
        return dict(self.options).get("trace", 0)

    def fields(self) -> dict[str, Any]:
        p = self.plan
        config = {f.name: getattr(p.config, f.name) for f in dataclasses.fields(p.config) if f.compare}
        return {
            "config": config,
            "batch": p.batch,
            "ways": p.ways,
            "expert_ways": p.expert_ways,
            "peers": p.peers,
            "target": {"sms": p.target.sms, "shared": p.target.shared_bytes, "registers": p.target.registers},
            "arch": self.arch,
            "entry": self.entry,
            "options": sorted(self.options),
            "source": source_digest(self.entry),
            "dsl": DSL_VERSION,
            "host": platform.machine(),
        }

    @functools.cached_property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()
        p = self.plan
        spread = f"-experts{p.expert_ways}" if p.expert_ways > 1 else ""
        spread += "-peers" if p.peers else ""
        return f"{self.arch}-{p.sms}sm-batch{p.batch}-ways{p.ways}{spread}-{digest[:20]}.k3kernel"


@functools.cache
def source_digest(entry: str) -> str:
    """SHA-256 of the sources a kernel is made from: this package, and the entry's module."""
    files = {
        str(path.relative_to(_SOURCE)): path
        for path in sorted(_SOURCE.rglob("*.py"))
        if not set(path.relative_to(_SOURCE).parts) & set(_NOT_SOURCE)
    }
    module = entry.split(":")[0]
    if not module.startswith(f"{__package__}.decode_megakernel."):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"entry: expected MODULE:FUNCTION of an importable module, got {entry!r}")
        files["entry"] = Path(spec.origin)
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Path, dtype and shape of one operand or result; an extent of -1 is the cache's capacity."""

    path: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
        module: the bytes that the runtime library loads; ``fingerprint`` is their SHA-256.
        target: the call target.
        operands, results: leaves in the order in which the module takes them.
        aliases: (operand, result) pairs that share a buffer.
        about: the key's fields, and registers, local_bytes, code_bytes, compile_seconds and the jax that
            built it.
    """

    module: bytes
    fingerprint: bytes
    target: str
    operands: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    aliases: tuple[tuple[int, int], ...]
    about: dict[str, Any]

    @property
    def trace(self) -> int:
        """As :attr:`Key.trace`."""
        return dict(self.about.get("options", ())).get("trace", 0)

    def to_bytes(self) -> bytes:
        text = {
            "target": self.target,
            "fingerprint": self.fingerprint.hex(),
            "operands": [dataclasses.astuple(leaf) for leaf in self.operands],
            "results": [dataclasses.astuple(leaf) for leaf in self.results],
            "aliases": self.aliases,
            "about": self.about,
        }
        description = json.dumps(text).encode()
        body = _HEAD.pack(_MAGIC, len(description)) + description + self.module
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Artifact:
        """What :meth:`to_bytes` wrote.

        Raises:
            ArtifactError: the bytes are not, or no longer, an artifact.
        """
        body, digest = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
        if len(data) < _HEAD.size + _HASH_BYTES or not data.startswith(_MAGIC):
            raise ArtifactError(
                f"{where}: expected a compiled kernel, got {len(data)} bytes of something else"
            )
        if hashlib.sha256(body).digest() != digest:
            raise ArtifactError(f"{where}: damaged: its checksum is not that of its content")
        _, length = _HEAD.unpack_from(body)
        text = json.loads(body[_HEAD.size : _HEAD.size + length])

        def leaves(rows: list[Any]) -> tuple[Leaf, ...]:
            return tuple(Leaf(path, dtype, tuple(shape)) for path, dtype, shape in rows)

        return cls(
            body[_HEAD.size + length :],
            bytes.fromhex(text["fingerprint"]),
            text["target"],
            leaves(text["operands"]),
            leaves(text["results"]),
            tuple((operand, result) for operand, result in text["aliases"]),
            text["about"],
        )


# -- where they are -----------------------------------------------------------------------------

_folders: list[Path] = []


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``k3jax/kernels`` in the user's cache (``XDG_CACHE_HOME``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3jax" / "kernels"


def add_folder(folder: str | os.PathLike[str]) -> None:
    """Look for compiled kernels in ``folder`` too, from now on and first.

    Raises:
        NotADirectoryError: it is not a folder.
    """
    path = Path(folder).absolute()
    if not path.is_dir():
        raise NotADirectoryError(f"folder: expected a folder of compiled kernels, got {path}")
    if path not in _folders:
        _folders.insert(0, path)
        load.cache_clear()


def find(key: Key) -> Path | None:
    """The file of a compiled kernel, or None."""
    for folder in (*_folders, cache_folder()):
        if (folder / key.file_name).is_file():
            return folder / key.file_name
    return None


@functools.lru_cache(maxsize=32)
def load(path: Path) -> Artifact:
    """Read an artifact.

    Raises:
        ArtifactError: it is damaged, or calls another target than the runtime library's;
            FileNotFoundError: it is not there.
    """
    artifact = Artifact.from_bytes(path.read_bytes(), str(path))
    if artifact.target != ffi.TARGET:
        raise ArtifactError(
            f"{path}: expected a kernel that calls {ffi.TARGET}, which the runtime library has, "
            f"got {artifact.target}"
        )
    return artifact


def write(artifact: Artifact, path: Path) -> None:
    """Write an artifact; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(artifact.to_bytes())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    load.cache_clear()


# -- what they take -----------------------------------------------------------------------------


def leaves_of(tree: Any, capacity_rows: int | None = None) -> tuple[Leaf, ...]:
    """The leaves of a tree of arrays or shapes, in order.

    Args:
        capacity_rows: the extent of the latent caches, recorded as -1; None records it as it is.
    """
    import jax

    def one(path: Any, leaf: Any) -> Leaf:
        name, shape = jax.tree_util.keystr(path), tuple(leaf.shape)
        if capacity_rows is not None and name.endswith("['cache']"):
            shape = (shape[0], _ANY, *shape[2:])
        return Leaf(name, str(leaf.dtype), shape)

    return tuple(one(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0])


def check_leaves(what: str, have: tuple[Leaf, ...], want: tuple[Leaf, ...]) -> None:
    """Raise unless arrays, in any order, are those that a kernel was compiled for.

    Raises:
        ArtifactError: names the first one that is not.
    """
    if odd := sorted({leaf.path for leaf in have} ^ {leaf.path for leaf in want}):
        raise ArtifactError(
            f"{what}: expected {len(want)} arrays, got {len(have)}; only in one of them: {', '.join(odd[:5])}"
        )
    named = {leaf.path: leaf for leaf in have}
    for expected in want:
        got = named[expected.path]
        fits = len(got.shape) == len(expected.shape) and all(
            e in (_ANY, n) for n, e in zip(got.shape, expected.shape, strict=True)
        )
        if not fits or got.dtype != expected.dtype:
            raise ArtifactError(
                f"{what}{got.path}: expected {expected.dtype} {list(expected.shape)} (-1: any), "
                f"got {got.dtype} {list(got.shape)}"
            )


__all__ = [
    "DSL_VERSION",
    "KERNEL",
    "Artifact",
    "ArtifactError",
    "Key",
    "Leaf",
    "add_folder",
    "cache_folder",
    "check_leaves",
    "find",
    "leaves_of",
    "load",
    "source_digest",
    "write",
]
