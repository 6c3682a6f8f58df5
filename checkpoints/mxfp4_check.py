"""The scale bytes that can be decoded exactly, and the refusal of the others.

A weight is code * 2**(byte - 127). With all 32 codes of a block zero every byte but 255 decodes
to zeros. With a nonzero code:

* 255 is NaN: always refused.
* 2..252: every value is a normal bfloat16 number: always accepted.
* 0 and 1 reach below the normal numbers. The decode itself is exact (integer arithmetic), but
  bfloat16 arithmetic on accelerators flushes such numbers to zero, so they are refused unless
  the compute dtype is float32.
* 253 and 254 are accepted in float32 where code * 2**(byte - 127) is below 2**128, else refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from k3jax.quant import CODE_VALUES

from .errors import CheckpointError

SAFE = (2, 252)
"""Scale bytes whose blocks decode exactly to normal bfloat16 (and float32) numbers."""

_MAGNITUDE = np.array(CODE_VALUES)


def suspicious(low: int, high: int) -> bool:
    """Whether scale bytes from ``low`` to ``high`` need a look at their codes."""
    return low < SAFE[0] or high > SAFE[1]


def check_scales(
    scales: np.ndarray,
    codes: Callable[[], np.ndarray],
    dtype: str | None,
    where: Callable[[tuple[int, ...]], str],
) -> None:
    """Refuse scale bytes by the rules above.

    Args:
        scales: uint8 [..., out, blocks].
        codes: gives the packed codes, uint8 [..., out, 16 * blocks]; called only if needed.
        dtype: "bfloat16" or "float32", the decoded dtype; None refuses byte 255 only.
        where: names the place of an index into ``scales``.

    Raises:
        CheckpointError: names the first such byte and counts the others.
    """
    if not scales.size or not suspicious(int(scales.min()), int(scales.max())):
        return
    bad = scales == 255
    if dtype is not None and not bad.any():
        bad = _inexact(scales, codes(), dtype)
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    byte = int(scales[index])
    if byte == 255:
        why = "is NaN in E8M0"
    elif byte < SAFE[0]:
        why = f"scales nonzero codes below the normal numbers of {dtype}; load it with dtype='float32'"
    else:
        why = f"scales nonzero codes past what {dtype} decodes exactly"
        why += "" if dtype == "float32" else "; dtype='float32' may hold them"
    count = int(bad.sum())
    others = f" ({count} such bytes in this part)" if count > 1 else ""
    raise CheckpointError(where(index), [f"scale byte {byte} {why}{others}"])


def _inexact(scales: np.ndarray, codes: np.ndarray, dtype: str) -> np.ndarray:
    """bool like ``scales``: blocks of bytes outside SAFE whose codes ``dtype`` cannot hold."""
    bad = (scales < SAFE[0]) | (scales > SAFE[1])
    pairs = codes.reshape(*scales.shape, -1)[bad]
    largest = np.maximum(_MAGNITUDE[pairs & 7], _MAGNITUDE[(pairs >> 4) & 7]).max(axis=-1)
    inexact = np.zeros_like(bad)
    if dtype == "float32":
        inexact[bad] = largest * np.exp2(scales[bad].astype(np.float64) - 127.0) >= 2.0**128
    else:
        inexact[bad] = largest > 0
    return inexact


def check_arrays(
    codes: Any, scales: Any, dtype: str, name: str, experts: Sequence[int] | None = None
) -> None:
    """As :func:`check_scales` for device arrays, whose scales are reduced where they lie.

    Args:
        codes: uint8 jax.Array [E, out, in / 2].
        scales: uint8 jax.Array [E, out, in / 32].
        name: of the leaf.
        experts: the expert at each place of axis 0; None is that of its number.

    Raises:
        CheckpointError: as there.
    """

    def where(index: tuple[int, ...]) -> str:
        expert = index[0] if experts is None else experts[index[0]]
        return f"leaf {name}, scale at {[expert, *index[1:]]}"

    if not scales.size or not suspicious(int(scales.min()), int(scales.max())):
        return
    if scales.is_fully_addressable:
        check_scales(np.asarray(scales), lambda: np.asarray(codes), dtype, where)
        return
    # Codes and scales may be cut differently over processes: gather both, expert by expert.
    from jax.experimental import multihost_utils

    for expert in range(scales.shape[0]):
        part, packed = multihost_utils.process_allgather((scales[expert], codes[expert]), tiled=True)
        check_scales(part, lambda packed=packed: packed, dtype, lambda i, e=expert: where((e, *i)))


__all__ = ["SAFE", "check_arrays", "check_scales", "suspicious"]
