"""What a benchmark found: figures, their table, their JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

TYPICAL = 0.05
"""Relative RMS of a row's logits that at least a quarter of the rows must stay below. In bfloat16 a
sublayer's output moves by 2e-3 to 8e-3 with the order of its sums, and the logits by a few times that after
a slice's layers. A quarter, because where two router scores are nearly equal another order of sums chooses
another expert: of random weights, whose scores lie close, a third of the rows do so in a step."""

WORST = 0.9
"""Largest relative RMS of any row's logits. An expert chosen otherwise replaces one of A random terms of a
layer's sum, sqrt(2 / A) of it; logits of zero are 1 from the right ones, unrelated ones 1.4."""

ROW_STEPS = 8
"""Steps from which on every row of the batch must stay below TYPICAL in one of them: 3**-8 of the rows whose
choices turn in a third of the steps do not."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Logits and states of one implementation against those of the first, over all steps and rows.

    Every step starts from the first one's state, so that a choice of experts that turned moves one step only.

    Attributes:
        quarter, median, worst: relative RMS of a row's logits, |a - b| / |b| over the vocabulary: what a
            quarter of the rows stay below, half of them, all.
        same_token: share of rows with the same greedy token.
        compared: rows compared, steps times batch.
        every_row: what each row of the batch stays below in one step at least; None below ROW_STEPS steps.
        state: what a quarter of the rows stay below in every array of the state: |a - b| over how far the
            step moved it, so that an array that was not written is 1 away.
    """

    quarter: float
    median: float
    worst: float
    same_token: float
    compared: int
    every_row: float | None
    state: float

    @property
    def problem(self) -> str | None:
        """What is wrong, None if logits and states agree."""
        if not self.quarter <= TYPICAL:
            return (
                f"logits: relative RMS {self.quarter:.2e} or more in three quarters of the rows, "
                f"expected {TYPICAL}"
            )
        if not self.worst <= WORST:
            return f"logits: worst relative RMS {self.worst:.2e}, expected at most {WORST}"
        if self.every_row is not None and not self.every_row <= TYPICAL:
            return (
                f"logits: a row with relative RMS {self.every_row:.2e} or more in every step, "
                f"expected {TYPICAL}"
            )
        if not self.state <= TYPICAL:
            return (
                f"state: an array with relative RMS {self.state:.2e} of its change or more in three "
                f"quarters of the rows, expected {TYPICAL}"
            )
        return None


