"""The kernel: one block an SM, a producer warp and eight consumer warps, and the launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Constexpr, Int32, Int64, cute
from cutlass.utils import SmemAllocator

from k3jax.state import CACHE_BLOCK, STATUS_BAD_TOKEN, STATUS_FULL

from ..operands import COUNTER_WORDS, packed_shapes
from ..resources import CONSUMER_REGISTERS, CONSUMER_WARPS, PRODUCER_REGISTERS, RING_STAGES, THREADS
from . import geometry as g
from .consume import consume
from .context import (
    DEAD_AT,
    EMPTY_AT,
    FREE_AT,
    FULL_AT,
    LENGTH_AT,
    REFUSAL_AT,
    ROUTED_AT,
    RUN_AT,
    TOKEN_AT,
    Context,
)
from .geometry import Geometry
from .produce import produce
from .ptx import evict_first, load, select_int, store, store_shared

_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}


def _address(tensor):
    return tensor.iterator.toint()


def _pointers(geo: Geometry, operands):
    """Addresses of the pointer table, in its order."""
    p = geo.plan
    some = _address(operands["packed"]["lm_head"])
    out = [_address(operands["packed"][m]) if m in geo.present else some for m in g.MATRICES]
    for expert in operands["experts"]:
        for name in ("w1", "w3", "w2"):
            out += [_address(expert[name]), _address(expert[f"{name}_scale"])]
    for i, kind in enumerate(p.config.layer_types):
        if kind == "kda":
            out += [_address(operands["state"][i]["S"]), _address(operands["state"][i]["conv"])]
    for i, kind in enumerate(p.config.layer_types):
        if kind == "mla":
            out.append(_address(operands["state"][i]["cache"]))
    return out


def _packed_vectors(geo: Geometry, operands):
    """(address, bytes of an element, elements of an entry) of every packed operand."""
    out = {}
    for name, (dtype, shape) in packed_shapes(geo.plan).items():
        count = 1
        for n in shape[1:]:
            count *= n
        out[name] = (_address(operands["packed"][name]), _BYTES[dtype], count)
    return out


@cute.jit
def prepare(t, operands, pointers):
    """Barriers, the pointer table and row data to shared memory; the other bank of counters to zero."""
    geo, p = t.geo, t.p
    for i, pointer in enumerate(pointers):
        if t.tid == 32 * (i % (CONSUMER_WARPS + 1)):
            store_shared(t.table + 8 * i, Int64, pointer)
    if t.tid == 0:
        for stage in cutlass.range_constexpr(RING_STAGES):
            arrivals = 32 * CONSUMER_WARPS if geo.all_lanes else CONSUMER_WARPS
            cute.arch.mbarrier_init(t.barrier(FULL_AT) + stage, 1)
            cute.arch.mbarrier_init(t.barrier(EMPTY_AT) + stage, arrivals)
        cute.arch.mbarrier_init(t.barrier(ROUTED_AT), 1)
        cute.arch.mbarrier_init(t.barrier(FREE_AT), CONSUMER_WARPS)
        fault = load(t.fault, Int32)
        store_shared(t.small + DEAD_AT, Int32, select_int(fault != 0, Int32(1), Int32(0)))
    if t.tid < t.B:
        prepare_row(t, operands)
    words = geo.schedule.counters * COUNTER_WORDS
    other = t.at("counters") + Int64(((t.epoch + 1) & 1) * (4 * words))
    for i in cutlass.range(t.sm * THREADS + t.tid, words, p.sms * THREADS, unroll=1):
        store(other + Int64(4 * i), Int32, Int32(0))
    if (t.sm == 0) & (t.tid == 0):
        store(t.epoch_out, Int32, t.epoch + 1)


@cute.jit
def prepare_row(t, operands):
    """Whether row ``tid`` runs, or why not; a step that follows a fault runs no row."""
    b = t.tid
    token = load(_address(operands["tokens"]) + Int64(4 * b), Int32)
    active = load(_address(operands["active"]) + Int64(4 * b), Int32) != 0
    length = load(t.lengths + Int64(4 * b), Int32)
    full = length >= load(_address(operands["max_length"]), Int32)
    bad = (token < 0) | (token >= t.p.config.vocab_size)
    refusal = select_int(active & full, Int32(STATUS_FULL), Int32(0))
    refusal = refusal | select_int(active & bad, Int32(STATUS_BAD_TOKEN), Int32(0))
    fault = load(t.fault, Int32)
    run = select_int(active & (refusal == 0) & (fault == 0), Int32(1), Int32(0))
    usable = active & (refusal == 0)
    store_shared(t.small + TOKEN_AT + 4 * b, Int32, select_int(usable, token, Int32(0)))
    store_shared(t.small + RUN_AT + 4 * b, Int32, run)
    store_shared(t.small + REFUSAL_AT + 4 * b, Int32, refusal)
    store_shared(t.small + LENGTH_AT + 4 * b, Int32, length)


@cute.kernel
def step(fixed: dict, moving: dict, results: dict, geo: Constexpr):
    operands = fixed | moving
    tid, _, _ = cute.arch.thread_idx()
    sm, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    base = SmemAllocator().allocate(geo.shared_bytes, byte_alignment=1024).toint()
    work = _address(operands["work"])
    epoch = load(_address(operands["epoch"]), Int32)
    starts = _address(operands["starts"]) + Int64(4 * sm)
    bank = work + Int64(geo.offset("counters"))
    bank = bank + Int64((epoch & 1) * (4 * COUNTER_WORDS * geo.schedule.counters))
    limit = load(_address(operands["max_length"]), Int32)
    if cutlass.const_expr(geo.plan.ways > 1):
        own = {"take": _address(operands["take"]), "rank": load(_address(operands["rank"]), Int32)}
        if cutlass.const_expr(geo.plan.peers):
            own["peers"] = _address(operands["peers"])
        else:
            own["give"] = _address(results["give"])
    else:
        own = {"embed": _address(operands["embed"])}
    t = Context(
        geo,
        **own,
        sm=sm,
        tid=tid,
        warp=warp,
        lane=cute.arch.lane_idx(),
        base=base,
        work=work,
        epoch=epoch,
        bank=bank,
        packed=_packed_vectors(geo, operands),
        lengths=_address(operands["lengths"]),
        status=_address(operands["status"]),
        fault=_address(operands["fault"]),
        records=_address(operands["records"]),
        program=_address(operands["program"]),
        first=load(starts, Int32),
        last=load(starts + 4, Int32),
        logits=_address(results["logits"]),
        token_out=_address(results["token"]),
        epoch_out=_address(results["epoch"]),
        cache_rows=(limit + (CACHE_BLOCK - 1)) // CACHE_BLOCK * CACHE_BLOCK,
        policy=evict_first(),
    )
    prepare(t, operands, _pointers(geo, operands))
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    # The producer's group of four warps hands its registers to the two that compute.
    if warp >= CONSUMER_WARPS:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == CONSUMER_WARPS:
            produce(t)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume(t)


@cute.jit
def launch(stream: cuda.CUstream, fixed: dict, moving: dict, results: dict, *, geo: Constexpr):
    """Operands that are only read, those updated in place, and new results."""
    step(fixed, moving, results, geo).launch(
        grid=(geo.plan.sms, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )


__all__ = ["launch"]
