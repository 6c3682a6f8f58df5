"""Comparisons whose failure says what differs, by how much, and why the tolerance is what it is."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_float64(x: Any) -> np.ndarray:
    """A host float64 copy of any array (bfloat16 included)."""
    return np.asarray(x).astype(np.float64)


def relative_rms(got: Any, want: Any) -> float:
    """|got - want| / |want| in the 2-norm over all entries; inf if ``want`` is 0 and ``got`` is not."""
    g, w = as_float64(got), as_float64(want)
    if g.shape != w.shape:
        raise AssertionError(f"shapes differ: got {g.shape}, want {w.shape}")
    error, size = float(np.linalg.norm(g - w)), float(np.linalg.norm(w))
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def assert_close(name: str, got: Any, want: Any, tol: float, reason: str) -> None:
    """Fail unless relative_rms(got, want) <= tol and both are finite.

    Args:
        name: what is compared, for the message.
        tol: bound on the relative RMS error.
        reason: why this bound; part of the message.
    """
    g, w = as_float64(got), as_float64(want)
    if g.shape != w.shape:
        raise AssertionError(f"{name}: shape {g.shape}, expected {w.shape}")
    if not np.isfinite(w).all():
        raise AssertionError(f"{name}: the expected values are not finite")
    if not np.isfinite(g).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(g))[0])
        raise AssertionError(
            f"{name}: {np.size(g) - np.isfinite(g).sum()} non-finite values, first at {where}"
        )
    error = relative_rms(g, w)
    if not error <= tol:
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(g - w)), g.shape))
        raise AssertionError(
            f"{name}: relative RMS error {error:.3e} above {tol:.3e} ({reason}); "
            f"worst at {worst}: got {g[worst]:.9g}, expected {w[worst]:.9g}"
        )


def assert_argmax_equal(name: str, got: Any, want: Any) -> None:
    """Fail unless the largest entry of every row is the same one."""
    g, w = as_float64(got).argmax(-1), as_float64(want).argmax(-1)
    if g.shape != w.shape:
        raise AssertionError(f"{name}: shape {g.shape}, expected {w.shape}")
    if (g != w).any():
        first = tuple(int(i) for i in np.argwhere(g != w)[0])
        raise AssertionError(
            f"{name}: argmax differs in {int((g != w).sum())} of {w.size} rows, "
            f"first at {first}: got {g[first]}, expected {w[first]}"
        )


def assert_routing_equal(
    ids: Any,
    weights: Any,
    ids_ref: Any,
    weights_ref: Any,
    scores_ref: Any,
    tol: float,
    *,
    tie_margin: float = 0.0,
    name: str = "routing",
) -> int:
    """Same sets of experts, and the same weight for each; returns how many rows were near ties.

    Order within a row does not matter. A row with other experts is accepted only if every expert
    in one set and not in the other has a reference selection score within ``tie_margin`` of the
    reference's last chosen one; the experts both chose must then share weight in the same ratio.

    Args:
        ids, weights: [..., A] under test; ids_ref, weights_ref: [..., A] expected.
        scores_ref: [..., E] selection scores (bias included) behind ids_ref.
        tol: bound on the absolute error of a weight.
        tie_margin: largest score difference called a tie; 0 allows none.
    """
    got, want = np.asarray(ids), np.asarray(ids_ref)
    if got.shape != want.shape or np.shape(weights) != got.shape or np.shape(weights_ref) != want.shape:
        raise AssertionError(
            f"{name}: shapes ids {got.shape}, weights {np.shape(weights)}, expected {want.shape} "
            f"and {np.shape(weights_ref)}"
        )
    top_k = got.shape[-1]
    scores = as_float64(scores_ref).reshape(-1, np.shape(scores_ref)[-1])
    got, want = got.reshape(-1, top_k), want.reshape(-1, top_k)
    w, w_ref = as_float64(weights).reshape(-1, top_k), as_float64(weights_ref).reshape(-1, top_k)
    if len(scores) != len(want):
        raise AssertionError(f"{name}: {len(scores)} rows of scores for {len(want)} rows of ids")
    ties = 0
    for row in range(len(want)):
        a = dict(zip(got[row].tolist(), w[row].tolist(), strict=True))
        b = dict(zip(want[row].tolist(), w_ref[row].tolist(), strict=True))
        if len(a) != top_k:
            raise AssertionError(f"{name}: row {row} names an expert twice: {got[row].tolist()}")
        if a.keys() != b.keys():
            _require_tie(
                name, row, a.keys() ^ b.keys(), scores[row], scores[row][want[row]].min(), tie_margin
            )
            ties += 1
            shared = sorted(a.keys() & b.keys())
            a, b = _as_shares(a, shared), _as_shares(b, shared)
        for expert, weight in b.items():
            if not abs(a[expert] - weight) <= tol:
                raise AssertionError(
                    f"{name}: row {row}, expert {expert}: weight {a[expert]:.9g}, expected {weight:.9g} "
                    f"within {tol:.1e}"
                )
    return ties


def _require_tie(
    name: str, row: int, differing: set[int], scores: np.ndarray, last_chosen: float, margin: float
) -> None:
    for expert in sorted(differing):
        gap = abs(float(scores[expert]) - float(last_chosen))
        if not gap < margin:
            raise AssertionError(
                f"{name}: row {row} chose other experts: {sorted(differing)} are in one set only and "
                f"expert {expert} is {gap:.3e} from the last chosen score (ties allowed below {margin:.1e})"
            )


def _as_shares(weights: dict[int, float], shared: list[int]) -> dict[int, float]:
    total = sum(weights[e] for e in shared)
    return {e: weights[e] / total for e in shared}
