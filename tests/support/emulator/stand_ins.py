"""Modules that the kernel's sources import, made of emulated parts: cutlass, cute, the driver, and ptx.

Every function stands for the one of its name in cutlass or in ``kernel/ptx.py``.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from .device import Device, mma
from .memory import SIZE
from .numbers import (
    BF16,
    BFloat16,
    Float32,
    Int32,
    Int64,
    Uint8,
    bits_of,
    float_of,
    halves,
    rounded,
    wrap,
)


class Pointer:
    """An address in one of the memories; adding moves by whole elements."""

    def __init__(self, address: int, ty: Any, is_shared: bool):
        self.address, self.ty, self.is_shared = int(address), ty, is_shared

    def __add__(self, n: int) -> Pointer:
        return Pointer(self.address + int(n) * SIZE[self.ty], self.ty, self.is_shared)

    def toint(self) -> Int32 | Int64:
        return Int32(self.address) if self.is_shared else Int64(self.address)


def _quiet(function: Any) -> Any:
    def call(*args: Any) -> np.float32:
        with np.errstate(all="ignore"):
            return np.float32(function(*(np.float32(x) for x in args)))

    return call


def _range(*args: Any, unroll: Any = None) -> Any:
    del unroll
    return (Int32(i) for i in range(*(int(a) for a in args)))


class Modules:
    """The stand-in modules of one device; ``device`` is set before a launch."""

    def __init__(self) -> None:
        self.device: Any = None
        self.cutlass = self._cutlass()
        self.ptx = self._ptx()

    def table(self, kernel: str) -> dict[str, types.ModuleType]:
        """Module by the name under which the sources of package ``kernel`` import it."""
        driver = types.ModuleType("cuda.bindings.driver")
        driver.CUstream = object  # type: ignore[attr-defined]
        utils = types.ModuleType("cutlass.utils")
        utils.SmemAllocator = lambda: types.SimpleNamespace(  # type: ignore[attr-defined]
            allocate=lambda count, byte_alignment: Pointer(0, Int32, True)
        )
        bindings, cuda = types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
        bindings.driver, cuda.bindings = driver, bindings  # type: ignore[attr-defined]
        return {
            "cutlass": self.cutlass,
            "cutlass.cute": self.cutlass.cute,
            "cutlass.utils": utils,
            "cuda": cuda,
            "cuda.bindings": bindings,
            "cuda.bindings.driver": driver,
            f"{kernel}.ptx": self.ptx,
        }

    # -- cutlass ------------------------------------------------------------------------------

    def _cutlass(self) -> Any:
        module: Any = types.ModuleType("cutlass")
        module.__path__ = []
        cute: Any = types.ModuleType("cutlass.cute")
        values = {
            "Int32": Int32, "Int64": Int64, "Float32": Float32, "BFloat16": BFloat16, "Uint8": Uint8,
            "Constexpr": object, "cute": cute, "range": _range,
            "range_constexpr": range, "const_expr": lambda x: x,
            "min": lambda *x: Int32(min(int(i) for i in x)), "max": lambda *x: Int32(max(int(i) for i in x)),
        }  # fmt: skip
        vars(module).update(values)
        cute.jit = cute.kernel = lambda function: function
        cute.make_rmem_tensor = lambda n, ty: [None] * n
        cute.size = len
        cute.arch = types.SimpleNamespace(**self._arch())
        return module

    def _arch(self) -> dict[str, Any]:
        def device() -> Device:
            return self.device

        def load(pointer: Pointer, ty: Any, *, sem: str, scope: str) -> Any:
            del sem, scope
            return device().memory.get(pointer.address, ty)[0]

        def store(pointer: Pointer, value: Any, *, sem: str, scope: str) -> None:
            del sem, scope
            device().memory.put(pointer.address, pointer.ty, [value])

        def red(pointer: Pointer, value: Any, *, op: str, dtype: str, sem: str, scope: str) -> None:
            del op, dtype, sem, scope
            old = device().memory.get(pointer.address, Int32)[0]
            device().memory.put(pointer.address, Int32, [old + value])

        def atomic_cas(pointer: Pointer, *, cmp: Any, val: Any) -> Any:
            old = device().memory.get(pointer.address, Int32)[0]
            if old == cmp:
                device().memory.put(pointer.address, Int32, [val])
            return old

        def atomic_or(pointer: Pointer, value: Any) -> Any:
            shared = device().me.block.shared
            old = shared.get(pointer.address, Int32)[0]
            shared.put(pointer.address, Int32, [old | value])
            return old

        def redux(value: Any, kind: str) -> Any:
            combine = {"max": max, "min": min}[kind]
            return device().together(f"redux {kind}", value, lambda v: [combine(v)] * 32)

        def clock() -> Int32:
            device().clock += 1000  # a busy lane reads it between waits of microseconds
            return Int32(device().clock)

        return {
            "load": load,
            "store": store,
            "red": red,
            "atomic_cas": atomic_cas,
            "atomic_or": atomic_or,
            "warp_redux_sync": redux,
            "clock": clock,
            "shuffle_sync": self._from_lane,
            "shuffle_sync_bfly": self._from_other,
            "make_warp_uniform": lambda x: x,
            "popc": lambda x: Int32((int(x) & 0xFFFFFFFF).bit_count()),
            "fence_proxy": lambda *_, **__: None,
            "setmaxregister_decrease": lambda count: None,
            "setmaxregister_increase": lambda count: None,
            "mbarrier_init_fence": lambda: None,
            "sync_warp": lambda: device().sync_warp(),
            "barrier": lambda *, barrier_id, number_of_threads: device().sync_block(
                str(barrier_id), number_of_threads
            ),
            "sync_threads": lambda: device().sync_block("of all", device().threads),
            "mbarrier_init": lambda pointer, count: device().mbarrier_init(pointer.address, count),
            "mbarrier_arrive": lambda pointer: device().mbarrier_arrive(pointer.address),
            "mbarrier_arrive_and_expect_tx": lambda pointer, count: device().mbarrier_arrive(
                pointer.address, count
            ),
            "mbarrier_wait": lambda pointer, parity: device().mbarrier_wait(pointer.address, parity),
            "thread_idx": lambda: (Int32(device().me.tid), Int32(0), Int32(0)),
            "block_idx": lambda: (Int32(device().me.block.number % device().grid), Int32(0), Int32(0)),
            "warp_idx": lambda: Int32(device().me.tid // 32),
            "lane_idx": lambda: Int32(device().me.lane),
        }

    # -- ptx ------------------------------------------------------------------------------------

    def _from_lane(self, x: Any, lane: Any) -> Any:
        return self.device.together(
            "shuffle", (x, int(lane) & 31), lambda all_lanes: [all_lanes[at][0] for _, at in all_lanes]
        )

    def _from_other(self, x: Any, mask: int) -> Any:
        return self.device.together(
            f"exchange {int(mask)}", x, lambda v: [v[lane ^ int(mask)] for lane in range(32)]
        )

    def _ptx(self) -> Any:
        module: Any = types.ModuleType("ptx")
        vars(module).update(self._memory() | self._numbers() | self._products())
        module.from_lane, module.from_other = self._from_lane, self._from_other
        module.warp_sum = self._over_warp("sum", lambda a, b: np.float32(a + b))
        module.warp_max = self._over_warp("maximum", np.fmax)
        return module

    def _over_warp(self, name: str, combine: Any) -> Any:
        """In the order of the kernel: five exchanges."""

        def lanes(values: list[Any]) -> list[Any]:
            with np.errstate(all="ignore"):
                for mask in (16, 8, 4, 2, 1):
                    values = [combine(values[i], values[i ^ mask]) for i in range(32)]
            return values

        return lambda x: self.device.together(f"{name} over the warp", x, lanes)

    def _memory(self) -> dict[str, Any]:
        def get(address: Any, ty: Any, n: int = 1) -> list[Any]:
            return self.device.memory.get(int(address), ty, n)

        def put(address: Any, ty: Any, values: list[Any]) -> None:
            self.device.memory.put(int(address), ty, values)

        def get_shared(address: Any, ty: Any, n: int = 1) -> list[Any]:
            me = self.device.me
            return me.block.shared.get_as(me.who, int(address), ty, n)

        def put_shared(address: Any, ty: Any, values: list[Any]) -> None:
            me = self.device.me
            me.block.shared.put_as(me.who, int(address), ty, values)

        return {
            "gmem": lambda address, ty, align=None: Pointer(address, ty, False),
            "smem": lambda address, ty, align=None: Pointer(address, ty, True),
            "load": lambda address, ty: get(address, ty)[0],
            "store": lambda address, ty, value: put(address, ty, [value]),
            "load_shared": lambda address, ty: get_shared(address, ty)[0],
            "store_shared": lambda address, ty, value: put_shared(address, ty, [value]),
            "load4": lambda address, ty=Int32: get(address, ty, 4),
            "load4_shared": lambda address, ty=Int32: get_shared(address, ty, 4),
            "load2_shared": lambda address, ty=Int32: get_shared(address, ty, 2),
            "store4": lambda address, words, ty=Int32: put(address, ty, list(words)),
            "store4_shared": lambda address, words, ty=Int32: put_shared(address, ty, list(words)),
            "store2_shared": lambda address, words, ty=Int32: put_shared(address, ty, list(words)),
            "load_bf16": lambda address: get(address, BFloat16)[0],
            "store_bf16": lambda address, x: put(address, BFloat16, [x]),
            "bulk_copy": lambda shared, source, count, barrier, policy: self.device.bulk_copy(
                int(shared), int(source), int(count), int(barrier)
            ),
            "prefetch": lambda source, count: self.device.prefetch(int(source), int(count)),
            "is_over": lambda barrier, parity: Int32(self.device.is_over(int(barrier), int(parity))),
            "evict_first": lambda: Int64(0),
            "sleep": lambda nanoseconds: self.device.scheduler.pause(),
        }

    def _numbers(self) -> dict[str, Any]:
        def low(word: Any) -> np.float32:
            return float_of(wrap(int(word) << 16))

        def high(word: Any) -> np.float32:
            return float_of(wrap(int(word) & ~0xFFFF))

        def pack(dtype: Any) -> Any:
            def call(lower: Any, upper: Any) -> Int32:
                with np.errstate(all="ignore"):
                    return Int32(rounded(lower, dtype) | rounded(upper, dtype) << 16)

            return call

        def permute(a: Any, b: Any, selector: Any) -> Int32:
            source = ((int(a) & 0xFFFFFFFF) | (int(b) & 0xFFFFFFFF) << 32).to_bytes(8, "little")
            chosen = bytes(source[(int(selector) >> 4 * i) & 7] for i in range(4))
            return Int32(int.from_bytes(chosen, "little"))

        def choose_bits(mask: Any, ones: Any, zeros: Any) -> Int32:
            return Int32((int(mask) & int(ones) | ~int(mask) & int(zeros)) & 0xFFFFFFFF)

        def multiply(a: Any, b: Any) -> Int32:
            product = halves([[a]], np.float16) * halves([[b]], np.float16)
            return Int32(int(product.astype(np.float16).view(np.uint32)[0, 0]))

        exp = _quiet(np.exp)
        return {
            "low": low,
            "high": high,
            "bits_to_float": float_of,
            "float_to_bits": bits_of,
            "pack_bf16": pack(BF16),
            "pack_f16": pack(np.float16),
            "round_bf16": lambda x: np.float32(np.float32(x).astype(BF16)),
            "permute": permute,
            "choose_bits": choose_bits,
            "multiply_f16": multiply,
            "exp": exp,
            "exp2": _quiet(np.exp2),
            "reciprocal": _quiet(lambda x: np.float32(1) / x),
            "rsqrt": _quiet(lambda x: np.float32(1) / np.sqrt(x)),
            "absolute": _quiet(np.abs),
            "maximum": _quiet(np.fmax),
            "sigmoid": _quiet(lambda x: np.float32(1) / (np.float32(1) + np.exp(-x))),
            "tanh": _quiet(np.tanh),
            "select": lambda condition, yes, no: np.float32(yes) if condition else np.float32(no),
            "select_int": lambda condition, yes, no: Int32(yes) if condition else Int32(no),
            "LOG2_E": float(np.log2(np.e)),
        }

    def _products(self) -> dict[str, Any]:
        def product(dtype: Any) -> Any:
            def call(a: Any, b: Any, c: Any) -> Any:
                return self.device.together(
                    f"product of {np.dtype(dtype).name}",
                    (tuple(map(int, a)), tuple(map(int, b)), tuple(c)),
                    lambda lanes: mma(lanes, dtype, halves),
                )

            return call

        bf16 = product(BF16)

        def tokens(x0: Any, x1: Any, w0: Any, w1: Any, c0: Any, c1: Any) -> Any:
            zero = np.float32(0)
            return bf16((x0, 0, x1, 0), (w0, w1), (c0, c1, zero, zero))[:2]

        return {"mma_bf16": bf16, "mma_f16": product(np.float16), "mma_tokens": tokens}


__all__ = ["Modules", "Pointer"]
