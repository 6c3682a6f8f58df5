"""The dense weights in the megakernel's layout: packed once on the device, kept beside the parameters.

``params["megakernel"]`` holds :func:`~.decode_megakernel.operands.packed_shapes`; the other
implementations ignore it. Expert weights stay as they are, in one copy for every implementation.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import K3Config
from k3jax.quant import BLOCK, MXFP4

from .decode_megakernel.layout import Tiling
from .decode_megakernel.operands import is_matrix, layers_with, packed_part, packed_shapes, packed_vector
from .decode_megakernel.shapes import Plan

PACKED = "megakernel"
"""Name of the packed weights in the parameter tree."""
LEAST_SCALE, MOST_SCALE = 105, 128
"""E8M0 bytes of a block with a number in it: 2**-22 .. 2**1, where the decode to float16 is exact."""
_MATRICES = ("w1", "w3", "w2")


def plan_of(config: K3Config) -> Plan:
    """A plan for its sizes alone: packed weights depend neither on the batch nor on the SMs."""
    return Plan(config, 1)


def pack(params: Mapping[str, Any], config: K3Config) -> dict[str, jax.Array]:
    """Every dense weight of a model in the kernel's layout, made on the device of the weights.

    One matrix at a time is written into its stack, in place, so the extra memory besides the result is
    one matrix.

    Args:
        params: parameter tree in bfloat16 with MXFP4 experts, on one device.

    Raises:
        NotImplementedError: float32 parameters, float experts, or parameters on several devices.
        ValueError: expert scales outside the exact range, or shapes that are not the configuration's.
    """
    if problems := packing_problems(params):
        raise NotImplementedError("; ".join(problems))
    check_scales(params, config)
    plan = plan_of(config)
    return {
        name: _matrices(params, plan, name, shape) if is_matrix(name) else _vectors(params, plan, name, shape)
        for name, (_, shape) in packed_shapes(plan).items()
    }


def with_packed(
    params: Mapping[str, Any], config: K3Config, folder: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The parameter tree with its packed weights.

    Args:
        folder: where they are kept: read from there, or packed and written if the folder is not there.

    Raises:
        as :func:`pack` and :func:`load_packed`.
    """
    if folder is None or not Path(folder).exists():
        packed = pack(params, config)
        if folder is not None:
            save_packed(folder, packed, config)
    else:
        if problems := packing_problems(params):
            raise NotImplementedError("; ".join(problems))
        check_scales(params, config)
        packed = load_packed(folder, config, params["embed_tokens"].sharding)
    return {**params, PACKED: packed}


def packing_problems(params: Mapping[str, Any]) -> list[str]:
    """Why a parameter tree cannot be packed for one device; empty if it can."""
    found = kind_problems(params)
    devices = _devices(params)
    if len(devices) > 1:
        found.append(f"params: the megakernel runs on one device, got parameters on {len(devices)}")
    return found


def kind_problems(params: Mapping[str, Any]) -> list[str]:
    """Why weights are not of the kinds that the kernel reads; empty if they are."""
    found = []
    if params["embed_tokens"].dtype != jnp.bfloat16:
        found.append(f"dtype: the megakernel computes in bfloat16, got {params['embed_tokens'].dtype}")
    moe = [layer["block_sparse_moe"] for layer in params["layers"] if "block_sparse_moe" in layer]
    if not all(isinstance(layer["experts"][name], MXFP4) for layer in moe for name in _MATRICES):
        found.append("experts: the megakernel reads MXFP4 experts, got floats")
    return found


def _devices(params: Mapping[str, Any]) -> set[Any]:
    leaf = params["embed_tokens"]
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return set(leaf.devices()) if concrete else set()


# -- matrices -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("plan", "name"), donate_argnames="stack")
def _put(stack: jax.Array, source: Any, place: jax.Array, *, plan: Plan, name: str) -> jax.Array:
    """``stack`` with a layer's matrix at ``place``; all layers of a stack are one program."""
    if name == "lm_head":
        part = packed_part({"lm_head": source}, plan, name, 0)
    else:
        first = layers_with(plan, name)[0]
        part = packed_part({"layers": {first: source}}, plan, name, 0)
    return lax.dynamic_update_slice(stack, part[None].astype(stack.dtype), (place, *[0] * part.ndim))


def _matrices(params: Mapping[str, Any], plan: Plan, name: str, shape: tuple[int, ...]) -> jax.Array:
    source = params["embed_tokens"]
    stack = jnp.zeros(shape, jnp.bfloat16, device=_device(source))
    layers = [None] if name == "lm_head" else layers_with(plan, name)
    for place, layer in enumerate(layers):
        leaf = params["lm_head"] if layer is None else dense_of_layer(params["layers"][layer])
        try:
            stack = _put(stack, leaf, jnp.int32(place), plan=plan, name=name)
        except TypeError as error:
            where = name if layer is None else f"layer {layer}: {name}"
            raise ValueError(f"params: {where}: not of the configuration's shape: {error}") from error
    return stack


def _device(leaf: Any) -> Any:
    """Where the parameters are, unless this is traced."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return leaf.sharding if concrete else None


def dense_of_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer without its experts: they are not packed, and need not be looked at."""
    if "block_sparse_moe" not in layer:
        return dict(layer)
    moe = {name: leaf for name, leaf in layer["block_sparse_moe"].items() if name != "experts"}
    return {**layer, "block_sparse_moe": moe}


