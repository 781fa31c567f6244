"""Device code that the ops share: registers, copies, reductions, and a row kept in shared memory.

The unit of everything is the *vector*: 16 bytes of a row, aligned in global memory. A row that starts unaligned
is widened to whole vectors at both ends; what belongs to its neighbours is masked when it arrives and never written.

Prefixes, as in the kernels that use this module: ``g_`` a global address (Int64), ``s_`` a shared-memory address
(Int32). Values in registers have none. Lists of registers are Python lists, so every loop over them is unrolled.
"""

from __future__ import annotations

import struct

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute

from ._schedule import NOTE_BYTES, VECTOR_BYTES, Eviction, Schedule, most_vectors

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

# The running maximum starts at the lowest finite number: with -inf, a thread that has seen only -inf logits would
# compute -inf - -inf = NaN.
LOWEST = -3.4028234663852886e38


def ptx(code, outputs=None, inputs=None, predicate=None):
    operands = None if inputs is None else [operand(value) for value in inputs]
    return cute.arch.inline_ptx(code, write_only_types=outputs, read_only_args=operands, predicate=predicate)


def operand(value):
    """An input of ``ptx``; a float32 that is known here in a register, for DSL 4.7 takes none for an operand.

    Of one that only the DSL's compiler finds to be known, as a sum to which nothing is ever added, its libNVVM says
    that "constraint 'n' expects an integer constant expression".
    """
    if not (isinstance(value, Float32) and isinstance(value.value, float)):
        return value
    bits = int.from_bytes(struct.pack("<f", value.value), "little")
    return cute.arch.inline_ptx(f"mov.f32 {{$w0}}, 0f{bits:08X};", write_only_types=[Float32])


# Arithmetic


def exp2(x):
    return ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], [x])


def log2(x):
    return ptx("lg2.approx.f32 {$w0}, {$r0};", [Float32], [x])


def fma(a, b, c):
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], [a, b, c])


def maximum(a, b):
    return ptx("max.f32 {$w0}, {$r0}, {$r1};", [Float32], [a, b])


def larger_pair(dtype, a, b):
    """``maximum`` of two 16-bit elements at a time: a word."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return ptx(f"max.{kind} {{$w0}}, {{$r0}}, {{$r1}};", [Uint32], [a, b])


def maximum_or_nan(a, b):
    return ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], [a, b])


def above(a, b):
    """Whether a is above b, where NaN is above all numbers: 1 or 0."""
    return ptx(
        "{ .reg .pred p, q; setp.num.f32 q, {$r1}, {$r1}; setp.gtu.and.f32 p, {$r0}, {$r1}, q;"
        " selp.b32 {$w0}, 1, 0, p; }",
        [Int32],
        [a, b],
    )


def divide(a, b):
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], [a, b])


def select_below(index, bound, inside, outside):
    """``inside`` if 0 <= index < bound, else ``outside``."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r0}, {$r1}; selp.f32 {$w0}, {$r2}, {$r3}, p; }",
        [Float32],
        [index, bound, inside, outside],
    )


def argument_of(highest, power):
    """Factor, bias and unit with which 2**((t - highest) * power) is 2**(t * factor + bias) / unit, for t <= highest.

    One instruction for the argument instead of two. The bias is rounded, which the unit takes back: it is the same
    power of ``highest``, so that of ``highest`` itself exactly 1 is left. From a bias of 2**30 on, whose rounding could
    be too much for that, float32 numbers lie so far apart that the result is 1 or 0; it is with any factor that keeps
    them apart, and a power of two rounds nothing.
    """
    factor = ptx(
        "{ .reg .pred p, q; .reg .f32 a, b, c; mul.f32 b, {$r0}, {$r1}; abs.f32 b, b; setp.lt.f32 p, b, 0f4E800000;"
        " abs.f32 a, {$r0}; setp.gt.f32 q, a, 0f53800000; selp.f32 c, 0f3F800000, 0f5F800000, q;"
        " selp.f32 {$w0}, {$r1}, c, p; }",
        [Float32],
        [highest, power],
    )
    bias = Float32(0.0) - highest * factor
    return factor, bias, exp2(fma(highest, factor, bias))


def moderate(x):
    """x, or 0 where it is no number below 2**64 in size, so that a difference to it could overflow."""
    return ptx(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, {$r0}; setp.lt.f32 p, a, 0f5F800000;"
        " selp.f32 {$w0}, {$r0}, 0f00000000, p; }",
        [Float32],
        [x],
    )


