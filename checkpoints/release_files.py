"""The files of a checkpoint in release format: index, shards and what their headers list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .safetensors_file import Tensor, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


def is_release_dir(path: Path) -> bool:
    """Whether ``path`` is a directory with a config and weights in the release's format."""
    return (path / CONFIG).is_file() and ((path / INDEX).is_file() or (path / SINGLE).is_file())


def list_tensors(path: Path) -> tuple[list[Tensor], tuple[Path, ...], list[str]]:
    """(tensors, files, faults) of a directory; reads headers only."""
    faults: list[str] = []
    if (path / INDEX).is_file():
        weight_map = _weight_map(path / INDEX)
        files = tuple(path / name for name in sorted(set(weight_map.values())))
        faults += [
            f"{file.name}: not a safetensors file of any index, beside {INDEX}"
            for file in sorted(path.glob("*.safetensors"))
            if file not in files
        ]
    elif (path / SINGLE).is_file():
        weight_map, files = None, (path / SINGLE,)
    else:
        return [], (), [f"no weights: expected {INDEX} or {SINGLE}"]
    tensors: dict[str, Tensor] = {}
    broken = set()
    for file in files:
        if not file.is_file():
            count = sum(name == file.name for name in (weight_map or {}).values())
            faults.append(f"{file.name}: missing; the index puts {count} tensors there")
            broken.add(file.name)
            continue
        try:
            header = read_header(file)
        except CheckpointError as error:
            faults += [f"{file.name}: {fault}" for fault in error.faults]
            broken.add(file.name)
            continue
        for name, tensor in header.items():
            if weight_map is not None and weight_map.get(name) != file.name:
                owner = weight_map.get(name, "nowhere")
                faults.append(f"{file.name}: tensor {name}: is here, but the index puts it {owner}")
            tensors.setdefault(name, tensor)
    for name, file_name in (weight_map or {}).items():
        if name not in tensors and file_name not in broken:
            faults.append(f"{file_name}: tensor {name}: the index puts it here, the file has no such tensor")
    return list(tensors.values()), files, faults


def _weight_map(path: Path) -> dict[str, str]:
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"not valid JSON: {error}"]) from error
    found = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise CheckpointError(path, ["weight_map: expected an object of tensor name to file name"])
    if not found:
        raise CheckpointError(path, ["weight_map: expected at least one tensor, got none"])
    for name, file in found.items():
        if Path(file).name != file or file in ("", ".."):
            raise CheckpointError(path, [f"tensor {name}: expected a file name, got {file!r}"])
    return found
