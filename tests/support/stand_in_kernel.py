"""A tiny CuTe kernel with the operands and results of the decode megakernel: tests of everything around it.

It advances ``lengths`` and ``epoch`` by one, says ``token = tokens + lengths`` and fills ``logits`` with
the row number; all other aliased buffers stay as they are. Imports cutlass: for subprocesses only.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass.jax import cutlass_call

from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.operands import ALIASED, abstract_results


@cute.kernel
def _kernel(fixed: dict, moving: dict, out: dict) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread < moving["lengths"].shape[0]:
        out["token"][thread] = fixed["tokens"][thread] + moving["lengths"][thread]
        moving["lengths"][thread] = moving["lengths"][thread] + 1
        for column in range(out["logits"].shape[1]):
            out["logits"][thread, column] = cutlass.Float32(thread)
    if thread == 0:
        out["epoch"][0] = fixed["epoch"][0] + 1


@cute.jit
def _launch(stream: CUstream, fixed: dict, moving: dict, out: dict) -> None:
    launched: Any = _kernel(fixed, moving, out)
    launched.launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def call(geometry: Geometry, operands: dict[str, Any]) -> dict[str, Any]:
    """One custom call of the kernel: the results of :func:`operands.abstract_results`."""
    results = abstract_results(geometry.plan, operands)
    moving = {name: operands[name] for name in ALIASED}
    make: Any = cutlass_call
    run = make(
        _launch,
        output_shape_dtype=(
            {name: results[name] for name in ALIASED},
            {name: results[name] for name in results if name not in ALIASED},
        ),
        input_output_aliases={1: 0},
        use_static_tensors=True,
    )
    updated, new = run({name: operands[name] for name in operands if name not in ALIASED}, moving)
    return updated | new


__all__ = ["call"]
