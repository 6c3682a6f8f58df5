"""What a load did: bytes, time, memory, and what it left aside."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from pathlib import Path


def peak_host_bytes() -> int:
    """Largest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file():
        # getrusage would count the process that started this one, until it ran its own program.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """A finished load.

    Attributes:
        path: the directory.
        format: "release" or "orbax".
        leaves: arrays made, codes and scales of a packed weight counted separately.
        tensors: tensors used: of the files (release), or as many as leaves (orbax).
        bytes: read by this process.
        seconds: wall time.
        peak_host_bytes: largest resident size of the process up to the end of the load.
        skipped: tensors of the files that the text model has no place for.
    """

    path: str
    format: str
    leaves: int
    tensors: int
    bytes: int
    seconds: float
    peak_host_bytes: int
    skipped: tuple[str, ...]

    @property
    def gb_per_second(self) -> float:
        return self.bytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        text = (
            f"loaded {self.path} ({self.format}): {self.tensors} tensors, {self.bytes / 1e9:.3f} GB in "
            f"{self.seconds:.2f} s, {self.gb_per_second:.3g} GB/s, "
            f"peak host memory {self.peak_host_bytes / 1e9:.2f} GB"
        )
        if self.skipped:
            text += f"; skipped {len(self.skipped)} tensors outside the text model"
        return text


class Stopwatch:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
