"""The learning curve of a run, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_AVERAGED = 20
"""Steps averaged for the training curve."""


def draw_curve(lines: list[dict[str, Any]], ngram: float, xz: float, path: Path) -> None:
    """Draw training and validation bits per byte over steps.

    Args:
        lines: of the run's curve file.
        ngram, xz: bits per byte of the baselines (of the held-out text).
        path: PNG to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    steps, bits = np.array([line["step"] + 1 for line in lines]), np.array([line["bits"] for line in lines])
    whole = len(bits) // _AVERAGED * _AVERAGED
    mean = lambda values: values[:whole].reshape(-1, _AVERAGED).mean(axis=1)  # noqa: E731
    axes.plot(mean(steps), mean(bits), lw=1, label="training windows (a fifth of the bytes hidden)")
    scored = [(line["step"] + 1, line["validation_bits"]) for line in lines if "validation_bits" in line]
    axes.plot(*zip(*scored, strict=True), "o-", ms=4, label="validation blocks")
    axes.axhline(ngram, color="0.4", ls="--", lw=1, label=f"n-gram, {ngram:.3f}")
    axes.axhline(xz, color="0.6", ls=":", lw=1, label=f"xz, {xz:.3f}")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0.9, 3.0), xlim=(0, steps[-1]))
    axes.legend(fontsize=8)
    figure.savefig(path)
