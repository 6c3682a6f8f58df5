"""The record of a converted checkpoint: ``k3jax.json`` beside the config and the Orbax pieces.

Layout of the directory::

    k3jax.json         format, version, leaves of every piece with shape and dtype, complete or not
    config.json        that of the source
    pieces/embed_tokens, lm_head, final, layers.000, layers.001.w1, ...   one Orbax checkpoint each
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError

MANIFEST = "k3jax.json"
PIECES = "pieces"
FORMAT = "k3jax-orbax"
VERSION = 1
MXFP4_LAYOUT = "mxfp4-pack-quantized"
"""Layout tag of packed leaves: codes two to a byte, even column low; E8M0 scales per 32 inputs."""
_DTYPES = ("bfloat16", "float32", "uint8")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The record of one conversion.

    Attributes:
        pieces: for each piece its leaves: path -> ShapeDtype, or MXFP4 of two.
        complete: whether every piece has been written.
        kda_a_log_size: stored length of A_log in the source; the pieces hold the heads' entries.
        source: digest of the source; a resumed conversion must have the same.
        skipped: tensors of the source outside the text model.
    """

    pieces: dict[str, dict[names.Path_, Any]]
    complete: bool
    kda_a_log_size: int
    source: str
    skipped: tuple[str, ...]

    def leaves(self) -> dict[names.Path_, Any]:
        return {path: leaf for piece in self.pieces.values() for path, leaf in piece.items()}


@dataclasses.dataclass(frozen=True)
class ShapeDtype:
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def shape_dtype(array: Any) -> Any:
    """ShapeDtype of an array-like, or the MXFP4 of two."""
    if isinstance(array, MXFP4):
        return MXFP4(shape_dtype(array.codes), shape_dtype(array.scales))
    return ShapeDtype(tuple(array.shape), str(np.dtype(array.dtype)))


def parts(leaf: Any) -> dict[str, Any]:
    """The arrays of a leaf by name: codes and scales, or the one unnamed."""
    return {"codes": leaf.codes, "scales": leaf.scales} if isinstance(leaf, MXFP4) else {"": leaf}


def is_orbax_dir(path: Path) -> bool:
    """Whether ``path`` was written by ``convert``, finished or not."""
    return (path / MANIFEST).is_file()


def _entry(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, MXFP4):
        return {"layout": MXFP4_LAYOUT, "codes": _entry(leaf.codes), "scales": _entry(leaf.scales)}
    return {"shape": list(leaf.shape), "dtype": leaf.dtype}


def _leaf(entry: dict[str, Any], where: str) -> Any:
    if "layout" in entry:
        if entry["layout"] != MXFP4_LAYOUT:
            raise ValueError(f"{where}: layout: expected {MXFP4_LAYOUT!r}, got {entry['layout']!r}")
        return MXFP4(_leaf(entry["codes"], where), _leaf(entry["scales"], where))
    shape, dtype = entry["shape"], entry["dtype"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{where}: shape: expected a list of integers of at least 0, got {shape!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"{where}: dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    return ShapeDtype(tuple(shape), dtype)


def _path(key: str) -> names.Path_:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace ``k3jax.json`` in one step."""
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "complete": manifest.complete,
        "kda_a_log_size": manifest.kda_a_log_size,
        "source": manifest.source,
        "skipped": list(manifest.skipped),
        "pieces": {
            piece: {names.dotted(path): _entry(leaf) for path, leaf in leaves.items()}
            for piece, leaves in manifest.pieces.items()
        },
    }
    write_atomically(folder / MANIFEST, json.dumps(tree, indent=1).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if it is not one of this version."""
    file = folder / MANIFEST
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT or tree["version"] != VERSION:
            got = f"{tree['format']!r} version {tree['version']!r}"
            raise ValueError(f"expected format {FORMAT!r} version {VERSION}, got {got}")
        pieces = {
            piece: {_path(key): _leaf(entry, key) for key, entry in leaves.items()}
            for piece, leaves in tree["pieces"].items()
        }
        size, skipped = int(tree["kda_a_log_size"]), tuple(tree["skipped"])
        return Manifest(pieces, bool(tree["complete"]), size, tree["source"], skipped)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(file, [f"not a record of a converted checkpoint: {reason}"]) from error
