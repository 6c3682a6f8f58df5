"""Dealing row groups to SMs so that bytes are level."""

from __future__ import annotations

from collections.abc import Sequence


def deal(groups: int, each: int, loads: Sequence[int]) -> list[int]:
    """How many of ``groups`` every SM takes, so that ``load + count * each`` is as level as it can be.

    Ties go to the lowest SM. Args: ``each`` bytes of a group; ``loads`` bytes each SM has already.
    """
    if groups < 0 or each < 1:
        raise ValueError(f"groups, each: expected at least 0 and 1, got {groups} and {each}")
    low, high = min(loads), max(loads) + groups * each
    while low < high:  # the highest level that needs no more groups than there are
        middle = (low + high + 1) // 2
        if sum(max(0, (middle - load) // each) for load in loads) <= groups:
            low = middle
        else:
            high = middle - 1
    counts = [max(0, (low - load) // each) for load in loads]
    rest = groups - sum(counts)
    order = sorted(range(len(loads)), key=lambda sm: (loads[sm] + counts[sm] * each, sm))
    for sm in order[:rest]:
        counts[sm] += 1
    return counts


def runs(counts: Sequence[int], first: int = 0) -> list[tuple[int, int, int, int]]:
    """(sm0, sm1, g0, g1) of neighbouring SMs with equal counts, groups dealt in SM order from ``first``."""
    out: list[tuple[int, int, int, int]] = []
    at = first
    for sm, count in enumerate(counts):
        if count:
            if out and out[-1][1] == sm and (out[-1][3] - out[-1][2]) == count * (sm - out[-1][0]):
                out[-1] = (out[-1][0], sm + 1, out[-1][2], at + count)
            else:
                out.append((sm, sm + 1, at, at + count))
        at += count
    return out


__all__ = ["deal", "runs"]
