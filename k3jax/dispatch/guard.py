"""Where ``ragged_all_to_all`` is known to fail: as data, so that a plan refuses before any launch."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable

RANK_LIMIT = 32
"""Ranks up to which XLA's one-shot kernel has been seen right; 64 crashed on an NVL72 (xla 47283)."""

FIXED_JAXLIB: str | None = None
"""The first jaxlib in which more ranks are known to work; none is."""

BAD_NCCL: dict[str, tuple[int, str]] = {
    "2.30.7": (32, "breaks ragged exchanges of 64 ranks across an NVL72 (marin 8313)"),
}
"""NCCL version -> (ranks up to which it works, what is wrong)."""

_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:4])


def ragged_faults(platform: str, ranks: int, installed: Callable[[str], str | None] = _version) -> list[str]:
    """Reasons not to exchange by ``ragged_all_to_all``; empty where it is known to work.

    Args:
        platform: of the devices, as jax names it.
        ranks: that exchange.
        installed: version of a distribution, or None.
    """
    if platform not in ("gpu", "cuda"):
        return [f"ragged_all_to_all is not implemented on {platform}"]
    faults = []
    jaxlib = installed("jaxlib") or "0"
    fixed = FIXED_JAXLIB is not None and _numbers(jaxlib) >= _numbers(FIXED_JAXLIB)
    if ranks > RANK_LIMIT and not fixed:
        faults.append(
            f"ragged_all_to_all of {ranks} ranks: jaxlib {jaxlib} is not known to survive more than "
            f"{RANK_LIMIT} (openxla/xla 47283)"
        )
    for wheel in _NCCL_WHEELS:
        version = installed(wheel)
        limit, what = BAD_NCCL.get(version or "", (ranks, ""))
        if ranks > limit:
            faults.append(f"NCCL {version} ({wheel}) {what}")
    return faults


__all__ = ["BAD_NCCL", "FIXED_JAXLIB", "RANK_LIMIT", "ragged_faults"]
