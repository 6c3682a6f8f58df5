"""RESIDUAL: the end of a sublayer in a rank's share, behind the exchange that summed the ranks' results.

::

    pre'    = round(pre + round(sum))                     (sum alone where a block starts)
    score_j = (sum_d v_j[d]^2, sum_d v_j[d] u[d])         over own d, for every source j of the next mixture

The sum is float32 [B, D], the same on every rank. Warp b takes row b, a lane its columns l and l + 32.

Constraints: at most 8 groups an SM, so D <= 64 x SMs.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from ..context import Part
from ..flow import signal, wait
from ..ptx import load
from .residual import Own, end_sublayer, load_own

NO_MATRIX = -1


@cute.jit
def residual(t, record):
    """This SM's columns of all rows."""
    p = t.p
    part = Part(t, record)
    wait(t, record)
    own = Own(p)
    load_own(t, own, record, part, True)
    sums = cute.make_rmem_tensor(2, Float32)
    b = cutlass.min(t.warp, t.B - 1)
    for half in cutlass.range_constexpr(2):
        column = cutlass.min(8 * part.g0 + t.lane + 32 * half, p.D - 1)
        sums[half] = load(t.taken(b, column), Float32)
    if t.warp < t.B:
        width = cutlass.min(8 * part.n, p.D - 8 * part.g0)
        end_sublayer(t, record, part, sums, t.warp, width, Int32(NO_MATRIX), own)
    signal(t, record)


__all__ = ["residual"]