@dataclasses.dataclass(frozen=True)
class Timing:
    """One form of an implementation.

    Attributes:
        implementation: its name.
        form: what else was set, "" if nothing.
        seconds: of a step, one number per round.
        agreement: None for the first form, which the others are compared with.
    """

    implementation: str
    form: str
    seconds: tuple[float, ...]
    agreement: Agreement | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """All figures of one batch size.

    Attributes:
        batch, length: rows, and tokens cached in each at the first step.
        bytes: that a step must move, at the middle of the steps, by ``K3Config.bytes_per_step``.
        distinct_experts: read per LatentMoE layer and step, measured.
        timings: every form that ran.
        missing: implementation -> why it did not run.
        ceiling: bytes per second, None if there is none.
        faults: what else is wrong.
    """

    batch: int
    length: int
    bytes: int
    distinct_experts: float
    timings: tuple[Timing, ...]
    missing: dict[str, tuple[str, ...]]
    ceiling: float | None
    faults: tuple[str, ...] = ()

    def best(self, implementation: str) -> Timing | None:
        """The fastest form of an implementation."""
        forms = [t for t in self.timings if t.implementation == implementation]
        return min(forms, key=lambda t: t.median, default=None)

    def share(self, timing: Timing) -> float | None:
        """Bytes per second over the ceiling."""
        return None if self.ceiling is None else self.bytes / timing.median / self.ceiling

    def speedup(self, timing: Timing) -> float | None:
        """How many times faster than the fastest form of "xla"."""
        xla = self.best("xla")
        return None if xla is None else xla.median / timing.median

    def problems(self) -> list[str]:
        """What does not agree, and all else that is wrong."""
        found = [(t, t.agreement.problem) for t in self.timings if t.agreement is not None]
        found_here = [f"{_label(t)}: {why}" for t, why in found if why is not None]
        return [f"batch {self.batch}: {fault}" for fault in (*self.faults, *found_here)]

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per form, in units of the table."""
        return [self._row(t) for t in self.timings]

    def _row(self, t: Timing) -> dict[str, Any]:
        agreement = None if t.agreement is None else _finite(dataclasses.asdict(t.agreement))
        return {
            "implementation": t.implementation,
            "form": t.form,
            "step_ms": t.median * 1e3,
            "step_ms_rounds": [s * 1e3 for s in t.seconds],
            "tokens_per_s_per_user": 1 / t.median,
            "bytes": self.bytes,
            "tb_per_s": self.bytes / t.median * 1e-12,
            "ceiling_share": self.share(t),
            "speedup_over_xla": self.speedup(t),
            "agreement": agreement,
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        about: device, versions, command, model, settings.
        ceiling: bytes per second or None; ``ceiling_source``: where it is from.
    """

    about: dict[str, Any]
    ceiling: float | None
    ceiling_source: str
    batches: tuple[BatchReport, ...]

    def problems(self) -> list[str]:
        return [problem for batch in self.batches for problem in batch.problems()]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.about,
            "ceiling_tb_per_s": None if self.ceiling is None else self.ceiling * 1e-12,
            "ceiling_source": self.ceiling_source,
            "agreement_limits": {"quarter": TYPICAL, "worst": WORST},
            "batches": [
                {
                    "batch": b.batch,
                    "length": b.length,
                    "bytes": b.bytes,
                    "distinct_experts": b.distinct_experts,
                    "rows": b.rows(),
                    "missing": {name: list(reasons) for name, reasons in b.missing.items()},
                }
                for b in self.batches
            ],
            "problems": self.problems(),
        }

    def text(self) -> str:
        """The report as lines for a terminal."""
        rate = "none" if self.ceiling is None else f"{self.ceiling * 1e-12:.3f} TB/s"
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        lines.append(f"read ceiling: {rate} ({self.ceiling_source})")
        lines.append(
            "compared: logits and state of every step with those of the first form, same weights and tokens, "
            f"each step from its state; accepted: relative RMS {TYPICAL} in a quarter of the rows, and "
            f"{WORST} of the logits in all"
        )
        for batch in self.batches:
            lines += ["", *_table(batch)]
        lines += [f"PROBLEM: {problem}" for problem in self.problems()]
        return "\n".join(lines)


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """With None for what JSON cannot hold: figures of logits that are not finite."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in figures.items()}


_HEADINGS = (
    "",
    "ms/step",
    "min..max",
    "tok/s/user",
    "TB/s",
    "ceiling",
    "x xla",
    "logits quarter/median/worst, same token; state",
)


def _label(t: Timing) -> str:
    return f"{t.implementation} ({t.form})" if t.form else t.implementation


def _table(b: BatchReport) -> list[str]:
    title = (
        f"batch {b.batch}, {b.length} tokens cached: {b.bytes / 1e9:.3f} GB a step, "
        f"{b.distinct_experts:.1f} distinct experts a layer"
    )
    cells = [_HEADINGS, *(_cells(b, t) for t in b.timings)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADINGS))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *rest])

    missing = [f"{name}: not run: {'; '.join(reasons)}" for name, reasons in b.missing.items()]
    return [title, *map(line, cells), *missing]


def _cells(b: BatchReport, t: Timing) -> tuple[str, ...]:
    share, speedup, a = b.share(t), b.speedup(t), t.agreement
    return (
        _label(t),
        f"{t.median * 1e3:.3f}",
        f"{min(t.seconds) * 1e3:.3f}..{max(t.seconds) * 1e3:.3f}",
        f"{1 / t.median:.1f}",
        f"{b.bytes / t.median * 1e-12:.3f}",
        "-" if share is None else f"{share:.1%}",
        "-" if speedup is None else f"{speedup:.2f}",
        "reference"
        if a is None
        else f"{a.quarter:.1e}/{a.median:.1e}/{a.worst:.1e}, {a.same_token:.0%}; {a.state:.1e}",
    )


__all__ = ["ROW_STEPS", "TYPICAL", "WORST", "Agreement", "BatchReport", "Report", "Timing"]
