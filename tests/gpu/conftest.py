"""Figures of the GPU tests, shown at the end of a run."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from support.megakernel_gpu import REPORT

    if REPORT:
        terminalreporter.section("figures")
        for line in REPORT:
            terminalreporter.write_line(line)
