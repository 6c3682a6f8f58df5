"""The picture of ``k3jax plan``: memory, collectives, time, and one layer's schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plots import _figure
from .gpus import GPUS
from .report import Report
from .schedule import KINDS, Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 0.005
"""Share of a device's bytes from which a kind has a part of its own in the picture."""

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e", "#f08cc3")
_KERNELS = (
    ("experts", "routed experts", "#4269d0"),
    ("shared_experts", "shared expert (or with latent)", "#f08cc3"),
    ("self_attn", "attention", "#3ca951"),
    ("gate", "router", "#a463f2"),
    ("routed_expert", "latent", "#efb118"),
)


def plot_plan(report: Report) -> Figure:
    """Memory per device, and where the compiler ran, collectives, projected times and a layer's schedule.

    Raises:
        ImportError: matplotlib is not installed.
    """
    request = report.request
    title = f"{report.config.num_hidden_layers} layers of K3, {report.plan}\n{request.batch} rows of up to "
    title += f"{request.context:,} tokens, {request.gpu}"
    if report.compiled is None:
        figure = _figure(figsize=(6, 5.5), layout="constrained")
        _plot_memory(figure.subplots(), report)
    else:
        figure = _figure(figsize=(13, 8.5), layout="constrained")
        grid = figure.add_gridspec(2, 3, height_ratios=[3, 2])
        _plot_memory(figure.add_subplot(grid[0, 0]), report)
        _plot_collectives(figure.add_subplot(grid[0, 1]), report)
        _plot_times(figure.add_subplot(grid[0, 2]), report)
        if report.compiled.events:
            _plot_schedule(figure.add_subplot(grid[1, :]), report.compiled.events, report.compiled.layer)
    figure.suptitle(title, fontsize=11)
    return figure


def save(report: Report, path: str | Path) -> None:
    """Write the picture to a file; its ending says the format."""
    plot_plan(report).savefig(path, dpi=120)


def _plot_memory(axes: Axes, report: Report) -> None:
    every = {**report.held.weights, **report.held.state, "work space, logits": report.work_space}
    parts = {name: size for name, size in every.items() if size >= SHOWN * sum(every.values())}
    parts["the rest"] = sum(every.values()) - sum(parts.values())
    bottom = 0.0
    for i, (name, size) in enumerate(parts.items()):
        axes.bar(0, size / 1e9, 0.55, bottom=bottom, color=_COLORS[i % len(_COLORS)], label=name)
        bottom += size / 1e9
    for name, gpu in GPUS.items():
        axes.axhline(gpu.memory / 1e9, color="black", lw=1, ls="--")
        axes.text(0.95, gpu.memory / 1e9, f"{name} ", ha="right", va="bottom", fontsize=8)
    axes.set(title=f"memory per device: {bottom:.1f} GB", ylabel="GB", xlim=(-0.5, 1.0), xticks=[])
    axes.set_ylim(0, 1.12 * max(bottom, *(gpu.memory / 1e9 for gpu in GPUS.values())))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="upper left", framealpha=0.9)


def _plot_collectives(axes: Axes, report: Report) -> None:
    found = () if report.compiled is None else report.compiled.collectives
    names = sorted({(c.kind, len(c.group)) for c in found}, key=lambda k: (KINDS.index(k[0]), k[1]))
    for i, (kind, size) in enumerate(names):
        mine = [c for c in found if (c.kind, len(c.group)) == (kind, size)]
        apart = sum(c.asynchronous for c in mine)
        axes.barh(i, len(mine) - apart, color="#ff725c", label="waited for" if i == 0 else None)
        axes.barh(
            i,
            apart,
            left=len(mine) - apart,
            color="#6cc5b0",
            label="starts and ends apart" if i == 0 else None,
        )
        axes.text(len(mine), i, f" {sum(c.wire for c in mine) / 1e6:.0f} MB", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), [f"{kind}\nover {size}" for kind, size in names], fontsize=8)
    axes.set(title=f"{len(found)} collectives a step, bytes a device sends", xlabel="count")
    axes.margins(x=0.18)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")


def _plot_times(axes: Axes, report: Report) -> None:
    for i, p in enumerate(report.projections):
        left = 0.0
        for part, color, label in (
            (p.stream, "#4269d0", "memory"),
            (p.exchange, "#ff725c", "collectives waited for"),
            (p.hidden, "#6cc5b0", "collectives apart, not hidden"),
        ):
            axes.barh(i, part * 1e3, left=left, color=color, label=label if i == 0 else None)
            left += part * 1e3
        axes.text(left, i, f" {left:.1f}", va="center", fontsize=9)
    names = [p.name.replace(", ", ",\n") for p in report.projections]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(title="projected step (not measured)", xlabel="ms")
    axes.margins(x=0.15)
    axes.set_ylim(len(names) + 0.3, -0.6)
    axes.legend(fontsize=8, loc="lower right")


def _label(event: Event) -> tuple[str, str]:
    words = event.detail.replace("block_sparse_moe.", "").split(", ")
    for key, label, color in _KERNELS:
        if any(word == key or word.startswith((f"{key}.", f"{key}_")) for word in words):
            return label, color
    return "other kernels", "#c7c9cf"


def _plot_schedule(axes: Axes, events: tuple[Event, ...], layer: int) -> None:
    seen: dict[str, Any] = {}
    for event in events:
        if event.what == "kernel":
            label, color = _label(event)
            seen[label] = axes.barh(0, 0.9, left=event.start - 0.45, color=color, height=0.7)
        else:
            apart = event.end > event.start
            width = event.end - event.start + 0.9
            color = "#6cc5b0" if apart else "#ff725c"
            bar = axes.barh(1, width, left=event.start - 0.45, color=color, height=0.7)
            seen["collective, apart" if apart else "collective, waited for"] = bar
            axes.text(
                event.start + width / 2 - 0.45,
                1.42,
                event.what,
                fontsize=7,
                rotation=25,
                ha="left",
                va="bottom",
            )
    axes.set(
        title=f"layer {layer} in the compiled schedule: order, not time", xlabel="kernel or collective",
        yticks=[0, 1], yticklabels=["kernels", "collectives"], ylim=(-0.6, 2.6),
    )  # fmt: skip
    axes.legend(seen.values(), seen.keys(), fontsize=8, ncols=4, loc="upper left")


__all__ = ["plot_plan", "save"]
