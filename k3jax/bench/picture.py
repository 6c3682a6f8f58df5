"""A benchmark as a picture. Needs matplotlib: ``pip install 'k3jax[viz]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plots import _figure
from .report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#4477aa", "#228833", "#ee6677", "#ccbb44", "#aa3377")


def plot(report: Report) -> Figure:
    """Step time of each implementation's fastest form by batch, over the time that the bytes alone take."""
    names = list(dict.fromkeys(t.implementation for b in report.batches for t in b.timings))
    if not names:
        raise ValueError("picture: no implementation ran")
    figure = _figure(figsize=(2.6 + 1.6 * len(report.batches) + 0.5 * len(names), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        for i, batch in enumerate(report.batches):
            best = batch.best(name)
            if best is None:
                continue
            middle, share = best.median * 1e3, batch.share(best)
            spread = [[middle - min(best.seconds) * 1e3], [max(best.seconds) * 1e3 - middle]]
            x = i + (n - (len(names) - 1) / 2) * width
            first = all(b.best(name) is None for b in report.batches[:i])
            axes.bar(
                x, middle, width * 0.9, yerr=spread, capsize=2, color=COLORS[n % len(COLORS)],
                label=name if first else None,
            )  # fmt: skip
            text = f"{middle:.3g} ms" + ("" if share is None else f"\n{share:.0%}")
            axes.annotate(
                text,
                (x, max(best.seconds) * 1e3),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    if report.ceiling is not None:
        for i, batch in enumerate(report.batches):
            floor = batch.bytes / report.ceiling * 1e3
            label = f"bytes at {report.ceiling * 1e-12:.2f} TB/s" if i == 0 else None
            axes.plot([i - 0.45, i + 0.45], [floor, floor], color="black", linewidth=1.2, label=label)
    axes.set_xticks(range(len(report.batches)), [f"batch {b.batch}" for b in report.batches])
    axes.set_xlim(-0.6, len(report.batches) - 0.4)
    axes.margins(y=0.18)
    axes.set_ylabel("ms per decode step")
    axes.set_title(f"{report.about['model']}\n{report.about['device']}, {report.about['date']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


__all__ = ["plot"]
