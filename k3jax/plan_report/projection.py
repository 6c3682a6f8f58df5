"""What a step should take: the bytes a device reads and what it exchanges, each with its assumption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..config import K3Config
from ..mesh.plan import MeshPlan
from ..mesh.table import DeviceBytes
from ..sizes import BF16, expert_bytes, expert_params
from .gpus import Gpu
from .schedule import Collective

NCCL_SECONDS = 26e-6
"""A small collective of NCCL: the middle of 23-29 us, measured for sums of 14-57 KB on two H200s."""
NETWORK_SECONDS = 40e-6
"""A small collective between NVLink domains: assumed, not measured."""
PEER_SECONDS = 3e-6
"""An exchange from within a kernel through peer-mapped memory: the target, 1.4 us in a prototype."""
XLA_SHARE = 0.53
"""Share of the read ceiling that XLA's matrix-vector products reach: the middle of 46-61 % on an H200."""
DRAWS = 64


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest device moves in a step.

    Attributes:
        dense: bf16 and float32 weights, read once; of the embedding only its rows.
        experts: packed weights of the distinct experts that its rank computes.
        state: KDA states, read and written.
        cache: latent rows read.
        slots: distinct experts of the busiest rank per layer, on average.
    """

    dense: int
    experts: int
    state: int
    cache: int
    slots: float

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.state + self.cache


def busiest_slots(plan: MeshPlan, config: K3Config, batch: int, seed: int = 0) -> float:
    """Distinct experts that the busiest rank computes in a layer, mean of drawn uniform routings."""
    if not config.num_moe_layers:
        return 0.0
    place = plan.placements(config)[0]
    table, copies, rng = place.slot_table(), place.copies, np.random.default_rng(seed)
    most = []
    for _ in range(DRAWS):
        keys = rng.random((batch, config.num_experts))
        ids = np.argpartition(keys, config.num_experts_per_token - 1)[:, : config.num_experts_per_token]
        slots = np.unique(table[ids, np.arange(batch)[:, None] % copies[ids]])
        most.append(np.bincount(slots // place.slots_per_rank, minlength=place.ranks).max())
    return float(np.mean(most))


def traffic(plan: MeshPlan, config: K3Config, held: DeviceBytes, batch: int) -> Traffic:
    """Bytes that the busiest device moves in one step of ``batch`` rows with full caches.

    Args:
        held: what a device holds, see :func:`k3jax.mesh.device_bytes`.
    """
    slots = busiest_slots(plan, config, batch)
    table = config.vocab_size * config.hidden_size * BF16 // plan.tensor
    rows = plan.padded(batch) // plan.data
    dense = sum(held.weights.values()) - held.weights.get("routed experts", 0) - table
    return Traffic(
        dense=dense + rows * config.hidden_size * BF16,
        experts=round(config.num_moe_layers * slots * expert_bytes(config) / plan.expert_width),
        state=2 * held.state["KDA states"],
        cache=held.state["latent cache"],
        slots=slots,
    )


@dataclasses.dataclass(frozen=True)
class Projection:
    """Seconds of a step under one set of assumptions.

    Attributes:
        name: what is assumed.
        stream: reading and writing memory.
        exchange: collectives that are waited for.
        hidden: collectives that start and end apart, if nothing hid them.
    """

    name: str
    stream: float
    exchange: float
    hidden: float

    @property
    def total(self) -> float:
        """With nothing hidden."""
        return self.stream + self.exchange + self.hidden


def exchange_seconds(found: Sequence[Collective], gpu: Gpu, latency: float, network_latency: float) -> float:
    """Seconds of collectives one after the other: a latency each, and the bytes sent at the link's rate."""
    total = 0.0
    for c in found:
        inside = len({device // gpu.domain for device in c.group}) == 1
        total += latency if inside else network_latency
        total += c.wire / (gpu.link if inside else gpu.network)
    return total


def project(moved: Traffic, found: Sequence[Collective], gpu: Gpu, config: K3Config) -> list[Projection]:
    """The step at the ceiling and as XLA is known to run, with NCCL's and with in-kernel exchanges."""
    waited = [c for c in found if not c.asynchronous]
    apart = [c for c in found if c.asynchronous]
    # XLA writes an expert's weights as bfloat16 and reads them again.
    decoded = moved.experts * 2 * BF16 * expert_params(config) / expert_bytes(config)
    streams = {
        "memory at the read ceiling, NCCL": (moved.total / gpu.ceiling, NCCL_SECONDS, NETWORK_SECONDS),
        "as XLA runs on an H200, NCCL": (
            (moved.total + decoded) / (XLA_SHARE * gpu.ceiling), NCCL_SECONDS, NETWORK_SECONDS,
        ),
        "memory at the read ceiling, exchanges in the kernel": (
            moved.total / gpu.ceiling, PEER_SECONDS, NETWORK_SECONDS,
        ),
    }  # fmt: skip
    return [
        Projection(
            name, stream, exchange_seconds(waited, gpu, near, far), exchange_seconds(apart, gpu, near, far)
        )
        for name, (stream, near, far) in streams.items()
    ]


def assumptions(moved: Traffic, gpu: Gpu, plan: MeshPlan) -> list[str]:
    """Every assumption of :func:`project` in words."""
    said = [
        f"reads at {gpu.ceiling / 1e12:.2f} TB/s: {gpu.ceiling_source}",
        f"routing uniform: the busiest of {plan.expert_ranks} ranks computes {moved.slots:.1f} distinct "
        f"experts a layer (mean of {DRAWS} draws); all layers wait for their busiest rank",
        "caches full; arithmetic costs nothing beside the bytes; kernels follow each other without gaps",
        f"a collective takes {NCCL_SECONDS * 1e6:.0f} us (NCCL's sum on two H200s: 23-29 us) and its bytes, "
        f"as a ring sends them, at {gpu.link / 1e9:.0f} GB/s; not measured for {plan.num_devices} GPUs",
        f"XLA reaches {XLA_SHARE:.0%} of the ceiling (its matrix-vector products on an H200: 46-61 %) and "
        "writes and reads every expert once more as bfloat16",
        "sums that XLA runs in a kernel of its own, where a group is one host, count as NCCL's",
        f"exchanges in the kernel take {PEER_SECONDS * 1e6:.0f} us: the target; this version has none",
    ]
    if plan.num_devices > gpu.domain:
        said.append(
            f"between groups of {gpu.domain} GPUs {NETWORK_SECONDS * 1e6:.0f} us and "
            f"{gpu.network / 1e9:.0f} GB/s"
        )
    return said


__all__ = [
    "Projection", "Traffic", "assumptions", "busiest_slots", "exchange_seconds", "project", "traffic",
]  # fmt: skip
