"""The report of ``k3jax plan``: what a plan holds, exchanges and should take, as text and as data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..config import K3Config
from ..mesh.plan import MeshPlan, for_devices
from ..mesh.table import DeviceBytes, device_bytes, table
from .compile_step import Compiled, Request
from .gpus import GPUS, Gpu, gpu_named
from .projection import Projection, Traffic, assumptions, project, traffic
from .schedule import Collective

MOST_DEVICES = 1152
"""Devices up to which a plan that fits is looked for."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan with what arithmetic and, if it ran, the compiler say of it.

    Attributes:
        request: what was asked.
        held: bytes per device by arithmetic.
        compiled: None where only arithmetic was asked for or possible.
        moved: bytes of a step.
        projections: empty without ``compiled``, whose collectives they count.
        fits: GPU name -> whether the step fits it.
        devices_needed: GPU name -> devices of the smallest plan that fits, None up to MOST_DEVICES.
    """

    request: Request
    config: K3Config
    plan: MeshPlan
    held: DeviceBytes
    compiled: Compiled | None
    moved: Traffic
    projections: tuple[Projection, ...]
    fits: dict[str, bool]
    devices_needed: dict[str, int | None]

    @property
    def work_space(self) -> int:
        """Bytes beyond weights and state."""
        return 0 if self.compiled is None else max(0, self.compiled.peak - self.held.total)


def make_report(request: Request, compiled: Compiled | None) -> Report:
    """The report of a request and what the compiler said.

    Raises:
        ValueError: the plan does not fit the architecture, or a number is out of range.
    """
    config = request.config()
    plan, gpu = request.plan(config), gpu_named(request.gpu)
    held = device_bytes(plan, config, request.batch, request.context)
    moved = traffic(plan, config, held, request.batch)
    found = () if compiled is None else tuple(project(moved, compiled.collectives, gpu, config))
    peak = held.total if compiled is None else compiled.peak
    space = peak - held.total
    fits = {name: peak <= other.usable for name, other in GPUS.items()}
    needed = {name: _devices_needed(request, config, plan, other, space) for name, other in GPUS.items()}
    return Report(request, config, plan, held, compiled, moved, found, fits, needed)


def _devices_needed(request: Request, config: K3Config, plan: MeshPlan, gpu: Gpu, space: int) -> int | None:
    """Devices of the smallest plan with this tensor parallelism that holds the batch, work space as here."""
    here = device_bytes(plan, config, request.batch, request.context)
    replicated = sum(here.weights.values()) - here.weights.get("routed experts", 0)
    if replicated + space > gpu.usable:
        return None  # more devices only spread the experts and the rows
    least = -(-config.checkpoint_bytes() // gpu.usable)
    for n in range(-(-least // plan.tensor) * plan.tensor, MOST_DEVICES + 1, plan.tensor):
        other = for_devices(
            n, config, tensor=plan.tensor, expert_width=plan.expert_width, split_sequence=plan.split_sequence
        )
        if device_bytes(other, config, request.batch, request.context).total + space <= gpu.usable:
            return n
    return None


def as_data(report: Report) -> dict[str, Any]:
    """The report for JSON."""
    return {
        "request": dataclasses.asdict(report.request),
        "plan": str(report.plan),
        "dispatch": str(report.plan.choice(report.config, report.plan.padded(report.request.batch))),
        "bytes_per_device": {**report.held.weights, **report.held.state, "total": report.held.total},
        "compiled": None if report.compiled is None else dataclasses.asdict(report.compiled),
        "step_bytes": dataclasses.asdict(report.moved) | {"total": report.moved.total},
        "projections": [dataclasses.asdict(p) | {"total": p.total} for p in report.projections],
        "assumptions": assumptions(report.moved, gpu_named(report.request.gpu), report.plan),
        "fits": report.fits,
        "devices_needed": report.devices_needed,
    }


def text(report: Report) -> str:
    """The report as text."""
    request = report.request
    parts = [table(report.plan, report.config, request.batch, request.context)]
    if report.compiled is not None:
        parts += [_memory(report, report.compiled), _exchanges(report.compiled), _overlap(report.compiled)]
    parts.append(_fits(report))
    if report.compiled is not None:
        parts += [_times(report), _about(report, report.compiled)]
    return "\n\n".join(parts)


def _memory(report: Report, compiled: Compiled) -> str:
    words = {
        "argument": "arguments: weights, state, tokens", "output": "results: state, logits",
        "alias": "of these in place, once", "temp": "work space", "code": "code",
    }  # fmt: skip
    lines = [f"memory per device as the compiler lays it out for {report.request.gpu}, bytes:"]
    lines += [f"  {words[name]:<34} {compiled.memory[name]:>18,}" for name in words]
    lines.append(f"  {'together':<34} {compiled.peak:>18,}")
    lines.append(f"  {'beyond weights and state':<34} {report.work_space:>18,}")
    return "\n".join(lines)


def _across(c: Collective) -> str:
    step = c.group[1] - c.group[0] if len(c.group) > 1 else 0
    return f"{len(c.group)} devices, every {step}" if step > 1 else f"{len(c.group)} neighbours"


def _exchanges(compiled: Compiled) -> str:
    lines = ["collectives of a step, from the optimised module (bytes: the whole of one; sent: by a device):"]
    lines.append(
        f"  {'kind':<24} {'over':<22} {'count':>5} {'apart':>6} {'bytes':>12} {'sent in a step':>15}"
    )
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for c in compiled.collectives:
        name = c.kind + (" (kernel)" if c.fused else "") + (" (a round)" if c.loop else "")
        groups.setdefault((name, _across(c), c.payload), []).append(c)
    for (kind, across, payload), mine in sorted(groups.items(), key=lambda item: -len(item[1])):
        apart, sent = sum(c.asynchronous for c in mine), sum(c.wire for c in mine)
        lines.append(f"  {kind:<24} {across:<22} {len(mine):>5} {apart:>6} {payload:>12,} {sent:>15,.0f}")
    total = compiled.collectives
    lines.append(
        f"  {'together':<24} {'':<22} {len(total):>5} {sum(c.asynchronous for c in total):>6} {'':>12} "
        f"{sum(c.wire for c in total):>15,.0f}"
    )
    return "\n".join(lines)


def _overlap(compiled: Compiled) -> str:
    """What the schedule has between start and end of the collectives that run apart."""
    apart = [c for c in compiled.collectives if c.asynchronous]
    lines = [
        f"what runs beside the {len(apart)} collectives that start and end apart, in the compiled schedule:"
    ]
    beside = Counter((c.kind, _across(c), _named(c.beside)) for c in apart)
    for (kind, across, weights), count in beside.most_common():
        lines.append(f"  {count:>4} x {kind} over {across}: {weights}")
    layers = {c.layer for c in apart if any("shared_experts" in name for name in c.beside)}
    moe = {c.layer for c in compiled.collectives if c.kind == "reduce-scatter" or c.kind.endswith("to-all")}
    if moe:
        lines.append(
            f"  the shared expert runs beside an exchange of routed outputs in {len(layers & moe)} of "
            f"{len(moe)} LatentMoE layers"
        )
    return "\n".join(lines)


def _named(weights: Sequence[str]) -> str:
    return ", ".join(name.removeprefix("block_sparse_moe.") for name in weights) or "nothing with weights"


def _fits(report: Report) -> str:
    basis = "arithmetic alone" if report.compiled is None else "the compiler's memory"
    lines = [f"does it fit, by {basis}, in 95 % of a GPU:"]
    for name, gpu in GPUS.items():
        needed = report.devices_needed[name]
        size = f"{name} ({gpu.memory:,} bytes)"
        if needed is None:
            why = f"no plan of up to {MOST_DEVICES} devices with tensor={report.plan.tensor} holds it"
        else:
            why = f"the smallest plan with tensor={report.plan.tensor} that holds it has {needed} devices"
        lines.append(f"  {size:<30} {'fits' if report.fits[name] else 'does not fit'}; {why}")
    return "\n".join(lines)


def _times(report: Report) -> str:
    moved, gpu = report.moved, gpu_named(report.request.gpu)
    lines = ["bytes that the busiest device moves in a step:"]
    for name in ("dense", "experts", "state", "cache"):
        lines.append(f"  {name:<34} {getattr(moved, name):>18,}")
    lines.append(f"  {'together':<34} {moved.total:>18,}")
    lines.append(
        f"projected time of a step on {gpu.name}, ms (memory + waited for + apart, if nothing hides them):"
    )
    for p in report.projections:
        rows = report.request.batch / p.total
        lines.append(
            f"  {p.name:<52} {p.stream * 1e3:6.2f} + {p.exchange * 1e3:6.2f} + {p.hidden * 1e3:6.2f} = "
            f"{p.total * 1e3:6.2f}; {rows:,.0f} tokens/s, {1 / p.total:,.0f} a row"
        )
    lines.append("assumed:")
    lines += [f"  - {line}" for line in assumptions(moved, gpu, report.plan)]
    return "\n".join(lines)


def _about(report: Report, compiled: Compiled) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    return (
        f"compiled {report.config.num_hidden_layers} layers, unrolled, for {report.request.devices} "
        f"{report.request.gpu} ({compiled.topology}) without a GPU: traced in "
        f"{compiled.trace_seconds:.0f} s, "
        f"compiled in {compiled.compile_seconds:.0f} s, {compiled.peak_bytes / 2**30:.1f} GiB; {versions}"
    )


__all__ = ["Report", "as_data", "make_report", "text"]
