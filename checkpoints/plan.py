"""Everything that can be known about a checkpoint before reading weights: the plan of a load.

Headers are read, names matched both ways, shapes and dtypes compared; only the paddings of
``A_log``, a few hundred bytes, are read.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.config import K3Config
from k3jax.quant import MXFP4

from . import names
from .errors import CheckpointError
from .release_files import CONFIG, list_tensors
from .safetensors_file import DTYPES, Reader, Tensor, whole
from .sources import Source

PACKED, SCALE, FLOAT = "weight_packed", "weight_scale", "weight"
_SCALE_DTYPES = ("U8", "F8_E8M0")
_RELEASED = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
MXFP4_FORMAT = "mxfp4-pack-quantized"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the files of a checkpoint fill the parameter tree.

    Attributes:
        config: with ``kda_a_log_size`` as stored in the files.
        leaves: for each path of the tree its Source, or an MXFP4 of two.
        skipped: full names of tensors without a place in the text model (vision).
        files: the files that hold tensors.
        tensors: how many tensors fill the leaves.
    """

    path: Path
    config: K3Config
    leaves: dict[names.Path_, Any]
    skipped: tuple[str, ...]
    files: tuple[Path, ...]
    tensors: int

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.arrays())

    def arrays(self) -> list[Source]:
        """Every source, codes and scales separately."""
        found: list[Source] = []
        for leaf in self.leaves.values():
            found += [leaf.codes, leaf.scales] if isinstance(leaf, MXFP4) else [leaf]
        return found


@dataclasses.dataclass
class Examination:
    """What was found, faults included; ``plan`` is only whole when there are none."""

    plan: Plan
    faults: list[str]
    found: dict[str, Tensor]


def preflight(path: Path, config: K3Config | None = None) -> Plan:
    """The plan of a checkpoint in release format.

    Args:
        config: the expected architecture; None reads config.json.

    Raises:
        CheckpointError: lists every fault with its file and tensor.
        FileNotFoundError: no config.json.
    """
    result = examine(path, config)
    if result.faults:
        raise CheckpointError(path, result.faults)
    return result.plan


def examine(path: Path, config: K3Config | None = None) -> Examination:
    """As :func:`preflight`, with the faults in the result instead of raised."""
    config = config or K3Config.from_pretrained(path)
    stored, files, faults = list_tensors(path)
    incomplete = bool(faults)
    found, skipped = _by_canonical_name(stored, faults)
    unused = dict(found)
    leaves: dict[names.Path_, Any] = {}
    absent: list[str] = []
    for slot in names.slots(config) if files else ():
        leaf = (_expert_leaf if slot.expert else _leaf)(slot, unused, faults, absent)
        if leaf is not None:
            leaves[slot.path] = leaf
    # Once the files themselves are in order; before that, these only repeat what is wrong there.
    faults += [] if incomplete else absent
    unknown = [f"{tensor.file.name}: tensor {tensor.name}" for tensor in unused.values()]
    faults += [f"{where}: unknown, it fills no leaf of this model" for where in unknown]
    packed = any(isinstance(leaf, MXFP4) for leaf in leaves.values())
    _check_quantization(path, packed, faults)
    size = _check_a_log(config, leaves, faults)
    config = dataclasses.replace(config, kda_a_log_size=size)
    used = len(found) - len(unused)
    return Examination(Plan(path, config, leaves, skipped, files, used), faults, found)


