"""One piece of a converted checkpoint: a small tree of arrays in Orbax's format.

Orbax writes a piece beside its final name and renames it, so a piece that is there is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from . import names
from .errors import CheckpointError
from .manifest import PIECES, ShapeDtype, parts
from .orbax_files import file_faults

_CHUNK = 4 << 20
"""Bytes of a storage chunk: the least a process reads of an array it needs a part of."""


def piece_path(folder: Path, piece: str) -> Path:
    return (folder / PIECES / piece).absolute()


def _key(path: names.Path_, part: str) -> str:
    return names.dotted(path) + (f".{part}" if part else "")


def _flat(leaves: dict[names.Path_, Any]) -> dict[str, Any]:
    return {_key(path, part): array for path, leaf in leaves.items() for part, array in parts(leaf).items()}


def _reason(error: BaseException) -> str:
    """First line of the innermost cause, which names the leaf; around it are pages of settings."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


class Store:
    """Saves and restores pieces; a context manager."""

    def __init__(self, folder: Path):
        self._folder = folder
        # Quantised and trained weights hardly compress, and decompression would bound the load.
        self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._orbax.close()

    def save(self, piece: str, leaves: dict[names.Path_, Any]) -> None:
        """Write one piece; it appears whole or not at all.

        Args:
            leaves: path -> numpy array, or an MXFP4 of two.
        """
        tree = _flat(leaves)
        args = {
            # Experts are what a mesh divides first, so no chunk spans two of them.
            key: ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=(0,) if array.ndim == 3 else ())
            for key, array in tree.items()
        }
        self._orbax.save(piece_path(self._folder, piece), args=ocp.args.PyTreeSave(tree, save_args=args))

    def is_saved(self, piece: str) -> bool:
        return piece_path(self._folder, piece).is_dir()

    def check(self, piece: str, leaves: dict[names.Path_, Any]) -> list[str]:
        """Faults of a stored piece: shapes, dtypes and lengths of files, not values; [] if none.

        Args:
            leaves: path -> ShapeDtype, or an MXFP4 of two.
        """
        expected: dict[str, ShapeDtype] = _flat(leaves)
        path = piece_path(self._folder, piece)
        if not path.is_dir():
            return [f"{PIECES}/{piece}: missing"]
        where = f"{PIECES}/{piece}: leaf"
        try:
            # First, as Orbax logs pages about a store that it cannot read.
            faults = [f"{where} {key}: {fault}" for key, fault in file_faults(path).items()]
        except (OSError, ValueError, KeyError) as error:
            return [f"{PIECES}/{piece}: unreadable store of arrays: {_reason(error)}"]
        try:
            metadata = self._orbax.metadata(path).item_metadata
        except (OSError, ValueError, AttributeError, KeyError) as error:
            return [f"{PIECES}/{piece}: unreadable Orbax metadata: {error}"]
        if metadata is None:
            return [f"{PIECES}/{piece}: unreadable Orbax metadata: a file is missing, cut short or changed"]
        stored = metadata.tree
        faults += [f"{where} {key}: missing" for key in expected.keys() - stored.keys()]
        faults += [f"{where} {key}: unknown" for key in stored.keys() - expected.keys()]
        for key in expected.keys() & stored.keys():
            found = ShapeDtype(tuple(stored[key].shape), str(np.dtype(stored[key].dtype)))
            if found != expected[key]:
                faults.append(f"{where} {key}: expected {expected[key]}, got {found}")
        return sorted(faults)

    def restore(
        self, piece: str, leaves: dict[names.Path_, Any], shardings: dict[str, Any]
    ) -> dict[str, jax.Array]:
        """The arrays of one piece on the devices of their shardings, exactly as stored.

        Args:
            leaves: path -> ShapeDtype, or an MXFP4 of two: already checked.
            shardings: by the keys of the result: path joined by dots, ".codes" or ".scales" if packed.

        Raises:
            CheckpointError: an array cannot be read; names the piece and the leaf.
        """
        args = {
            key: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=shardings[key],
                global_shape=array.shape,
                dtype=np.dtype(array.dtype),
            )
            for key, array in _flat(leaves).items()
        }
        path = piece_path(self._folder, piece)
        try:
            return self._orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # the host's or the devices' trouble, not the files'
        except Exception as error:  # what Orbax raises for an unreadable array is Exception itself
            raise CheckpointError(
                self._folder, [f"{PIECES}/{piece}: cannot be restored: {_reason(error)}"]
            ) from error

    def read_experts(self, piece: str, key: str, box: tuple[slice, ...], experts: list[int]) -> np.ndarray:
        """``box`` of an array whose axis 0 counts experts, with ``experts`` in place of axis 0.

        Args:
            key: path joined by dots, ".codes" or ".scales" if packed.
            box: its first slice is not used.

        Raises:
            CheckpointError: the array cannot be read; names the piece and the leaf.
        """
        store = {"driver": "ocdbt", "base": f"file://{piece_path(self._folder, piece)}/", "path": f"{key}/"}
        try:
            array = ts.open({"driver": "zarr", "kvstore": store}).result()
            return np.stack([array[(e, *box[1:])].read().result() for e in experts])
        except (ValueError, OSError) as error:
            raise CheckpointError(
                self._folder, [f"{PIECES}/{piece}: leaf {key} cannot be read: {_reason(error)}"]
            ) from error

    def discard_unfinished(self) -> None:
        """Remove what an interrupted save left beside the pieces."""
        for path in (self._folder / PIECES).glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path)
