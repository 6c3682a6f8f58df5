"""A kernel that reads all of an array and nothing else: what a card's memory gives at best."""
# pyright: basic, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.utils import SmemAllocator

from k3jax.custom_calls.decode_megakernel.kernel.ptx import (
    bulk_copy,
    evict_first,
    load_shared,
    smem,
    store,
)

STAGES, TILE_BYTES, WARPS = 6, 32_768, 8
THREADS = 32 * (WARPS + 1)


@cute.kernel
def read(words: cute.Tensor, result: cute.Tensor, sms: Constexpr, tiles: Constexpr):
    """Block b takes tiles b, b + sms, ..; its result is the xor of their first words."""
    tid, _, _ = cute.arch.thread_idx()
    sm, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    base = SmemAllocator().allocate(STAGES * TILE_BYTES + 256, byte_alignment=1024).toint()
    full = smem(base + STAGES * TILE_BYTES, Int64)
    empty = smem(base + STAGES * TILE_BYTES + 64, Int64)
    if tid == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, WARPS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    k, total = Int32(0), Int32(0)
    if warp == WARPS:
        source, policy = words.iterator.toint(), evict_first()
        if lane == 0:
            for tile in cutlass.range(sm, tiles, sms, unroll=1):
                stage = k % STAGES
                cute.arch.mbarrier_wait(empty + stage, ((k // STAGES) & 1) ^ 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)
                at = source + Int64(tile) * TILE_BYTES
                bulk_copy(base + stage * TILE_BYTES, at, Int32(TILE_BYTES), (full + stage).toint(), policy)
                k += 1
    else:
        for _tile in cutlass.range(sm, tiles, sms, unroll=1):
            stage = k % STAGES
            cute.arch.mbarrier_wait(full + stage, (k // STAGES) & 1)
            total = total ^ load_shared(base + stage * TILE_BYTES, Int32)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)
            k += 1
    if tid == 0:
        store(result.iterator.toint() + Int64(4 * sm), Int32, total)


@cute.jit
def launch(
    stream: cuda.CUstream, words: cute.Tensor, result: cute.Tensor, *, sms: Constexpr, tiles: Constexpr
):
    read(words, result, sms, tiles).launch(grid=(sms, 1, 1), block=(THREADS, 1, 1), stream=stream)
