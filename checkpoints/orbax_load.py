"""Restoring a converted checkpoint onto the devices of a mesh of any size."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from k3jax.config import K3Config
from k3jax.mesh import MeshPlan
from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError
from .manifest import MANIFEST, Manifest, parts, read_manifest, shape_dtype
from .mxfp4_check import check_arrays
from .orbax_store import Store
from .place import Shardings, needed_bytes, place


def open_manifest(folder: Path, config: K3Config | None) -> tuple[Manifest, K3Config]:
    """The manifest of a finished conversion and its config, checked against the architecture.

    Raises:
        CheckpointError: unfinished, or leaves that differ from the architecture's in name, shape or dtype.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise CheckpointError(folder, [_unfinished(folder, manifest)])
    config = config or K3Config.from_pretrained(folder)
    config = dataclasses.replace(config, kda_a_log_size=manifest.kda_a_log_size)
    if faults := _differences(manifest.leaves(), config):
        raise CheckpointError(folder / MANIFEST, faults)
    return manifest, config


def orbax_faults(folder: Path, manifest: Manifest, config: K3Config) -> list[str]:
    """What is missing or wrong in a converted checkpoint, by its records; no array is read."""
    if not manifest.complete:
        return [_unfinished(folder, manifest)]
    with Store(folder) as store:
        faults = [f for piece, leaves in manifest.pieces.items() for f in store.check(piece, leaves)]
    return _differences(manifest.leaves(), config) + faults


def _unfinished(folder: Path, manifest: Manifest) -> str:
    with Store(folder) as store:
        done = sum(map(store.is_saved, manifest.pieces))
    return (
        f"conversion not finished: {done} of {len(manifest.pieces)} pieces; "
        "run the same `k3jax convert SRC DST` again to resume it"
    )


def _differences(stored: dict[names.Path_, Any], config: K3Config) -> list[str]:
    from k3jax.model import abstract_params

    expected = dict(names.leaves(abstract_params(config)))
    faults = [f"leaf {names.dotted(p)}: missing" for p in expected if p not in stored]
    extra = [path for path in stored if path not in expected]
    faults += [f"leaf {names.dotted(path)}: unknown, it fills no leaf of this model" for path in extra]
    for path in expected.keys() & stored.keys():
        want, got = expected[path], stored[path]
        if isinstance(want, MXFP4) and not isinstance(got, MXFP4):  # experts kept in a float type
            allowed = {(tuple(want.shape), "bfloat16"), (tuple(want.shape), "float32")}
            if (got.shape, got.dtype) not in allowed:
                faults.append(f"leaf {names.dotted(path)}: expected MXFP4 or float {want.shape}, got {got}")
        elif shape_dtype(want) != got:
            text = f"expected {_text(shape_dtype(want))}, got {_text(got)}"
            faults.append(f"leaf {names.dotted(path)}: {text}")
    return sorted(faults)


def _text(leaf: Any) -> str:
    return " ".join(filter(None, (f"{name} {array}".strip() for name, array in parts(leaf).items())))


def load_orbax(
    folder: Path, config: K3Config | None, dtype: str | None, mesh: Mesh | MeshPlan | None, progress: bool
) -> tuple[Any, K3Config, int, tuple[str, ...]]:
    """(params, config, bytes, skipped) of a converted checkpoint; see ``load_params``."""
    from k3jax.model import abstract_params

    manifest, config = open_manifest(folder, config)
    sharding = Shardings(config, mesh)
    with Store(folder) as store:
        if faults := [f for piece, leaves in manifest.pieces.items() for f in store.check(piece, leaves)]:
            raise CheckpointError(folder, faults)
        found: dict[names.Path_, Any] = {}
        targets = {piece: _targets(leaves, sharding) for piece, leaves in manifest.pieces.items()}
        sizes = {
            piece: _needed(leaves, targets[piece], sharding) for piece, leaves in manifest.pieces.items()
        }
        total = sum(sizes.values())
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="load", disable=None if progress else True
        ) as bar:
            for piece, leaves in manifest.pieces.items():
                plain = {path: leaf for path, leaf in leaves.items() if sharding.slots(path) is None}
                arrays = store.restore(piece, plain, targets[piece]) if plain else {}
                for path in leaves.keys() - plain.keys():
                    arrays |= _restore_slots(store, piece, path, leaves[path], sharding)
                found |= {
                    path: _finish(path, leaf, arrays, dtype, sharding.slots(path))
                    for path, leaf in leaves.items()
                }
                bar.update(sizes[piece])
    params = names.map_leaves(lambda path, _: found.pop(path), abstract_params(config))
    return sharding.with_placement(params), config, total, manifest.skipped


def _restore_slots(
    store: Store, piece: str, path: names.Path_, leaf: Any, sharding: Shardings
) -> dict[str, jax.Array]:
    """The arrays of an expert leaf in a plan's physical slots, each expert read where it is needed."""
    slots = sharding.slots(path)
    assert slots is not None  # this is for such leaves
    arrays = {}
    for key, (shape, array) in _in_slots(path, leaf, sharding).items():

        def read(box: tuple[slice, ...], key: str = key) -> np.ndarray:
            return store.read_experts(piece, key, box, list(slots[box[0]]))

        part = key.rpartition(".")[2] if isinstance(leaf, MXFP4) else None
        arrays[key] = place(read, shape, np.dtype(array.dtype), sharding(path, shape, part))
    return arrays


def _in_slots(path: names.Path_, leaf: Any, sharding: Shardings) -> dict[str, tuple[tuple[int, ...], Any]]:
    """For each array of a leaf its shape under the plan, and itself."""
    slots = sharding.slots(path)
    return {
        key: (array.shape if slots is None else (len(slots), *array.shape[1:]), array)
        for key, array in _keyed(path, leaf).items()
    }


def _keyed(path: names.Path_, leaf: Any) -> dict[str, Any]:
    return {names.dotted(path) + (f".{part}" if part else ""): array for part, array in parts(leaf).items()}


def _targets(leaves: dict[names.Path_, Any], sharding: Shardings) -> dict[str, Any]:
    return {
        names.dotted(path) + (f".{part}" if part else ""): sharding(path, array.shape, part or None)
        for path, leaf in leaves.items()
        for part, array in parts(leaf).items()
    }


def _needed(leaves: dict[names.Path_, Any], targets: dict[str, Any], sharding: Shardings) -> int:
    return sum(
        needed_bytes(shape, np.dtype(array.dtype).itemsize, targets[key])
        for path, leaf in leaves.items()
        for key, (shape, array) in _in_slots(path, leaf, sharding).items()
    )


def _finish(
    path: names.Path_,
    leaf: Any,
    arrays: dict[str, jax.Array],
    dtype: str | None,
    experts: tuple[int, ...] | None,
) -> Any:
    name = names.dotted(path)
    if isinstance(leaf, MXFP4):
        codes, scales = arrays[f"{name}.codes"], arrays[f"{name}.scales"]
        check_arrays(codes, scales, dtype or "bfloat16", name, experts)
        return MXFP4(codes, scales)
    array = arrays[name]
    return array.astype(jnp.float32) if dtype == "float32" else array
