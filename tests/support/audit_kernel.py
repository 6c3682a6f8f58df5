"""A small kernel out of the megakernel's own hand-offs and ring, with faults that an audit must find.

Rounds of: wait for the round's record, read one number of the workspace, stream tiles against a resident
vector, write the workspace, signal. Imports cutlass: for subprocesses only.
"""

# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (names that the DSL makes at run time)
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import jax
import jax.numpy as jnp
from cutlass import Constexpr, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.jax import cutlass_call
from cutlass.utils import SmemAllocator

from k3jax.custom_calls.call_site import call_site
from k3jax.custom_calls.decode_megakernel.kernel.context import DEAD_AT, EMPTY_AT, FULL_AT, Context, Record
from k3jax.custom_calls.decode_megakernel.kernel.flow import (
    copy,
    counter,
    fetch,
    open_tile,
    release,
    signal,
    take,
    wait,
)
from k3jax.custom_calls.decode_megakernel.kernel.geometry import Geometry
from k3jax.custom_calls.decode_megakernel.kernel.ptx import (
    bits_to_float,
    evict_first,
    gmem,
    load,
    load4_shared,
    mma_tokens,
    store,
    store_shared,
)
from k3jax.custom_calls.decode_megakernel.resources import (
    CONSUMER_WARPS,
    RING_STAGE_BYTES,
    RING_STAGES,
    THREADS,
)
from support.audit_faults import KINDS

TILES = 4
"""Tiles of a round."""
BLOCK = 272
"""Offset of the number that a round reads."""


@dsl_user_op
def _assembly_load(address, text, *, loc=None, ip=None):
    """A load that the compiler takes for arithmetic."""
    word = llvm.inline_asm(
        T.i32(),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        text,
        "=r,l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return bits_to_float(Int32(word))


def read(t, kind):
    """The number that a round reads."""
    address = t.work + Int64(BLOCK)
    if kind == "non-coherent":
        return _assembly_load(address, "ld.global.nc.b32 $0, [$1];")
    if kind == "hoistable":
        return _assembly_load(address, "ld.global.b32 $0, [$1];")
    return load(address, Float32)


@cute.jit
def poll_alone(t, index):
    """A wait of every thread for itself, without a limit and without a barrier behind it."""
    address = gmem(counter(t, index), Int32)
    value = cute.arch.load(address, Int32, sem="acquire", scope="gpu")
    while value < t.geo.plan.sms:
        value = cute.arch.load(address, Int32, sem="acquire", scope="gpu")


@cute.jit
def consume(t, kind: cutlass.Constexpr, rounds, words: cutlass.Constexpr):
    """All rounds of the consumer warps."""
    x = cute.make_rmem_tensor(words, Int32)
    for i in cutlass.range_constexpr(words):
        x[i] = load(t.weights + Int64(4 * (t.tid + 256 * i)), Int32)
    k = Int32(0)
    c0, c1 = Float32(0), Float32(0)
    for i in cutlass.range(rounds, unroll=1):
        record = Record(fetch(t, i, rounds), i)
        if cutlass.const_expr(kind == "early"):
            c0 = c0 + read(t, kind)
            wait(t, record)
        elif cutlass.const_expr(kind in ("between", "hoistable")):
            poll_alone(t, i)
            c0 = c0 + read(t, kind)
            t.sync()
        else:
            wait(t, record)
            c0 = c0 + read(t, kind)
        for _ in cutlass.range(TILES, unroll=1):
            tile = take(t, k)
            for j in cutlass.range_constexpr(0, words, 4):
                w = load4_shared(tile + 512 * (j // 4) + 16 * t.lane)
                c0, c1 = mma_tokens(x[j], x[j + 1], w[0], w[1], c0, c1)
                c0, c1 = mma_tokens(x[j + 2], x[j + 3], w[2], w[3], c0, c1)
            release(t, k)
            k += 1
        store(t.work + Int64(1024 + 4 * t.tid), Float32, c0 + c1)
        signal(t, record)


@cute.jit
def produce(t, kind: cutlass.Constexpr, rounds):
    """The tiles of all rounds."""
    source = t.work if kind == "copied" else t.weights
    for k in cutlass.range(rounds * TILES, unroll=1):
        open_tile(t, k, Int32(RING_STAGE_BYTES))
        copy(t, k, Int32(0), source + Int64(k) * RING_STAGE_BYTES, Int32(RING_STAGE_BYTES))


@cute.kernel
def step(fixed: dict, moving: dict, geo: Constexpr, kind: Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    sm, _, _ = cute.arch.block_idx()
    work = moving["work"].iterator.toint()
    t = Context(
        geo,
        sm=sm,
        tid=tid,
        warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
        lane=cute.arch.lane_idx(),
        base=SmemAllocator().allocate(geo.shared_bytes, byte_alignment=1024).toint(),
        work=work,
        bank=work + Int64(4096),
        epoch=Int32(0),
        fault=moving["fault"].iterator.toint(),
        weights=fixed["weights"].iterator.toint(),
        records=fixed["records"].iterator.toint(),
        program=fixed["program"].iterator.toint(),
        policy=evict_first(),
    )
    if tid == 0:
        for stage in cutlass.range_constexpr(RING_STAGES):
            cute.arch.mbarrier_init(t.barrier(FULL_AT) + stage, 1)
            cute.arch.mbarrier_init(t.barrier(EMPTY_AT) + stage, CONSUMER_WARPS)
        store_shared(t.small + DEAD_AT, Int32, Int32(0))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    rounds = load(fixed["rounds"].iterator.toint(), Int32)
    if t.warp == CONSUMER_WARPS:
        produce(t, kind, rounds)
    else:
        # 40 words of the vector more than a thread has registers.
        consume(t, kind, rounds, 208 if kind == "spilled" else 16)


@cute.jit
def launch(stream: cuda.CUstream, fixed: dict, moving: dict, *, geo: Constexpr, kind: Constexpr):
    launched: Any = step(fixed, moving, geo, kind)
    launched.launch(grid=(geo.plan.sms, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)


def module(geometry: Geometry, kind: str) -> bytes:
    """The compiled module of a kernel with a fault."""

    def call(fixed: Mapping[str, Any], moving: Mapping[str, Any]) -> Any:
        run = cutlass_call(
            launch,
            output_shape_dtype={name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in moving.items()},
            input_output_aliases={1: 0},
            use_static_tensors=True,
            geo=geometry,
            kind=kind,
        )
        return run(fixed, moving)

    def words(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), jnp.int32)

    fixed = {"weights": words(1 << 20), "records": words(1 << 10), "program": words(64), "rounds": words(1)}
    moving = {"work": words(1 << 16), "fault": words(16)}
    lowered = jax.jit(call).trace(fixed, moving).lower(lowering_platforms=("cuda",))
    return call_site(lowered).attributes["module"]


def main(folder: str) -> None:
    """Write the modules of all kinds."""
    from k3jax import K3Config, checkpoints
    from k3jax.custom_calls.decode_megakernel.schedule import build
    from k3jax.custom_calls.decode_megakernel.shapes import Plan

    geometry = Geometry(build(Plan(K3Config.from_pretrained(checkpoints.resolve("nano")), 1)))
    for kind in KINDS:
        (Path(folder) / f"{kind}.module").write_bytes(module(geometry, kind))
