"""Machine instructions and typed memory access that the stages share.

Addresses are Int64 (global memory) or Int32 (shared memory) byte addresses. Loads and stores of data
are the compiler's own, hence ordered by barriers and never non-coherent; pure arithmetic is inline
assembly without side effects, so the compiler schedules it freely.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_ATT = llvm.AsmDialect.AD_ATT
LOG2_E = 1.4426950408889634


def _value(x, loc, ip):
    return x.ir_value(loc=loc, ip=ip) if hasattr(x, "ir_value") else x


def _asm(result, text, constraints, args, loc, ip, side_effects=False):
    return llvm.inline_asm(
        result,
        [_value(a, loc, ip) for a in args],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=_ATT,
    )


# -- memory -------------------------------------------------------------------------------------


def gmem(address, dtype, align=None):
    """Pointer to ``dtype`` in global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def smem(address, dtype, align=None):
    """Pointer to ``dtype`` in shared memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align or dtype.width // 8)


def _one(pointer):
    return cute.make_tensor(pointer, cute.make_layout(1))


def load(address, dtype):
    """One element of global memory."""
    return _one(gmem(address, dtype))[0]


def store(address, dtype, value):
    _one(gmem(address, dtype))[0] = dtype(value)


def load_shared(address, dtype):
    return _one(smem(address, dtype))[0]


def store_shared(address, dtype, value):
    _one(smem(address, dtype))[0] = dtype(value)


def _vector(pointer, dtype, n):
    fragment = cute.make_rmem_tensor(n, dtype)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(n)), fragment)
    return fragment


def load4(address, dtype=Int32):
    """16 bytes of global memory as four words."""
    return _vector(gmem(address, dtype, 16), dtype, 4)


def load4_shared(address, dtype=Int32):
    return _vector(smem(address, dtype, 16), dtype, 4)


def load2_shared(address, dtype=Int32):
    return _vector(smem(address, dtype, 8), dtype, 2)


def _store_vector(pointer, dtype, words, n):
    fragment = cute.make_rmem_tensor(n, dtype)
    for i in range(n):
        fragment[i] = dtype(words[i])
    cute.autovec_copy(fragment, cute.make_tensor(pointer, cute.make_layout(n)))


def store4(address, words, dtype=Int32):
    _store_vector(gmem(address, dtype, 16), dtype, words, 4)


def store4_shared(address, words, dtype=Int32):
    _store_vector(smem(address, dtype, 16), dtype, words, 4)


def store2_shared(address, words, dtype=Int32):
    _store_vector(smem(address, dtype, 8), dtype, words, 2)


@dsl_user_op
def bulk_copy(shared, source, count, barrier, policy, *, loc=None, ip=None):
    """Asynchronous copy of ``count`` bytes (a multiple of 16) to shared memory, evicted first from L2."""
    _asm(
        None,
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $4;",
        "r,l,r,r,l,~{memory}",
        (Int32(shared), Int64(source), Int32(count), Int32(barrier), Int64(policy)),
        loc,
        ip,
        side_effects=True,
    )


@dsl_user_op
def prefetch(source, count, *, loc=None, ip=None):
    """Ask for ``count`` bytes of global memory (a multiple of 16) to be brought to L2."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    _asm(None, text, "l,r,~{memory}", (Int64(source), Int32(count)), loc, ip, side_effects=True)


@dsl_user_op
def is_over(barrier, parity, *, loc=None, ip=None):
    """1 if the phase of this parity of a barrier in shared memory is over, else 0; does not wait."""
    text = "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    args = (Int32(barrier), Int32(parity))
    return Int32(_asm(T.i32(), text, "=r,r,r,~{memory}", args, loc, ip, side_effects=True))


