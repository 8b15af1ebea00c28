"""What linear_packed's kernels for Hopper GPUs share: the ring that W comes through, and small functions.

The copy engine brings W into the ring in shared memory, DEPTH steps ahead of its use, also over the end of a tile of 16
rows, and before the kernel waits for the one before it. Planes with 16 rows interleaved (packed_weights) are such that
a step of a plane is contiguous.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, gl, gluon, mbarrier, tma


@triton.constexpr_function
def mma(c, a, x, first):
    """PTX: c = a x, or `first` not, c += a x; x: the number of the first of its two registers."""
    sums = f"{{{c}0, {c}1, {c}2, {c}3}}"
    before = "{z, z, z, z}" if first else sums
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {a}, {{${x}, ${x + 1}}}, {before};\n"


@triton.constexpr_function
def layout(regs, lanes, step, shape, S):
    """Bases of a lane's registers, of lanes, and of the S warps, which are `step` apart."""
    warps = [[n << i for n in step] for i in range(S.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], shape)


@triton.constexpr_function
def byte_to_f32(i):
    """PTX: byte i of a word, in the mantissa of 2^23."""
    return f"{{\n.reg .b32 a;\nprmt.b32 a, $1, 0x4b000000, 0x754{i};\nmov.b32 $0, a;\n}}"


@gluon.jit
def times_byte(a, b_v, i: gl.constexpr):
    """a times byte i of words, in f32, rounded once."""
    asm: gl.constexpr = byte_to_f32(i)
    byte = gl.inline_asm_elementwise(asm, "=f,r", [b_v], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(a, byte, -8388608.0 * a)


@gluon.jit
def f16_at(b_v, shift: gl.constexpr):
    return ((b_v >> shift) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def after(slot, phase, DEPTH: gl.constexpr):
    """The next slot of the ring, and the phase of its barriers."""
    last = slot == DEPTH - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def release(free, slot, i, DEPTH: gl.constexpr):
    """Give back the slot of the step before, when all warps have computed with it; i: steps before this one.

    Not sooner: a warp's loads from shared memory may still be under way when it has passed a barrier, and the copy
    engine does not wait for them. Instructions that use what was loaded are issued in order, before this.
    """
    gl.thread_barrier()
    mbarrier.arrive(free.index(gl.where(slot == 0, DEPTH - 1, slot - 1)), count=1, pred=i > 0)


@gluon.jit
def loader(
    codes, high, scales, d, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, apart, K,
    BITS: gl.constexpr, EACH: gl.constexpr, TILES: gl.constexpr, S: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    HIGH: gl.constexpr = 8 if BITS == 6 else 4
    SCALES: gl.constexpr = 2 if BITS == 8 else 4
    OTHERS: gl.constexpr = (0 if BITS == 8 else 64 * (256 // EACH)) + (HIGH * 128 if BITS == 5 or BITS == 6 else 0)
    slot, phase = 0, 0
    for tile in range(i_p, tiles, P):
        for step in range(steps):
            bar = full.index(slot)
            mbarrier.wait(free.index(slot), phase ^ 1)
            mbarrier.expect(bar, TILES * S * (16 * 128 + SCALES * 64 + OTHERS))
            for j in gl.static_range(TILES):
                i_t, at = tile + j * apart, slot * TILES + j
                row = i_t * (K // 8 if BITS == 8 else K // 16) + step * (16 * S)
                tma.async_copy_global_to_shared(codes, [row, 0], bar, q_ring.index(at))
                row = i_t * (K // 64) + step * (SCALES * S)
                tma.async_copy_global_to_shared(scales, [row, 0], bar, s_ring.index(at))
                if BITS != 8:
                    row = i_t * (K // EACH) + step * (S * 256 // EACH)
                    tma.async_copy_global_to_shared(d, [row, 0], bar, d_ring.index(at))
                if BITS == 5 or BITS == 6:
                    row = i_t * (K // (32 if BITS == 6 else 64)) + step * (HIGH * S)
                    tma.async_copy_global_to_shared(high, [row, 0], bar, h_ring.index(at))
            slot, phase = after(slot, phase, DEPTH)
    cuda.gdc_launch_dependents()
