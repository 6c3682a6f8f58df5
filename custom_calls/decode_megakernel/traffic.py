"""Bytes a schedule streams, against the bytes the model has."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from k3jax.sizes import StepBytes, expert_bytes

from .buffers import Buffer, Kind
from .schedule import Schedule
from .shapes import Plan, groups_of


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes one step moves, by kind; padding of tiles and of expert row groups apart."""

    weights: int
    state_read: int
    state_write: int
    cache_read: int
    cache_write: int
    padding: int

    @property
    def total(self) -> int:
        return self.weights + self.state_read + self.state_write + self.cache_read + self.cache_write


def _intervals(s: Schedule) -> tuple[dict[str, list[tuple[int, int]]], dict[str, list[tuple[int, int]]]]:
    """Reads and writes of inputs, states and outputs by buffer."""
    table: tuple[dict[str, list[tuple[int, int]]], ...] = (defaultdict(list), defaultdict(list))
    for ins in s.instructions:
        for at, accesses in enumerate((ins.reads, ins.writes)):
            for a in accesses:
                table[at][a.buffer].append((a.lo, a.hi))
    return table[0], table[1]


def _covered_units(intervals: list[tuple[int, int]]) -> int:
    """Units in the union of intervals."""
    total, end = 0, 0
    for lo, hi in sorted(intervals):
        total += max(0, hi - max(lo, end))
        end = max(end, hi)
    return total


def streamed_once(name: str) -> bool:
    """Whether a weight is streamed from memory (a matrix), not a small vector that stays in the L2 cache."""
    small = ("layernorm", "_res", "norm", "bias", "kda_head", "embed", "expert_place")
    return not name.rsplit(".", 1)[-1].endswith(small)


def traffic(s: Schedule, length: int, distinct: int) -> Traffic:
    """Bytes of a step: ``length`` cached tokens in every row, ``distinct`` experts read per MoE layer."""
    p = s.plan
    reads, writes = _intervals(s)
    weights = padding = state_read = state_write = cache_read = cache_write = 0
    for name, b in s.buffers.items():
        if name.startswith("w."):
            real, pad = _weight_bytes(p, b, reads[name], distinct)
            weights, padding = weights + real, padding + pad
        elif name.startswith(("S.", "conv.")):
            state_read += b.unit_bytes * _total(reads[name])
            state_write += b.unit_bytes * _total(writes[name])
        elif name.startswith("cache."):
            cache_write += b.unit_bytes * _total(writes[name])
        elif name.startswith("old."):
            row = 2 * (p.C + p.R)
            cache_read += p.B * length * row * _total(reads[name]) // b.units
    return Traffic(weights, state_read, state_write, cache_read, cache_write, padding)


def _total(intervals: list[tuple[int, int]]) -> int:
    return sum(hi - lo for lo, hi in intervals)


def _weight_bytes(p: Plan, b: Buffer, intervals: list[tuple[int, int]], distinct: int) -> tuple[int, int]:
    """Real and padding bytes that the reads of a weight stream."""
    kind = b.name.rsplit(".", 1)[-1]
    if not streamed_once(b.name):
        return b.unit_bytes * _covered_units(intervals), 0
    if kind in ("w13", "w2"):
        rows = p.F if kind == "w13" else p.L
        per_slot = _total(intervals) // p.slots  # row groups of one expert
        whole = distinct * per_slot * b.unit_bytes
        return whole * rows // (8 * groups_of(rows)), whole - whole * rows // (8 * groups_of(rows))
    whole = b.unit_bytes * _total(intervals)
    real = b.real_bytes * _total(intervals) // b.units
    return real, whole - real


def expected(p: Plan, length: int, distinct: int) -> StepBytes | Traffic:
    """What the model says: ``config.bytes_per_step``, or for a rank's share the same of divided sizes."""
    if p.ways == 1:
        return p.config.bytes_per_step(p.batch, length, distinct)
    c = p.config
    share = dataclasses.replace(
        c,
        vocab_size=p.W,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        kda_num_heads=p.kda_heads,
        kda_a_log_size=p.kda_heads,
        num_attention_heads=p.mla_heads,
        intermediate_size=p.dense,
        num_shared_experts=1,
        moe_intermediate_size=32,
    )
    # The shared expert, the routed experts and the latent matrices do not divide as one configuration.
    b = share.bytes_per_step(p.batch, length, 0)
    layers = c.num_moe_layers
    weights = b.weights - b.unused + layers * 2 * 3 * p.D * (p.shared - 32)
    weights -= layers * 2 * (p.L - p.latent_rows) * (2 * p.D + 1)
    weights += layers * distinct * (expert_bytes(c) // p.expert_width)
    weights += layers * 4 * p.E * p.B  # which of a rank's experts serves a row
    return Traffic(weights, b.state_read, b.state_write, b.cache_read, b.cache_write, 0)


def traffic_problems(s: Schedule, length: int = 4096) -> Iterator[str]:
    """Weights left out or streamed twice, and sums that are not the model's."""
    reads, _ = _intervals(s)
    for name, b in s.buffers.items():
        if b.kind is not Kind.INPUT:
            continue
        total, union = _total(reads[name]), _covered_units(reads[name])
        once = name.startswith("old.") or streamed_once(name)
        if union != b.units:
            yield f"{name}: {b.units - union} of {b.units} units are never read"
        elif once and total != union:
            yield f"{name}: {total - union} units are streamed twice"
    p = s.plan
    counts = {1, min(p.A, p.slots), p.slots} if p.config.num_moe_layers else {0}
    for distinct in sorted(counts):
        got, want = traffic(s, length, distinct), expected(p, length, distinct)
        unused = want.unused if isinstance(want, StepBytes) else 0
        for field in ("weights", "state_read", "state_write", "cache_read", "cache_write"):
            right = getattr(want, field) - (unused if field == "weights" else 0)
            if getattr(got, field) != right:
                yield f"{field} with {distinct} experts: {getattr(got, field)} bytes, the model has {right}"


__all__ = ["Traffic", "expected", "traffic", "traffic_problems"]
