"""MeshPlan: how K3 lies on n devices.

Mesh axes are ``("data", "tensor", "inner")``. Attention, dense widths and the vocabulary are cut
over ``tensor x inner`` (tensor parallel), rows over ``data``; routed experts are spread over
``data x tensor`` (expert parallel), and each expert's width F is cut over ``inner``::

    72 devices                 data 9, tensor 8, inner 1    attention TP8 x DP9, experts EP72
    16 devices, EP8 x TP2      data 8, tensor 1, inner 2    attention TP2 x DP8, experts EP8, F / 2
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..config import K3Config
from ..dispatch.choice import KINDS, Choice, choose
from ..dispatch.guard import ragged_faults
from ..state import CACHE_BLOCK
from .placement import Placement, place

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA, TENSOR, INNER = "data", "tensor", "inner"
ROWS = (DATA,)
TENSOR_PARALLEL = (TENSOR, INNER)
EXPERT_PARALLEL = (DATA, TENSOR)
EVERY = (DATA, TENSOR, INNER)

MESH_AXES: dict[str, tuple[str, ...]] = {
    "batch": ROWS,
    "kda_heads": TENSOR_PARALLEL,
    "mla_heads": TENSOR_PARALLEL,
    "width": TENSOR_PARALLEL,
    "latent": TENSOR_PARALLEL,
    "vocab": TENSOR_PARALLEL,
    "expert": EXPERT_PARALLEL,
    "expert_width": (INNER,),
    "sequence": TENSOR_PARALLEL,
}
"""Logical axis -> the mesh axes that cut it. A logical axis that is not listed is whole."""

HOST_TENSOR_LIMIT = 8
"""The widest tensor parallelism chosen unasked: its sums are latency, two a layer."""


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """K3 on ``data * tensor`` devices; make one with :func:`for_devices` or :func:`nvl72`.

    Attributes:
        data: groups of rows (data parallel attention).
        tensor: ways that heads, widths and vocabulary are cut (tensor parallel attention).
        expert_width: ways that each expert's width F is cut, a divisor of ``tensor``; experts are
            spread over the other ``data * tensor / expert_width`` ranks.
        dispatch: how tokens reach their experts, see :mod:`k3jax.dispatch`: "gather", "all_to_all",
            "ragged", or "auto", which chooses one of the first two by batch.
        capacity: rows that a rank sends each peer in one round of "all_to_all"; None is chosen by
            batch. Rows past it go in another round: none is ever dropped.
        split_sequence: the latent cache is cut by position over ``tensor``, not whole on each.
        devices: the devices in mesh order; None is jax's first ones.
        loads: measured expert loads [E] or [MoE layers, E], which choose the replicas; None is uniform.

    Raises:
        ValueError: sizes that are no mesh.
    """

    data: int
    tensor: int
    expert_width: int = 1
    dispatch: str = "auto"
    capacity: int | None = None
    split_sequence: bool = False
    devices: tuple[Any, ...] | None = None
    # Where experts lie is data of the parameter tree: plans that differ here share compiled programs.
    loads: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "expert_width"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        if self.tensor % self.expert_width:
            fits = [w for w in range(1, self.tensor + 1) if self.tensor % w == 0]
            raise ValueError(
                f"expert_width: expected a divisor of tensor={self.tensor} ({_listed(fits)}), "
                f"got {self.expert_width}"
            )
        if self.dispatch not in KINDS:
            raise ValueError(f"dispatch: expected one of {', '.join(KINDS)}, got {self.dispatch!r}")
        capacity = self.capacity
        if capacity is not None and (
            isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1
        ):
            raise ValueError(f"capacity: expected None or an integer of at least 1, got {capacity!r}")
        if self.devices is not None and len(self.devices) != self.num_devices:
            raise ValueError(f"devices: expected {self.num_devices}, got {len(self.devices)}")

    # -- sizes ------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts are spread over; the devices of one rank share each expert's width."""
        return self.num_devices // self.expert_width

    @property
    def shape(self) -> tuple[int, int, int]:
        """Extents of the mesh axes data, tensor, inner."""
        return self.data, self.tensor // self.expert_width, self.expert_width

    def extent(self, logical: str | None) -> int:
        """Pieces that a logical axis is cut into."""
        sizes: dict[str, int] = dict(zip(EVERY, self.shape, strict=True))
        return math.prod(sizes[axis] for axis in MESH_AXES.get(logical or "", ()))

    def padded(self, rows: int) -> int:
        """``rows`` rounded up to a multiple of ``data``: the rows of a state; extra ones are inactive."""
        return -(-rows // self.data) * self.data

    # -- devices ----------------------------------------------------------------------

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The ``jax.sharding.Mesh``.

        Raises:
            ValueError: jax sees fewer devices than the plan needs.
        """
        devices = self.devices
        if devices is None:
            seen = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
            if len(seen) < self.num_devices:
                raise ValueError(f"mesh: expected {self.num_devices} devices, jax sees {len(seen)}")
            devices = tuple(seen[: self.num_devices])
        array = np.array(devices, dtype=object).reshape(self.shape)
        return Mesh(array, EVERY, axis_types=(AxisType.Auto,) * len(EVERY))

    def sharding(self, *logical: str | None) -> NamedSharding:
        """The ``NamedSharding`` of an array whose dimensions have these logical axes."""
        return NamedSharding(self.mesh, spec(*logical))

    @property
    def platform(self) -> str:
        """Platform of the devices, as jax names it."""
        return self.mesh.devices.flat[0].platform

    # -- experts ----------------------------------------------------------------------

    def placements(self, config: K3Config) -> tuple[Placement, ...]:
        """Where the experts of each MoE layer lie: what loader, placement map and dispatch follow.

        Raises:
            ValueError: ``loads`` of another shape.
        """
        layers, experts = config.num_moe_layers, config.num_experts
        if self.loads is None:
            return (place(experts, self.expert_ranks),) * layers
        loads = np.asarray(self.loads, np.float64)
        if loads.shape == (experts,):
            return (place(experts, self.expert_ranks, loads),) * layers
        if loads.shape != (layers, experts):
            raise ValueError(f"loads: expected [{experts}] or [{layers}, {experts}], got {list(loads.shape)}")
        return tuple(place(experts, self.expert_ranks, row) for row in loads)

    def choice(self, config: K3Config, rows: int) -> Choice:
        """How ``rows`` tokens in all reach their experts, and why.

        Args:
            rows: tokens of one step over all devices, padding included.
        """
        groups, lanes, _ = self.shape
        return choose(
            self.dispatch, self.capacity, rows=-(-rows // groups), lanes=lanes, ranks=self.expert_ranks,
            slots=config.num_experts_per_token,
        )  # fmt: skip

    # -- what works -------------------------------------------------------------------

    def faults(self, config: K3Config) -> list[str]:
        """Every reason why ``config`` cannot lie on this mesh, with the sizes that can."""
        found = []
        for name, size in _cut_by_tensor(config).items():
            if size % self.tensor:
                found.append(
                    f"tensor={self.tensor} does not divide {name}={size}; "
                    f"tensor sizes that can: {_listed(tensor_sizes(config))}"
                )
                break
        blocks = config.moe_intermediate_size // 32
        if blocks % self.expert_width:
            fits = [w for w in range(1, blocks + 1) if blocks % w == 0]
            found.append(
                f"expert_width={self.expert_width} does not cut moe_intermediate_size="
                f"{config.moe_intermediate_size} at blocks of 32; widths that can: {_listed(fits)}"
            )
        if self.split_sequence and CACHE_BLOCK % self.tensor:
            fits = [t for t in tensor_sizes(config) if CACHE_BLOCK % t == 0]
            found.append(
                f"split_sequence: tensor={self.tensor} does not divide cache blocks of {CACHE_BLOCK} rows; "
                f"tensor sizes that can: {_listed(fits)}"
            )
        return found

    def check(self, config: K3Config) -> None:
        """Raise ValueError with all of :meth:`faults`."""
        if found := self.faults(config):
            raise ValueError("mesh: " + "; ".join(found))

    def check_devices(self) -> None:
        """Raise unless the plan's devices are there and can exchange as it asks.

        Raises:
            ValueError: too few devices.
            NotImplementedError: see :meth:`check_exchange`.
        """
        self.check_exchange(self.platform)

    def check_exchange(self, platform: str) -> None:
        """Raise unless devices of ``platform``, as jax names it, can exchange as the plan asks.

        Raises:
            NotImplementedError: dispatch "ragged" where it is known to fail, with every reason.
        """
        if self.dispatch == "ragged" and (faults := ragged_faults(platform, self.expert_ranks)):
            raise NotImplementedError("dispatch 'ragged': " + "; ".join(faults))

    def local_config(self, config: K3Config) -> K3Config:
        """The architecture as one device sees its share: its heads."""
        return dataclasses.replace(
            config,
            num_attention_heads=config.num_attention_heads // self.tensor,
            kda_num_heads=config.kda_num_heads // self.tensor,
            kda_a_log_size=config.kda_num_heads // self.tensor,
        )

    def __str__(self) -> str:
        width = f", each cut {self.expert_width} ways" if self.expert_width > 1 else ""
        cache = f"cut by position {self.tensor} ways" if self.split_sequence else "whole on each tensor rank"
        return (
            f"{self.num_devices} devices: attention tensor parallel {self.tensor} x data parallel "
            f"{self.data}; experts over {self.expert_ranks} ranks{width}; latent cache {cache}"
        )


def spec(*logical: str | None) -> PartitionSpec:
    """The ``PartitionSpec`` of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(MESH_AXES.get(name) if name else None for name in logical))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "none"


