"""Product of one packed MXFP4 tile with eight tokens: the inner step of the expert kernels.

A tile is 64 weight rows by 256 columns: 128 code bytes and eight scale bytes a row. In the
codes' register layout a lane holds 16 code bytes with one scale. A 32-bit word of them holds
eight codes n_0..n_7; shifted so that a code's sign meets bit 15 and its magnitude bits 8..6 of
each 16-bit half, it reads as two bfloat16 numbers, codes c and c + 4, times 2**-126 (magnitudes
E2M1 are then exponent and mantissa; 0.5 becomes a subnormal). One product with
2**(byte - 1) = 2**(byte - 127) * 2**126 gives both weights exactly.

Nothing is shuffled between lanes: position p of the contraction is whichever column the lane
already has, and the activations are stored in that order (:func:`permute_columns`)::

    p = 128 j + 32 i + 8 c + 2 q + b   holds column   64 q + 32 j + 8 i + 4 b + c
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ...quant import dequantize
from .configs import COLUMNS, ROWS

CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 128), (16, 128), (8, 128), (32,), (16,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
"""Register layout of a tile's code bytes: four lanes share a row, each with two runs of 16 bytes."""

WGMMA = plgpu.Layout.WGMMA
HALF = COLUMNS // 2


def permute_columns(x: jax.Array) -> jax.Array:
    """``x`` [..., columns] in the kernels' order of contraction: [..., columns / 256, 256]."""
    lead = x.shape[:-1]
    parts = x.reshape(*lead, -1, 4, 2, 4, 2, 4)  # tile, q, j, i, b, c
    base = len(lead)
    order = (*range(base + 1), *(base + axis for axis in (2, 3, 5, 1, 4)))
    return parts.transpose(order).reshape(*lead, -1, COLUMNS)


def _decode(ctx: Any, codes: Any, scales: Any) -> tuple[Any, Any]:
    """Two bfloat16 halves [64, 128] of the tile's weights, registers in the operand layout of wgmma."""
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    word4 = ir.VectorType.get((4,), i32)
    word1 = ir.VectorType.get((1,), i32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def const(bits: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, bits - (1 << 32) if bits >> 31 else bits))

    def shifted(word: Any, left: int) -> Any:
        if left == 0:
            return word
        return arith.shli(word, const(left)) if left > 0 else arith.shrui(word, const(-left))

    def pick(values: Any, index: int) -> Any:
        return vector.extract(values, dynamic_position=[], static_position=[index])

    layout = WGMMA.to_mgpu()
    code_registers = codes.registers.reshape(2, 2)  # row + 0 or 8; run of 16 bytes
    scale_registers = scales.registers.reshape(2)
    halves = []
    for j in range(2):
        registers = np.empty(layout.registers_shape((ROWS, HALF)), dtype=object)
        flat = registers.reshape(16, 2)  # positions 8 t + 2 q + b; row + 0 or 8
        for h in range(2):
            byte = arith.extui(i32, pick(scale_registers[h], j))
            # The exponent byte + 126 at bits 7 and 23: 2**(byte - 1) in both halves.
            factor = arith.addi(arith.muli(byte, const(0x0080_0080)), const(126 * 0x0080_0080 & 0xFFFF_FFFF))
            words = vector.bitcast(word4, code_registers[h, j])
            for i in range(4):
                word = pick(words, i)
                for c in range(4):
                    sign = arith.andi(shifted(word, 12 - 4 * c), const(0x8000_8000))
                    magnitude = arith.andi(shifted(word, 6 - 4 * c), const(0x01C0_01C0))
                    # PTX keeps subnormals here; an ordinary product might be flushed.
                    value = llvm.inline_asm(
                        i32, [arith.ori(sign, magnitude), factor], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r"
                    )
                    flat[4 * i + c, h] = vector.bitcast(pair, vector.broadcast(word1, value))
        halves.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
    return halves[0], halves[1]


def packed_dot(acc: Any, codes: Any, scales: Any, x: Any) -> None:
    """``acc [64, 8] += decode(codes, scales) [64, 256] x [8, 256]ᵀ`` on the GPU; complete on return.

    Args:
        acc: float32 accumulator reference.
        codes: uint8 [64, 128] in shared memory, tiled (8, 128), swizzled by 128 bytes.
        scales: uint8 [64, 8] in shared memory.
        x: bfloat16 [8, 256] in shared memory, columns permuted, tiled (8, 64), swizzled.
    """
    half = plgpu.ShapeDtypeStruct((ROWS, HALF), jnp.dtype(jnp.bfloat16), WGMMA)
    decode = plgpu.inline_mgpu(arg_types=(CODES, WGMMA), return_type=(half, half))(_decode)
    low, high = decode(plgpu.load(codes, layout=CODES), plgpu.load(scales, layout=WGMMA, optimized=False))
    plgpu.wgmma(acc, low, x.at[:, :HALF].T)
    plgpu.wgmma(acc, high, x.at[:, HALF:].T)
    plgpu.wgmma_wait(0)


def packed_dot_interpreted(acc: Any, codes: Any, scales: Any, x: Any, decoded: Any) -> None:
    """:func:`packed_dot` for the interpreter, which has no registers: the decoded tile passes through
    ``decoded``, bfloat16 [64, 256] in shared memory.
    """
    weights = dequantize(codes[...], scales[...], jnp.bfloat16)
    decoded[...] = permute_columns(weights).reshape(ROWS, COLUMNS)
    plgpu.wgmma(acc, decoded, x.T)
    plgpu.wgmma_wait(0)