@dsl_user_op
def evict_first(*, loc=None, ip=None):
    """The cache policy of data that is read once."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
    return Int64(_asm(T.i64(), text, "=l", (), loc, ip))


@dsl_user_op
def sleep(nanoseconds, *, loc=None, ip=None):
    _asm(None, "nanosleep.u32 $0;", "r,~{memory}", (Int32(nanoseconds),), loc, ip, side_effects=True)


# -- numbers ------------------------------------------------------------------------------------


@dsl_user_op
def bits_to_float(x, *, loc=None, ip=None):
    return Float32(llvm.bitcast(T.f32(), Int32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_to_bits(x, *, loc=None, ip=None):
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def low(word):
    """float32 of the lower of two packed bf16."""
    return bits_to_float(word << 16)


def high(word):
    """float32 of the upper of two packed bf16."""
    return bits_to_float(word & Int32(-65536))


@dsl_user_op
def pack_bf16(lower, upper, *, loc=None, ip=None):
    """Two float32 rounded to nearest even, as packed bf16."""
    args = (Float32(upper), Float32(lower))
    return Int32(_asm(T.i32(), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", args, loc, ip))


@dsl_user_op
def pack_f16(lower, upper, *, loc=None, ip=None):
    """Two float32 rounded to nearest even, as packed f16."""
    args = (Float32(upper), Float32(lower))
    return Int32(_asm(T.i32(), "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", args, loc, ip))


def round_bf16(x):
    """float32 rounded to the nearest bf16."""
    return low(pack_bf16(x, Float32(0)))


def load_bf16(address):
    """float32 of a bf16 in global memory."""
    return load(address, cutlass.BFloat16).to(Float32)


def store_bf16(address, x):
    """float32 rounded to bf16 in global memory."""
    store(address, cutlass.BFloat16, x.to(cutlass.BFloat16))


def _unary(text):
    @dsl_user_op
    def function(x, *, loc=None, ip=None):
        return Float32(_asm(T.f32(), text, "=f,f", (Float32(x),), loc, ip))

    return function


exp2 = _unary("ex2.approx.f32 $0, $1;")
"""2**x, relative error 2**-22."""
reciprocal = _unary("rcp.approx.f32 $0, $1;")
"""1 / x, one unit in the last place."""
rsqrt = _unary("rsqrt.approx.f32 $0, $1;")
"""x**-1/2, relative error 2**-22.9."""
absolute = _unary("abs.f32 $0, $1;")


@dsl_user_op
def maximum(x, y, *, loc=None, ip=None):
    """The larger of two float32; a NaN loses."""
    return Float32(_asm(T.f32(), "max.f32 $0, $1, $2;", "=f,f,f", (Float32(x), Float32(y)), loc, ip))


@dsl_user_op
def select(condition, yes, no, *, loc=None, ip=None):
    """``yes if condition else no`` of two float32, both computed."""
    args = (Float32(yes), Float32(no), Int32(condition))
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.f32 $0, $1, $2, p; }"
    return Float32(_asm(T.f32(), text, "=f,f,f,r", args, loc, ip))


@dsl_user_op
def select_int(condition, yes, no, *, loc=None, ip=None):
    """``yes if condition else no`` of two int32, both computed."""
    args = (Int32(yes), Int32(no), Int32(condition))
    text = "{ .reg .pred p; setp.ne.s32 p, $3, 0; selp.b32 $0, $1, $2, p; }"
    return Int32(_asm(T.i32(), text, "=r,r,r,r", args, loc, ip))


def exp(x):
    return exp2(x * Float32(LOG2_E))


def sigmoid(x):
    return reciprocal(Float32(1) + exp(Float32(0) - x))


def tanh(x):
    """Relative error about 1e-6: a polynomial near 0, where the exponential form cancels."""
    a = absolute(x)
    t = exp(a * Float32(-2))
    far = (Float32(1) - t) * reciprocal(Float32(1) + t)
    far = select(x < Float32(0), Float32(0) - far, far)
    s = x * x
    near = x * (Float32(1) + s * (Float32(-1 / 3) + s * (Float32(2 / 15) + s * Float32(-17 / 315))))
    return select(a < Float32(0.15), near, far)


# -- matrix instructions ------------------------------------------------------------------------


def _mma(kind, a, b, c, loc, ip):
    args = [*(Int32(x) for x in a), *(Int32(x) for x in b), *(Float32(x) for x in c)]
    f = T.f32()
    out = _asm(
        llvm.StructType.get_literal([f, f, f, f]),
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        args,
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(f, out, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def mma_tokens(x0, x1, w0, w1, c0, c1, *, loc=None, ip=None):
    """Sums of 8 tokens x 8 weight rows over 16 columns, bf16, added to (c0, c1).

    Lane ``4 g + q`` gives columns of token g (x0, x1) and the same columns of weight row g (w0, w1),
    and holds the sums of token g with weight rows 2 q and 2 q + 1. The instruction takes 16 tokens; the
    upper 8 are zeros.
    """
    zero = Int32(0)
    z = Float32(0)
    return _mma("bf16", (x0, zero, x1, zero), (w0, w1), (c0, c1, z, z), loc, ip)[:2]


@dsl_user_op
def mma_bf16(a, b, c, *, loc=None, ip=None):
    """m16n8k16 of bf16 with float32 sums: four words a, two words b, four sums c; returns the sums."""
    return _mma("bf16", a, b, c, loc, ip)


@dsl_user_op
def mma_f16(a, b, c, *, loc=None, ip=None):
    """m16n8k16 of f16 with float32 sums: four words a, two words b, four sums c; returns the sums."""
    return _mma("f16", a, b, c, loc, ip)


@dsl_user_op
def choose_bits(mask, ones, zeros, *, loc=None, ip=None):
    """The bits of ``ones`` where the mask has a 1, of ``zeros`` elsewhere."""
    args = (Int32(mask), Int32(ones), Int32(zeros))
    return Int32(_asm(T.i32(), "lop3.b32 $0, $1, $2, $3, 0xca;", "=r,r,r,r", args, loc, ip))


@dsl_user_op
def permute(a, b, selector, *, loc=None, ip=None):
    """Four bytes out of the eight of (a, b)."""
    args = (Int32(a), Int32(b), Int32(selector))
    return Int32(_asm(T.i32(), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", args, loc, ip))


@dsl_user_op
def multiply_f16(a, b, *, loc=None, ip=None):
    """Products of two packed f16 pairs."""
    return Int32(_asm(T.i32(), "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", (Int32(a), Int32(b)), loc, ip))


# -- warps --------------------------------------------------------------------------------------


def from_lane(x, lane):
    return cute.arch.shuffle_sync(x, lane)


def from_other(x, mask):
    """The value of the lane whose number differs in the bits of ``mask``."""
    return cute.arch.shuffle_sync_bfly(x, mask)


def warp_sum(x):
    """Sum over the 32 lanes, in all of them, in a fixed order."""
    for mask in (16, 8, 4, 2, 1):
        x = x + from_other(x, mask)
    return x


def warp_max(x):
    for mask in (16, 8, 4, 2, 1):
        x = maximum(x, from_other(x, mask))
    return x
