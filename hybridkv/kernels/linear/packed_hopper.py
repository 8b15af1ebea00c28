"""linear_packed's kernel for Hopper GPUs and the few rows of a decode step, in Gluon.

A program takes TILES tiles of 16 rows of W (GATED: one of gates and one of their ups) and all columns, which its warps
share. W goes from memory into registers, DEPTH steps ahead of its use, and never through shared memory: planes with 16
rows interleaved (packed_weights) are such that what a warp loads is contiguous. The first loads are sent before the
kernel waits for the one before it.

Tensors are [32 S, R]: lanes of all warps, registers, so that what a lane holds is in sight. Tensor cores multiply in
PTX, 16 rows of W by 8 columns (mma.m16n8k16): lane 4 g + t holds rows g and g + 8 of W, and of each 32 columns those
from 8 t on. Codes become BF16 integers, 128 more than they are (the code in the mantissa of 128), which is exact.

A sum must have one scale, but a step has two pairs of groups. So the 8 columns of the other side are SPLIT parts, one
for each scale, of 8 / SPLIT rows of x each, and x is zero where the scale is another part's. Each sum is then scaled in
f32. Minima and the 128 are subtracted by way of the sums of x, which rows of ones give.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, gl, gluon

ONE = "0x3f803f80"  # BF16, twice


@triton.constexpr_function
def mma(c, a, x, first):
    """PTX: c = a x, or `first` not, c += a x; x: the number of the first of its two registers."""
    sums = f"{{{c}0, {c}1, {c}2, {c}3}}"
    before = "{z, z, z, z}" if first else sums
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sums}, {a}, {{${x}, ${x + 1}}}, {before};\n"


@triton.constexpr_function
def words_of(v, i):
    """PTX: rows g and g + 8, columns of the i-th product: the first or last half of a lane's 8, of one pair."""
    h, q = i // 2, i % 2 * 2
    return f"{{{v}{h}0{q}, {v}{h}1{q}, {v}{h}0{q + 1}, {v}{h}1{q + 1}}}"


@triton.constexpr_function
def results(tiles):
    """PTX: the sums of two products, in the order (row g or g + 8, column, product)."""
    return "".join(f"mov.f32 ${2 * c + i}, {tile}{c};\n" for i, tile in enumerate(tiles) for c in range(4))


@triton.constexpr_function
def framed(body):
    words = ", ".join(f"{v}{h}{r}{q}" for v in "lu" for h in (0, 1) for r in (0, 1) for q in range(4))
    sums = ", ".join(f"{v}{i}" for v in "cd" for i in range(4))
    return f"{{\n.reg .b32 a, b, k, one, {words};\n.reg .f32 z, {sums};\nmov.f32 z, 0f00000000;\n{body}}}"


@triton.constexpr_function
def multiply_nibbles(bits):
    """PTX: 8 words of codes (pair of groups, row, word) with, for 5 and 6 bits, as many of the high plane, whose
    lowest bits are the first group's, by x for the lower (4 registers a pair) and the upper nibbles -> both sums.
    """
    body, width = "", bits - 4
    for h in (0, 1):
        for r in (0, 1):
            for w in (0, 1):
                i = 4 * h + 2 * r + w
                body += f"and.b32 a, ${8 + i}, 0x0f0f0f0f;\nshr.u32 b, ${8 + i}, 4;\nand.b32 b, b, 0x0f0f0f0f;\n"
                for name, up in (("a", 0), ("b", 1)) if width else ():
                    bit = (2 * h + up) * width
                    way = f"shl.b32 k, ${32 + i}, {4 - bit}" if bit <= 4 else f"shr.u32 k, ${32 + i}, {bit - 4}"
                    mask = "0x10101010" if width == 1 else "0x30303030"
                    body += f"{way};\nand.b32 k, k, {mask};\nor.b32 {name}, {name}, k;\n"
                for name, to in (("a", "l"), ("b", "u")):
                    body += f"prmt.b32 {to}{h}{r}{2 * w}, {name}, 0x43434343, 0x4140;\n"
                    body += f"prmt.b32 {to}{h}{r}{2 * w + 1}, {name}, 0x43434343, 0x4342;\n"
    for i in range(4):
        for to, c, x in (("l", "c", 16), ("u", "d", 24)):
            body += mma(c, words_of(to, i), x + 2 * i, i == 0)
    return framed(body + results("cd"))


