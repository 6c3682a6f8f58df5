"""Headers of safetensors files, checked, and reads of the byte ranges of a tensor.

The format: eight bytes little-endian n, n bytes of JSON, then the tensors' bytes. Reading
needs no mapping of the file and no copy of a tensor of which only a part is wanted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from .errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    # Scale bytes under their own name: the same bytes, read as the exponents they are.
    "F8_E8M0": np.dtype(np.uint8),
}
"""Stored types that this library reads, and the numpy type of their bytes."""

_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER = 1 << 30
_PIECE = 16 << 20
_OPEN_FILES = 64

Box = tuple[slice, ...]
"""One slice with start and stop, step 1, per axis."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: ``offset`` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


def read_header(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file.

    Raises:
        CheckpointError: the file is shorter or longer than its header says, or the header is not
            one: broken JSON or another structure, a name twice, sizes that contradict shapes, gaps
            or overlaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(path, [f"no complete safetensors header in {size} bytes (cut short?)"])
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"unreadable safetensors header: {error}"]) from error
    if not isinstance(entries, dict):
        got = type(entries).__name__
        raise CheckpointError(path, [f"unreadable safetensors header: expected an object, got {got}"])
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extent(path, list(tensors.values()), 8 + length, size)
    return tensors


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a name twice: {sorted({n for n in names if names.count(n) > 1})}")
    return found


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of sizes or positions."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _entry_fault(entry: Any) -> str | None:
    """What keeps ``entry`` from describing a tensor."""
    if not isinstance(entry, dict):
        return f"expected an object, got {entry!r}"
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SIZES:
        return f"dtype: expected one of {', '.join(_SIZES)}, got {dtype!r}"
    if not _sizes(shape):
        return f"shape: expected a list of integers of at least 0, got {shape!r}"
    if not _sizes(offsets) or len(offsets) != 2:
        return f"data_offsets: expected two integers of at least 0, got {offsets!r}"
    return None


def _tensor(path: Path, name: str, entry: Any, data: int) -> Tensor:
    if fault := _entry_fault(entry):
        raise CheckpointError(path, [f"tensor {name}: unreadable header entry: {fault}"])
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    size = _SIZES[dtype] * math.prod(shape)
    if end - begin != size:
        text = f"{dtype} {list(shape)} is {size} bytes, the header gives it {begin}..{end}"
        raise CheckpointError(path, [f"tensor {name}: {text}"])
    return Tensor(name, dtype, shape, data + begin, path)


def _check_extent(path: Path, tensors: list[Tensor], data: int, size: int) -> None:
    """The tensors must tile the rest of the file."""
    position = data
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            text = f"begins at byte {tensor.offset}, expected {position} (gap or overlap)"
            raise CheckpointError(path, [f"tensor {tensor.name}: {text}"])
        position += tensor.nbytes
    if position != size:
        what = "is cut short" if position > size else "has bytes no tensor owns"
        raise CheckpointError(path, [f"the file {what}: its header needs {position} bytes, it has {size}"])


def whole(shape: tuple[int, ...]) -> Box:
    """The box of an entire array."""
    return tuple(slice(0, n) for n in shape)


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """(first element, elements) of each contiguous stretch of ``box``, in order."""
    axis = len(shape)
    while axis > 0 and box[axis - 1] == slice(0, shape[axis - 1]):
        axis -= 1
    outer = max(axis - 1, 0)  # axes before this one are walked, the rest is contiguous
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    inner_start = box[outer].start * strides[outer] if shape else 0
    length = (box[outer].stop - box[outer].start) * strides[outer] if shape else 1
    for index in itertools.product(*(range(s.start, s.stop) for s in box[:outer])):
        yield sum(i * s for i, s in zip(index, strides, strict=False)) + inner_start, length


class Reader:
    """Reads boxes of tensors with several threads; counts the bytes it has read.

    Use it as a context manager; it holds open files.
    """

    def __init__(self, threads: int = 8):
        self.bytes_read = 0
        self._pool = ThreadPoolExecutor(threads)
        self._files: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._close(0)

    def _close(self, keep: int) -> None:
        while len(self._files) > keep:
            os.close(self._files.popitem(last=False)[1])

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        self._files.move_to_end(path)
        return self._files[path]

    def read(self, tensors: tuple[Tensor, ...], boxes: tuple[Box, ...], out: np.ndarray) -> None:
        """Fill ``out`` (C order) with one box of each tensor, one after the other."""
        self._close(_OPEN_FILES)
        target = memoryview(out.reshape(-1).view(np.uint8))
        position, jobs = 0, []
        for tensor, box in zip(tensors, boxes, strict=True):
            descriptor, item = self._open(tensor.file), _SIZES[tensor.dtype]
            for first, count in _runs(tensor.shape, box):
                for begin in range(0, count * item, _PIECE):
                    size = min(_PIECE, count * item - begin)
                    at = tensor.offset + first * item + begin
                    jobs.append((descriptor, at, target[position : position + size], tensor))
                    position += size
        if position != len(target):
            raise AssertionError(f"boxes of {position} bytes for a buffer of {len(target)}")
        # Handing small reads to threads costs more than the reads.
        fill = map if position < _PIECE else self._pool.map
        for _ in fill(_fill, jobs):
            pass
        self.bytes_read += position


def _fill(job: tuple[int, int, memoryview, Tensor]) -> None:
    descriptor, at, target, tensor = job
    while len(target):
        count = os.preadv(descriptor, [target], at)
        if count == 0:
            raise CheckpointError(tensor.file, [f"tensor {tensor.name}: the file ends at byte {at}"])
        at, target = at + count, target[count:]
