"""Names of the ways to run a decode step, and which of them this library holds."""

from __future__ import annotations

AVAILABLE = ("xla", "megakernel-interpret")
KNOWN = ("auto", "xla", "pallas", "pallas-interpret", "megakernel", "megakernel-interpret")


def resolve(implementation: str) -> str:
    """The implementation that ``implementation`` stands for; "auto" is the fastest one available.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a name this version of the library does not hold, with the reasons.
    """
    if implementation == "auto":
        return "xla"
    if implementation in AVAILABLE:
        return implementation
    if implementation not in KNOWN:
        raise ValueError(f"implementation: expected one of {', '.join(KNOWN)}, got {implementation!r}")
    raise NotImplementedError(
        f"implementation {implementation!r} is not part of this version of k3jax; "
        f"available: auto, {', '.join(AVAILABLE)}"
    )


__all__ = ["AVAILABLE", "KNOWN", "resolve"]