@triton.constexpr_function
def sum_columns():
    """PTX: the sums of x over each part, for the lower and the upper nibbles, as if multiplied by rows of ones."""
    body = f"mov.b32 one, {ONE};\n"
    for i in range(4):
        for c, x in (("c", 8), ("d", 16)):
            body += mma(c, "{one, one, one, one}", x + 2 * i, i == 0)
    return framed(body + results("cd"))


@triton.constexpr_function
def upcast_int8(word, to0, to1):
    """Seven bits in the mantissa of 128 are 128 + bits; the sign bit beside them makes 128 256."""
    body = ""
    for to, which in ((to0, "0x4140"), (to1, "0x4342")):
        body += f"prmt.b32 a, {word}, 0x43434343, {which};\nand.b32 b, a, 0xff80ff80;\nand.b32 a, a, 0xff7fff7f;\n"
        body += f"fma.rn.bf16x2 {to}, b, k, a;\n"
    return body


@triton.constexpr_function
def multiply_bytes():
    """PTX: 8 words of codes (group, row, word) by x (4 registers a group) -> the sum, in two parts."""
    body = "mov.b32 k, 0xbf80bf80;\n"
    for h in (0, 1):
        for r in (0, 1):
            for w in (0, 1):
                i = 4 * h + 2 * r + w
                body += upcast_int8(f"${8 + i}", f"l{h}{r}{2 * w}", f"l{h}{r}{2 * w + 1}")
    for i in range(4):
        body += mma("cd"[i % 2], words_of("l", i), 16 + 2 * i, i < 2)
    return framed(body + results("cd"))


SUMS = gl.constexpr(sum_columns())
_OUT, _IN = gl.constexpr(",".join(["=f"] * 8)), gl.constexpr(",r" * 8)


@triton.constexpr_function
def byte_to_f32(i):
    """PTX: byte i of a word, in the mantissa of 2^23."""
    return f"{{\n.reg .b32 a;\nprmt.b32 a, $1, 0x4b000000, 0x754{i};\nmov.b32 $0, a;\n}}"


