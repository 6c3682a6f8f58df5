"""Writing a parameter tree in the release's format: what ``load`` reads back bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.config import K3Config
from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError
from .manifest import write_atomically
from .plan import FLOAT, PACKED, SCALE
from .release_files import CONFIG, INDEX

_STORED = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
_Entry = tuple[str, Any, int | None]
"""Released name, leaf, and expert or None."""

SHARD_BYTES = 8 << 30
"""Default bound on the bytes of tensors in one file."""


def write_release(
    path: str | os.PathLike[str], config: K3Config, params: Any, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Write parameters as a checkpoint in the release's format.

    Released names with prefix, an index, experts packed as they are (or float, where the leaf
    is), ``A_log`` zero padded to ``config.kda_a_log_size``. Tensors are fetched and written one leaf at
    a time.

    Args:
        path: directory to make; it must not hold a checkpoint.
        config: architecture of ``params``.
        params: parameter tree in the released dtypes.
        max_shard_bytes: bound on the tensors of one file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the directory holds a checkpoint; a leaf is missing, unknown, or not of the
            released shape and dtype.
    """
    folder = Path(path)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: expected at least 1, got {max_shard_bytes}")
    taken = [p.name for p in (folder / CONFIG, folder / INDEX) if p.exists()]
    taken += [p.name for p in folder.glob("*.safetensors")]
    if taken:
        raise CheckpointError(folder, [f"path: expected no checkpoint there, found {', '.join(taken)}"])
    found = dict(names.leaves(params))
    if faults := _faults(config, found):
        raise CheckpointError("params", faults)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(config, found, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, leaves in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        written, size = _write_shard(folder / file, config, leaves)
        weight_map |= dict.fromkeys(written, file)
        total += size
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX, (json.dumps(tree, indent=1) + "\n").encode())
    write_atomically(folder / CONFIG, (json.dumps(config.to_hf_dict(), indent=1) + "\n").encode())


def _faults(config: K3Config, found: dict[names.Path_, Any]) -> list[str]:
    expected = {slot.path: slot for slot in names.slots(config)}
    faults = [f"leaf {names.dotted(p)}: missing" for p in expected if p not in found]
    faults += [f"leaf {names.dotted(p)}: unknown" for p in found if p not in expected]
    for path in expected.keys() & found.keys():
        slot, leaf = expected[path], found[path]
        array = leaf.codes if isinstance(leaf, MXFP4) else leaf
        allowed = {slot.dtype}
        if slot.expert and not isinstance(leaf, MXFP4):
            allowed = {"bfloat16", "float32"}
        got = (tuple(leaf.shape), str(np.dtype(array.dtype)))
        if got[0] != slot.shape or got[1] not in allowed:
            faults.append(
                f"leaf {names.dotted(path)}: expected {' or '.join(sorted(allowed))} {list(slot.shape)}, "
                f"got {got[1]} {list(got[0])}"
            )
    return sorted(faults)


def _shards(config: K3Config, found: dict[names.Path_, Any], limit: int) -> list[list[_Entry]]:
    """(name, leaf, expert or None) of the tensors of each file, in the order of the tree."""
    shards: list[list[_Entry]] = [[]]
    room = limit
    for slot in names.slots(config):
        leaf = found[slot.path]
        for expert in range(slot.shape[0]) if slot.expert else (None,):
            size = leaf.nbytes // (slot.shape[0] if slot.expert else 1)
            if size > room and shards[-1]:
                shards.append([])
                room = limit
            shards[-1].append((slot.name, leaf, expert))
            room -= size
    return shards


def _tensors(config: K3Config, name: str, leaf: Any, expert: int | None) -> dict[str, np.ndarray]:
    """Released names and values of one entry of a shard."""
    if expert is None:
        value = np.asarray(jax.device_get(leaf))
        if name.endswith("A_log"):
            value = np.concatenate([value, np.zeros(config.kda_a_log_size - len(value), value.dtype)])
        return {name: value}
    base = name.format(expert)
    if isinstance(leaf, MXFP4):
        return {
            f"{base}.{PACKED}": np.asarray(jax.device_get(leaf.codes[expert])),
            f"{base}.{SCALE}": np.asarray(jax.device_get(leaf.scales[expert])),
        }
    return {f"{base}.{FLOAT}": np.asarray(jax.device_get(leaf[expert]))}


def _layout(config: K3Config, entries: list[_Entry]) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """(full name, dtype, shape) of every tensor of a shard, without its values."""
    for name, leaf, expert in entries:
        if expert is None:
            shape = (config.kda_a_log_size,) if name.endswith("A_log") else tuple(leaf.shape)
            yield names.PREFIX + name, leaf.dtype, shape
        elif isinstance(leaf, MXFP4):
            for suffix, half in ((PACKED, leaf.codes), (SCALE, leaf.scales)):
                yield f"{names.PREFIX}{name.format(expert)}.{suffix}", half.dtype, tuple(half.shape[1:])
        else:
            yield f"{names.PREFIX}{name.format(expert)}.{FLOAT}", leaf.dtype, tuple(leaf.shape[1:])


def _write_shard(path: Path, config: K3Config, entries: list[_Entry]) -> tuple[list[str], int]:
    """Write one file; returns the full names in it and the bytes of its tensors."""
    # Wide types first keeps every tensor aligned to its type.
    entries = sorted(entries, key=lambda e: -_itemsize(e[1]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in _layout(config, entries):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        stored = _STORED[str(np.dtype(dtype))]
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, leaf, expert in entries:
            for value in _tensors(config, name, leaf, expert).values():
                file.write(np.ascontiguousarray(value).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return [name for name in header if name != "__metadata__"], position


def _itemsize(leaf: Any) -> int:
    return 1 if isinstance(leaf, MXFP4) else np.dtype(leaf.dtype).itemsize
