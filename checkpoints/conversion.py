"""Conversion of a release checkpoint to Orbax pieces: streamed, and resumable after a kill.

A piece is all leaves of a layer but the experts, one expert leaf, or a part outside the layers;
pieces already there are kept as they are. Host memory: one piece, read once, and the copy Orbax
makes of it; the largest piece of the release is one expert leaf of a layer, 5.3 GB.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError
from .load_report import Stopwatch, peak_host_bytes
from .locate import resolve, shipped_names
from .manifest import (
    MANIFEST,
    PIECES,
    Manifest,
    is_orbax_dir,
    parts,
    read_manifest,
    shape_dtype,
    write_atomically,
    write_manifest,
)
from .plan import Plan, preflight
from .release_files import CONFIG, INDEX, is_release_dir
from .safetensors_file import Reader
from .sources import ScaleSource, read_whole

_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken")
"""Endings of the small files (tokenizer, generation settings, licence) that go along."""


@dataclasses.dataclass(frozen=True)
class ConvertReport:
    """A finished conversion; ``bytes`` and ``seconds`` are of this run, which may have resumed one."""

    pieces: int
    resumed: int
    bytes: int
    seconds: float
    peak_host_bytes: int

    def __str__(self) -> str:
        rate = self.bytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"converted {self.pieces} pieces ({self.resumed} were there), {self.bytes / 1e9:.3f} GB in "
            f"{self.seconds:.2f} s, {rate:.3g} GB/s, peak host memory {self.peak_host_bytes / 1e9:.2f} GB"
        )


def convert(src: str | os.PathLike[str], dst: str | os.PathLike[str], progress: bool = True) -> ConvertReport:
    """Convert a checkpoint in release format to an Orbax checkpoint that ``load`` reads.

    Run it again with the same arguments after an interruption: finished pieces stay, the result
    is the same as without the interruption.

    Args:
        src: directory in release format, or the name of a checkpoint that ships.
        dst: directory to make, or one that this function began to fill from the same source.
        progress: a bar on stderr where that is a terminal, and the report at the end.

    Raises:
        CheckpointError: a fault of the source; ``dst`` holds something else, or another source's.
        FileNotFoundError: ``src`` is no checkpoint in release format.
    """
    from .orbax_store import Store  # imports Orbax, which takes longer than all else together

    source, folder = _source(src), Path(dst)
    watch = Stopwatch()
    plan = preflight(source)
    _claim(folder)
    with _only_one(folder):
        manifest = _begin(folder, source, plan)
        with Store(folder) as store, Reader() as reader:
            store.discard_unfinished()
            todo = [piece for piece in manifest.pieces if not store.is_saved(piece)]
            total = sum(_nbytes(manifest.pieces[piece]) for piece in todo)
            with tqdm(
                total=total, unit="B", unit_scale=True, desc="convert", disable=None if progress else True
            ) as bar:
                for piece in todo:
                    leaves = manifest.pieces[piece]
                    store.save(piece, {path: _read(plan.leaves[path], reader) for path in leaves})
                    bar.update(_nbytes(leaves))
            if faults := [f for piece, leaves in manifest.pieces.items() for f in store.check(piece, leaves)]:
                raise CheckpointError(folder, faults)
        write_manifest(folder, dataclasses.replace(manifest, complete=True))
    count = len(manifest.pieces)
    report = ConvertReport(count, count - len(todo), total, watch.seconds, peak_host_bytes())
    if progress:
        print(report, file=sys.stderr)
    return report


def _source(src: str | os.PathLike[str]) -> Path:
    expected = (
        f"src: expected a directory in the release's format or a name that ships "
        f"({', '.join(shipped_names()) or 'none in this installation'}), got {os.fspath(src)!r}"
    )
    try:
        found = resolve(src)
    except FileNotFoundError as error:
        raise FileNotFoundError(expected) from error
    if not is_release_dir(found):
        raise FileNotFoundError(f"{expected}, which is a converted checkpoint")
    return found


def _claim(folder: Path) -> None:
    if folder.exists() and not is_orbax_dir(folder):
        ours = {MANIFEST + ".partial", ".lock"}
        if not folder.is_dir() or any(entry.name not in ours for entry in folder.iterdir()):
            raise CheckpointError(folder, ["dst: expected a new or empty directory, or one of convert's"])
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the directory against a second conversion; the lock ends with the process."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(folder, ["dst: another conversion is writing to it"]) from error
        yield
    (folder / ".lock").unlink(missing_ok=True)


def _begin(folder: Path, source: Path, plan: Plan) -> Manifest:
    """The manifest, new or of the conversion to resume; the small files are in place after it."""
    pieces: dict[str, dict[names.Path_, Any]] = {}
    for path, leaf in plan.leaves.items():
        pieces.setdefault(piece_of(path), {})[path] = shape_dtype(leaf)
    digest = _digest(source, plan)
    manifest = Manifest(pieces, False, plan.config.kda_a_log_size, digest, plan.skipped)
    if is_orbax_dir(folder):
        begun = read_manifest(folder)
        if begun.source != digest or begun.pieces != pieces:
            raise CheckpointError(folder, [f"dst: holds a conversion of another checkpoint than {source}"])
    else:
        write_manifest(folder, manifest)
    (folder / PIECES).mkdir(exist_ok=True)
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED or file.name.startswith("LICENSE")
        if wanted and file.is_file() and file.name not in (INDEX, MANIFEST):
            write_atomically(folder / file.name, file.read_bytes())
    return manifest


def piece_of(path: names.Path_) -> str:
    """Name of the piece that holds the leaf at ``path``."""
    if path[0] == "layers":
        layer = f"layers.{path[1]:03d}"
        return f"{layer}.{path[-1]}" if "experts" in path else layer
    return str(path[0]) if path[0] in ("embed_tokens", "lm_head") else "final"


def _nbytes(leaves: dict[names.Path_, Any]) -> int:
    return sum(array.nbytes for leaf in leaves.values() for array in parts(leaf).values())


def _read(leaf: Any, reader: Reader) -> Any:
    if isinstance(leaf, MXFP4):
        return MXFP4(read_whole(leaf.codes, reader), read_whole(ScaleSource(leaf, None), reader))
    return read_whole(leaf, reader)


def _digest(source: Path, plan: Plan) -> str:
    """Identifies the source without reading all of it: config, sizes, headers, samples of the data."""
    found = hashlib.sha256((source / CONFIG).read_bytes())
    for file in plan.files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            found.update(stream.read(int.from_bytes(stream.read(8), "little")))
            for part in range(16):
                stream.seek(part * size // 16)
                found.update(stream.read(4096))
            stream.seek(max(size - 4096, 0))
            found.update(stream.read(4096))
    return found.hexdigest()
