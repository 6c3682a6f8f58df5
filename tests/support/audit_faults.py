"""Kinds of faults of ``support.audit_kernel``, and the rule that each breaks."""

from __future__ import annotations

from k3jax.custom_calls.audit import Rule

KINDS: dict[str, Rule | None] = {
    "sound": None,
    "non-coherent": Rule.NON_COHERENT,
    "early": Rule.UNORDERED_LOAD,
    "between": Rule.UNORDERED_LOAD,
    "hoistable": Rule.UNORDERED_LOAD,
    "copied": Rule.UNORDERED_COPY,
    "spilled": Rule.SPILL,
}
"""non-coherent: assembly ld.global.nc. early: a plain load written before the wait. between: one between
poll and barrier. hoistable: the same in assembly that the compiler may move, and does. copied: a bulk copy
of the workspace. spilled: more of the vector than there are registers."""

__all__ = ["KINDS"]
