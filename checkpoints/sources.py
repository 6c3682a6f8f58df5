"""Where the values of a leaf come from: one tensor of a file, or one per expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from k3jax.quant import MXFP4

from .mxfp4_check import check_scales
from .safetensors_file import DTYPES, Box, Reader, Tensor, whole


@dataclasses.dataclass(frozen=True)
class Source:
    """An array in the files of a checkpoint.

    Attributes:
        tensors: one tensor, or the E of a leaf that stacks experts.
        stacked: whether axis 0 counts the tensors.
    """

    tensors: tuple[Tensor, ...]
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.tensors[0].shape
        return (len(self.tensors), *inner) if self.stacked else inner

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.tensors[0].dtype]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def in_slots(self, experts: tuple[int, ...] | None) -> Source:
        """A leaf of experts in the order of physical slots, which may repeat one; None leaves it alone."""
        if experts is None:
            return self
        return dataclasses.replace(self, tensors=tuple(self.tensors[e] for e in experts))

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        """The values inside ``box``; reads nothing outside it."""
        out = np.empty([s.stop - s.start for s in box], self.dtype)
        if self.stacked:
            chosen = self.tensors[box[0]]
            reader.read(chosen, (box[1:],) * len(chosen), out)
        else:
            reader.read(self.tensors, (box,), out)
        return out


@dataclasses.dataclass(frozen=True)
class ScaleSource:
    """The scale bytes of a packed weight, refused where they cannot be decoded exactly.

    Attributes:
        packed: sources of the codes and of the scales.
        dtype_name: the dtype they will be decoded to; None for no decode (bytes are copied).
    """

    packed: MXFP4
    dtype_name: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.scales.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.packed.scales.dtype

    @property
    def nbytes(self) -> int:
        return self.packed.scales.nbytes

    def read(self, reader: Reader, box: Box) -> np.ndarray:
        scales = self.packed.scales.read(reader, box)

        def codes() -> np.ndarray:
            columns = slice(16 * box[-1].start, 16 * box[-1].stop)
            return self.packed.codes.read(reader, (*box[:-1], columns))

        first = self.packed.scales.tensors

        def name(index: tuple[int, ...]) -> str:
            tensor = first[index[0]]
            flat = index[1] * tensor.shape[1] + index[2]
            return f"{tensor.file.name}: tensor {tensor.name}, byte {flat} (row {index[1]}, block {index[2]})"

        origin = tuple(s.start for s in box)
        check_scales(scales, codes, self.dtype_name, lambda i: name(tuple(np.add(i, origin).tolist())))
        return scales


Readable = Source | ScaleSource


def read_whole(source: Readable, reader: Reader) -> np.ndarray:
    return source.read(reader, whole(source.shape))
