"""Checks on the machine code of a compiled kernel: what its memory accesses may and may not do."""

from .report import Finding, Report, Rule
from .rules import audit
from .sass import disassembler_problem
from .sources import inline_loads

__all__ = ["Finding", "Report", "Rule", "audit", "disassembler_problem", "inline_loads"]
