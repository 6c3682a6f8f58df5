"""What an audit found."""

from __future__ import annotations

import dataclasses
import enum


class Rule(enum.StrEnum):
    """The rules; each value says what a finding under it means."""

    NON_COHERENT = "non-coherent global load"
    UNORDERED_LOAD = "load of step data not behind its wait"
    UNORDERED_COPY = "bulk copy of step data"
    WAIT = "hand-off wait out of form"
    SIGNAL = "hand-off signal out of form"
    SPILL = "local memory in a streaming loop"
    UNREACHED = "memory access in code that the analysis does not reach"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A violation.

    Attributes:
        rule: the rule broken.
        address: of the instruction, in bytes from the start of the kernel.
        instruction: its text.
        why: what is wrong with it.
    """

    rule: Rule
    address: int
    instruction: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.address:#07x} {self.instruction}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was audited, and how much of each kind there was: then having no findings means something.

    Attributes:
        kernel: its name.
        registers: 32-bit registers a thread.
        local_bytes: stack of a thread.
        code_bytes: size of the instructions.
        polls: acquire loads; waits: block barriers that end a poll.
        signals: release reductions.
        step_loads: global loads of what the step may write; fixed_loads: of what it never writes.
        bulk_copies: copies from global to shared memory.
        streaming_loops: innermost loops with a wait for the ring and products, shared loads or bulk copies.
        spills: loads and stores of local memory, wherever they are.
        findings: the violations.
    """

    kernel: str
    registers: int
    local_bytes: int
    code_bytes: int
    polls: int
    waits: int
    signals: int
    step_loads: int
    fixed_loads: int
    bulk_copies: int
    streaming_loops: int
    spills: int
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        numbers = ", ".join(
            f"{getattr(self, field.name)} {field.name.replace('_', ' ')}"
            for field in dataclasses.fields(self)
            if field.name not in ("kernel", "findings")
        )
        lines = [f"{self.kernel[:60]}: {numbers}; {len(self.findings)} findings"]
        return "\n".join(lines + [f"  {finding}" for finding in self.findings])


__all__ = ["Finding", "Report", "Rule"]