def _cut_by_tensor(config: K3Config) -> dict[str, int]:
    """Sizes that tensor parallelism must divide."""
    return {
        "num_attention_heads": config.num_attention_heads,
        "kda_num_heads": config.kda_num_heads,
        "intermediate_size": config.intermediate_size,
        "shared_intermediate_size": config.shared_intermediate_size,
        "routed_expert_hidden_size": config.routed_expert_hidden_size,
        "vocab_size": config.vocab_size,
    }


def tensor_sizes(config: K3Config) -> list[int]:
    """Every size of tensor parallelism that divides ``config``."""
    common = math.gcd(*_cut_by_tensor(config).values())
    return [t for t in range(1, common + 1) if common % t == 0]


def for_devices(
    n: int, config: K3Config | None = None, *, tensor: int | None = None, **options: Any
) -> MeshPlan:
    """The plan for ``n`` devices.

    Args:
        n: devices in all.
        config: the architecture to lay out; None is the release.
        tensor: ways of tensor parallelism; None is the most that divides both ``n`` and ``config``,
            at most 8.
        options: expert_width, dispatch, capacity, split_sequence, devices, loads, see :class:`MeshPlan`.

    Raises:
        ValueError: what cannot work, with the sizes that can.
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"n: expected an integer of at least 1, got {n!r}")
    config = config or K3Config.preset("k3")
    fits = [t for t in tensor_sizes(config) if n % t == 0]
    if tensor is None:
        wide = [t for t in fits if t <= HOST_TENSOR_LIMIT and t % options.get("expert_width", 1) == 0]
        tensor = max(wide, default=max(fits))
    elif tensor not in fits:
        raise ValueError(
            f"tensor: expected a size that divides {n} devices and the architecture ({_listed(fits)}), "
            f"got {tensor!r}"
        )
    plan = MeshPlan(data=int(n) // tensor, tensor=tensor, **options)
    plan.check(config)
    return plan


def nvl72(config: K3Config | None = None, *, tensor: int = 8, **options: Any) -> MeshPlan:
    """The plan for the 72 GPUs of an NVL72 rack: attention TP8 x DP9, experts over all 72.

    Args:
        config, options: as :func:`for_devices`.
        tensor: 8 unless the architecture needs another.
    """
    return for_devices(72, config, tensor=tensor, **options)


__all__ = [
    "DATA", "EVERY", "EXPERT_PARALLEL", "INNER", "MESH_AXES", "ROWS", "TENSOR", "TENSOR_PARALLEL",
    "MeshPlan", "for_devices", "nvl72", "spec", "tensor_sizes",
]  # fmt: skip
