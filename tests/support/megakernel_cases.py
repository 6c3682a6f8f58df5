"""The kernels that the GPU tests of the decode megakernel run, as data: what to compile, and for which test.

``tests/gpu/build_artifacts.py`` compiles them where there is a compiler and no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from k3jax import K3Config, checkpoints
from k3jax.custom_calls.artifacts import Key
from k3jax.custom_calls.decode_megakernel.shapes import Plan, Target

SMS = 132
"""SMs of an H200."""
SPINS = 20_000
"""Polls of the impatient builds: some 20 ms, against less than 1 ms of a step of the small models."""


def _nano() -> K3Config:
    return K3Config.from_pretrained(checkpoints.resolve("nano"))


def _wide_experts() -> K3Config:
    """nano with experts of 128: halves of them are still whole tiles."""
    return dataclasses.replace(_nano(), moe_intermediate_size=128)


def _slice4() -> K3Config:
    """The first four layers of the release at full width, all 896 experts: 57.6 GB."""
    return K3Config.preset("k3-slice", num_layers=4)


def _slice4_e16() -> K3Config:
    """The same four layers with 16 experts, all of them active: 11 GB, and no choice of experts to turn."""
    return K3Config.preset("k3-slice", num_layers=4, num_experts=16)


def _shard93() -> K3Config:
    """All 93 layers at the widths that one of 16 tensor-parallel ranks has, 16 experts; latent columns whole.

    A model of its own, not a share: heads, FFN widths and the vocabulary are a sixteenth of the release's.
    """
    k3 = K3Config.preset("k3")
    return dataclasses.replace(
        k3,
        num_attention_heads=k3.num_attention_heads // 16,
        kda_num_heads=k3.kda_num_heads // 16,
        intermediate_size=k3.intermediate_size // 16,
        moe_intermediate_size=k3.moe_intermediate_size // 16,
        vocab_size=k3.vocab_size // 16,
        num_experts=16,
        num_experts_per_token=16,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


_CONFIGS = {
    "nano": _nano,
    "wide-experts": _wide_experts,
    "slice4": _slice4,
    "slice4-e16": _slice4_e16,
    "shard93": _shard93,
}


@functools.cache
def config(name: str) -> K3Config:
    """The configuration of a model by its name here: nano, wide-experts, slice4, slice4-e16 or shard93."""
    return _CONFIGS[name]()


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A kernel to compile.

    Attributes:
        model: name of its configuration.
        sms: thread blocks, one an SM.
        ways, expert_ways, peers: of a rank's share, as :class:`Plan` has them.
        options: options of ``kernel.geometry.Geometry`` other than its defaults.
    """

    model: str
    batch: int
    sms: int = SMS
    options: tuple[tuple[str, Any], ...] = ()
    ways: int = 1
    expert_ways: int = 1
    peers: bool = False

    @property
    def plan(self) -> Plan:
        target = Target("sm_90a", sms=self.sms)
        return Plan(config(self.model), self.batch, target, self.ways, self.expert_ways, self.peers)

    @property
    def key(self) -> Key:
        return Key(self.plan, "sm_90a", options=self.options)

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in self.options]
        sms = [] if self.sms == SMS else [f"{self.sms}sm"]
        share = [] if self.ways == 1 else [f"ways{self.ways}", f"experts{self.expert_ways}"]
        share += ["peers"] if self.peers else []
        return "-".join([self.model, f"b{self.batch}", *sms, *share, *named])


NANO = tuple(KernelCase("nano", batch) for batch in (1, 3, 8, 2, 4, 5, 6, 7))
SLICE4 = tuple(KernelCase("slice4", batch) for batch in (1, 2, 4, 8))
SHARD93 = (KernelCase("shard93", 1), KernelCase("shard93", 4))
DELAYS = (KernelCase("nano", 3, options=(("delays", True),)),)
"""Every wait and signal pauses for a pseudo-random time."""
FEWER_SMS = (KernelCase("nano", 3, sms=20), KernelCase("nano", 3, sms=100))
IMPATIENT = (KernelCase("nano", 3, options=(("spins", SPINS),)),)
TOO_MANY = (KernelCase("nano", 3, sms=2 * SMS, options=(("spins", SPINS),)),)
"""Twice the blocks that can be resident: the second half starts when the first has given up."""
API = (KernelCase("nano", 1, options=(("spins", 1),)),)
"""With NANO's batches 1 and 2, what tests/gpu/test_megakernel_api.py runs."""
SANITIZER = (KernelCase("nano", 2, options=(("all_lanes", True), ("spins", 1 << 29))),)
"""compute-sanitizer slows the kernel a thousand times, so its waits must last."""

SPREAD = tuple(KernelCase("nano", batch, ways=2, expert_ways=2) for batch in (1, 3))
"""A rank of two, each with half of the experts."""
CUT = tuple(KernelCase("wide-experts", batch, ways=2) for batch in (1, 3))
"""A rank of two, each with half of every expert's width."""

SIXTEEN = tuple(KernelCase("slice4-e16", 1, ways=16, expert_ways=n) for n in (1, 16))
"""A rank of 16 at the release's widths: with a sixteenth of every expert's width, and with whole experts."""
LONG = (KernelCase("slice4-e16", 2), KernelCase("slice4-e16", 4))
"""For rows of a million tokens."""

PEERS = tuple(dataclasses.replace(case, peers=True) for case in (*SPREAD, *CUT))
"""The same, exchanging in the kernel."""

CASES = (
    *NANO,
    *SPREAD,
    *CUT,
    *PEERS,
    *DELAYS,
    *FEWER_SMS,
    *IMPATIENT,
    *TOO_MANY,
    *API,
    *SLICE4,
    *SHARD93,
    *SIXTEEN,
    *LONG,
    *SANITIZER,
)

__all__ = [
    "API",
    "CASES",
    "CUT",
    "DELAYS",
    "FEWER_SMS",
    "IMPATIENT",
    "LONG",
    "NANO",
    "PEERS",
    "SANITIZER",
    "SHARD93",
    "SIXTEEN",
    "SLICE4",
    "SMS",
    "SPINS",
    "SPREAD",
    "TOO_MANY",
    "KernelCase",
    "config",
]
