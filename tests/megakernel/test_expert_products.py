"""One tile of an expert's rows times the tokens, at many widths: the kernel's functions, emulated."""

from __future__ import annotations

import importlib
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from k3jax.quant import CODE_VALUES
from support.emulator import step
from support.emulator.device import Device
from support.emulator.memory import Global
from support.emulator.numbers import Int32, Int64
from support.emulator.stand_ins import Modules

THREADS = 256
E2M1 = np.array([*CODE_VALUES, *(-x for x in CODE_VALUES)])
"""By code: the sign is its bit 3."""
TOLERANCE = 2e-6
"""Of the sum of magnitudes: float32 sums of some hundred products each; weights and tokens are exact."""
WIDTHS = (64, 320, 512, 576, 768, 896, 1024, 1088, 1408, 1536, 1600, 1984, 3072, 3520, 3584)
"""1 to 28 steps of 128 columns: none to three rounds of eight, then 0 to 7 steps, some half empty."""


def tile_of(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of 8 rows and 8 rows more, as the checkpoint has them: codes, then scales."""
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    halves = [(packed[at : at + 8].ravel(), scales[at : at + 8].ravel()) for at in (0, 8)]
    return np.concatenate([part for half in halves for part in half])


def products(tile: np.ndarray, x: np.ndarray, columns: int) -> np.ndarray:
    """[half, row, token] by the kernel's functions, 8 warps that add up."""
    modules = Modules()
    with step.in_place_of(modules.table(step.KERNEL)):
        kernel: Any = importlib.import_module(f"{step.KERNEL}.stages.experts")
    sums = -(-len(tile) // 128) * 128
    memory = Global(x.nbytes + 65536)
    source = memory.place("x", x)
    device = Device(memory, 1, THREADS, THREADS, sums + kernel.PASS_BYTES)
    device.blocks[0].shared.bytes[: len(tile)] = tile
    modules.device = device
    got = np.full((2, 8, 8), np.nan)
    floats = x.dtype == np.float32

    def body() -> None:
        tid = device.me.tid
        t = types.SimpleNamespace(tid=Int32(tid), lane=Int32(tid % 32), warp=Int32(tid // 32), B=len(x))
        registers: list[Any] = [None] * kernel.registers_of(columns)
        undo: list[Any] = [None] * 2
        y: list[Any] = [None] * 4
        kernel.load_tokens(t, registers, Int64(source), x.itemsize * columns, columns, floats)
        kernel.scale_tokens(t, registers, undo)
        kernel.multiply(t, registers, undo, y, Int32(0), Int32(len(tile) // 2), columns)
        kernel.keep(t, Int32(sums), Int32(0), y)
        device.sync_block("1", THREADS)
        if tid < 64:
            got[0, tid >> 3, tid & 7], got[1, tid >> 3, tid & 7] = kernel.add_warps(t, Int32(sums))

    device.run(body)
    return got


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_tile_of_any_width_meets_every_column_once(columns: int) -> None:
    rng = np.random.default_rng(columns)
    batch = (5, 8, 2, 1)[columns // 64 % 4]
    codes = rng.integers(0, 16, (16, columns)).astype(np.uint8)
    scales = rng.integers(105, 129, (16, columns // 32)).astype(np.uint8)
    x = rng.standard_normal((batch, columns)) * np.exp(rng.standard_normal((batch, columns)))
    x[-1] = 0
    x[-1, -1] = 1e36
    x = x.astype(ml_dtypes.bfloat16)
    weights = E2M1[codes] * np.exp2(scales.astype(float) - 127).repeat(32, 1)
    rows = x.astype(np.float32) if columns % 128 else x  # of a share: float32 of bfloat16 numbers
    got = products(tile_of(codes, scales), rows, columns)[:, :, :batch]
    exact = x.astype(np.float64).T
    want, size = ((w @ v).reshape(2, 8, batch) for w, v in ((weights, exact), (abs(weights), abs(exact))))
    assert (np.abs(got - want) <= TOLERANCE * size).all()
