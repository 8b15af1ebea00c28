"""linear_packed's kernel for Hopper GPUs (packed_hopper.py): the work for one row of x.

Tensor cores multiply in PTX, 16 rows of W by 8 columns of which x fills one for each scale (mma.m16n8k16). Lane
4 g + 2 u + h holds rows g and g + 8 of W, and of the pairs of groups 2 u and 2 u + 1 (BITS = 8: groups) the columns
from 16 h on. Its columns of the other side are 4 u + 2 h, where lower nibbles' x is, and the next, where upper nibbles'
is; x is zero elsewhere. So a lane has a sum for each of its scales, and nothing is computed twice. Codes become BF16
integers, 128 more than they are (the code in the mantissa of 128), which is exact. Sums are scaled in f32. Minima and
the 128 are subtracted by way of the sums of x, which rows of ones give.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, gl, gluon, mbarrier
from hybridkv.kernels.linear.packed_parts_hopper import after, f16_at, layout, mma, release, times_byte


@triton.constexpr_function
def framed(body, ones):
    """PTX: statements with their registers. Results [16]: (of W or of ones, row g or g + 8, column, pair of groups)."""
    names = ", ".join(f"{v}{r}{w}{q}" for v in "lu" for r in (0, 1) for w in range(4) for q in (0, 1))
    sums = ", ".join(f"{v}{p}{i}" for v in "cs" for p in (0, 1) for i in range(4))
    frame = f".reg .b32 a, b, k, one, {names};\n.reg .f32 z, {sums};\nmov.f32 z, 0f00000000;\n"
    out = "".join(f"mov.f32 ${2 * i + p}, c{p}{i};\n" for p in (0, 1) for i in range(4))
    out += "".join(f"mov.f32 ${8 + 2 * i + p}, {f's{p}{i}' if ones else 'z'};\n" for p in (0, 1) for i in range(4))
    return f"{{\n{frame}{body}{out}}}"


@triton.constexpr_function
def multiply_pairs(bits, ones):
    """PTX: 16 words of codes (pair of groups, row, word) by x for lower and for upper nibbles (8 registers a pair);
    for 5 and 6 bits with as many words of the high plane, whose lowest bits are the first group's.
    """
    body, width = "mov.b32 one, 0x3f803f80;\n", bits - 4
    for p in (0, 1):
        for w in range(4):
            for r in (0, 1):
                i = 16 + 8 * p + 4 * r + w
                body += f"and.b32 a, ${i}, 0x0f0f0f0f;\nshr.u32 b, ${i}, 4;\nand.b32 b, b, 0x0f0f0f0f;\n"
                for name, up in (("a", 0), ("b", 1)) if width else ():
                    bit = (2 * p + up) * width
                    way = f"shl.b32 k, ${i + 48}, {4 - bit}" if bit <= 4 else f"shr.u32 k, ${i + 48}, {bit - 4}"
                    mask = "0x10101010" if width == 1 else "0x30303030"
                    body += f"{way};\nand.b32 k, k, {mask};\nor.b32 {name}, {name}, k;\n"
                for name, to in (("a", "l"), ("b", "u")):
                    body += f"prmt.b32 {to}{r}{w}0, {name}, 0x43434343, 0x4140;\n"
                    body += f"prmt.b32 {to}{r}{w}1, {name}, 0x43434343, 0x4342;\n"
            for to, x in (("l", 32), ("u", 48)):
                a, at, first = (
                    f"{{{to}0{w}0, {to}1{w}0, {to}0{w}1, {to}1{w}1}}",
                    x + 8 * p + 2 * w,
                    to == "l" and w == 0,
                )
                body += mma(f"c{p}", a, at, first)
                body += mma(f"s{p}", "{one, one, one, one}", at, first) if ones else ""
    return framed(body, ones)


@triton.constexpr_function
def multiply_groups():
    """PTX: 16 words of int8 codes (group, row, word) by x (8 registers a group).

    Seven bits in the mantissa of 128 are 128 + bits; the sign bit beside them makes 128 256.
    """
    body = "mov.b32 k, 0xbf80bf80;\n"
    for p in (0, 1):
        for w in range(4):
            for r in (0, 1):
                for q, which in ((0, "0x4140"), (1, "0x4342")):
                    body += f"prmt.b32 a, ${16 + 8 * p + 4 * r + w}, 0x43434343, {which};\n"
                    body += "and.b32 b, a, 0xff80ff80;\nand.b32 a, a, 0xff7fff7f;\n"
                    body += f"fma.rn.bf16x2 l{r}{w}{q}, b, k, a;\n"
            body += mma(f"c{p}", f"{{l0{w}0, l1{w}0, l0{w}1, l1{w}1}}", 32 + 8 * p + 2 * w, w == 0)
    return framed(body, False)


@triton.constexpr_function
def operands(words):
    """Constraints of an asm statement with tensors of 16 registers, one of them the result."""
    return ",".join(["=f"] * 16 + ["r"] * (16 * words))


@triton.constexpr_function
def codes_layout(S):
    """[16 S, 32] words, 128 bytes a row: 16 rows of a step for each pair, then the next pair."""
    return layout([[0, 1], [0, 2], [2, 0], [4, 0]], [[0, 4], [8, 0], [0, 8], [0, 16], [1, 0]], [16, 0], [16 * S, 32], S)


@triton.constexpr_function
def high_layout(bits, S):
    """[8 S, 32] words (BITS = 6), for each two pairs; [4 S, 32, 2] (BITS = 5): both u have the same."""
    if bits == 6:
        return layout([[0, 1], [0, 2], [2, 0]], [[0, 4], [4, 0], [0, 8], [0, 16], [1, 0]], [8, 0], [8 * S, 32], S)
    lanes = [[0, 4, 0], [0, 0, 1], [0, 8, 0], [0, 16, 0], [1, 0, 0]]
    return layout([[0, 1, 0], [0, 2, 0], [2, 0, 0]], lanes, [4, 0, 0], [4 * S, 32, 2], S)


@triton.constexpr_function
def sums_layout(S):
    """[4 S, 2, 16, 2]: pair of groups, h, row, lower or upper nibbles."""
    lanes = [[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return layout([[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 8, 0]], lanes, [4, 0, 0, 0], [4 * S, 2, 16, 2], S)


@triton.constexpr_function
def d_layout(each, S):
    """[S 256 / each, each / 64, 16]: what has one d, its pairs of groups, row."""
    pairs = each // 64
    p, u = ([0, w, 0] if w < pairs else [w // pairs, 0, 0] for w in (1, 2))
    lanes = [[0, 0, 0], u, [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return layout([p, [0, 0, 8]], lanes, [4 // pairs, 0, 0], [4 * S // pairs, pairs, 16], S)


@triton.constexpr_function
def groups_layout(S):
    """[2 S, 16, 2]: two groups, row, which of them (BITS = 8)."""
    lanes = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return layout([[0, 0, 1], [0, 8, 0]], lanes, [2, 0, 0], [2 * S, 16, 2], S)


@gluon.jit
def read_codes(tile, S: gl.constexpr):
    """[lanes, (pair, row, word)]."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [S, 1], [1, 0])
    b_q = gl.reshape(tile.load(codes_layout(S)), [S, 2, 2, 2, 2, 4, 2, 4])
    return gl.convert_layout(
        gl.reshape(gl.permute(b_q, (0, 4, 5, 1, 6, 2, 3, 7)), [32 * S, 16]), L, assert_trivial=True
    )


