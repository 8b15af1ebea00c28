"""Experts in codes with a scale for each block: reference and kernels, on the values and on true ones."""

import math
import weakref

import numpy as np
import pytest
import torch
from block_cases import BASE, FP4, FP8, SMALL, encode, random_blocks, random_stack
from long_form import few
from numerics import assert_close_rms, assert_same_bytes, rel_rms
from own_process import compile_alone
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.linear import block_scaled
from hybridkv.kernels.linear.block_form import BlockForm
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.kernels.moe import block_experts
from hybridkv.kernels.moe.block_experts import ExpertStack, run_block_experts_ref
from hybridkv.kernels.moe.block_experts_one import ROWS, launch_one, one_up_kernel
from hybridkv.kernels.moe.grouped import run_experts_ref

pytest.importorskip("triton")
F32, BF16 = torch.float32, torch.bfloat16
# against float64 on the values in x's dtype. f32: sums of up to 300 products, twice. bf16: gate, up and their product,
# what an expert gives and the sum are rounded, each by 1.6e-3 RMS.
BOUND = {F32: 4e-6, BF16: 6.5e-3}
LIMIT = 1.5  # low enough to cut many of the values


def stacks(form: BlockForm | None, E: int, D: int, I: int) -> tuple[ExpertStack, Tensor, Tensor]:
    """Experts of a form (None: plain), and their values."""
    if form is None:
        gate_up, down = torch.randn(E, 2 * I, D) / D**0.5, torch.randn(E, D, I) / I**0.5
        return ExpertStack(gate_up, down), gate_up, down
    (up, up_values), (down, down_values) = (
        random_stack(form.joined(I, I), E, 2 * I, D), random_stack(form, E, D, I)
    )  # fmt: skip
    return ExpertStack(up, down), up_values, down_values


def put(stack: ExpertStack, dtype: torch.dtype) -> ExpertStack:
    def there(part: Tensor | BlockScaled) -> Tensor | BlockScaled:
        if isinstance(part, Tensor):
            return part.to(DEVICE, dtype)
        return BlockScaled(part.codes.to(DEVICE), part.scales.to(DEVICE), part.form)

    return ExpertStack(there(stack.gate_up), there(stack.down))


def pairs(T: int, E: int, k: int) -> tuple[Tensor, Tensor]:
    """k of E experts for each token, and the last one for all."""
    chosen = torch.stack([torch.randperm(E)[:k] for _ in range(T)] or [torch.zeros(k)])[:T].int()
    chosen = torch.cat((chosen, torch.full((T, 1), E, dtype=torch.int32)), 1)
    return torch.rand(T, k + 1), chosen


