"""Routing by a softmax, its experts and the shared one: against loops in float64, and the kernels against them."""

import pytest
import torch
from expert_parts import in_parts, summed_parts
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels import row_ops
from hybridkv.kernels.moe import expert_loop
from hybridkv.kernels.moe.expert_loop import loop_experts, run_softmax_experts
from hybridkv.kernels.moe.shared_expert import add_shared_ref, add_shared_triton
from hybridkv.kernels.moe.softmax_router import route_softmax_ref, route_softmax_triton
from hybridkv.parallel.shard import spans

pytest.importorskip("triton")
F32, BF16 = torch.float32, torch.bfloat16
# f32: sums of up to 100 products, twice. bf16: six roundings in the loop (gate, up, silu, product, result, sum), each
# by 2^-8 of a value at most and 1.6e-3 RMS, two of which do not reach the end in full.
BOUND = {F32: 3e-6, BF16: 6.5e-3}


@pytest.mark.parametrize("form", (route_softmax_ref, route_softmax_triton))
@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("renormalise", (False, True))
@pytest.mark.parametrize(("T", "E", "k"), ((0, 4, 2), (1, 1, 1), (3, 10, 3), (2, 256, 8), (5, 300, 10)))
def test_routing(form, dtype: torch.dtype, renormalise: bool, T: int, E: int, k: int) -> None:
    # different in every column, so that there is one best choice; rows of a wider product
    logits = torch.stack([torch.randperm(E + 2) / 64 for _ in range(T)] or [torch.zeros(E + 2)])[:T, 1:-1].to(dtype)
    weights, chosen = form(logits.to(DEVICE), k, renormalise)
    assert weights.dtype == F32 and chosen.dtype == torch.int32 and chosen.shape == (T, k)
    probs = logits.double().softmax(-1)
    for t in range(T):
        best = sorted(range(E), key=lambda e: -float(logits[t, e]))[:k]
        assert sorted(chosen[t].tolist()) == sorted(best) or dtype == BF16  # of equal ones either may be taken
        want = probs[t, chosen[t].long().cpu()]
        want = want / want.sum() if renormalise else want
        assert_close_rms("weights", want, weights[t], 1e-6)
        assert chosen[t].unique().numel() == k
        assert_close_rms("best", probs[t, best], probs[t, chosen[t].long().cpu()], 1e-12)


def case(T: int, E: int, k: int, D: int, I: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    chosen = torch.stack([torch.randperm(E)[:k] for _ in range(T)]).int()
    gate_up, down = torch.randn(E, 2 * I, D) * 2 / D**0.5, torch.randn(E, D, I) / I**0.5
    return torch.randn(T, D).to(dtype), torch.rand(T, k), chosen, gate_up.to(dtype), down.to(dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("T", (1, 5, 40))
def test_experts(dtype: torch.dtype, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, chosen, gate_up, down = made = case(T, 6, 2, 40, 24, dtype)
    want = torch.zeros(T, 40, dtype=torch.float64)
    for t in range(T):
        for w, e in zip(weights[t], chosen[t].tolist()):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            want[t] += w * (down[e].double() @ (gate * gate.sigmoid() * up))
    assert_close_rms("loop", want, loop_experts(*made), BOUND[dtype])
    monkeypatch.setattr(expert_loop, "use_triton", lambda x: True)
    there = [t.to(DEVICE) for t in made]
    assert_close_rms("grouped kernels", want, run_softmax_experts(*there), BOUND[dtype])


@pytest.mark.parametrize("T", (1, 5, 40))
def test_experts_that_are_not_here_add_nothing(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with three of six experts: choices of the others have number 3 and a weight of zero."""
    x, weights, chosen, gate_up, down = case(T, 6, 2, 40, 24, F32)
    beyond = chosen >= 3
    want = loop_experts(x, weights.masked_fill(beyond, 0), chosen, gate_up, down)
    made = x, weights.masked_fill(beyond, 0), chosen.clamp(max=3), gate_up[:3].contiguous(), down[:3].contiguous()
    assert_close_rms("loop", want, run_softmax_experts(*made, others=True), BOUND[F32])
    monkeypatch.setattr(expert_loop, "use_triton", lambda x: True)
    there = [t.to(DEVICE) for t in made]
    assert_close_rms("grouped kernels", want, run_softmax_experts(*there, others=True), BOUND[F32])


# the last two: parts of one row and of many, which a BLAS library multiplies in another order than all rows at once
@pytest.mark.parametrize(
    ("size", "T", "D", "I", "kernels"),
    [
        (2, 19, 101, 69, False),
        (2, 19, 101, 69, True),
        (4, 19, 101, 69, True),
        (4, 5, 5, 227, False),
        (8, 1, 984, 275, False),
    ],
)
def test_experts_in_parts_have_the_bits_of_the_whole(
    size: int, T: int, D: int, I: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode, whose sums are whole. A sum that is added up in parts has others."""
    monkeypatch.setattr(row_ops, "use_triton", lambda x: kernels)
    made = [t.to(DEVICE) if kernels else t for t in case(T, 6, 2, D, I, F32)]
    inner, outputs = ([end - begin for begin, end in spans(width, size)] for width in (I, D))
    want = row_ops.run_experts_exact(*made)
    assert_same_bytes(want, in_parts(*made, inner, outputs))
    parted = summed_parts(*made, inner)
    assert_close_rms("the same number", want.double(), parted, BOUND[F32])
    assert not torch.equal(want, parted)


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize(("T", "D"), ((0, 8), (1, 1), (3, 100), (2, 2048)))
def test_the_shared_expert_joins(dtype: torch.dtype, T: int, D: int) -> None:
    routed, shared, x = (torch.randn(T, D).to(dtype) for _ in range(3))
    gate = (torch.randn(1, D) / D**0.5).to(dtype)
    weight = (x.double() @ gate.double().T).sigmoid()
    want = routed.double() + shared.double() * weight
    for form in (add_shared_ref, add_shared_triton):
        got = form(*(t.to(DEVICE) for t in (routed, shared, x, gate)))
        assert got.dtype == dtype
        assert_close_rms(form.__name__, want, got, 1e-6 if dtype == F32 else 4e-3)  # four roundings of 2^-9 at most
