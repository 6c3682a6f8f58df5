"""Numbers of the emulated GPU: int32 that wraps, int64 as Python's, float32 as numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Float32 = np.float32
BF16 = ml_dtypes.bfloat16


def wrap(x: int) -> int:
    """The low 32 bits as a signed number."""
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000


class Int32(int):
    """A signed 32-bit integer. Sums, products and shifts wrap; with an Int64 the result is one."""

    def __new__(cls, x: Any = 0) -> Int32:
        return super().__new__(cls, wrap(int(x)))

    @property
    def width(self) -> int:
        return 32


class Int64(int):
    """A 64-bit integer, of which only addresses and offsets are made: no wrapping is emulated."""

    def __new__(cls, x: Any = 0) -> Int64:
        return super().__new__(cls, int(x))


class Uint8(int):
    """An 8-bit integer in memory."""


class BFloat16:
    """bfloat16 in memory."""


def _operator(name: str) -> Callable[[Any, Any], Any]:
    plain: Any = getattr(int, name)

    def wrapped(a: Any, b: Any) -> Any:
        if isinstance(b, Int64) or not isinstance(b, int):
            out = plain(int(a), b) if isinstance(b, int) else NotImplemented
            return Int64(out) if out is not NotImplemented else out
        return Int32(plain(a, b))

    def wide(a: Any, b: Any) -> Any:
        out = plain(a, int(b)) if isinstance(b, int) else NotImplemented
        return Int64(out) if out is not NotImplemented else out

    setattr(Int32, name, wrapped)
    setattr(Int64, name, wide)
    return wrapped


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    _operator(f"__{_name}__")
    _operator(f"__r{_name}__")


def _division(name: str) -> None:
    """Quotients are only taken of numbers that are not negative, where all languages agree."""
    plain: Any = getattr(int, name)

    def checked(a: Any, b: Any) -> Any:
        if a < 0 or b < 0:
            raise ArithmeticError(f"{name.strip('_')}: a negative operand: {int(a)}, {int(b)}")
        wide = isinstance(a, Int64) or isinstance(b, Int64)
        return (Int64 if wide else Int32)(plain(int(a), int(b)))

    setattr(Int32, name, checked)
    setattr(Int64, name, checked)


for _name in ("floordiv", "mod", "rfloordiv", "rmod"):
    _division(f"__{_name}__")

Int32.__neg__ = lambda self: Int32(-int(self))
Int32.__invert__ = lambda self: Int32(~int(self))


def bits_of(x: Any) -> Int32:
    """The bits of a float32."""
    return Int32(int(np.float32(x).view(np.int32)))


def float_of(x: Any) -> np.float32:
    """The float32 with these bits."""
    return np.float32(np.array(wrap(int(x)), np.int32).view(np.float32))


def rounded(x: Any, dtype: Any) -> int:
    """16 bits of a float32 rounded to a 16-bit type."""
    return int(np.float32(x).astype(dtype).view(np.uint16))


def halves(words: Any, dtype: Any) -> np.ndarray:
    """int [.., n] words as float32 [.., 2 n] of packed 16-bit numbers, the lower half first."""
    packed = (np.array(words, np.int64) & 0xFFFFFFFF).astype(np.uint32)
    return np.ascontiguousarray(packed).view(np.uint16).view(dtype).astype(np.float32)


__all__ = [
    "BF16",
    "BFloat16",
    "Float32",
    "Int32",
    "Int64",
    "Uint8",
    "bits_of",
    "float_of",
    "halves",
    "rounded",
    "wrap",
]
