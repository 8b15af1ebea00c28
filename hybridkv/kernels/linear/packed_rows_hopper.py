"""linear_packed's kernel for Hopper GPUs (packed_hopper.py): the work for up to sixteen rows of x.

As packed_vector_hopper.py, but for the roles of lanes. Lane 4 g + t holds rows g and g + 8 of W, and of each group the
8 columns from 8 t on. The 8 columns of the other side are rows of x, so each pair of groups (BITS = 8: each group) has
sums of its own, for each of BLOCKS blocks of rows. In Q6_K half a group has a scale: there columns are four rows of x
for the first half, zero in the second, and the same four for the second half.
"""

from __future__ import annotations

from hybridkv.kernels.backend import triton
from hybridkv.kernels.gluon import cuda, gl, gluon, mbarrier
from hybridkv.kernels.linear.packed_parts_hopper import after, f16_at, layout, mma, release, times_byte


@triton.constexpr_function
def words_of(v, i):
    """PTX: rows g and g + 8, columns of the i-th product: the first or last half of a lane's 8, of one pair."""
    h, q = i // 2, i % 2 * 2
    return f"{{{v}{h}0{q}, {v}{h}1{q}, {v}{h}0{q + 1}, {v}{h}1{q + 1}}}"


@triton.constexpr_function
def framed(body, sums):
    """PTX: the statements with their registers; `sums`: pairs of products, each pair a result [8] in the order (row g
    or g + 8, column, product).
    """
    words = ", ".join(f"{v}{h}{r}{q}" for v in "lu" for h in (0, 1) for r in (0, 1) for q in range(4))
    floats = ", ".join(f"{v}{i}" for pair in sums for v in pair for i in range(4))
    results = "".join(
        f"mov.f32 ${8 * k + 2 * i + j}, {v}{i};\n"
        for k, pair in enumerate(sums)
        for j, v in enumerate(pair)
        for i in range(4)
    )
    frame = f".reg .b32 a, b, k, one, {words};\n.reg .f32 z, {floats};\nmov.f32 z, 0f00000000;\n"
    return f"{{\n{frame}{body}{results}}}"


@triton.constexpr_function
def names(pairs, blocks):
    """The sums for lower and upper nibbles, of each block of rows and of both pairs, or of them together."""
    return [(f"c{b}{h}", f"d{b}{h}") for b in range(blocks) for h in range(pairs)]


