"""The error of a faulty checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SHOWN = 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is.

    Attributes:
        faults: every fault found, each naming the file or tensor, what was expected and what came.
    """

    def __init__(self, where: str | Path, faults: Iterable[str]):
        self.faults = tuple(faults)
        lines = list(self.faults[:_SHOWN])
        if more := len(self.faults) - len(lines):
            lines.append(f"... and {more} more")
        super().__init__(f"{where}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{where}:", *lines]))