def _vectors(params: Mapping[str, Any], plan: Plan, name: str, shape: tuple[int, ...]) -> jax.Array:
    by_sublayer = name in ("gain", "direction")
    every = list(range(shape[0])) if by_sublayer else layers_with(plan, name)
    dense = {**params, "layers": [dense_of_layer(layer) for layer in params["layers"]]}
    dense.pop(PACKED, None)

    @jax.jit
    def stacked(params: Any) -> jax.Array:
        return jnp.stack([packed_vector(params, plan, name, i) for i in every])

    result = stacked(dense)
    if result.shape != shape:
        raise ValueError(f"params: {name}: expected {list(shape)}, got {list(result.shape)}")
    return result


# -- expert scales --------------------------------------------------------------------------------


@jax.jit
def _extreme_scales(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and most scale byte of blocks with a code that is not zero; (255, 0) if there is none."""
    used = _used(codes, scales)
    return jnp.min(jnp.where(used, scales, 255)), jnp.max(jnp.where(used, scales, 0))


def _used(codes: jax.Array, scales: jax.Array) -> jax.Array:
    blocks = codes.reshape(*scales.shape, BLOCK // 2)
    return ((blocks & 0x77) != 0).any(axis=-1)


def check_scales(params: Mapping[str, Any], config: K3Config) -> None:
    """Raise unless the kernel's decode of every expert weight is exact.

    It multiplies 4-bit codes by block scales in float16, which holds code * 2**(byte - 127) exactly for
    bytes 105 .. 128. Blocks of zeros may have any scale.

    Raises:
        ValueError: names layers, matrices and the bytes found.
    """
    found = []
    for i, layer in enumerate(params["layers"]):
        for name in _MATRICES if "block_sparse_moe" in layer else ():
            weight = layer["block_sparse_moe"]["experts"][name]
            low, high = (int(x) for x in jax.device_get(_extreme_scales(weight.codes, weight.scales)))
            if low > high or (low >= LEAST_SCALE and high <= MOST_SCALE):
                continue
            found.append(f"layer {i}, {name}: {_bytes_outside(weight)}")
    if found:
        more = f"; and {len(found) - 5} more matrices" if len(found) > 5 else ""
        raise ValueError(
            f"experts: expected scale bytes {LEAST_SCALE}..{MOST_SCALE} in blocks that are not zero, which "
            f"the megakernel decodes exactly; got {'; '.join(found[:5])}{more}"
        )


def _bytes_outside(weight: MXFP4) -> str:
    used = jax.jit(_used)(weight.codes, weight.scales)
    outside = used & ((weight.scales < LEAST_SCALE) | (weight.scales > MOST_SCALE))
    count = jnp.zeros(256, jnp.int32).at[weight.scales.reshape(-1)].add(outside.reshape(-1).astype(jnp.int32))
    counts = np.asarray(count)
    names = [str(byte) for byte in np.flatnonzero(counts)]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"bytes {shown} in {counts.sum()} blocks"


# -- files --------------------------------------------------------------------------------------

_ABOUT = "k3jax_packed.json"


def _about(config: K3Config) -> dict[str, Any]:
    shapes = {name: [dtype, list(shape)] for name, (dtype, shape) in packed_shapes(plan_of(config)).items()}
    return {"format": "k3jax.packed", "layout": _layout_digest(), "arrays": shapes}


@functools.cache
def _layout_digest() -> str:
    """Tells layouts apart that have equal shapes: the packed form of a small matrix."""
    import hashlib

    from .decode_megakernel.layout import pack as tile

    columns = 3 * 1984  # several chunks under any limit that a stage of the ring can have
    whole = tile(np.arange(16 * columns, dtype=np.int32).astype(np.float32).reshape(16, columns))
    return f"{Tiling(16, columns).chunk}-{hashlib.sha256(np.ascontiguousarray(whole)).hexdigest()[:16]}"


def save_packed(folder: str | os.PathLike[str], packed: Mapping[str, jax.Array], config: K3Config) -> None:
    """Store packed weights with Orbax in a new folder; :func:`load_packed` reads them.

    Raises:
        FileExistsError: the folder is there.
    """
    import orbax.checkpoint as ocp

    path = Path(folder).absolute()
    if path.exists():
        raise FileExistsError(f"folder: {path} exists")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as writer:
        writer.save(path / "arrays", args=ocp.args.PyTreeSave(dict(packed)))
    # Last: a folder without it is unfinished.
    partial = path / f"{_ABOUT}.partial"
    partial.write_text(json.dumps(_about(config)))
    os.replace(partial, path / _ABOUT)


def load_packed(
    folder: str | os.PathLike[str], config: K3Config, sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.Array]:
    """Packed weights that :func:`save_packed` stored.

    Args:
        sharding: where they go; default the first device.

    Raises:
        FileNotFoundError: there are none, or they are unfinished.
        ValueError: they are another configuration's, or of another version's layout.
    """
    import orbax.checkpoint as ocp

    path = Path(folder).absolute()
    if not (path / _ABOUT).is_file():
        raise FileNotFoundError(f"folder: no packed weights at {path}")
    have, want = json.loads((path / _ABOUT).read_text()), _about(config)
    if have != want:
        keys = [k for k in want if have.get(k) != want[k]]
        raise ValueError(f"{path}: packed for another configuration or version ({', '.join(keys)} differ)")
    where = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = packed_shapes(plan_of(config))
    items = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)
        for name, (dtype, shape) in shapes.items()
    }
    restore = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=where, global_shape=leaf.shape, dtype=leaf.dtype), items
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as reader:
        return reader.restore(path / "arrays", args=ocp.args.PyTreeRestore(item=items, restore_args=restore))


__all__ = [
    "LEAST_SCALE",
    "MOST_SCALE",
    "PACKED",
    "check_scales",
    "dense_of_layer",
    "kind_problems",
    "load_packed",
    "pack",
    "packing_problems",
    "save_packed",
    "with_packed",
]