@triton.constexpr_function
def products(left, right, pairs, blocks, x):
    """PTX: left and right, each (operand of the i-th product), by x for lower and upper nibbles, from register x on."""
    body = ""
    for b in range(blocks):
        for i in range(4):
            h = i // 2 * (pairs - 1)
            for c, side, at in (("c", left, 0), ("d", right, 8)):
                body += mma(f"{c}{b}{h}", side[i], x + 16 * b + at + 2 * i, i % (4 // pairs) == 0)
    return body


@triton.constexpr_function
def multiply_nibbles(bits, pairs, blocks):
    """PTX: 8 words of codes (pair of groups, row, word), by x for the lower (4 registers a pair) and the upper nibbles
    of each block; for 5 and 6 bits with as many words of the high plane, whose lowest bits are the first group's.
    """
    body, width, at = "", bits - 4, 8 * pairs * blocks
    for h in (0, 1):
        for r in (0, 1):
            for w in (0, 1):
                i = at + 4 * h + 2 * r + w
                body += f"and.b32 a, ${i}, 0x0f0f0f0f;\nshr.u32 b, ${i}, 4;\nand.b32 b, b, 0x0f0f0f0f;\n"
                for name, up in (("a", 0), ("b", 1)) if width else ():
                    bit, more = (2 * h + up) * width, i + 8 + 16 * blocks
                    way = f"shl.b32 k, ${more}, {4 - bit}" if bit <= 4 else f"shr.u32 k, ${more}, {bit - 4}"
                    mask = "0x10101010" if width == 1 else "0x30303030"
                    body += f"{way};\nand.b32 k, k, {mask};\nor.b32 {name}, {name}, k;\n"
                for name, to in (("a", "l"), ("b", "u")):
                    body += f"prmt.b32 {to}{h}{r}{2 * w}, {name}, 0x43434343, 0x4140;\n"
                    body += f"prmt.b32 {to}{h}{r}{2 * w + 1}, {name}, 0x43434343, 0x4342;\n"
    left, right = ([words_of(v, i) for i in range(4)] for v in "lu")
    return framed(body + products(left, right, pairs, blocks, at + 8), names(pairs, blocks))


@triton.constexpr_function
def sum_columns(pairs, blocks):
    """PTX: sums of x, as if multiplied by rows of ones."""
    ones = ["{one, one, one, one}"] * 4
    body = "mov.b32 one, 0x3f803f80;\n" + products(ones, ones, pairs, blocks, 8 * pairs * blocks)
    return framed(body, names(pairs, blocks))


@triton.constexpr_function
def multiply_bytes(blocks):
    """PTX: 8 words of codes (group, row, word) by x (4 registers a group) of each block -> the sums of both groups.

    Seven bits of an int8 in the mantissa of 128 are 128 + bits; the sign bit beside them makes 128 256.
    """
    body, at = "mov.b32 k, 0xbf80bf80;\n", 8 * blocks
    for h in (0, 1):
        for r in (0, 1):
            for w in (0, 1):
                for q, which in ((0, "0x4140"), (1, "0x4342")):
                    body += f"prmt.b32 a, ${at + 4 * h + 2 * r + w}, 0x43434343, {which};\n"
                    body += "and.b32 b, a, 0xff80ff80;\nand.b32 a, a, 0xff7fff7f;\n"
                    body += f"fma.rn.bf16x2 l{h}{r}{2 * w + q}, b, k, a;\n"
    for b in range(blocks):
        for i in range(4):
            body += mma("cd"[i // 2] + str(b), words_of("l", i), at + 8 + 8 * b + 2 * i, i % 2 == 0)
    return framed(body, [(f"c{b}", f"d{b}") for b in range(blocks)])


@triton.constexpr_function
def constraints(results, words):
    """Of an asm statement with tensors of 8 registers."""
    return ",".join(["=f"] * (8 * results) + ["r"] * (8 * words))


@triton.constexpr_function
def kinds(results):
    return (gl.float32,) * results


@triton.constexpr_function
def codes_layout(S):
    """[16 S, 32] words, 128 bytes a row: 16 rows of a step for each pair, then the next pair."""
    regs, lanes = [[0, 1], [2, 0], [4, 0], [8, 0]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
    return layout(regs, lanes, [16, 0], [16 * S, 32], S)


@triton.constexpr_function
def high_layout(bits, S):
    """[8 S, 32] words for two pairs each (BITS = 6); [4 S, 32] for four (BITS = 5)."""
    lanes = [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
    if bits == 6:
        return layout([[0, 1], [2, 0], [4, 0]], lanes, [8, 0], [8 * S, 32], S)
    return layout([[0, 1], [2, 0]], lanes, [4, 0], [4 * S, 32], S)


@triton.constexpr_function
def sums_layout(S):
    """[16 S, 4, 2, 2]: row of W, two rows of x, which of them, product."""
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return layout([[0, 0, 0, 1], [0, 0, 1, 0], [8, 0, 0, 0]], lanes, [16, 0, 0, 0], [16 * S, 4, 2, 2], S)


@triton.constexpr_function
def scales_layout(count, S):
    """[count S, 16]: the pairs of a step, row; lanes t have the same."""
    regs = [[1, 0], [0, 8]] if count == 2 else [[1, 0], [2, 0], [0, 8]]
    return layout(regs, [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [count, 0], [count * S, 16], S)


@triton.constexpr_function
def d_layout(each, S):
    """[S 256 / each, each / 64, 16]: what has one d, its pairs of groups, row; lanes t have the same."""
    pairs = each // 64
    regs = [[0, w, 0] if w < pairs else [w // pairs, 0, 0] for w in (1, 2)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return layout([*regs, [0, 0, 8]], lanes, [4 // pairs, 0, 0], [4 * S // pairs, pairs, 16], S)


@gluon.jit
def halves(b_v, R: gl.constexpr, S: gl.constexpr):
    """[lanes, 2 R] -> the first R registers and the others."""
    L: gl.constexpr = gl.BlockedLayout([1, R], [32, 1], [S, 1], [1, 0])
    a, b = gl.split(gl.permute(gl.reshape(b_v, [32 * S, 2, R]), (0, 2, 1)))
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True)


@gluon.jit
def read_codes(tile, S: gl.constexpr):
    """Of the first two pairs and of the others [lanes, (pair, row, word)]."""
    b_q = gl.permute(gl.reshape(tile.load(codes_layout(S)), [S, 4, 2, 2, 4, 4, 2]), (0, 3, 4, 5, 1, 2, 6))
    return halves(gl.reshape(b_q, [32 * S, 16]), 8, S)


@gluon.jit
def twice(b_h, S: gl.constexpr):
    """[lanes, (row, word)] -> [lanes, (pair, row, word)]."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [S, 1], [1, 0])
    both = gl.permute(gl.join(b_h, b_h), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [32 * S, 8]), L, assert_trivial=True)


@gluon.jit
def read_high(tile, BITS: gl.constexpr, S: gl.constexpr):
    """As read_codes; the first pair of two has the lowest bits."""
    b_h = tile.load(high_layout(BITS, S))
    if BITS == 6:
        b_h = gl.permute(gl.reshape(b_h, [S, 2, 2, 2, 4, 4, 2]), (0, 3, 4, 5, 1, 2, 6))
        a, b = halves(gl.reshape(b_h, [32 * S, 8]), 4, S)
        return twice(a, S), twice(b, S)
    else:
        b_h = gl.permute(gl.reshape(b_h, [S, 2, 2, 4, 4, 2]), (0, 2, 3, 4, 1, 5))
        b_h = twice(gl.reshape(b_h, [32 * S, 4]), S)
        return b_h, b_h >> 4


@gluon.jit
def by_pair(b_v, COUNT: gl.constexpr, S: gl.constexpr):
    """[COUNT S, 16] -> a tuple of COUNT tensors [16 S]."""
    C: gl.constexpr = sums_layout(S)
    L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, C)))
    b_v = gl.permute(gl.reshape(b_v, [S, COUNT, 16]), (0, 2, 1))
    if COUNT == 2:
        a, b = gl.split(gl.reshape(b_v, [16 * S, 2]))
        found = (a, b)
    else:
        even, odd = gl.split(gl.reshape(b_v, [16 * S, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        found = (a, b, c, d)
    laid = ()
    for i in gl.static_range(COUNT):
        laid = laid + (gl.convert_layout(found[i], L, assert_trivial=True),)
    return laid


@gluon.jit
def read_d(tile, EACH: gl.constexpr, S: gl.constexpr):
    """[4 S, 16]: d of each pair, row."""
    D: gl.constexpr = d_layout(EACH, S)
    pairs = gl.zeros([S * 256 // EACH, EACH // 64, 16], gl.int32, layout=D)
    return gl.reshape(tile.load(gl.SliceLayout(1, D))[:, None, :] | pairs, [4 * S, 16])


@gluon.jit
def of_products(lo, hi, S: gl.constexpr):
    """Factors [16 S] or, of Q6_K, [16 S, 4] of two products -> [16 S, 1 or 4, 1, 2]."""
    if len(lo.shape) == 1:
        lo, hi = lo[:, None], hi[:, None]
    C: gl.constexpr = sums_layout(S)
    o = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, C))))
    return gl.where(o[None, None, None, :] == 0, lo[:, :, None, None], hi[:, :, None, None])


@gluon.jit
def factors(b_s, b_d, BITS: gl.constexpr, S: gl.constexpr):
    """Of the sums of a pair, and of the sums of x (BITS = 8: none)."""
    C: gl.constexpr = sums_layout(S)
    if BITS == 8:
        b_a = of_products(f16_at(b_s, 0), f16_at(b_s, 16), S)
        return b_a, b_a
    else:
        a, b = f16_at(b_d, 0), f16_at(b_d, 16)
        if BITS == 6:
            L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, C))  # [16 S, 4]
            o_t = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
            b_s = (gl.convert_layout(b_s, gl.SliceLayout(1, L))[:, None] ^ -0x7F7F7F80) >> (o_t // 2 * 8)
            a = gl.convert_layout(a, gl.SliceLayout(1, L))[:, None]
            b_a = of_products(times_byte(a, b_s, 0) - 128.0 * a, times_byte(a, b_s, 2) - 128.0 * a, S)
            return b_a, 160.0 * b_a
        else:
            b_a = of_products(times_byte(a, b_s, 0), times_byte(a, b_s, 2), S)
            return b_a, of_products(times_byte(b, b_s, 1), times_byte(b, b_s, 3), S) + 128.0 * b_a


@gluon.jit
def as_sums(b_c, S: gl.constexpr):
    b_c = gl.permute(gl.reshape(b_c, [S, 8, 4, 2, 2, 2]), (0, 3, 1, 2, 4, 5))
    return gl.convert_layout(gl.reshape(b_c, [16 * S, 4, 2, 2]), sums_layout(S), assert_trivial=True)


@gluon.jit
def read_step(
    q_tile, h_tile, s_tile, d_tile, BITS: gl.constexpr, EACH: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """A step of a tile: words of codes and of the high plane, both of the first half and of the second; scales and d,
    of each pair.
    """
    words = read_codes(q_tile, S)
    high = words
    if BITS == 5 or BITS == 6:
        high = read_high(h_tile, BITS, S)
    PAIRS: gl.constexpr = 2 if BITS == 8 else 4
    scales = by_pair(s_tile.load(scales_layout(PAIRS, S)), PAIRS, S)
    d = scales
    if BITS != 8:
        d = by_pair(read_d(d_tile, EACH, S), 4, S)
    return words, high, scales, d


@gluon.jit
def add_tile(
    b_y, b_x, b_sum, given, u: gl.constexpr, BITS: gl.constexpr, BLOCKS: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """b_y: sums of each block, to which the product of a half, u, of a step's words is added."""
    PAIRS: gl.constexpr = 1 if BITS == 8 else 2
    words, high, b_s, b_d = given
    given = (words[u],) + b_x
    if BITS == 5 or BITS == 6:
        given = given + (high[u],)
    asm: gl.constexpr = multiply_bytes(BLOCKS) if BITS == 8 else multiply_nibbles(BITS, 2, BLOCKS)
    b_c = gl.inline_asm_elementwise(
        asm, constraints(PAIRS * BLOCKS, len(given)), given, dtype=kinds(PAIRS * BLOCKS), is_pure=True, pack=8
    )
    for h in gl.static_range(PAIRS):
        a, less = factors(b_s[u * PAIRS + h], b_d[u * PAIRS + h], BITS, S)
        new = ()
        for b in gl.static_range(BLOCKS):
            y = b_y[b] + a * as_sums(b_c[b * PAIRS + h], S)
            if BITS != 8:
                y -= less * b_sum[b * PAIRS + h]
            new = new + (y,)
        b_y = new
    return b_y


@gluon.jit
def load_x(x, rows, o_x, m_x, stride_x, BLOCKS: gl.constexpr, MASKED: gl.constexpr):
    found = ()
    for b in gl.static_range(BLOCKS):
        p_x = x + rows[b].to(gl.int64) * stride_x + o_x
        if MASKED:
            found = found + (gl.load(p_x, mask=m_x, other=0),)
        else:
            found = found + (gl.load(p_x),)
    return found


@gluon.jit
def total(b_y, bias, o_n, RT: gl.constexpr, BIAS: gl.constexpr, S: gl.constexpr):
    """[16 S, 4, 2, 2] -> [16 RT]: row of W, row of x."""
    b_out = gl.sum(b_y, 3)
    if RT == 4:  # both halves of the groups
        b_out = gl.sum(gl.reshape(b_out, [16 * S, 2, 4]), 1)
    b_out = gl.sum(gl.reshape(b_out, [S, 16, RT]), 0)
    b_out = gl.convert_layout(gl.reshape(b_out, [16 * RT]), gl.BlockedLayout([1], [32], [S], [0]))
    if BIAS:
        b_out += gl.load(bias + o_n).to(gl.float32)
    return b_out


@gluon.jit
def multiply_rows(
    x, bias, y, q_ring, h_ring, s_ring, d_ring, full, free, tiles, steps, i_p, P, T, N, K, stride_x, stride_y,
    BITS: gl.constexpr, EACH: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, EVEN: gl.constexpr,
    BLOCKS: gl.constexpr, TILES: gl.constexpr, S: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    RT: gl.constexpr = 4 if BITS == 6 else 8  # rows of x in a block
    WORDS: gl.constexpr = 64 if BITS == 8 else 128  # of x in a warp's step
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [S, 1], [1, 0])
    C: gl.constexpr = sums_layout(S)
    # lane 4 g + t, registers (pair of groups or group, two columns)
    o_l = gl.arange(0, 32 * S, layout=gl.SliceLayout(1, L))[:, None]
    o_r = gl.arange(0, 8, layout=gl.SliceLayout(0, L))[None, :]
    s, g, t = o_l // 32, o_l % 32 // 4, o_l % 4
    o_x = s * WORDS + o_r // 4 * (16 if BITS == 8 else 32) + t * 4 + o_r % 4
    m_x = (g // 4 == t // 2) if BITS == 6 else g < 8
    rows = ()
    for b in gl.static_range(BLOCKS):
        rows = rows + (gl.minimum(b * RT + g % RT, T - 1),)  # sums of rows past the end are not stored
    o = gl.arange(0, 16 * RT, layout=gl.BlockedLayout([1], [32], [S], [0]))
    slot, phase, i = 0, 0, 0
    cuda.gdc_wait()
    for tile in range(i_p, tiles, P):
        b_y, b_up = (), ()
        for _ in gl.static_range(BLOCKS):
            b_y = b_y + (gl.zeros([16 * S, 4, 2, 2], gl.float32, layout=C),)
            b_up = b_up + (gl.zeros([16 * S, 4, 2, 2], gl.float32, layout=C),)
        for step in range(steps):
            m_k = m_x if EVEN else m_x & (step * S + s < K // (2 * WORDS))
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
            for u in gl.static_range(2):
                o_k = step * (S * WORDS) + u * (WORDS // 2) + o_x
                b_x = load_x(x, rows, o_k, m_k, stride_x, BLOCKS, BITS == 6 or not EVEN)
                b_sum = ()
                if BITS != 8:
                    b_x2 = load_x(x, rows, o_k + 16, m_k, stride_x, BLOCKS, BITS == 6 or not EVEN)
                    both = ()
                    for b in gl.static_range(BLOCKS):
                        both = both + (b_x[b], b_x2[b])
                    b_x = both
                    b_1 = gl.inline_asm_elementwise(
                        sum_columns(2, BLOCKS), constraints(2 * BLOCKS, len(b_x)), b_x, dtype=kinds(2 * BLOCKS),
                        is_pure=True, pack=8,
                    )  # fmt: skip
                    for b in gl.static_range(2 * BLOCKS):
                        b_sum = b_sum + (as_sums(b_1[b], S),)
                b_y = add_tile(b_y, b_x, b_sum, one, u, BITS, BLOCKS, S)
                if GATED:
                    b_up = add_tile(b_up, b_x, b_sum, two, u, BITS, BLOCKS, S)
        o_n = tile * 16 + o // RT
        for b in gl.static_range(BLOCKS):
            b_out = total(b_y[b], bias, o_n, RT, BIAS, S)
            if GATED:
                b_out *= total(b_up[b], bias, o_n + N, RT, BIAS, S) / (1.0 + gl.exp(-b_out))
            o_t = b * RT + o % RT
            gl.store(y + o_t.to(gl.int64) * stride_y + o_n, b_out.to(y.dtype.element_ty), mask=o_t < T)
