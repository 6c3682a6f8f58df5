"""Whether a plan fits the kernel's tiles and an SM's resources, and a compiled kernel its device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from k3jax.config import K3Config

from .artifacts import Artifact
from .decode_megakernel.kernel import constraints
from .decode_megakernel.resources import most_registers, resource_problems
from .decode_megakernel.schedule import build
from .decode_megakernel.shapes import MAX_ACTIVE, MAX_BATCH, Plan, Target, plan_faults

_RANKS = (1, 2, 4, 8, 16)
"""Shares that are looked at where the one asked for cannot be."""


@functools.lru_cache(maxsize=32)
def plan_reasons(plan: Plan) -> tuple[str, ...]:
    """Why the megakernel cannot be compiled for a plan, all of it, each once; empty if it can."""
    return tuple(dict.fromkeys((*constraints.reasons(plan), *resource_problems(build(plan)))))


def nearest_plan(
    config: K3Config, batch: int, target: Target, ways: int = 1, expert_ways: int = 1
) -> Plan | None:
    """The plan, with rows and experts a token moved into what plans take; None if it has other faults."""
    batch = min(max(batch, 1), MAX_BATCH)
    if config.num_experts_per_token > MAX_ACTIVE:
        config = dataclasses.replace(config, num_experts_per_token=MAX_ACTIVE)
    if plan_faults(config, batch, target, ways, expert_ways):
        return None
    return Plan(config, batch, target, ways, expert_ways)


def kernel_reasons(
    config: K3Config, batch: int, target: Target, ways: int = 1, expert_ways: int = 1
) -> tuple[str, ...]:
    """As :func:`plan_reasons`, for what need not be a plan: beside its ``plan_faults``, not instead.

    Rows and experts a token are moved into what plans take. A share that cannot be has neither sizes nor a
    schedule: of it, the reasons are those that the kernel has, word for word, against all of _RANKS that
    there can be.
    """
    plan = nearest_plan(config, batch, target, ways, expert_ways)
    if plan is not None:
        return plan_reasons(plan)
    tried = [(ranks, spread) for ranks in _RANKS for spread in sorted({1, ranks})]
    shares = [nearest_plan(config, batch, target, *ways) for ways in tried]
    found = [constraints.reasons(share) for share in shares if share is not None]
    return tuple(reason for reason in found[0] if all(reason in one for one in found)) if found else ()


def device_problems(artifact: Artifact, plan: Plan, arch: str, device: Any) -> Iterator[str]:
    """Why a device cannot hold a compiled kernel, one block on each of its SMs; nothing if it can.

    Args:
        plan: of the step, with the device's SMs.
        arch: the device's architecture.
        device: a jax device, asked for the shared memory that a block can have; one that does not tell, or
            None, leaves that to the plan's target, which the kernel was compiled for.
    """
    made = artifact.about
    if (made["arch"], made["target"]["sms"]) != (arch, plan.sms):
        yield (
            f"device: the kernel is compiled for {made['target']['sms']} SMs of {made['arch']}, "
            f"got {plan.sms} of {arch}"
        )
    if (taken := made["registers"]) > (most := most_registers(plan.target)):
        yield f"occupancy: the kernel takes {taken} registers a thread, an SM has {most}"
    shared = getattr(device, "shared_memory_per_block_optin", None)
    if shared is not None and shared < (need := constraints.shared_bytes(plan)):
        yield f"occupancy: a block takes {need} bytes of shared memory, got {shared}"


__all__ = ["device_problems", "kernel_reasons", "nearest_plan", "plan_reasons"]
