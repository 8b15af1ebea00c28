"""linear_fp8's kernel for Hopper GPUs and up to eight rows, in Gluon, after the pattern of packed_hopper.py.

A program takes 16 rows of W (GATED: 16 gates and their 16 ups) and all columns, 64 at a time for each of its warps. A
lane reads 16 bytes of rows g and g + 8, DEPTH steps ahead, the first of them before the kernel before has ended. The
codes are upcast in registers, so every product is exact.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, gl, gluon
from hybridkv.kernels.linear.packed_hopper import biased, framed, lane_of, lanes, mma, results, rows_of, words_of


@triton.constexpr_function
def multiply_e4m3():
    """PTX: 8 words of codes (row, half of the 16 bytes, word) by x (4 registers a half) -> the sum, in two parts.

    The seven low bits of a code, put at exponent and mantissa of BF16, are 2^120 times too small.
    """
    body = "mov.b32 k, 0x7b807b80;\n"
    for i in range(8):
        for q, which in ((0, "0x9180"), (1, "0xb3a2")):
            body += f"prmt.b32 a, ${8 + i}, 0, {which};\nshl.b32 a, a, 4;\nand.b32 a, a, 0x87f087f0;\n"
            body += f"mul.bf16x2 l{i // 2 % 2}{i // 4}{i % 2 * 2 + q}, a, k;\n"
    for i in range(4):
        body += mma("cd"[i % 2], words_of("l", i), 16 + 2 * i, i < 2)
    return framed(body + results("cd"))


_SUMS, _WORDS = gl.constexpr(",".join(["=f"] * 8)), gl.constexpr(",r" * 16)


@gluon.jit
def load_codes(p_w, K, inside, S: gl.constexpr):
    o_r = lanes(8, S)[1]
    return gl.load(p_w + o_r // 4 * (2 * K) + o_r % 4, mask=inside, cache_modifier=".cg")


@gluon.jit
def add_product(b_y, b_w, p_x, m_x, S: gl.constexpr):
    """b_y: the sums [lanes, 8] of each tile, whose words of a step are b_w."""
    b_x = gl.load(p_x + lanes(8, S)[1], mask=m_x, other=0)
    new = ()
    for j in gl.static_range(len(b_w)):
        new = new + (
            b_y[j] + gl.inline_asm_elementwise(
                multiply_e4m3(), _SUMS + _WORDS, [b_w[j], b_x], dtype=gl.float32, is_pure=True, pack=8
            ),
        )  # fmt: skip
    return new


@gluon.jit(do_not_specialize=["T"])
def linear_fp8_hopper_kernel(
    x,  # [T, K] as words, rows stride_x words apart
    w,  # [N, K], GATED: [2 N, K], as words
    scale,
    bias,
    y,  # [T, N]
    T,
    N,
    K,
    stride_x,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,  # all warps have as many steps
    S: gl.constexpr,  # warps
    DEPTH: gl.constexpr,  # steps that are loaded ahead
):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [S, 1], [1, 0])
    TILES: gl.constexpr = 2 if GATED else 1
    first = gl.program_id(0)
    steps = K // 64
    n = (steps + S - 1) // S  # of each warp
    s, g, t = lane_of(S, 8)
    b_y, p_w, ring = (), (), ()
    for j in gl.static_range(TILES):
        b_y = b_y + (gl.zeros([32 * S, 8], gl.float32, layout=L),)
        p_w = p_w + (w + ((first * 16 + j * N).to(gl.int64) + g) * (K // 4) + s * 16 + t * 4,)
    for k in gl.static_range(DEPTH):
        b_w = ()
        for j in gl.static_range(TILES):
            inside = (k < n) if EVEN else k * S + s < steps
            b_w = b_w + (load_codes(p_w[j] + k * (16 * S), K, inside, S),)
        ring = ring + (b_w,)
    p_x = x + g.to(gl.int64) * stride_x + s * 32 + t * 8
    m_x = g < T
    cuda.gdc_wait()
    for i in range(0, n // DEPTH * DEPTH, DEPTH):
        later = ()
        for k in gl.static_range(DEPTH):
            m_k = m_x if EVEN else m_x & ((i + k) * S + s < steps)
            b_y = add_product(b_y, ring[k], p_x + k * (32 * S), m_k, S)
            b_w = ()
            for j in gl.static_range(TILES):
                inside = (i + k + DEPTH < n) if EVEN else (i + k + DEPTH) * S + s < steps
                b_w = b_w + (load_codes(p_w[j] + (k + DEPTH) * (16 * S), K, inside, S),)
            later = later + (b_w,)
        ring = later
        moved = ()
        for j in gl.static_range(TILES):
            moved = moved + (p_w[j] + DEPTH * (16 * S),)
        p_w = moved
        p_x += DEPTH * 32 * S
    for k in gl.static_range(DEPTH - 1):
        if k < n % DEPTH:
            m_k = m_x if EVEN else m_x & ((n // DEPTH * DEPTH + k) * S + s < steps)
            b_y = add_product(b_y, ring[k], p_x + k * (32 * S), m_k, S)
    cuda.gdc_launch_dependents()
    o = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [S], [0]))
    o_n = first * 16 + o // 16 + o // 2 % 2 * 8
    o_t = o // 4 % 4 * 2 + o % 2
    b_out = biased(rows_of(b_y[0], 8, S) * gl.load(scale + o_n), bias, o_n, BIAS)
    if GATED:
        b_up = biased(rows_of(b_y[1], 8, S) * gl.load(scale + o_n + N), bias, o_n + N, BIAS)
        b_out *= b_up / (1.0 + gl.exp(-b_out))
    gl.store(y + o_t.to(gl.int64) * N + o_n, b_out.to(y.dtype.element_ty), mask=o_t < T)