@gluon.jit
def read_high(tile, BITS: gl.constexpr, S: gl.constexpr):
    """[lanes, (pair, row, word)]: the same words for both pairs, of which the first has the lowest bits."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [S, 1], [1, 0])
    if BITS == 6:
        b_h = gl.reshape(tile.load(high_layout(6, S)), [S, 2, 2, 2, 4, 2, 4])
        b_h = gl.permute(b_h, (0, 3, 4, 1, 5, 2, 6))
    else:
        H: gl.constexpr = high_layout(5, S)
        o_u = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, H)))
        b_h = tile.load(gl.SliceLayout(2, H))[:, :, None] >> (o_u * 4)[None, None, :]
        b_h = gl.permute(gl.reshape(b_h, [S, 2, 2, 4, 2, 4, 2]), (0, 2, 3, 6, 4, 1, 5))
    b_h = gl.reshape(b_h, [32 * S, 8])
    both = gl.permute(gl.join(b_h, b_h), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [32 * S, 16]), L, assert_trivial=True)


@gluon.jit
def factors(s_tile, d_tile, BITS: gl.constexpr, EACH: gl.constexpr, S: gl.constexpr):
    """What the sums are multiplied by, and what the sums of x are."""
    C: gl.constexpr = sums_layout(S)
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, C))  # [4 S, 16]
    L2: gl.constexpr = gl.SliceLayout(1, C)  # [4 S, 16, 2]
    if BITS == 8:
        G: gl.constexpr = groups_layout(S)
        b_s = s_tile.load(gl.SliceLayout(2, G))
        b_a = gl.permute(gl.join(f16_at(b_s, 0), f16_at(b_s, 16)), (0, 2, 1))
        b_a = gl.convert_layout(gl.reshape(b_a, [4 * S, 16]), L, assert_trivial=True)
        b_a = gl.convert_layout(gl.join(b_a, b_a), L2, assert_trivial=True)[:, None, :, :]
        return b_a, b_a
    else:
        D: gl.constexpr = d_layout(EACH, S)
        pairs = gl.zeros([S * 256 // EACH, EACH // 64, 16], gl.int32, layout=D)
        b_d = gl.reshape(d_tile.load(gl.SliceLayout(1, D))[:, None, :] | pairs, [4 * S, 16])
        b_d = gl.convert_layout(b_d, L, assert_trivial=True)
        b_s = s_tile.load(L)
        a, b = f16_at(b_d, 0), f16_at(b_d, 16)
        if BITS == 6:
            L3: gl.constexpr = gl.SliceLayout(3, C)  # [4 S, 2, 16]
            o_h = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]
            b_s = (gl.convert_layout(b_s, gl.SliceLayout(1, L3))[:, None, :] ^ -0x7F7F7F80) >> (o_h * 8)
            a = gl.convert_layout(a, gl.SliceLayout(1, L3))[:, None, :]
            a_lo, a_hi = times_byte(a, b_s, 0) - 128.0 * a, times_byte(a, b_s, 2) - 128.0 * a
            b_a = gl.convert_layout(gl.join(a_lo, a_hi), C, assert_trivial=True)
            return b_a, 160.0 * b_a
        else:
            a_lo, a_hi = times_byte(a, b_s, 0), times_byte(a, b_s, 2)
            b_a = gl.convert_layout(gl.join(a_lo, a_hi), L2, assert_trivial=True)
            less = gl.join(times_byte(b, b_s, 1), times_byte(b, b_s, 3))
            less = gl.convert_layout(less, L2, assert_trivial=True) + 128.0 * b_a
            return b_a[:, None, :, :], less[:, None, :, :]


@gluon.jit
def as_sums(b_c, S: gl.constexpr):
    """[lanes, (of W or of ones, row, column, pair)] -> both [4 S, 2, 16, 2]."""
    b_c = gl.permute(gl.reshape(b_c, [S, 8, 2, 2, 2, 2, 2, 2]), (0, 2, 7, 3, 5, 1, 6, 4))
    c, s = gl.split(gl.reshape(b_c, [4 * S, 2, 16, 2, 2]))
    C: gl.constexpr = sums_layout(S)
    return gl.convert_layout(c, C, assert_trivial=True), gl.convert_layout(s, C, assert_trivial=True)


@gluon.jit
def read_step(
    q_tile, h_tile, s_tile, d_tile, BITS: gl.constexpr, EACH: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """A step of a tile: words of codes and of the high plane, and factors."""
    words = (read_codes(q_tile, S),)
    if BITS == 5 or BITS == 6:
        words = words + (read_high(h_tile, BITS, S),)
    a, less = factors(s_tile, d_tile, BITS, EACH, S)
    return words, a, less


@gluon.jit
def multiply(words, given, BITS: gl.constexpr, ONES: gl.constexpr, S: gl.constexpr):
    """The sums of a tile and, with ONES, those of x."""
    asm: gl.constexpr = multiply_groups() if BITS == 8 else multiply_pairs(BITS, ONES)
    args = words[:1] + given + words[1:]
    b_c = gl.inline_asm_elementwise(asm, operands(len(args)), args, dtype=gl.float32, is_pure=True, pack=16)
    return as_sums(b_c, S)


@gluon.jit
def total(b_y, bias, o_n, BIAS: gl.constexpr, L: gl.constexpr):
    """The 16 rows of a tile, over all columns."""
    b_out = gl.convert_layout(gl.sum(gl.sum(gl.sum(b_y, 3), 1), 0), L)
    if BIAS:
        b_out += gl.load(bias + o_n).to(gl.float32)
    return b_out


@gluon.jit
def multiply_row(
    x, bias, y, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, N, K,
    BITS: gl.constexpr, EACH: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, EVEN: gl.constexpr,
    TILES: gl.constexpr, S: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    WORDS: gl.constexpr = 64 if BITS == 8 else 128  # of x in a warp's step
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [S, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [S], [0])
    C: gl.constexpr = sums_layout(S)
    # lane 4 g + 2 u + h, registers (pair of groups, two columns)
    o_l = gl.arange(0, 32 * S, layout=gl.SliceLayout(1, L))[:, None]
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :]
    s, g, t = o_l // 32, o_l % 32 // 4, o_l % 4
    o_x = s * WORDS + (t // 2 * 2 + o_r // 8) * (16 if BITS == 8 else 32) + t % 2 * 8 + o_r % 8
    m_lo, m_hi = g == t * 2, g == t * 2 + 1
    o = gl.arange(0, 16, layout=L1)
    slot, phase, i = 0, 0, 0
    cuda.gdc_wait()
    for tile in range(i_p, tiles, P):
        b_y = gl.zeros([4 * S, 2, 16, 2], gl.float32, layout=C)
        b_up = gl.zeros([4 * S, 2, 16, 2], gl.float32, layout=C)
        for step in range(steps):
            p_x = x + step * (S * WORDS) + o_x
            inside = True if EVEN else step * S + s < K // (2 * WORDS)
            given = (gl.load(p_x, mask=m_lo & inside, other=0),)
            if BITS != 8:
                given = given + (gl.load(p_x + 16, mask=m_hi & inside, other=0),)
            mbarrier.wait(full.index(slot), phase)
            release(free, slot, i, DEPTH)
            at = slot * TILES
            one = read_step(q_ring.index(at), h_ring.index(at), s_ring.index(at), d_ring.index(at), BITS, EACH, S)
            two = one
            if GATED:
                at += 1
                two = read_step(q_ring.index(at), h_ring.index(at), s_ring.index(at), d_ring.index(at), BITS, EACH, S)
            slot, phase = after(slot, phase, DEPTH)
            i += 1
            c, ones = multiply(one[0], given, BITS, True, S)
            b_y += one[1] * c
            if BITS != 8:
                b_y -= one[2] * ones
            if GATED:
                c, _ = multiply(two[0], given, BITS, False, S)
                b_up += two[1] * c
                if BITS != 8:
                    b_up -= two[2] * ones
        o_n = tile * 16 + o
        b_out = total(b_y, bias, o_n, BIAS, L1)
        if GATED:
            b_out *= total(b_up, bias, o_n + N, BIAS, L1) / (1.0 + gl.exp(-b_out))
        gl.store(y + o_n, b_out.to(y.dtype.element_ty))
