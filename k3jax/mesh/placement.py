"""Which expert lies in which physical slot of which rank: the one map of loader and dispatch.

E experts on n ranks take ``ceil(E / n)`` slots on every rank, so all ranks hold equally many. The
slots left over hold replicas of the busiest experts. Slot s belongs to rank ``s // slots_per_rank``.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Placement:
    """Experts of one layer in physical slots.

    Attributes:
        experts: the expert in each slot, slot by slot, rank by rank.
        num_experts: E; every one of 0..E-1 is in at least one slot.
        ranks: n.

    Raises:
        ValueError: slots that do not divide by the ranks, an expert in no slot or unknown, or two
            replicas of one expert on a rank.
    """

    experts: tuple[int, ...]
    num_experts: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or len(self.experts) % self.ranks:
            raise ValueError(
                f"placement: expected slots in equal shares for {self.ranks} ranks, got {len(self.experts)}"
            )
        held = np.asarray(self.experts)
        if set(self.experts) != set(range(self.num_experts)):
            missing = sorted(set(range(self.num_experts)) - set(self.experts))
            raise ValueError(f"placement: expected each of {self.num_experts} experts, missing {missing[:5]}")
        for rank, mine in enumerate(held.reshape(self.ranks, -1)):
            if len(set(mine.tolist())) != len(mine):
                raise ValueError(f"placement: rank {rank} holds an expert twice: {mine.tolist()}")

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.ranks

    @property
    def copies(self) -> np.ndarray:
        """int32 [E], replicas of each expert."""
        return np.bincount(self.experts, minlength=self.num_experts).astype(np.int32)

    def slot_table(self, width: int | None = None) -> np.ndarray:
        """int32 [E, width], the slots of each expert, lowest first; past its replicas they repeat.

        Args:
            width: at least the most replicas of an expert, which is the default.
        """
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        width = max(map(len, slots)) if width is None else width
        return np.array([[mine[i % len(mine)] for i in range(width)] for mine in slots], np.int32)

    def rank_loads(self, loads: Any = None) -> np.ndarray:
        """float64 [n], each rank's load when replicas share their expert's equally.

        Args:
            loads: [E]; None is 1 for each expert.
        """
        each = np.ones(self.num_experts) if loads is None else np.asarray(loads, np.float64)
        share = (each / self.copies)[list(self.experts)]
        return share.reshape(self.ranks, -1).sum(axis=1)


def place(num_experts: int, ranks: int, loads: Any = None) -> Placement:
    """The placement of E experts on n ranks; the same arguments always give the same one.

    Spare slots go one by one to the expert with the largest load per replica (ties: the lowest id).
    Then the replicas, heaviest first, go each to the rank with the least load that has room and does
    not hold the expert. Without loads and without spare slots the order is that of the ids.

    Args:
        loads: measured loads [E], at least 0 and finite; None is uniform.

    Raises:
        ValueError: loads of another shape, negative or not finite; sizes below 1.
    """
    if num_experts < 1 or ranks < 1:
        raise ValueError(f"placement: expected at least 1 expert and rank, got {num_experts} and {ranks}")
    if loads is None:
        return _place(num_experts, ranks, None)
    array = np.asarray(loads, np.float64)
    if array.shape != (num_experts,) or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(
            f"loads: expected {num_experts} finite numbers of at least 0, got shape {list(array.shape)}"
            + (f" with values {array.min()}..{array.max()}" if array.size else "")
        )
    return _place(num_experts, ranks, tuple(array.tolist()))


@functools.lru_cache(maxsize=512)
def _place(num_experts: int, ranks: int, loads: tuple[float, ...] | None) -> Placement:
    per_rank = -(-num_experts // ranks)
    spare = per_rank * ranks - num_experts
    if loads is None and spare == 0:
        return Placement(tuple(range(num_experts)), num_experts, ranks)
    each = (1.0,) * num_experts if loads is None else loads
    copies = _copies(each, spare, ranks)
    share = [load / n for load, n in zip(each, copies, strict=True)]
    order = sorted(range(num_experts), key=lambda e: (-share[e], e))
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for expert in order:
        for _ in range(copies[expert]):
            rank = _choose(expert, held, total, per_rank)
            held[rank].append(expert)
            total[rank] += share[expert]
    return Placement(tuple(e for mine in held for e in sorted(mine)), num_experts, ranks)


def _copies(loads: tuple[float, ...], spare: int, ranks: int) -> list[int]:
    """Replicas of each expert; none gets more than there are ranks."""
    copies = [1] * len(loads)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(spare):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
    return copies


def _choose(expert: int, held: list[list[int]], total: list[float], per_rank: int) -> int:
    """The rank for one more replica of ``expert``, making room by one exchange if need be."""
    free = [r for r, mine in enumerate(held) if len(mine) < per_rank]
    fit = [r for r in free if expert not in held[r]]
    if fit:
        return min(fit, key=lambda r: (total[r], r))
    # Every rank with room holds it already: a full rank passes an expert on and takes this one.
    for full in sorted(range(len(held)), key=lambda r: (total[r], r)):
        if expert in held[full] or len(held[full]) < per_rank:
            continue
        for other in held[full]:
            for rank in free:
                if other not in held[rank]:
                    held[full].remove(other)
                    held[rank].append(other)
                    return full
    raise AssertionError(f"no rank for a replica of expert {expert}")


__all__ = ["Placement", "place"]
