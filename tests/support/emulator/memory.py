"""Memories of the emulated GPU: no access outside an array, and shared memory is watched for races."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from typing import Any

import numpy as np

from .numbers import BF16, BFloat16, Float32, Int32, Int64, Uint8

_VIEW: dict[Any, Any] = {
    Int32: np.int32,
    Int64: np.int64,
    Float32: np.float32,
    BFloat16: np.uint16,
    Uint8: np.uint8,
}
SIZE: dict[Any, int] = {ty: np.dtype(view).itemsize for ty, view in _VIEW.items()}
"""Bytes of a type in memory."""


class AccessError(RuntimeError):
    """An address that is not aligned, or outside every array."""


class Memory:
    """``size`` bytes, each 0xFF: NaN in every float type."""

    def __init__(self, size: int):
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self._views = {ty: self.bytes.view(view) for ty, view in _VIEW.items()}

    def check(self, address: int, count: int) -> None:
        """Raise unless ``count`` bytes from ``address`` on exist."""
        if not 0 <= address <= len(self.bytes) - count:
            raise AccessError(f"address {address}, {count} bytes: outside memory")

    def get(self, address: int, ty: Any, n: int = 1) -> list[Any]:
        """``n`` numbers; the address is aligned to all of them, as one load."""
        self._aligned(address, ty, n)
        at = address // SIZE[ty]
        values = self._views[ty][at : at + n]
        if ty is Float32:
            return list(values)
        if ty is BFloat16:
            return list(values.view(BF16).astype(np.float32))
        make = Int64 if ty is Int64 else Int32
        return [make(x) for x in values]

    def put(self, address: int, ty: Any, values: list[Any]) -> None:
        self._aligned(address, ty, len(values))
        at = address // SIZE[ty]
        if ty is BFloat16:
            values = list(np.array(values, np.float32).astype(BF16).view(np.uint16))
        self._views[ty][at : at + len(values)] = values

    def _aligned(self, address: int, ty: Any, n: int) -> None:
        if address % (SIZE[ty] * n):
            raise AccessError(f"address {address}: not aligned to {SIZE[ty] * n} bytes")
        self.check(address, SIZE[ty] * n)


class Global(Memory):
    """Global memory with named arrays; between them lies nothing."""

    def __init__(self, size: int):
        super().__init__(size)
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.names: list[str] = []

    def place(self, name: str, array: np.ndarray) -> int:
        """Copy an array in; its address."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at = -(-(self.ends[-1] if self.ends else 0) // 256) * 256 + 4096
        if at + len(data) > len(self.bytes):
            raise MemoryError(f"{name}: the emulated memory of {len(self.bytes)} bytes is full")
        self.bytes[at : at + len(data)] = data
        self.starts.append(at)
        self.ends.append(at + len(data))
        self.names.append(name)
        return at

    def check(self, address: int, count: int) -> None:
        i = bisect.bisect_right(self.starts, address) - 1
        if i < 0 or address + count > self.ends[i]:
            near = f"{address - self.starts[i]} bytes into {self.names[i]}" if i >= 0 else "before all"
            raise AccessError(f"address {address}, {count} bytes: outside every array; {near}")


class Race(RuntimeError):  # noqa: N818 (what it is)
    """Two threads touched the same shared memory, one writing, with nothing between that orders them."""


MANY = -2


class Shared(Memory):
    """Shared memory of a block. Accesses carry who makes them: (thread, block epoch, warp epoch).

    A barrier of the block begins a new block epoch, ``sync_warp`` a new epoch of its warp. Two accesses of
    different threads are ordered if their block epochs differ, or the threads are of one warp and its
    epochs differ. What arrives by an asynchronous copy has no owner.

    Args:
        flags: addresses of words that are not watched: whoever sets one sets it to the same number.
    """

    def __init__(self, size: int, flags: Collection[int] = ()):
        super().__init__(size)
        self.flags = frozenset(flags)
        self.wrote: list[Any] = [None] * (size // 4)
        self.read: list[Any] = [None] * (size // 4)

    def forget(self, address: int, count: int) -> None:
        """New contents, ordered by other means than epochs."""
        lo, hi = address // 4, (address + count + 3) // 4
        self.wrote[lo:hi] = [None] * (hi - lo)
        self.read[lo:hi] = [None] * (hi - lo)

    def get_as(self, who: tuple[int, int, int] | None, address: int, ty: Any, n: int = 1) -> list[Any]:
        if who is not None and address not in self.flags:
            for word in range(address // 4, (address + SIZE[ty] * n + 3) // 4):
                if _conflict(self.wrote[word], who):
                    raise Race(
                        f"byte {4 * word}: thread {who[0]} reads what thread {self.wrote[word][0]} wrote"
                    )
                last = self.read[word]
                # Readers of one epoch are kept as one: one of them, or that there were several.
                if last is not None and last[1] == who[1] and last[0] != who[0]:
                    same_warp = last[0] // 32 == who[0] // 32 and last[0] != MANY
                    self.read[word] = (who[0], *who[1:], True) if same_warp else (MANY, *who[1:], True)
                else:
                    self.read[word] = (*who, False)
        return self.get(address, ty, n)

    def put_as(self, who: tuple[int, int, int] | None, address: int, ty: Any, values: list[Any]) -> None:
        if who is not None and address not in self.flags:
            for word in range(address // 4, (address + SIZE[ty] * len(values) + 3) // 4):
                if _conflict(self.wrote[word], who):
                    raise Race(f"byte {4 * word}: threads {who[0]} and {self.wrote[word][0]} write")
                if _conflict(self.read[word], who):
                    raise Race(f"byte {4 * word}: thread {who[0]} writes what another reads")
                self.wrote[word] = who
        self.put(address, ty, values)


def _conflict(last: Any, who: tuple[int, int, int]) -> bool:
    """Whether an earlier access by another thread is not ordered before this one."""
    if last is None or last[1] != who[1]:
        return False
    if last[0] == MANY:
        return True
    shared_by_lanes = len(last) == 4 and last[3]
    if last[0] == who[0] and not shared_by_lanes:
        return False
    return last[0] // 32 != who[0] // 32 or last[2] == who[2]


__all__ = ["MANY", "SIZE", "AccessError", "Global", "Memory", "Race", "Shared"]
