"""What ``k3jax inspect`` prints: everything about a checkpoint but its weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.config import K3Config

from . import names
from .errors import CheckpointError
from .locate import resolve
from .manifest import MANIFEST, is_orbax_dir, parts, read_manifest
from .plan import FLOAT, PACKED, SCALE, examine
from .release_files import CONFIG, INDEX, SINGLE, is_release_dir
from .sources import Source

_FAULTS_SHOWN = 40
_EXPERT = re.compile(r"(?<=experts\.)\d+")

_Key = tuple[str, tuple[int, ...], str]
"""What the tensors of a row share: name pattern, shape, dtype."""


@dataclasses.dataclass
class _Row:
    """How many tensors there should be, how many there are."""

    bytes: int = 0
    expected: int = 0
    found: int = 0


class _Table:
    """Rows by name pattern, shape and dtype, so that none stands for tensors unlike it."""

    def __init__(self) -> None:
        self.rows: dict[_Key, _Row] = {}
        self._expected: dict[str, _Key] = {}

    def _row(self, key: _Key) -> _Row:
        return self.rows.setdefault(key, _Row())

    def expect(self, name: str, shape: tuple[int, ...], dtype: str, count: int = 1) -> None:
        """Tensors of a whole checkpoint; ``*`` in the name for ``count`` experts."""
        key = (names.pattern(name), shape, dtype)
        self._expected[name] = key
        row = self._row(key)
        row.expected += count
        row.bytes += count * int(np.prod(shape)) * np.dtype(dtype).itemsize

    def find(self, name: str, tensor: Any) -> None:
        """A stored tensor: in the row that expects its name, whatever its shape, or in one of its own."""
        if key := self._expected.get(_EXPERT.sub("*", name)):
            self._row(key).found += 1
        else:
            row = self._row((names.pattern(name), tuple(tensor.shape), tensor.dtype))
            row.found += 1
            row.bytes += tensor.nbytes


def inspect_report(path: str | os.PathLike[str]) -> str:
    """Config, tensor table, parameter and byte totals, and what is missing or faulty.

    Args:
        path: a checkpoint directory of either format, the name of one that ships, a directory with a
            config.json only, or the config.json.

    Raises:
        FileNotFoundError: none of those.
        ValueError: a config that is not K3's.
    """
    folder = Path(path)
    if not (folder.is_file() or (folder / CONFIG).is_file()):
        folder = resolve(path)
    config = K3Config.from_pretrained(folder)
    if folder.is_file():
        folder, only_config = folder.parent, True
    else:
        only_config = not (is_release_dir(folder) or is_orbax_dir(folder))
    if only_config:
        table, skipped, kind = _expected_rows(config, {}), (), "config only"
        missing = sum(row.expected for row in table.rows.values())
        faults = [f"no weights: {missing} tensors missing; expected {INDEX} or {SINGLE}"]
    elif is_orbax_dir(folder):
        kind = "converted (Orbax)"
        config, table, faults, skipped = _orbax(folder, config)
    else:
        kind = "release format"
        found = examine(folder, config)
        config, faults, skipped = found.plan.config, found.faults, found.plan.skipped
        table = _expected_rows(config, found.plan.leaves)
        for name, tensor in found.found.items():
            table.find(name, tensor)
    sections = [f"{folder} ({kind})", _config_text(config), _table_text(table)]
    sections.append(_totals_text(config, table, only_config))
    if skipped:
        sections.append(f"Skipped, outside the text model: {len(skipped)} tensors\n" + _patterns(skipped))
    sections.append(_faults_text(faults))
    if not only_config:
        sections.append("Names, shapes, dtypes and lengths of files were checked; the values were not.")
    return "\n\n".join(sections)


def _patterns(tensors: tuple[str, ...]) -> str:
    counts = sorted(Counter(map(names.pattern, tensors)).items())
    return "\n".join(f"  {count:7d} {name}" for name, count in counts)


def _expected_rows(config: K3Config, leaves: dict[names.Path_, Any]) -> _Table:
    """Rows of a complete checkpoint; experts are packed unless ``leaves`` has them in float."""
    table = _Table()
    for slot in names.slots(config):
        leaf = leaves.get(slot.path)
        if slot.expert and isinstance(leaf, Source):
            count, out, inner = slot.shape
            table.expect(f"{slot.name.replace('{}', '*')}.{FLOAT}", (out, inner), str(leaf.dtype), count)
        elif slot.expert:
            count, out, inner = slot.shape
            name = slot.name.replace("{}", "*")
            table.expect(f"{name}.{PACKED}", (out, inner // 2), "uint8", count)
            table.expect(f"{name}.{SCALE}", (out, inner // 32), "uint8", count)
        else:
            shape = (config.kda_a_log_size,) if slot.is_a_log else slot.shape
            table.expect(slot.name, shape, slot.dtype)
    return table


def _orbax(folder: Path, config: K3Config) -> tuple[K3Config, _Table, list[str], tuple[str, ...]]:
    from .orbax_load import orbax_faults

    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return config, _Table(), [f"{MANIFEST}: {fault}" for fault in error.faults], ()
    config = dataclasses.replace(config, kda_a_log_size=manifest.kda_a_log_size)
    table = _Table()
    for path, leaf in manifest.leaves().items():
        for part, array in parts(leaf).items():
            name = names.dotted(path) + (f".{part}" if part else "")
            table.expect(name, array.shape, array.dtype)
            table.find(name, array)
    return config, table, orbax_faults(folder, manifest, config), manifest.skipped


def _config_text(config: K3Config) -> str:
    lines = ["Config"]
    kinds = config.layer_types
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "layer_types":
            value = f"{kinds.count('kda')} kda, {kinds.count('mla')} mla (mla at " + (
                ", ".join(str(i) for i, kind in enumerate(kinds) if kind == "mla") + ")"
            )
        elif field.name == "ignored_keys":
            value = ", ".join(value) or "none"
        lines.append(f"  {field.name:32s} {value}")
    return "\n".join(lines)


def _table_text(table: _Table) -> str:
    lines = ["Tensors (name, found of expected, dtype and shape of each, bytes of all expected)"]
    width = max((len(name) for name, _, _ in table.rows), default=0)
    for (name, shape, dtype), row in table.rows.items():
        count = f"{row.found} of {row.expected}" if row.expected else f"{row.found} unknown"
        lines.append(f"  {name:{width}s}  {count:>16s}  {dtype} {list(shape)}  {row.bytes:,} B")
    return "\n".join(lines)


def _totals_text(config: K3Config, table: _Table, only_config: bool) -> str:
    tensors = sum(row.expected for row in table.rows.values())
    found = sum(row.found for row in table.rows.values())
    return "\n".join(
        [
            "Totals of the text model",
            f"  parameters               {config.param_count():,}",
            f"  active per token         {config.active_param_count():,}",
            f"  bytes of the weights     {config.checkpoint_bytes():,} (released dtypes)",
            f"  tensors                  {0 if only_config else found:,} found of {tensors:,} expected",
            f"  state bytes per sequence {config.state_bytes(1, 0):,} + "
            f"{config.state_bytes(1, 1) - config.state_bytes(1, 0):,} per cached token",
        ]
    )


def _faults_text(faults: list[str]) -> str:
    if not faults:
        return "Nothing is missing or faulty."
    lines = [f"Missing or faulty: {len(faults)}"]
    lines += [f"  {fault}" for fault in faults[:_FAULTS_SHOWN]]
    if len(faults) > _FAULTS_SHOWN:
        lines.append(f"  ... and {len(faults) - _FAULTS_SHOWN} more")
    return "\n".join(lines)