def by_hand(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, limit: float = LIMIT) -> Tensor:
    x, gate_up, down = x.double(), gate_up.to(x.dtype).double(), down.to(x.dtype).double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for w, e in zip(weights[t].double(), chosen[t].tolist()):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[t] += w * (down[e] @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.fixture(params=("reference", "kernel"))
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The public function, made to take one of its two forms."""
    monkeypatch.setattr(block_experts, "use_triton", lambda x: request.param == "kernel")
    return block_experts.run_block_experts


SHAPES = ((1, 4, 2, 64, 40), (9, 5, 3, 100, 34), (40, 3, 1, 32, 32))
STACKS = {"v4": (FP4, FP8), "base": (BASE, BASE), "plain": (FP4, None), "first": (None, SMALL)}


@pytest.mark.long
@few("dtype, shape", tuple(BOUND), SHAPES)
@pytest.mark.parametrize(("routed", "shared"), STACKS.values(), ids=STACKS)
def test_experts_are_those_of_the_values(
    op, routed: BlockForm | None, shared: BlockForm | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Routed experts and the last one in forms of their own, one of which may be plain. 34 rows have no whole block."""
    T, E, k, D, I = shape
    first, up, down = stacks(routed, E, D, I)
    last, last_up, last_down = stacks(shared, 1, D, I)
    x = (torch.randn(T, D) / 4).to(dtype)
    weights, chosen = pairs(T, E, k)
    want = by_hand(x, weights, chosen, torch.cat((up, last_up)), torch.cat((down, last_down)))
    there = [put(first, dtype), put(last, dtype)]
    got = op(x.to(DEVICE), weights.to(DEVICE), chosen.to(DEVICE), there, LIMIT)
    assert got.dtype == dtype
    assert_close_rms("experts", want, got, BOUND[dtype])


@pytest.mark.parametrize(("T", "ran"), ((1, "one"), (2, "few"), (9, "few"), (30, "many"), (130, "many")))
def test_each_number_of_tokens_has_its_kernels(T: int, ran: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16: one token, a few rows of an expert, and many."""
    (seen, E, D, I), one, tiles_of = ([], 3, 96, 70), block_experts.run_one, block_experts.tiles_of
    monkeypatch.setattr(block_experts, "run_one", lambda *a: seen.append("one") or one(*a))
    monkeypatch.setattr(block_experts, "tiles_of", lambda *a: seen.append(tiles_of(*a)) or seen[-1])
    (first, up, down), (last, last_up, last_down) = stacks(FP4, E, D, I), stacks(SMALL, 1, D, I)
    x, (weights, chosen) = (torch.randn(T, D) / 4).to(BF16), pairs(T, E, 2)
    want = by_hand(x, weights, chosen, torch.cat((up, last_up)), torch.cat((down, last_down)))
    there = [put(first, BF16), put(last, BF16)]
    got = block_experts.run_block_experts_triton(*(t.to(DEVICE) for t in (x, weights, chosen)), there, LIMIT)
    assert_close_rms("experts", want, got, BOUND[BF16])
    if ran == "one":
        assert seen == ["one"]
    else:
        assert [tiles.columns is not None for tiles in seen] == [ran == "few"] * 4


@pytest.mark.parametrize("T", (1, 9, 30))
def test_qwens_experts_have_no_limit_and_stand_alone(T: int) -> None:
    """One stack of FP4, by each number's kernels; most values are past what V4 cuts them to."""
    stack, up, down = stacks(FP4, 4, 64, 32)
    weights, chosen = torch.rand(T, 2), torch.stack([torch.randperm(4)[:2] for _ in range(T)]).int()
    x = (4 * torch.randn(T, 64)).to(BF16)
    want = by_hand(x, weights, chosen, up, down, math.inf)
    assert rel_rms(want, by_hand(x, weights, chosen, up, down)) > 0.1
    given = (each.to(DEVICE) for each in (x, weights, chosen))
    got = block_experts.run_block_experts_triton(*given, [put(stack, BF16)], math.inf)
    assert_close_rms("experts", want, got, BOUND[BF16])


@pytest.mark.parametrize("T", (1, 3))
def test_rows_of_x_may_begin_anywhere(T: int) -> None:
    """FP4 reads two numbers as one word. f16, which nothing here has, is no bf16."""
    stack, up, down = stacks(FP4, 3, 64, 40)
    weights, chosen = torch.rand(T, 2), torch.stack([torch.randperm(3)[:2] for _ in range(T)]).int()
    memory = (torch.randn(400) / 4).to(DEVICE, BF16)
    for dtype, first, step in ((BF16, 1, 64), (BF16, 0, 65), (BF16, 2, 67), (torch.float16, 0, 64)):
        x = memory.to(dtype).as_strided((T, 64), (step, 1), first)
        got = block_experts.run_block_experts_triton(
            x, weights.to(DEVICE), chosen.to(DEVICE), [put(stack, dtype)], LIMIT
        )
        assert_close_rms(f"{dtype, first, step}", by_hand(x.cpu(), weights, chosen, up, down), got, BOUND[BF16])


def test_one_stack_has_the_bits_of_the_plain_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an expert is one tile. bf16 holds the values exactly, so nothing tells the two apart."""
    stack, up, down = stacks(FP4, 5, 64, 48)
    x, (weights, chosen) = torch.randn(7, 64).to(BF16), pairs(7, 4, 2)
    want = run_experts_ref(x, weights, chosen, up.to(BF16), down.to(BF16), LIMIT)
    assert_same_bytes(run_block_experts_ref(x, weights, chosen, [stack], LIMIT), want)
    monkeypatch.setattr(block_scaled, "TILE", 64 * 7)  # and the same but for the order of sums where it is many
    assert_close_rms("tiles", want, run_block_experts_ref(x, weights, chosen, [stack], LIMIT), BOUND[BF16])


@pytest.mark.parametrize(("form", "bound"), ((FP8, 0.08), (FP4, 0.3)), ids=("fp8", "fp4"))
def test_experts_are_near_those_of_the_true_values(op, form: BlockForm, bound: float) -> None:
    """Three rounded matrices one after the other, each off by 2.7 % RMS in E4M3 and 10 to 12 % in E2M1."""
    E, D, I = 2, 128, 128
    up, down = torch.randn(E + 1, 2 * I, D) / D**0.5, torch.randn(E + 1, D, I) / I**0.5
    made = [[encode(matrix, form) for matrix in stack] for stack in (up, down)]
    both = (BlockScaled(torch.stack([m.codes for m in s]), torch.stack([m.scales for m in s]), form) for s in made)
    x, (weights, chosen) = torch.randn(5, D), pairs(5, E, 2)
    want = by_hand(x, weights, chosen, up, down)
    got = op(x.to(DEVICE), weights.to(DEVICE), chosen.to(DEVICE), [put(ExpertStack(*both), F32)], LIMIT)
    assert bound / 20 < rel_rms(want, got) < bound


def test_an_expert_of_its_own_scale_is_not_anothers(op) -> None:
    """Scales of one expert changed: its tokens alone change."""
    stack, _, _ = stacks(FP8, 4, 32, 40)
    scales = stack.down.scales.clone()
    scales[2] += 1
    other = ExpertStack(stack.gate_up, BlockScaled(stack.down.codes, scales, FP8))
    x, weights = torch.randn(6, 32), torch.ones(6, 1)
    chosen = torch.tensor([0, 2, 3, 2, 1, 0], dtype=torch.int32)[:, None]
    a, b = (op(*(t.to(DEVICE) for t in (x, weights, chosen)), [put(s, F32)], LIMIT).cpu() for s in (stack, other))
    assert torch.equal((a != b).any(1), chosen[:, 0] == 2)


@pytest.mark.parametrize("dtype", tuple(BOUND))
def test_no_token_one_expert_of_all_and_one_token_of_nan(op, dtype: torch.dtype) -> None:
    stack, up, down = stacks(FP4, 3, 32, 32)
    there = [put(stack, dtype)]
    none = op(torch.zeros(0, 32, device=DEVICE, dtype=dtype), *(t.to(DEVICE) for t in pairs(0, 2, 1)), there, LIMIT)
    assert none.shape == (0, 32)
    x, weights = torch.randn(40, 32).to(dtype), torch.rand(40, 1)
    x[5], chosen = torch.nan, torch.full((40, 1), 1, dtype=torch.int32)
    got = op(*(t.to(DEVICE) for t in (x, weights, chosen)), there, LIMIT).cpu()
    keep = torch.arange(40) != 5
    assert got[5].isnan().all()
    assert_close_rms("others", by_hand(x[keep], weights[keep], chosen[keep], up, down), got[keep], BOUND[dtype])


@pytest.mark.parametrize("dtype", tuple(BOUND))
@pytest.mark.parametrize("width", (24, 40))
@pytest.mark.parametrize("T", (1, 5, 40))
def test_experts_that_are_not_here_add_nothing(op, T: int, width: int, dtype: torch.dtype) -> None:
    """A rank with two of four experts and a part of the shared one, of another width or as wide: choices of experts of
    other ranks have the last number and a weight of zero.
    """
    (first, up, down), (last, last_up, last_down) = stacks(FP4, 4, 64, 40), stacks(FP8, 1, 64, width)
    x, (weights, chosen) = (torch.randn(T, 64) / 4).to(dtype), pairs(T, 4, 2)
    beyond = chosen < 2  # experts 2 and 3 are here
    weights = weights.masked_fill(beyond, 0.0)
    own = torch.where(beyond, 3, chosen - 2).int()
    routed, shared = (by_hand(x, w, c, *m) for w, c, m in (
        (weights[:, :2], chosen[:, :2], (up, down)), (weights[:, 2:], chosen[:, 2:] * 0, (last_up, last_down))
    ))  # fmt: skip
    here = ExpertStack(*(BlockScaled(m.codes[2:].clone(), m.scales[2:].clone(), m.form) for m in first))
    given = (x, weights, own, [put(here, dtype), put(last, dtype)])
    got = op(*(t.to(DEVICE) for t in given[:3]), given[3], LIMIT, others=True)
    assert_close_rms("experts", routed + shared, got, BOUND[dtype])


def test_what_lies_between_two_products_of_a_stack_is_gone_before_the_next_stack(monkeypatch) -> None:
    """It has a row for each pair: with two at once a prompt chunk would take more memory."""
    here = [put(stacks(form, E, 64, 40)[0], F32) for form, E in ((FP4, 3), (FP8, 1))]
    empty, made, most = torch.empty, [], [0]

    def counted(*shape, **how) -> Tensor:
        found = empty(*shape, **how)
        if found.shape == (5 * 3, 40):
            made.append(weakref.ref(found))
            most[0] = max(most[0], sum(each() is not None for each in made))
        return found

    monkeypatch.setattr(torch, "empty", counted)
    weights, chosen = (t.to(DEVICE) for t in pairs(5, 3, 2))
    block_experts.run_block_experts_triton((torch.randn(5, 64) / 4).to(DEVICE), weights, chosen, here, LIMIT)
    assert len(made) == 2 and most == [1]


def test_codes_past_two_gigabytes_are_reached() -> None:
    """514 experts of 4 MiB, of which all but the last are pages that were never touched."""
    E, D, I = 514, 8192, 256
    last, values = random_blocks(FP8, 2 * I, D)
    codes, scales = np.zeros((E, 2 * I, D), np.uint8), np.zeros((E, *last.scales.shape), np.uint8)
    codes[-1], scales[-1] = last.codes, last.scales
    assert codes[:-1].nbytes > 1 << 31
    up = BlockScaled(torch.from_numpy(codes).to(DEVICE), torch.from_numpy(scales).to(DEVICE), FP8)
    x = (torch.randn(1, D) / D**0.5).to(BF16)
    inner = torch.empty(1, I, dtype=BF16, device=DEVICE)
    order, offsets = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (1, E + 1))
    offsets[-1] = 1
    block_experts._launch(block_experts.UP, x.to(DEVICE), up, (order, offsets), inner, (E, D, I, 1, 1e9), I, 1)
    gate, up_ = (values.double() @ x[0].double()).chunk(2)
    want = gate / (1 + (-gate).exp()) * up_
    assert_close_rms("the last expert", want, inner[0], BOUND[BF16])
    inner, chosen = torch.empty_like(inner), torch.tensor([[E - 1]], dtype=torch.int32, device=DEVICE)
    launch_one(one_up_kernel, x.to(DEVICE), [up], chosen, inner, (D, I, 1e9), I // (ROWS // 2))
    assert_close_rms("by one token's kernel", want, inner[0], BOUND[BF16])


COMPILE = """
from long_form import few, more
from no_device import SHARED_MEMORY, built, usage
import torch
from hybridkv.kernels.linear.block_form import RELEASED_FP4, RELEASED_FP8
from hybridkv.kernels.linear.block_scaled import empty_blocks
from hybridkv.kernels.moe import block_experts, block_experts_one
from hybridkv.kernels.moe.block_experts import ExpertStack

block_experts.has_pdl = block_experts_one.has_pdl = lambda device: True
cpu = torch.device("cpu")
# Flash, by one, few and many tokens; and one of sixteen ranks of Pro, whose part of the shared expert has blocks of 64
halves = [RELEASED_FP8.part(rows=[(192, 384)]), RELEASED_FP8.part(columns=[(192, 384)])]
assert [halves[0].rows, halves[1].columns] == [64, 64]
for D, I, shared, many in ((4096, 2048, [RELEASED_FP8] * 2, (3, 64)), (7168, 192, halves, more(3, 64))):
    stacks = [
        ExpertStack(empty_blocks(up, (E, 2 * I, D), cpu), empty_blocks(down, (E, D, I), cpu))
        for (up, down), E in (([RELEASED_FP4] * 2, 2), (shared, 1))
    ]
    for T in (1, *many):
        x, weights = torch.zeros(T, D, dtype=torch.bfloat16), torch.zeros(T, 3)
        block_experts.run_block_experts_triton(x, weights, torch.zeros(T, 3, dtype=torch.int32), stacks, 10.0)
for name, kernel in built:
    if name.startswith(("one_", "few_", "block_")):
        ptx = kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED_MEMORY
        print(name, *usage(kernel), ptx.count("st.local"), ptx.count("wgmma.mma_async"), ptx.count("mma.sync"))
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_released_widths_compile_for_hopper_and_nothing_spills() -> None:
    """FP4 and FP8 experts, whole and as a rank has them, whose shared one is narrower: no kernel for one token takes
    both. The long form has more tokens for those, too.
    """
    built = [line.split() for line in compile_alone(COMPILE).splitlines()]
    assert {name for name, *_ in built} == {f"{k}_{p}_kernel" for k in ("one", "few", "block") for p in ("up", "down")}
    assert all(int(registers) <= 255 and spilled == local == "0" for _, registers, spilled, local, *_ in built), built
    for name, *_, hopper, other in built:  # tensor cores; many rows: those of Hopper, codes from registers
        assert int(hopper if name.startswith("block_") else other) > 0, built
