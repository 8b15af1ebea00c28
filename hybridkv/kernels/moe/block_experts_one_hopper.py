"""The kernel of block_experts_one.py for Hopper GPUs, in Gluon: one product of each of a token's experts, by warps that
read codes straight into the registers that tensor cores take them from.

A program has 16 rows of W (GATED: 8 gates and their ups), and its S warps share the columns. In a product of tensor
cores (mma.m16n8k16) lane 4 g + q holds columns of rows g and g + 8 of one side. Which ones does not matter, as long as
the other side has the same of x: so a lane reads 16 bytes of each of its rows, which are next to each other, and no
code passes through shared memory. All eight columns of the other side are x, and so are all columns of the sums.

    FP4   16 bytes are one group of 32 columns, so each lane of four has a scale of its own: it is multiplied into the
          codes, which is exact. A word has columns 0 to 7; the halves of a register have columns i and i + 4 of it.
    FP8   four lanes have 64 columns of a block, whose sums are scaled in f32.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import async_copy, cuda, from_triton, gl, gluon
from hybridkv.kernels.linear.block_scaled import LARGEST_SCALE
from hybridkv.kernels.linear.packed_parts_hopper import mma
from hybridkv.kernels.moe import grouped

clamped_silu_mul = from_triton(grouped.clamped_silu_mul)

# A scale of E8M0, s, is 2^(s - 127); codes are 2^-126 of their values where bf16 has them. They are multiplied by 2^94
# times the scale, and the sums by the 2^32 that are missing: so no scale of LEAST_SCALE to MOST_SCALE loses a bit. A
# file with larger ones is refused; with smaller ones a value is below 2^-90.
MOST_SCALE, LEAST_SCALE = LARGEST_SCALE[4], 34
_EXPONENT = 94


@triton.constexpr_function
def constraints(words):
    """Of an asm statement: four sums come out; so many words and the sums go in."""
    return ",".join(["=f"] * 4 + ["r"] * words + ["f"] * 4)


@triton.constexpr_function
def framed(body, names, sums):
    """PTX: statements with their registers; `sums`: the number of the first that goes in."""
    frame = f".reg .b32 {names};\n.reg .f32 c0, c1, c2, c3;\n"
    frame += "".join(f"mov.f32 c{i}, ${sums + i};\n" for i in range(4))
    return f"{{\n{frame}{body}{''.join(f'mov.f32 ${i}, c{i};' for i in range(4))}\n}}"


@triton.constexpr_function
def multiply_fp4(step):
    """PTX: 128 columns. Inputs, words of a lane: 4 of row g, 4 of row g + 8, 16 of x, 4 scales of each row of which
    number `step` is used, in 4 what picks the lane's byte of it, and the sums.
    """
    body = ""
    for r, scale in ((0, 28), (1, 32)):
        body += f"prmt.b32 s{r}, ${scale + step}, 0, $36;\n"  # the scale in both halves
        body += f"mad.lo.u32 s{r}, s{r}, 128, {_EXPONENT * 0x00800080};\n"
    for j in range(4):
        for r in (0, 1):
            word = f"${4 + 4 * r + j}"
            for p in range(4):
                if p == 2:
                    body += f"shr.u32 w, {word}, 8;\n"
                    word = "w"
                mask, factor = (0x000F000F, 0x1040) if p % 2 == 0 else (0x00F000F0, 0x104)
                body += f"and.b32 v, {word}, {mask};\n"  # one code in each half
                body += f"mul.lo.u32 v, v, {factor};\n"  # its sign at 15, the rest at 8 to 6, and something between
                body += f"and.b32 v, v, {0x81C081C0};\nmul.bf16x2 a{r}{p}, v, s{r};\n"
        x = 12 + 4 * j
        for p in range(4):  # columns p and p + 4
            body += f"prmt.b32 b{p}, ${x + p // 2}, ${x + 2 + p // 2}, {0x7632 if p % 2 else 0x5410};\n"
        for p in (0, 2):
            codes = f"{{a0{p}, a1{p}, a0{p + 1}, a1{p + 1}}}"
            body += mma("c", codes, 0, False).replace("{$0, $1}", f"{{b{p}, b{p + 1}}}")
    names = ", ".join(f"{a}{p}" for a in ("a0", "a1", "b") for p in range(4))
    return framed(body, f"v, w, s0, s1, {names}", 40)


@triton.constexpr_function
def multiply_fp8():
    """PTX: 64 columns. Inputs, words of a lane: 4 of row g, 4 of row g + 8, 8 of x, and the sums."""
    body = "mov.b32 k, 0x7b807b80;\n"  # as linear_vector converts E4M3: 2^120
    for j in range(4):
        for r in (0, 1):
            for p, which in ((0, "0x9180"), (1, "0xb3a2")):
                body += f"prmt.b32 v, ${4 + 4 * r + j}, 0, {which};\n"
                body += f"shl.b32 v, v, 4;\nand.b32 v, v, 0x87f087f0;\nmul.bf16x2 a{r}{p}, v, k;\n"
        body += mma("c", "{a00, a10, a01, a11}", 12 + 2 * j, False)
    return framed(body, "v, k, a00, a01, a10, a11", 20)


@gluon.jit
def read(p, inside, EVEN: gl.constexpr):
    """What is there; zeros past the last column, where columns are no whole number of stages of all warps."""
    if EVEN:
        return gl.load(p)
    else:
        return gl.load(p, mask=inside, other=0)


@gluon.jit
def make_room(S: gl.constexpr):
    """For the words of four steps. Each has a buffer of its own, or the compiler would have the warps wait for each
    other between two copies.
    """
    F: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = ()
    for _ in gl.static_range(8):
        room = room + (gl.allocate_shared_memory(gl.int32, [32 * S, 4], F),)
    return room


@gluon.jit
def ask(room, p_low, p_high, at, left, FIRST: gl.constexpr, END: gl.constexpr):
    """For the codes of some of four steps, or zeros where no step is `left`. A lane reads what it has asked for."""
    for u in gl.static_range(FIRST, END):
        async_copy.async_copy_global_to_shared(room[2 * u], p_low + at + u * 16, mask=left > u)
        async_copy.async_copy_global_to_shared(room[2 * u + 1], p_high + at + u * 16, mask=left > u)
    async_copy.commit_group()


@gluon.jit
def step_fp4(room, scales, b_y, p_x, inside, U: gl.constexpr, EVEN: gl.constexpr, L: gl.constexpr):
    """128 columns more in the sums."""
    given = (room[2 * U].load(L), room[2 * U + 1].load(L))
    for j in gl.static_range(4):
        given = given + (read(p_x + 4 * j, inside, EVEN),)
    asm: gl.constexpr = multiply_fp4(U)
    args = given + scales + (b_y,)
    return gl.inline_asm_elementwise(asm, constraints(36), args, dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def steps_fp4(room, scales, b_y, p_x, left, FIRST: gl.constexpr, END: gl.constexpr, EVEN: gl.constexpr,
              L: gl.constexpr):  # fmt: skip
    for u in gl.static_range(FIRST, END):
        b_y = step_fp4(room, scales, b_y, p_x + u * 64, left > u, u, EVEN, L)
    return b_y


@gluon.jit
def sums_fp4(x, codes, scales, low, high, K, stride, scale_stride, o_w, o_q, o_r, EVEN: gl.constexpr, S: gl.constexpr,
             PARTS: gl.constexpr, L: gl.constexpr):  # fmt: skip
    """[lanes, 4]: rows g, g, g + 8, g + 8. Four steps of 128 columns are a warp's stage."""
    room = make_room(S)
    b_y = gl.zeros([32 * S, 4], gl.float32, layout=L)
    steps = K // 128
    stages = (steps + 4 * S - 1) // (4 * S)
    pick = o_q * 0x101 + 0x4040 + o_r * 0  # of a prmt: byte q, 0, byte q, 0
    p_low, p_high = codes + low * stride + o_q * 4 + o_r, codes + high * stride + o_q * 4 + o_r
    p_s_low, p_s_high = scales + low * scale_stride + o_r, scales + high * scale_stride + o_r
    p_x = x + o_q * 16 + o_r
    first = o_w * 4
    for part in gl.static_range(PARTS):
        ask(room, p_low, p_high, first * 16, steps - first, 4 * part // PARTS, 4 * (part + 1) // PARTS)
    s_low, s_high = read(p_s_low + first, first + o_r < steps, EVEN), read(p_s_high + first, first + o_r < steps, EVEN)
    for i in range(stages):
        after = first + 4 * S
        there = (after + o_r < steps) & (i + 1 < stages)
        t_low, t_high = gl.load(p_s_low + after, mask=there, other=0), gl.load(p_s_high + after, mask=there, other=0)
        for part in gl.static_range(PARTS):
            async_copy.wait_group(PARTS - 1)
            b_y = steps_fp4(
                room, (s_low, s_high, pick), b_y, p_x + first * 64, steps - first, 4 * part // PARTS,
                4 * (part + 1) // PARTS, EVEN, L,
            )  # fmt: skip
            ask(room, p_low, p_high, after * 16, steps - after, 4 * part // PARTS, 4 * (part + 1) // PARTS)
        s_low, s_high, first = t_low, t_high, after
    return b_y * 4294967296.0  # 2^32


@gluon.jit
def step_fp8(room, b_y, p_x, inside, U: gl.constexpr, EVEN: gl.constexpr, L: gl.constexpr):
    """64 columns more in the sums."""
    asm: gl.constexpr = multiply_fp8()
    args = (room[2 * U].load(L), room[2 * U + 1].load(L), read(p_x, inside, EVEN), read(p_x + 4, inside, EVEN), b_y)
    return gl.inline_asm_elementwise(asm, constraints(16), args, dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def scales_fp8(p_scale, inside, POWERS: gl.constexpr):
    b_scale = gl.load(p_scale, mask=inside, other=0)
    if POWERS:
        b_scale = gl.maximum(b_scale.to(gl.int32) << 23, 0x00400000).to(gl.float32, bitcast=True)
    return b_scale


@gluon.jit
def sums_fp8(x, codes, scales, low, high, s_low, s_high, K, stride, o_w, o_q, o_r, POWERS: gl.constexpr,
             EVEN: gl.constexpr, S: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr):  # fmt: skip
    """As sums_fp4; four steps of 64 columns, two blocks, are a warp's stage."""
    room = make_room(S)
    b_y = gl.zeros([32 * S, 4], gl.float32, layout=L)
    blocks = K // 128
    stages = (blocks + 2 * S - 1) // (2 * S)
    p_low, p_high = codes + low * stride + o_q * 4 + o_r, codes + high * stride + o_q * 4 + o_r
    p_scale = scales + gl.where(o_r < 2, s_low, s_high) * blocks
    p_x = x + o_q * 8 + o_r
    first = o_w * 2
    for half in gl.static_range(2):
        ask(room, p_low, p_high, first * 32, (blocks - first) * 2, 2 * half, 2 * half + 2)
    scale_0 = scales_fp8(p_scale + first, first < blocks, POWERS)
    scale_1 = scales_fp8(p_scale + first + 1, first + 1 < blocks, POWERS)
    for _ in range(stages):
        after = first + 2 * S
        next_0 = scales_fp8(p_scale + after, after < blocks, POWERS)
        next_1 = scales_fp8(p_scale + after + 1, after + 1 < blocks, POWERS)
        for half in gl.static_range(2):
            async_copy.wait_group(1)
            inside, here = first + half < blocks, p_x + (first + half) * 64
            b_sum = gl.zeros([32 * S, 4], gl.float32, layout=L)
            b_sum = step_fp8(room, b_sum, here, inside, 2 * half, EVEN, L)
            b_sum = step_fp8(room, b_sum, here + 32, inside, 2 * half + 1, EVEN, L)
            b_y += b_sum * (scale_0 if half == 0 else scale_1)
            ask(room, p_low, p_high, after * 32, (blocks - after) * 2, 2 * half, 2 * half + 2)
        scale_0, scale_1, first = next_0, next_1, after
    return b_y


@gluon.jit
def sums_of(
    x, codes, scales, expert, low, high, rows, blocks_of_rows, K, stride, scale_stride, o_w, o_q, o_r,
    FORM: gl.constexpr, S: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Rows of one expert's matrix; FORM: a LanesForm."""
    at = expert * rows
    if FORM[0] == 4:
        b_y = sums_fp4(
            x, codes, scales, at + low, at + high, K, stride, scale_stride, o_w, o_q, o_r, FORM[3], S, PARTS, L
        )
    else:
        scale = expert * blocks_of_rows
        s_low, s_high = scale + low // FORM[1], scale + high // FORM[1]
        b_y = sums_fp8(
            x, codes, scales, at + low, at + high, s_low, s_high, K, stride, o_w, o_q, o_r, FORM[2], FORM[3], S,
            PARTS, L,
        )  # fmt: skip
    return b_y


@gluon.jit
def one_row_kernel(
    x,  # [K], or of each choice: pairs of bf16
    codes,  # of [E, N, K], GATED [E, 2 N, K]: words of four bytes
    scales,  # of FP4 words of four, else single ones
    others,  # of the second stack
    other_scales,
    chosen,  # [k]
    y,  # [k, N]
    choices,
    E,
    EXPERTS,  # of both stacks
    N,
    K,
    limit,
    apart,  # words of x from one choice to the next
    stride,  # words of a row of codes
    scale_stride,  # of FP4's scales
    other_stride,
    other_scale_stride,
    blocks_of_rows,  # rows of scales that an expert has
    other_blocks,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    TWO: gl.constexpr,  # stacks
    GATED: gl.constexpr,
    S: gl.constexpr,
    PARTS: gl.constexpr,  # of a stage of FP4, which are waited for one by one
):
    cuda.gdc_wait()
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [S, 1], [1, 0])
    ROWS: gl.constexpr = 8 if GATED else 16
    tiles = N // ROWS
    i_k = (choices - 1 - gl.program_id(0) // tiles).to(gl.int64)  # the last, which all tokens take, has most bytes
    i_n = gl.program_id(0) % tiles * ROWS
    expert = gl.load(chosen + i_k).to(gl.int64)
    if expert < EXPERTS:
        o_l = gl.arange(0, 32 * S, layout=gl.SliceLayout(1, L))[:, None]
        o_r = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
        o_w, o_g, o_q = o_l // 32, o_l % 32 // 4, o_l % 4
        low = i_n + o_g
        high = low + (N if GATED else 8)
        rows = 2 * N if GATED else N
        p_x = x + i_k * apart
        if not TWO or expert < E:
            b_y = sums_of(
                p_x, codes, scales, expert, low, high, rows, blocks_of_rows, K, stride, scale_stride, o_w, o_q,
                o_r, FIRST, S, PARTS, L,
            )  # fmt: skip
        else:
            b_y = sums_of(
                p_x, others, other_scales, expert - E, low, high, rows, other_blocks, K, other_stride,
                other_scale_stride, o_w, o_q, o_r, SECOND, S, PARTS, L,
            )  # fmt: skip
        cuda.gdc_launch_dependents()
        b_y = gl.sum(gl.sum(gl.reshape(b_y, [S, 8, 4, 2, 2]), 4), 2) * 0.125  # all of these are the same
        b_y = gl.sum(b_y, 0)  # [8, 2]
        L1: gl.constexpr = gl.BlockedLayout([1], [32], [S], [0])
        if GATED:
            b_gate, b_up = gl.split(b_y)
            b_out = gl.convert_layout(clamped_silu_mul(b_gate, b_up, limit), L1)
        else:
            b_out = gl.convert_layout(gl.reshape(gl.permute(b_y, (1, 0)), [16]), L1)
        gl.store(y + i_k * N + i_n + gl.arange(0, ROWS, layout=L1), b_out.to(y.dtype.element_ty))
    else:
        cuda.gdc_launch_dependents()