def _by_canonical_name(stored: list[Tensor], faults: list[str]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    found: dict[str, Tensor] = {}
    skipped = []
    for tensor in stored:
        if names.is_vision(tensor.name):
            skipped.append(tensor.name)
            continue
        name = names.canonical(tensor.name)
        if name in found:
            faults.append(
                f"{tensor.file.name}: tensor {tensor.name}: the same parameter as {found[name].name} "
                f"in {found[name].file.name}; expected one spelling"
            )
        else:
            found[name] = tensor
    return found, tuple(skipped)


def _compare(tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[str, ...], faults: list[str]) -> bool:
    if tensor.shape == shape and tensor.dtype in dtypes:
        return True
    faults.append(
        f"{tensor.file.name}: tensor {tensor.name}: expected {' or '.join(dtypes)} {list(shape)}, "
        f"got {tensor.dtype} {list(tensor.shape)}"
    )
    return False


def _leaf(slot: names.Slot, unused: dict[str, Tensor], faults: list[str], absent: list[str]) -> Source | None:
    tensor = unused.pop(slot.name, None)
    if tensor is None:
        absent.append(f"tensor {slot.name}: missing, expected {_RELEASED[slot.dtype]} {list(slot.shape)}")
        return None
    shape = slot.shape
    if slot.is_conv and tensor.shape in (shape[::2], (shape[0], shape[2], 1)):
        # [C, 4] and [C, 4, 1] are the same bytes in the same order as [C, 1, 4].
        tensor = dataclasses.replace(tensor, shape=shape)
    if slot.is_a_log and len(tensor.shape) == 1 and tensor.shape[0] >= shape[0]:
        shape = tensor.shape
    if not _compare(tensor, shape, (_RELEASED[slot.dtype],), faults):
        return None
    return Source((tensor,), stacked=False)


def _expert_leaf(
    slot: names.Slot, unused: dict[str, Tensor], faults: list[str], absent: list[str]
) -> Source | MXFP4 | None:
    """A leaf of E experts: packed or float, decided by the tensors that are there."""
    count, out, inner = slot.shape
    parts: dict[str, list[Tensor]] = {}
    for suffix in (PACKED, SCALE, FLOAT):
        keys = [f"{slot.name.format(e)}.{suffix}" for e in range(count)]
        parts[suffix] = [unused.pop(key) for key in keys if key in unused]
    if parts[PACKED] or parts[SCALE]:
        if parts[FLOAT]:
            faults.append(
                f"tensor {parts[FLOAT][0].name}: float beside packed experts; expected one kind in a leaf"
            )
        wanted = {PACKED: (out, inner // 2), SCALE: (out, inner // 32)}
        dtypes = {PACKED: ("U8",), SCALE: _SCALE_DTYPES}
    else:
        wanted, dtypes = {FLOAT: (out, inner)}, {FLOAT: ("BF16", "F32")}
    sources = []
    for suffix, shape in wanted.items():
        kind = PACKED if suffix == FLOAT and not parts[FLOAT] else suffix
        if not _all_there(slot, kind, parts[suffix], absent):
            continue
        fits = [_compare(tensor, shape, dtypes[suffix], faults) for tensor in parts[suffix]]
        if all(fits):
            sources.append(_stack(parts[suffix], faults))
    if len(sources) < len(wanted) or None in sources:
        return None
    return MXFP4(*sources) if len(sources) == 2 else sources[0]


def _all_there(slot: names.Slot, suffix: str, present: list[Tensor], missing: list[str]) -> bool:
    if len(present) == slot.shape[0]:
        return True
    there = {names.canonical(tensor.name) for tensor in present}
    absent = [e for e in range(slot.shape[0]) if f"{slot.name.format(e)}.{suffix}" not in there]
    missing.append(
        f"tensor {slot.name.format(absent[0])}.{suffix}: missing"
        + (f", and those of {len(absent) - 1} more of {slot.shape[0]} experts" if len(absent) > 1 else "")
    )
    return False


def _stack(tensors: list[Tensor], faults: list[str]) -> Source | None:
    kinds = {DTYPES[tensor.dtype] for tensor in tensors}
    if len(kinds) > 1:
        text = ", ".join(sorted(map(str, kinds)))
        faults.append(f"tensor {tensors[0].name}: expected one dtype for the experts of a leaf, got {text}")
        return None
    return Source(tuple(tensors), stacked=True)


def _check_quantization(path: Path, packed: bool, faults: list[str]) -> None:
    """Packed bytes mean nothing without their declared format."""
    try:
        tree = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        faults.append(f"{CONFIG}: not valid JSON: {error}")
        return
    if (tree := _object(tree, CONFIG, faults)) is None:
        return
    if (text := _object(tree.get("text_config"), f"{CONFIG}: text_config", faults)) is None:
        return
    declared = text.get("quantization_config") or tree.get("quantization_config")
    if declared is None:
        if packed:
            faults.append(
                "config.json: quantization_config: missing, but there are packed experts; "
                f"expected format {MXFP4_FORMAT!r}"
            )
        return
    where = f"{CONFIG}: quantization_config"
    if (declared := _object(declared, where, faults)) is None:
        return
    expected: list[tuple[str, Any, Any]] = [
        ("quant_method", declared.get("quant_method"), "compressed-tensors"),
        ("format", declared.get("format"), MXFP4_FORMAT),
    ]
    for group, content in (
        _object(declared.get("config_groups"), f"{where}.config_groups", faults) or {}
    ).items():
        name = f"config_groups.{group}"
        if (content := _object(content, f"{where}.{name}", faults)) is None:
            continue
        if (weights := _object(content.get("weights"), f"{where}.{name}.weights", faults)) is None:
            continue
        for key, only in (("num_bits", 4), ("type", "float"), ("group_size", 32), ("symmetric", True)):
            expected.append((f"{name}.weights.{key}", weights.get(key), only))
    faults += [
        f"{where}.{key}: expected {only!r}, got {value!r}" for key, value, only in expected if value != only
    ]


def _object(value: Any, where: str, faults: list[str]) -> dict[str, Any] | None:
    """``value`` if it is a JSON object, an empty one for null; else None, and a fault."""
    if value is None or isinstance(value, dict):
        return value or {}
    faults.append(f"{where}: expected an object, got {type(value).__name__} {value!r}"[:200])
    return None


def _check_a_log(config: K3Config, leaves: dict[names.Path_, Any], faults: list[str]) -> int:
    """Cut A_log to the heads after checking what is cut off; returns the stored length."""
    heads, sizes = config.kda_num_heads, {}
    with Reader() as reader:
        for path, source in leaves.items():
            if path[-1] != "A_log":
                continue
            (tensor,) = source.tensors
            values = source.read(reader, whole(source.shape))
            sizes[tensor.shape[0]] = tensor
            where = f"{tensor.file.name}: tensor {tensor.name}"
            if not np.isfinite(values[:heads]).all():
                faults.append(f"{where}: expected {heads} finite numbers, got {values[:heads].tolist()}")
            if (values[heads:] != 0).any():  # NaN differs from 0 too
                at = heads + int(np.argmax(values[heads:] != 0))
                faults.append(
                    f"{where}: expected zeros past the {heads} heads (one entry per head, not per "
                    f"channel), got {values[at]} at entry {at}"
                )
            leaves[path] = Source((dataclasses.replace(tensor, shape=(heads,)),), stacked=False)
    if len(sizes) > 1:
        faults.append(f"A_log: expected one length in every layer, got {sorted(sizes)}")
    return max(sizes, default=config.kda_a_log_size)