@gluon.jit
def times_byte(a, b_v, i: gl.constexpr, less: gl.constexpr = 0.0):
    """a (byte i of words - less) in f32, rounded once."""
    asm: gl.constexpr = byte_to_f32(i)
    byte = gl.inline_asm_elementwise(asm, "=f,r", [b_v], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(a, byte, (-8388608.0 - less) * a)


@gluon.jit
def f16_at(b_v, shift):
    return ((b_v >> shift) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def spread(b_lo, b_hi, L: gl.constexpr):
    """Factors [lanes, 2] of rows g and g + 8, of two products -> one for each of a lane's sums [lanes, 8]."""
    both = gl.join(gl.join(b_lo, b_lo), gl.join(b_hi, b_hi))
    return gl.convert_layout(gl.reshape(both, [b_lo.shape[0], 8]), L, assert_trivial=True)


@gluon.jit
def twice(b_v, L: gl.constexpr):
    """[lanes, 4] -> [lanes, 8]: the same registers for both pairs of groups."""
    both = gl.permute(gl.join(b_v, b_v), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [b_v.shape[0], 8]), L, assert_trivial=True)


@gluon.jit
def lanes(R: gl.constexpr, S: gl.constexpr):
    """Indices of threads [32 S, 1] and of their registers [1, R]."""
    L: gl.constexpr = gl.BlockedLayout([1, R], [32, 1], [S, 1], [1, 0])
    o_l = gl.arange(0, 32 * S, layout=gl.SliceLayout(1, L))[:, None]
    return o_l, gl.arange(0, R, layout=gl.SliceLayout(0, L))[None, :]


@gluon.jit
def lane_of(S: gl.constexpr, R: gl.constexpr):
    """Warp, g and t of each thread [32 S, 1], where R registers follow."""
    o_l = lanes(R, S)[0]
    return o_l // 32, o_l % 32 // 4, o_l % 4


@gluon.jit
def places(codes, high, scales, d, tile, K, BITS: gl.constexpr, EACH: gl.constexpr, S: gl.constexpr):
    """Where each lane begins to read the planes of a tile of 16 rows."""
    tile = tile.to(gl.int64)
    s, g, t = lane_of(S, 8)
    p_q = codes + tile * (4 * K if BITS == 8 else 2 * K) + s * 256 + g * 8 + t * 2
    p_h = p_q
    if BITS == 5 or BITS == 6:
        s, g, t = lane_of(S, 4)
        p_h = high + tile * (K // 2 if BITS == 5 else K) + (s // 2 if BITS == 5 else s) * 128 + g * 8 + t * 2
    s, g, t = lane_of(S, 2)
    pair = s if BITS == 8 else s * 2 + t // 2
    p_s = scales + tile * (K // 4) + pair * 16 + g
    p_d = p_s
    if BITS != 8:
        p_d = d + tile * (16 * (K // EACH)) + pair * 64 // EACH * 16 + g
    return p_q, p_h, p_s, p_d


@gluon.jit
def on(place, i, BITS: gl.constexpr, EACH: gl.constexpr, S: gl.constexpr):
    """i steps on."""
    p_q, p_h, p_s, p_d = place
    WIDE: gl.constexpr = 128 if BITS == 6 else 64  # words of the high plane
    SCALES: gl.constexpr = 16 if BITS == 8 else 32
    return p_q + i * (256 * S), p_h + i * (WIDE * S), p_s + i * (SCALES * S), p_d + i * (2048 * S // EACH)


@gluon.jit
def load_step(place, inside, BITS: gl.constexpr, S: gl.constexpr, EVEN: gl.constexpr):
    """Of 128 columns (BITS = 8: 64) the words of codes (pair of groups or group, row g or g + 8, word), of the high
    plane (row, word), scales and d.
    """
    p_q, p_h, p_s, p_d = place
    o_r = lanes(8, S)[1]
    b_q = gl.load(p_q + (o_r // 4 * 128 + o_r // 2 % 2 * 64 + o_r % 2), mask=inside, cache_modifier=".cg")
    b_h = b_q
    if BITS == 5 or BITS == 6:
        o_r = lanes(4, S)[1]
        b_h = gl.load(p_h + (o_r // 2 * 64 + o_r % 2), mask=inside, cache_modifier=".cg")
    o_r = lanes(2, S)[1]
    if EVEN:
        b_s = gl.load(p_s + o_r * 8, mask=inside)
    else:
        b_s = gl.load(p_s + o_r * 8, mask=inside, other=0)
    b_d = b_s
    if BITS != 8:
        if EVEN:
            b_d = gl.load(p_d + o_r * 8, mask=inside)
        else:
            b_d = gl.load(p_d + o_r * 8, mask=inside, other=0)
    return b_q, b_h, b_s, b_d


@gluon.jit
def load_x(p_x, m_x, WORDS: gl.constexpr, S: gl.constexpr):
    """x as the tensor cores take it: registers (pair of groups, two columns) of part and row g."""
    o_r = lanes(8, S)[1]
    return gl.load(p_x + (o_r // 4 * (WORDS // 2) + o_r % 4), mask=m_x, other=0)


@gluon.jit
def add_tile(b_y, b_w, b_x, b_x2, b_sum, BITS: gl.constexpr, S: gl.constexpr):
    """b_y [lanes, 8] and the product of a step's words, scaled."""
    L: gl.constexpr = b_y.type.layout
    b_q, b_h, b_s, b_d = b_w
    t = lanes(2, S)[0] % 4
    if BITS == 8:
        b_c = gl.inline_asm_elementwise(
            multiply_bytes(), _OUT + _IN + _IN, [b_q, b_x], dtype=gl.float32, is_pure=True, pack=8
        )
        a = f16_at(b_s, t // 2 * 16)
        return b_y + spread(a, a, L) * b_c
    else:
        asm: gl.constexpr = multiply_nibbles(BITS)
        if BITS == 4:
            b_c = gl.inline_asm_elementwise(
                asm, _OUT + _IN + _IN + _IN, [b_q, b_x, b_x2], dtype=gl.float32, is_pure=True, pack=8
            )
        else:
            if BITS == 5:  # every other step has the upper half of the bytes
                b_h = b_h >> (lane_of(S, 4)[0] % 2 * 4)
            b_c = gl.inline_asm_elementwise(
                asm, _OUT + _IN + _IN + _IN + _IN, [b_q, b_x, b_x2, twice(b_h, L)],
                dtype=gl.float32, is_pure=True, pack=8,
            )  # fmt: skip
        a, b = f16_at(b_d, 0), f16_at(b_d, 16)
        if BITS == 6:
            b_s = (b_s ^ -0x7F7F7F80) >> (t % 2 * 8)
            a_lo, a_hi = times_byte(a, b_s, 0, 128.0), times_byte(a, b_s, 2, 128.0)
            less_lo, less_hi = 160.0 * a_lo, 160.0 * a_hi
        else:
            a_lo, a_hi = times_byte(a, b_s, 0), times_byte(a, b_s, 2)
            less_lo, less_hi = times_byte(b, b_s, 1) + 128.0 * a_lo, times_byte(b, b_s, 3) + 128.0 * a_hi
        return b_y + spread(a_lo, a_hi, L) * b_c - spread(less_lo, less_hi, L) * b_sum


@gluon.jit
def add_step(b_y, b_w, p_x, m_x, BITS: gl.constexpr, S: gl.constexpr):
    """b_y: the sums [lanes, 8] of each of the tiles, whose words of a step are b_w."""
    WORDS: gl.constexpr = 32 if BITS == 8 else 64
    b_x = load_x(p_x, m_x, WORDS, S)
    b_x2, b_sum = b_x, b_x  # not used
    if BITS != 8:
        b_x2 = load_x(p_x + 16, m_x, WORDS, S)
        b_sum = gl.inline_asm_elementwise(SUMS, _OUT + _IN + _IN, [b_x, b_x2], dtype=gl.float32, is_pure=True, pack=8)
    new = ()
    for j in gl.static_range(len(b_w)):
        new = new + (add_tile(b_y[j], b_w[j], b_x, b_x2, b_sum, BITS, S),)
    return new


@gluon.jit
def rows_of(b_y, RT: gl.constexpr, S: gl.constexpr):
    """The sums [lanes, 8] of all warps and parts -> [16 RT]: (g, two rows of x, row g or g + 8, row of x)."""
    b_out = gl.sum(gl.sum(gl.reshape(b_y, [S, 32, 4, 2]), 0), 2)  # [32, 4]
    if RT < 8:
        b_out = gl.sum(gl.reshape(b_out, [8, 8 // RT, RT // 2, 4]), 1)
    return gl.convert_layout(gl.reshape(b_out, [16 * RT]), gl.BlockedLayout([1], [32], [S], [0]))


@gluon.jit
def biased(b_out, bias, o_n, BIAS: gl.constexpr):
    if BIAS:
        b_out += gl.load(bias + o_n).to(gl.float32)
    return b_out


@gluon.jit(do_not_specialize=["T", "stride_y"])
def linear_packed_hopper_kernel(
    x,  # [T, K] as words, rows stride_x words apart
    codes,  # planes of [N, K], GATED: [2 N, K], 16 rows interleaved, as words
    high,
    scales,
    d,
    bias,
    y,  # [T, N], rows stride_y apart
    T,
    N,
    K,
    stride_x,
    stride_y,
    BITS: gl.constexpr,
    EACH: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    EVEN: gl.constexpr,  # all warps have as many steps
    TILES: gl.constexpr,  # of 16 rows of W
    S: gl.constexpr,  # warps
    DEPTH: gl.constexpr,  # steps that are loaded ahead
):
    SPLIT: gl.constexpr = 4 if BITS == 6 else 2
    RT: gl.constexpr = 8 // SPLIT
    WORDS: gl.constexpr = 32 if BITS == 8 else 64  # of x in a step
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [S, 1], [1, 0])
    first = gl.program_id(0) * (1 if GATED else TILES)
    steps = K // (2 * WORDS)
    n = (steps + S - 1) // S  # of each warp
    s, g, t = lane_of(S, 8)
    b_y, place, ring = (), (), ()
    for j in gl.static_range(TILES):
        tile = first + j * (N // 16 if GATED else 1)
        b_y = b_y + (gl.zeros([32 * S, 8], gl.float32, layout=L),)
        place = place + (places(codes, high, scales, d, tile, K, BITS, EACH, S),)
    for k in gl.static_range(DEPTH):
        b_w = ()
        for j in gl.static_range(TILES):
            inside = (k < n) if EVEN else k * S + s < steps
            b_w = b_w + (load_step(on(place[j], k, BITS, EACH, S), inside, BITS, S, EVEN),)
        ring = ring + (b_w,)
    p_x = x + (g % RT).to(gl.int64) * stride_x + s * WORDS + t * 4
    half = lanes(8, S)[1] // 4
    m_x = (g % RT < T) & (g // RT == (half if SPLIT == 2 else half * 2 + t // 2))
    cuda.gdc_wait()
    for i in range(0, n // DEPTH * DEPTH, DEPTH):
        later = ()
        for k in gl.static_range(DEPTH):
            m_k = m_x if EVEN else m_x & ((i + k) * S + s < steps)
            b_y = add_step(b_y, ring[k], p_x + k * (S * WORDS), m_k, BITS, S)
            b_w = ()
            for j in gl.static_range(TILES):
                inside = (i + k + DEPTH < n) if EVEN else (i + k + DEPTH) * S + s < steps
                b_w = b_w + (load_step(on(place[j], k + DEPTH, BITS, EACH, S), inside, BITS, S, EVEN),)
            later = later + (b_w,)
        ring = later
        moved = ()
        for j in gl.static_range(TILES):
            moved = moved + (on(place[j], DEPTH, BITS, EACH, S),)
        place = moved
        p_x += DEPTH * S * WORDS
    for k in gl.static_range(DEPTH - 1):
        if k < n % DEPTH:
            m_k = m_x if EVEN else m_x & ((n // DEPTH * DEPTH + k) * S + s < steps)
            b_y = add_step(b_y, ring[k], p_x + k * (S * WORDS), m_k, BITS, S)
    cuda.gdc_launch_dependents()
    o = gl.arange(0, 16 * RT, layout=gl.BlockedLayout([1], [32], [S], [0]))
    o_n = first * 16 + o // (2 * RT) + o // 2 % 2 * 8
    o_t = o // 4 % (RT // 2) * 2 + o % 2
    p_y = y + o_t.to(gl.int64) * stride_y + o_n
    b_out = biased(rows_of(b_y[0], RT, S), bias, o_n, BIAS)
    if GATED:
        b_out *= biased(rows_of(b_y[1], RT, S), bias, o_n + N, BIAS) / (1.0 + gl.exp(-b_out))
    gl.store(p_y, b_out.to(y.dtype.element_ty), mask=o_t < T)
    if TILES > 1 and not GATED:
        b_out = biased(rows_of(b_y[1], RT, S), bias, o_n + 16, BIAS)
        gl.store(p_y + 16, b_out.to(y.dtype.element_ty), mask=o_t < T)