def tree(values, combine):
    """Combine a list pairwise: short dependency chains, and a sum whose error grows with the logarithm."""
    while len(values) > 1:
        pairs = [combine(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def add(a, b):
    return a + b


def quotient(value, divisor):
    """``//``, by a shift where that is one: the DSL makes it of a division that rounds to zero, in six instructions."""
    return value // divisor if divisor & (divisor - 1) else value >> (divisor.bit_length() - 1)


def remainder(value, divisor):
    """``%``, likewise."""
    return value % divisor if divisor & (divisor - 1) else value & (divisor - 1)


def tanh(u):
    """tanh to about 2 ulp: a polynomial near zero, where 1 - 2 / (exp(2 u) + 1) would cancel, else that."""
    z = u * u
    p = Float32(TANH_POLYNOMIAL[-1])
    for coefficient in reversed(TANH_POLYNOMIAL[:-1]):
        p = fma(p, z, Float32(coefficient))
    small = fma(u * z, p, u)
    large = fma(
        ptx("rcp.approx.f32 {$w0}, {$r0};", [Float32], [exp2(u * Float32(2.0 * LOG2E)) + Float32(1.0)]),
        Float32(-2.0),
        Float32(1.0),
    )
    return ptx(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, {$r0}; setp.lt.f32 p, a, 0f3F200000;"
        " selp.f32 {$w0}, {$r1}, {$r2}, p; }",
        [Float32],
        [u, small, large],
    )


# (tanh(u) / u - 1) / u**2 as a polynomial in u**2 on |u| < 0.625: Chebyshev fit, relative error of tanh 3e-8.
TANH_POLYNOMIAL = (-0.333332819, 0.133314422, -0.0537397156, 0.0206390888, -0.00570498873)


# Registers and memory


def unpack(dtype, words):
    """32-bit words to float32 values, in memory order."""
    values = []
    for word in words:
        if dtype is BFloat16:
            values.append(ptx("shl.b32 {$w0}, {$r0}, 16;", [Float32], [word]))
            values.append(ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", [Float32], [word]))
        elif dtype is Float16:
            values += ptx(
                "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
                [Float32, Float32],
                [word],
            )
        else:
            values.append(ptx("mov.b32 {$w0}, {$r0};", [Float32], [word]))
    return values


def pack(dtype, values):
    """Float32 values to 32-bit words of ``dtype``, each rounded once, to nearest even."""
    if dtype is Float32:
        return [ptx("mov.b32 {$w0}, {$r0};", [Uint32], [value]) for value in values]
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return [
        ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", [Uint32], [values[i], values[i + 1]])
        for i in range(0, len(values), 2)
    ]


def load_shared(s_address):
    return list(ptx("ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];", [Uint32] * 4, [s_address]))


def store_shared(s_address, words):
    ptx("st.shared.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", None, [s_address, *words])


def hint(policy, number):
    """What an access's policy, or none, adds to the instruction's name, to its operands and to ``number`` others."""
    return ("", "", ()) if policy is None else (".L2::cache_hint", f", {{$r{number}}}", (policy,))


def load_global(g_address, predicate=None, policy=None):
    name, operand, policies = hint(policy, 1)
    code = f"ld.global{name}.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}]{operand};"
    return list(ptx(code, [Uint32] * 4, [g_address, *policies], predicate))


def load_global_or(g_address, wanted, word, policy=None):
    """16 bytes, or four times ``word`` where they are not wanted."""
    name, operand, policies = hint(policy, 3)
    return list(
        ptx(
            "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.b32 {$w0}, {$r2}; mov.b32 {$w1}, {$r2}; mov.b32 {$w2}, {$r2};"
            " mov.b32 {$w3}, {$r2};"
            f" @p ld.global{name}.v4.b32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}]{operand}; }}",
            [Uint32] * 4,
            [g_address, Int32(wanted), word, *policies],
        )
    )


def store_global(g_address, words, predicate=None):
    ptx("st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", None, [g_address, *words], predicate)


def l2_policy(eviction: Eviction):
    """For copies: when the L2 gives up their lines."""
    return ptx(f"createpolicy.fractional.L2::{eviction}.b64 {{$w0}}, 1.0;", [Int64], [])


def copy_async(s_address, g_address, predicate=None, policy=None):
    name, operand, policies = hint(policy, 2)
    ptx(
        f"cp.async.cg.shared.global{name}.L2::128B [{{$r0}}], [{{$r1}}], 16{operand};",
        None,
        [s_address, g_address, *policies],
        predicate,
    )


def commit():
    ptx("cp.async.commit_group;")


def wait(pending):
    ptx(f"cp.async.wait_group {pending};")


def load_element(dtype, g_address, space="global"):
    """One element as float32."""
    if dtype is Float32:
        return ptx(f"ld.{space}.f32 {{$w0}}, [{{$r0}}];", [Float32], [g_address])
    if dtype is BFloat16:
        widen = "mov.b16 z, 0; mov.b32 {$w0}, {z, h};"
    else:
        widen = "cvt.f32.f16 {$w0}, h;"
    return ptx(f"{{ .reg .b16 h, z; ld.{space}.b16 h, [{{$r0}}]; {widen} }}", [Float32], [g_address])


def store_element(dtype, g_address, value, space="global", predicate=None):
    """One float32 value, rounded to ``dtype``."""
    if dtype is Float32:
        ptx(f"st.{space}.f32 [{{$r0}}], {{$r1}};", None, [g_address, value], predicate)
        return
    kind = "bf16" if dtype is BFloat16 else "f16"
    bits = ptx(
        f"{{ .reg .b16 h, z; mov.b16 z, 0; cvt.rn.{kind}.f32 h, {{$r0}}; mov.b32 {{$w0}}, {{h, z}}; }}",
        [Uint32],
        [value],
    )
    if predicate is None:
        ptx(f"{{ .reg .b16 h, z; mov.b32 {{h, z}}, {{$r1}}; st.{space}.b16 [{{$r0}}], h; }}", None, [g_address, bits])
    else:
        ptx(
            "{ .reg .pred p; .reg .b16 h, z; setp.ne.u32 p, {$r2}, 0; mov.b32 {h, z}, {$r1};"
            f" @p st.{space}.b16 [{{$r0}}], h; }}",
            None,
            [g_address, bits, Int32(predicate)],
        )


def load_element_below(dtype, g_address, index, bound):
    """One element as float32, or 0 where 0 <= index < bound does not hold; the address is then not touched."""
    if dtype is Float32:
        return load_float_below(g_address, index, bound)
    widen = "mov.b16 z, 0; mov.b32 {$w0}, {z, h};" if dtype is BFloat16 else "cvt.f32.f16 {$w0}, h;"
    return ptx(
        "{ .reg .pred p; .reg .b16 h, z; setp.lt.u32 p, {$r1}, {$r2}; mov.b16 h, 0; @p ld.global.b16 h, [{$r0}]; %s }"
        % widen,
        [Float32],
        [g_address, index, bound],
    )


def load_float(g_address):
    return ptx("ld.global.f32 {$w0}, [{$r0}];", [Float32], [g_address])


def load_float_below(g_address, index, bound):
    """A float32, or 0 where 0 <= index < bound does not hold; the address is then not touched."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r1}, {$r2}; mov.f32 {$w0}, 0f00000000; @p ld.global.f32 {$w0}, [{$r0}]; }",
        [Float32],
        [g_address, index, bound],
    )


def store_float(g_address, value):
    ptx("st.global.f32 [{$r0}], {$r1};", None, [g_address, value])


def store_floats(g_address, values, predicate=None):
    ptx("st.global.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", None, [g_address, *values], predicate)


def load_integer(bits, g_address):
    """A signed integer of 32 or 64 bits, as Int64."""
    if bits == 64:
        return ptx("ld.global.b64 {$w0}, [{$r0}];", [Int64], [g_address])
    return ptx("{ .reg .s32 v; ld.global.s32 v, [{$r0}]; cvt.s64.s32 {$w0}, v; }", [Int64], [g_address])


def store_int64(g_address, value):
    ptx("st.global.b64 [{$r0}], {$r1};", None, [g_address, value])


def store_byte(g_address, value):
    ptx("{ .reg .u16 v; cvt.u16.u32 v, {$r1}; st.global.u8 [{$r0}], v; }", None, [g_address, value])


def load_shared_word(s_address):
    return ptx("ld.shared.b32 {$w0}, [{$r0}];", [Int32], [s_address])


def store_shared_word(s_address, word):
    ptx("st.shared.b32 [{$r0}], {$r1};", None, [s_address, word])


# Synchronisation


def store_word(g_address, word, predicate=None):
    ptx("st.global.b32 [{$r0}], {$r1};", None, [g_address, word], predicate)


def load_relaxed_below(g_address, index, bound):
    """A float32 that another block wrote, or 0 where 0 <= index < bound does not hold."""
    return ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r1}, {$r2}; mov.f32 {$w0}, 0f00000000;"
        " @p ld.relaxed.gpu.global.f32 {$w0}, [{$r0}]; }",
        [Float32],
        [g_address, index, bound],
    )


def load_acquire(g_address):
    """A counter; what was written before it was counted up can be read afterwards."""
    return ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", [Int32], [g_address])


def add_release(g_address, value):
    """Count up, after everything that this thread has written."""
    ptx("red.release.gpu.global.add.u32 [{$r0}], {$r1};", None, [g_address, value])


def exchange_add(g_address, value):
    """Count up, after everything that this thread has written; the counter's value before."""
    return ptx("atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};", [Int32], [g_address, value])


def add_64(g_address, value):
    """Add to a word that other threads add to."""
    ptx("red.relaxed.gpu.global.add.u64 [{$r0}], {$r1};", None, [g_address, value])


def load_relaxed_64(g_address):
    return ptx("ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", [Int64], [g_address])


def store_relaxed(g_address, word):
    ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", None, [g_address, word])


def store_relaxed_64(g_address, word):
    ptx("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", None, [g_address, word])


def store_relaxed_four(g_address, words):
    ptx("st.relaxed.gpu.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", None, [g_address, *words])


def load_relaxed_four(g_address, wanted):
    """Four words, each by itself, or zeros where they are not wanted."""
    return list(
        ptx(
            "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0;"
            " mov.b32 {$w3}, 0; @p ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }",
            [Int32] * 4,
            [g_address, Int32(wanted)],
        )
    )


# A message: the bits of a float32 with the sign turned, so that 0.0, to which -0.0 is made, is a word that is not 0.


def message_of(value):
    return ptx(
        "{ .reg .f32 v; .reg .b32 b; add.f32 v, {$r0}, 0f00000000; mov.b32 b, v; xor.b32 {$w0}, b, 0x80000000; }",
        [Int32],
        [value],
    )


def number_of(message):
    """The float32 of a message, 0.0 where there is none."""
    return ptx(
        "{ .reg .pred p; .reg .b32 b; setp.ne.s32 p, {$r0}, 0; xor.b32 b, {$r0}, 0x80000000; selp.b32 b, b, 0, p;"
        " mov.b32 {$w0}, b; }",
        [Float32],
        [message],
    )


def float_of(integer):
    return ptx("cvt.rn.f32.s64 {$w0}, {$r0};", [Float32], [integer])


def load_floats(g_address, wanted):
    """Four float32 that other blocks wrote, or zeros."""
    return list(
        ptx(
            "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000;"
            " mov.f32 {$w2}, 0f00000000; mov.f32 {$w3}, 0f00000000;"
            " @p ld.global.cg.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }",
            [Float32] * 4,
            [g_address, Int32(wanted)],
        )
    )


def wait_for_launches():
    """Until the launches ahead of this one in its stream have ended, and what they have written can be read."""
    cute.arch.griddepcontrol_wait()


# A barrier object is 8 bytes of shared memory. It passes from one phase to the next when as many threads have arrived
# as it was made for and all bytes that they said to expect are there; a wait names the parity of the phase to be over.


def make_mbarrier(s_barrier, arrivals):
    ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", None, [s_barrier, Int32(arrivals)])


def show_mbarriers():
    """Before a barrier that all threads wait at, after the barrier objects have been made."""
    ptx("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;")


def arrive_and_expect(s_barrier, size):
    """Arrive, and let the phase last until so many more bytes have come."""
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", None, [s_barrier, size])


def wait_for(s_barrier, parity, scope="cta"):
    """Wait for the end of a phase; ``scope``: "cluster" where another block sends what is waited for."""
    ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.%s.shared::cta.b64 p, [{$r0}], {$r1};"
        " @!p bra again; }" % scope,
        None,
        [s_barrier, parity],
    )


def send(s_address, words, s_barrier, block, wanted):
    """Store one or two words in the shared memory of a block of the cluster, whose barrier object waits for them."""
    kind, values = (".v2.b32", "{ {$r4}, {$r5} }") if len(words) == 2 else (".b32", "{$r4}")
    ptx(
        "{ .reg .pred p; .reg .b32 a, b; setp.ne.u32 p, {$r3}, 0; mapa.shared::cluster.u32 a, {$r0}, {$r2};"
        " mapa.shared::cluster.u32 b, {$r1}, {$r2};"
        f" @p st.async.shared::cluster.mbarrier::complete_tx::bytes{kind} [a], {values}, [b]; }}",
        None,
        [s_address, s_barrier, block, Int32(wanted), *words],
    )


def smaller(a, b):
    return ptx("min.s32 {$w0}, {$r0}, {$r1};", [Int32], [a, b])


def larger(a, b):
    return ptx("max.s32 {$w0}, {$r0}, {$r1};", [Int32], [a, b])


def barrier():
    ptx("bar.sync 0;")


def warp_barrier():
    ptx("bar.warp.sync -1;")


def cluster_barrier():
    ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def cluster_arrive():
    """Half of a barrier of all threads of the cluster, which shows nothing but barrier objects just made."""
    ptx("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait():
    """The other half."""
    ptx("barrier.cluster.wait.acquire.aligned;")


def shuffle_xor(value, distance, kind=Float32):
    return ptx(f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {distance}, 31, -1;", [kind], [value])


def shuffle_xor_64(value, distance):
    """As ``shuffle_xor``, of 64 bits."""
    shuffle = "shfl.sync.bfly.b32 {0}, {0}, %d, 31, -1;" % distance
    return ptx(
        f"{{ .reg .b32 l, h; mov.b64 {{l, h}}, {{$r0}}; {shuffle.format('l')} {shuffle.format('h')}"
        " mov.b64 {$w0}, {l, h}; }",
        [Int64],
        [value],
    )


def warp_reduce(value, combine):
    for distance in (16, 8, 4, 2, 1):
        value = combine(value, shuffle_xor(value, distance))
    return value


def warp_argmax(key, index):
    """The largest key and the smallest index that has it."""
    for distance in (16, 8, 4, 2, 1):
        key, index = better(key, index, shuffle_xor(key, distance), shuffle_xor(index, distance, Int32))
    return key, index


def better(key, index, other_key, other_index):
    """Of two the one with the larger key, NaN being the largest, or of equals the one with the smaller index."""
    return ptx(
        "{ .reg .pred p, q, n; setp.num.f32 n, {$r0}, {$r0}; setp.gtu.and.f32 p, {$r2}, {$r0}, n;"
        " setp.nan.and.f32 q, {$r2}, {$r2}, !n; setp.eq.or.f32 q, {$r2}, {$r0}, q;"
        " setp.lt.and.s32 q, {$r3}, {$r1}, q; or.pred p, p, q;"
        " selp.f32 {$w0}, {$r2}, {$r0}, p; selp.b32 {$w1}, {$r3}, {$r1}, p; }",
        [Float32, Int32],
        [key, index, other_key, other_index],
    )


class StagedRows:
    """Rows that pass through shared memory, one group of threads to a row.

    A row's vectors are dealt to the threads of its group in turn (across the blocks of a cluster), and a thread
    copies exactly the vectors that it later reads. So the copies need no barrier at all: a thread waits for its
    own, and may start the next row's copy into a slot as soon as it has used what the slot held.

    An asynchronous copy is ordered with nothing before its thread has waited for it: a store to its slot meanwhile
    may be lost or stay. So slots are of two kinds, by the number of their vector. From ``most_vectors`` on no row is
    ever copied to them: ``fill_tails`` writes them once, at any time before the first row is read. Below, only copies
    write before the wait (``start``, and ``copy_edges`` for those vectors that ``start`` leaves out), and only
    ``mask_edges`` between the wait and the next row's copy. It covers the last such slot where a row does not reach
    it, which then holds what an earlier row left. Softmax has forms of its own of the two, in which the lanes of a warp
    work on one another's slots.

    Compile-time facts: ``dtype``, the schedule, ``ragged``: whether rows may start or end inside a vector, and
    ``eviction``: the L2's policy for what is copied.
    """

    eviction: Eviction | None = None

    def __init__(self, dtype, schedule: Schedule, ragged: bool, entry_words: int = 4):
        self.dtype = dtype
        self.element_bytes = dtype.width // 8
        self.width = VECTOR_BYTES // self.element_bytes
        self.ragged = ragged
        self.schedule = schedule
        self.threads = schedule.threads
        self.row_threads = schedule.row_threads
        self.groups = schedule.groups
        self.cluster = schedule.cluster
        self.stages = schedule.stages
        self.unroll = schedule.unroll
        self.step = self.row_threads * self.cluster
        self.warps = max(1, self.row_threads // 32)
        self.entry_bytes = 4 * entry_words
        self.scratch_bytes = schedule.scratch_bytes(entry_words)
        self.notes = self.scratch_bytes - NOTE_BYTES

    def lowest(self):
        """A word of -inf elements."""
        if self.dtype is Float32:
            return Uint32(0xFF800000)
        return Uint32(0xFF80FF80 if self.dtype is BFloat16 else 0xFC00FC00)

    def meet(self):
        """Wait for all threads that share one scratch."""
        barrier()

    # Geometry

    def place(self):
        """Where this thread is: thread and group of threads in the block, block of the cluster, first row, row step."""
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        if self.cluster > 1:
            rank = block % self.cluster
            return thread, Int32(0), rank, block // self.cluster, cute.arch.grid_dim()[0] // self.cluster
        if self.groups > 1:
            group = thread // self.row_threads
            row = block * self.groups + group
            return thread % self.row_threads, group, Int32(0), row, cute.arch.grid_dim()[0] * self.groups
        return thread, Int32(0), Int32(0), block, cute.arch.grid_dim()[0]

    def span(self, g_tensor, stride, row, cols):
        """First vector's address, elements of it before the row, and number of vectors, of one row."""
        g_row = g_tensor + Int64(row) * stride * Int64(self.element_bytes)
        if not self.ragged:
            return g_row, Int32(0), cols // self.width
        bytes_before = Int32(g_row & Int64(VECTOR_BYTES - 1))
        phase = quotient(bytes_before, self.element_bytes)
        return g_row - Int64(bytes_before), phase, quotient(phase + cols + (self.width - 1), self.width)

    def vector(self, first, index):
        """Number in the row of this thread's vector ``index``."""
        return first + index * self.step

    def slot(self, s_slots, index):
        """Shared-memory address of this thread's vector ``index``."""
        return s_slots + index * (self.row_threads * VECTOR_BYTES)

    # Copies

    def policy(self):
        """Of what is copied. Made outside of loops: inside, each copy would move it to where its instruction has it."""
        return None if self.eviction is None else l2_policy(self.eviction)

    @cute.jit
    def fill_tails(self, s_slots, chunks, cols, first, word: Uint32, parts: cutlass.Constexpr = 1):
        """Write ``word`` all over those slots of every stage that no copy ever reaches, so that they are neutral."""
        reached = most_vectors(cols, self.width, self.ragged)
        for s in cutlass.range_constexpr(self.stages * parts):
            for u in cutlass.range_constexpr(self.unroll):
                index = (chunks - 1) * self.unroll + u
                if self.vector(first, index) >= reached:
                    s_stage = s_slots + s * (chunks * (self.unroll * self.row_threads * VECTOR_BYTES))
                    store_shared(self.slot(s_stage, index), [word, word, word, word])

    @cute.jit
    def inside(self, g_vectors, vectors, g_begin, g_end):
        """The vectors of a row that lie wholly within the tensor's memory: [low, high)."""
        low = Int32(0)
        high = vectors
        if cutlass.const_expr(self.ragged):
            if g_vectors < g_begin:
                low = Int32(1)
            if g_vectors + Int64(vectors) * VECTOR_BYTES > g_end:
                high = vectors - 1
        return low, high

    def start(self, s_slots, g_vectors, first, index, low, high, policy):
        """Start the copy of one vector, if it is one of [low, high); ``policy``: what ``policy`` makes."""
        vector = self.vector(first, index)
        wanted = vector < high
        if self.ragged:
            wanted = wanted & (vector >= low)
        copy_async(self.slot(s_slots, index), g_vectors + Int64(vector) * VECTOR_BYTES, wanted, policy)

    def start_row(self, s_slots, g_vectors, first, chunks, low, high):
        self.start_between(s_slots, g_vectors, first, Int32(0), chunks, low, high, self.policy())

    @cute.jit
    def start_between(self, s_slots, g_vectors, first, begin, end, low, high, policy):
        """Start the copies of the chunks [begin, end) of a row."""
        for chunk in cutlass.range(begin, end, unroll=1):
            for u in cutlass.range_constexpr(self.unroll):
                self.start(s_slots, g_vectors, first, chunk * self.unroll + u, low, high, policy)

    @cute.jit
    def start_part(self, s_chunk, g_vectors, first, chunk, phase, vectors, low, high, cols):
        """Start the copies of one chunk of a row into slots that hold just a chunk."""
        policy = self.policy()
        # One address, and what is added to it known to the compiler.
        g_chunk = g_vectors + Int64(self.vector(first, chunk * self.unroll)) * VECTOR_BYTES
        for u in cutlass.range_constexpr(self.unroll):
            vector = self.vector(first, chunk * self.unroll + u)
            wanted = vector < high
            if cutlass.const_expr(self.ragged):
                wanted = wanted & (vector >= low)
            copy_async(self.slot(s_chunk, u), g_chunk + u * self.step * VECTOR_BYTES, wanted, policy)
        if cutlass.const_expr(self.ragged):
            # Only the tensor's first and last rows have vectors that reach beyond its memory.
            if (low > 0) | (high < vectors):
                for u in cutlass.range_constexpr(self.unroll):
                    vector = self.vector(first, chunk * self.unroll + u)
                    if (vector < low) | ((vector >= high) & (vector < vectors)):
                        self.copy_elements(self.slot(s_chunk, u), g_vectors, vector, phase, cols)

    @cute.jit
    def copy_edges(self, s_slots, g_vectors, first, phase, vectors, low, high, cols):
        """Copy, element by element, the (at most two) vectors that reach beyond the tensor's memory."""
        if cutlass.const_expr(self.ragged):
            if (low > 0) & (first == 0):
                self.copy_elements(s_slots, g_vectors, Int32(0), phase, cols)
            last = vectors - 1
            if (high <= last) & (last >= low) & (last >= first):
                if (last - first) % self.step == 0:
                    self.copy_elements(self.slot(s_slots, (last - first) // self.step), g_vectors, last, phase, cols)

    def copy_elements(self, s_slot, g_vectors, vector, phase, cols):
        for lane in range(self.width):
            col = vector * self.width + lane - phase
            g_element = g_vectors + Int64(vector) * VECTOR_BYTES + Int64(lane * self.element_bytes)
            bits = "b32" if self.element_bytes == 4 else "b16"
            # Set first: what is set under a predicate alone keeps its register all around the loop over rows.
            ptx(
                f"{{ .reg .pred p; .reg .{bits} v; setp.lt.u32 p, {{$r2}}, {{$r3}}; mov.{bits} v, 0;"
                f" @p ld.global.{bits} v, [{{$r1}}]; @p st.shared.{bits} [{{$r0}}], v; }}",
                None,
                [s_slot + lane * self.element_bytes, g_element, col, cols],
            )

    @cute.jit
    def mask_edges(self, s_slots, first, phase, vectors, slots, cols, outside: Float32):
        """Once a row has arrived: overwrite what is not of the row, and the slot behind its last vector."""
        if cutlass.const_expr(self.ragged):
            if (first == 0) & (phase > 0):
                self.mask_elements(s_slots, Int32(0), phase, cols, outside)
            last = vectors - 1
            if last >= first:
                if (last - first) % self.step == 0:
                    self.mask_elements(self.slot(s_slots, (last - first) // self.step), last, phase, cols, outside)
            if vectors >= first:
                if ((vectors - first) % self.step == 0) & ((vectors - first) // self.step < slots):
                    self.mask_elements(
                        self.slot(s_slots, (vectors - first) // self.step), vectors, phase, cols, outside
                    )

    def mask_elements(self, s_slot, vector, phase, cols, outside):
        for lane in range(self.width):
            col = vector * self.width + lane - phase
            beyond = (col < 0) | (col >= cols)
            store_element(self.dtype, s_slot + lane * self.element_bytes, outside, "shared", beyond)

    def load_words(self, g_vectors, first, chunk, phase, vectors, cols, outside):
        """The words of one chunk of a row into registers, ``outside`` where a vector is not (all of) the row's."""
        # One address, and what is added to it known to the compiler.
        g_chunk = g_vectors + Int64(self.vector(first, chunk * self.unroll)) * VECTOR_BYTES
        words = []
        for u in range(self.unroll):
            whole = self.whole(self.vector(first, chunk * self.unroll + u), phase, vectors, cols)
            words += load_global_or(g_chunk + u * self.step * VECTOR_BYTES, whole, outside)
        return words

    # Results

    def whole(self, vector, phase, vectors, cols):
        """Whether a vector belongs to the row entirely."""
        if not self.ragged:
            return vector < vectors
        return (vector * self.width >= phase) & ((vector + 1) * self.width - phase <= cols)

    def load_column(self, g_vectors, phase, col):
        """One element of a row."""
        return load_element(self.dtype, g_vectors + (Int64(phase) + Int64(col)) * self.element_bytes)

    def store_column(self, g_out, phase, col, value):
        """One element of a result."""
        store_element(self.dtype, g_out + (Int64(phase) + Int64(col)) * self.element_bytes, value)

    @cute.jit
    def owns(self, first, vector):
        """Whether this thread has that vector."""
        mine = False
        if vector >= first:
            mine = (vector - first) % self.step == 0
        return mine

    # Reduction over the threads of a row

    def exchange(self, s_scratch, parity, thread, rank, words):
        """Hand one list of words per warp to every warp of the row, and return the entries as this lane reads them.

        The scratch is double buffered by ``parity``: a warp that is a row ahead writes the other half, and cannot be
        two rows ahead, for that takes everyone's arrival at the barrier in between.
        """
        lane = thread % 32
        warp = thread // 32
        entries = self.warps * self.cluster
        s_half = s_scratch + parity * (entries * self.entry_bytes)
        s_mine = s_half + (rank * self.warps + warp) * self.entry_bytes
        values = [s_mine, lane, *words]
        if self.cluster > 1:
            code = (
                "{ .reg .pred p; .reg .b32 a; setp.lt.u32 p, {$r1}, %d; @p mapa.shared::cluster.u32 a, {$r0}, {$r1}; "
                % self.cluster
            )
            space, base = "shared::cluster", "a"
        else:
            code = "{ .reg .pred p; setp.eq.u32 p, {$r1}, 0; "
            space, base = "shared", "{$r0}"
        for i in range(len(words)):
            code += "@p st.%s.b32 [%s + %d], {$r%d}; " % (space, base, 4 * i, i + 2)
        ptx(code + "}", None, values)
        if self.cluster > 1:
            cluster_barrier()
        else:
            self.meet()
        read = []
        for e in range((entries + 31) // 32):
            index = lane + 32 * e
            read.append((index, entries, s_half + index * self.entry_bytes))
        return read

    def read_entry(self, entry, word, default, kind=Float32):
        index, entries, s_entry = entry
        return ptx(
            "{ .reg .pred p; setp.lt.u32 p, {$r1}, %d; mov.b32 {$w0}, {$r2}; @p ld.shared.b32 {$w0}, [{$r0} + %d]; }"
            % (entries, 4 * word),
            [kind],
            [s_entry, index, default],
        )

    def absorb_values(self, t, power, highest, total):
        """Take values into a running (maximum, sum of 2**((t - maximum) * power)).

        The maximum itself contributes exactly 1, and differences are taken before they are scaled: so large values
        lose nothing, and a row with one class left has exactly probability 1.
        """
        raised = maximum(highest, tree(t, maximum))
        fresh = [exp2((value - raised) * power) for value in t]
        return raised, fma(total, exp2((highest - raised) * power), tree(fresh, add))

    def absorb_words(self, words, power, highest, total):
        """The same of the elements of words."""
        raised = self.highest_of(words, highest)
        fresh = self.sum_vectors(lambda values: [exp2((value - raised) * power) for value in values], words)
        return raised, fma(total, exp2((highest - raised) * power), fresh)

    def highest_of(self, words, highest):
        """The largest of ``highest`` and the elements of words."""
        if self.dtype is not Float32:
            words = [tree(words, lambda a, b: larger_pair(self.dtype, a, b))]
        return maximum(highest, tree(unpack(self.dtype, words), maximum))

    @cute.jit
    def sum_staged(self, s_row, chunks, power):
        """Maximum and sum of 2**((t - maximum) * power) of the elements that this thread has in its slots.

        It reads them twice: with the maximum known they take fewer instructions than a running one costs.
        """
        highest = Float32(LOWEST)
        for chunk in cutlass.range(chunks, unroll=1):
            highest = self.highest_of(self.staged_words(s_row, chunk), highest)
        factor, bias, unit = argument_of(highest, power)
        total = Float32(0.0)
        for chunk in cutlass.range(chunks, unroll=1):
            total = total + self.total_of(self.staged_words(s_row, chunk), factor, bias)
        return highest, divide(total, unit)

    def total_of(self, words, factor, bias):
        """The sum of 2**(t * factor + bias) over the elements of words."""
        return self.sum_vectors(lambda values: [exp2(fma(value, factor, bias)) for value in values], words)

    def sum_vectors(self, terms, *words):
        """The sum of the terms that ``terms`` makes of the elements of a vector, over the vectors of words.

        A vector's are summed before the next one's are formed: all at a time would take more registers, one by one
        would leave the arithmetic of a warp nothing to overlap with.
        """
        count = len(words[0]) * 4 // VECTOR_BYTES
        return tree([tree(terms(*(self.vector_values(of, u) for of in words)), add) for u in range(count)], add)

    def staged_words(self, s_row, chunk):
        """The words of one chunk in this thread's slots."""
        words = []
        for u in range(self.unroll):
            words += load_shared(self.slot(s_row, chunk * self.unroll + u))
        return words

    def vector_values(self, words, u):
        """The elements of vector number ``u`` among words."""
        vector_words = VECTOR_BYTES // 4
        return unpack(self.dtype, words[u * vector_words : (u + 1) * vector_words])

    def reduce_row(self, s_scratch, parity, thread, rank, power, highest, total, sums=(), best=None):
        """Reduce over the threads of a row: a (maximum, sum) pair, plain sums, and a (key, index) argmax."""
        top = warp_reduce(highest, maximum)
        total = warp_reduce(total * exp2((highest - top) * power), add)
        highest = top
        sums = [warp_reduce(value, add) for value in sums]
        if best is not None:
            best = warp_argmax(*best)
        if self.warps * self.cluster == 1:
            return highest, total, sums, best
        words = [highest, total, *sums, *(best or ())]
        entries = self.exchange(s_scratch, parity, thread, rank, words)
        pairs = [
            (self.read_entry(entry, 0, Float32(LOWEST)), self.read_entry(entry, 1, Float32(0.0))) for entry in entries
        ]
        top = warp_reduce(tree([pair[0] for pair in pairs], maximum), maximum)
        total = warp_reduce(tree([pair[1] * exp2((pair[0] - top) * power) for pair in pairs], add), add)
        reduced = []
        for i in range(len(sums)):
            values = [self.read_entry(entry, 2 + i, Float32(0.0)) for entry in entries]
            reduced.append(warp_reduce(tree(values, add), add))
        if best is not None:
            at = 2 + len(sums)
            candidates = [
                (
                    self.read_entry(entry, at, Float32(float("-inf"))),
                    self.read_entry(entry, at + 1, Int32(2**31 - 1), Int32),
                )
                for entry in entries
            ]
            key, index = candidates[0]
            for other in candidates[1:]:
                key, index = better(key, index, *other)
            best = warp_argmax(key, index)
        return top, total, reduced, best

    def reduce_sums(self, s_scratch, parity, thread, rank, sums):
        """Reduce plain sums over the threads of a row."""
        sums = [warp_reduce(value, add) for value in sums]
        if self.warps * self.cluster == 1:
            return sums
        entries = self.exchange(s_scratch, parity, thread, rank, sums)
        return [
            warp_reduce(tree([self.read_entry(entry, i, Float32(0.0)) for entry in entries], add), add)
            for i in range(len(sums))
        ]

    def sum_block(self, s_scratch, thread, threads, value):
        """The block's sum, the same for all threads, in a fixed order. Ends before the scratch may be reused."""
        value = warp_reduce(value, add)
        warps = threads // 32
        if warps == 1:
            return value
        ptx(
            "{ .reg .pred p; setp.eq.u32 p, {$r1}, 0; @p st.shared.f32 [{$r0}], {$r2}; }",
            None,
            [s_scratch + thread // 32 * 4, thread % 32, value],
        )
        self.meet()
        lane = thread % 32
        value = ptx(
            "{ .reg .pred p; setp.lt.u32 p, {$r1}, %d; mov.f32 {$w0}, 0f00000000; @p ld.shared.f32 {$w0}, [{$r0}]; }"
            % warps,
            [Float32],
            [s_scratch + lane * 4, lane],
        )
        self.meet()
        return warp_reduce(value, add)

    # Elements at the edges of a row

    def has(self, first, vector):
        """Whether this thread's tile has that vector at this thread."""
        mine = vector == first
        for u in range(1, self.unroll):
            mine = mine | (vector == self.vector(first, u))
        return mine

    def load_edge(self, g_vectors, vector, phase, cols, outside=0.0):
        """A vector's elements; ``outside`` for those that are not of the row, which are not touched."""
        values = []
        for lane in range(self.width):
            col = vector * self.width + lane - phase
            g_element = g_vectors + Int64(vector) * VECTOR_BYTES + Int64(lane * self.element_bytes)
            value = load_element_below(self.dtype, g_element, col, cols)
            values.append(value if outside == 0.0 else select_below(col, cols, value, Float32(outside)))
        return values

    def store_edge(self, g_out, vector, phase, cols, values):
        """Store those elements of a vector that are of the row."""
        for lane in range(self.width):
            col = vector * self.width + lane - phase
            g_element = g_out + Int64(vector) * VECTOR_BYTES + Int64(lane * self.element_bytes)
            store_element(self.dtype, g_element, values[lane], "global", (col >= 0) & (col < cols))

    @cute.jit
    def write_zeros(self, g_out, phase, vectors, first, chunks, cols):
        zero = Uint32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            for u in cutlass.range_constexpr(self.unroll):
                vector = self.vector(first, chunk * self.unroll + u)
                g_vector = g_out + Int64(vector) * VECTOR_BYTES
                store_global(g_vector, [zero] * 4, self.whole(vector, phase, vectors, cols))
        if cutlass.const_expr(self.ragged):
            zeros = [Float32(0.0)] * self.width
            last = (vectors - 1 - first) // self.step
            if first == 0:
                self.store_edge(g_out, Int32(0), phase, cols, zeros)
            if (vectors > first) & (self.vector(first, last) == vectors - 1) & (last < chunks * self.unroll):
                self.store_edge(g_out, vectors - 1, phase, cols, zeros)
