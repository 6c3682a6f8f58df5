"""Mailboxes in the GPUs' memory, through which the ranks of a plan exchange inside the megakernel.

A rank's mailbox is an ordinary array on its device that its peers' kernels write to, by its address. It is
made once, never donated, and must outlive every step that uses it; so must its contents, which count the
launches. One set serves one plan's steps of one batch size, whatever their states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import K3Config
from k3jax.mesh.plan import TENSOR_PARALLEL, MeshPlan

from .decode_megakernel.operands import mailbox_words
from .decode_megakernel.shapes import Plan
from .planned import RANKS, plan_of_share, target_of_plan


def mailbox_problems(plan: MeshPlan) -> list[str]:
    """Why the plan's devices cannot exchange through mailboxes; empty if they can."""
    devices = list(plan.mesh.devices.flat)
    found = []
    if len(devices) < 2:
        found.append(f"mailboxes: expected at least 2 devices, got {len(devices)}")
    if others := sorted({device.platform for device in devices} - {"gpu", "cuda"}):
        found.append(f"mailboxes: expected NVIDIA GPUs, got {', '.join(others)}")
    if len({device.process_index for device in devices}) > 1:
        found.append("mailboxes: expected GPUs of one process, which reach one another's memory by address")
    return found


class Mailboxes:
    """The mailboxes of a plan.

    Args:
        config: the architecture.
        plan: with ``data`` 1, on GPUs of one process.
        batch: rows of the steps.

    Attributes:
        share: a rank's plan, with ``peers``.
        addresses: int32 [ranks, 2], low and high word of each mailbox's address: an operand of the step.

    Raises:
        NotImplementedError: devices that cannot; ValueError: a share that there cannot be.
    """

    def __init__(self, config: K3Config, plan: MeshPlan, batch: int):
        if problems := mailbox_problems(plan):
            raise NotImplementedError("; ".join(problems))
        self.share: Plan = peer_plan(config, plan, batch)
        size = mailbox_words(self.share)
        where = NamedSharding(plan.mesh, RANKS)
        make = jax.jit(lambda: jnp.zeros(plan.tensor * size, jnp.int32), out_shardings=where)
        self._boxes = make()
        _meet(plan)
        # A launch begins with zeros in all mailboxes, its own and the others'.
        jax.block_until_ready(self._boxes)
        by_device = {shard.device: shard.data for shard in self._boxes.addressable_shards}
        self.addresses = address_words(
            [by_device[device].unsafe_buffer_pointer() for device in plan.mesh.devices.flat]
        )


def peer_plan(config: K3Config, plan: MeshPlan, batch: int) -> Plan:
    """A rank's plan whose kernel exchanges itself, for the plan's devices.

    Raises:
        ValueError: rows or sizes that it cannot have.
    """
    return dataclasses.replace(plan_of_share(config, plan, batch, target_of_plan(plan)[1]), peers=True)


def address_words(addresses: Sequence[int]) -> np.ndarray:
    """int32 [ranks, 2] of 64-bit addresses: jax's arrays have 32 bits."""
    words = np.array([[address & 0xFFFFFFFF, address >> 32] for address in addresses], np.uint64)
    return words.astype(np.uint32).view(np.int32)


def _meet(plan: MeshPlan) -> None:
    """A first sum over the ranks: the collectives' library opens the GPUs' memory to one another."""

    def local() -> jax.Array:
        return lax.psum(jnp.ones(1, jnp.int32), TENSOR_PARALLEL)

    run: Any = jax.shard_map(local, mesh=plan.mesh, in_specs=(), out_specs=PartitionSpec())
    jax.block_until_ready(jax.jit(run)())


__all__ = ["Mailboxes", "address_words", "mailbox_problems", "peer_plan"]
