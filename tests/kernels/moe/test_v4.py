"""Routing and experts against a loop in float64, and the kernels against the reference."""

import math

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.moe.grouped import run_experts_ref, run_experts_triton, sort_pairs_triton
from hybridkv.kernels.moe.v4_router import Router, route_ref, route_triton

# against the reference in f32. f32: sums of up to 100 products, twice. bf16: what goes into the second product, its
# result and the sum are rounded, each by 2^-9 at most and 1.6e-3 RMS.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 4e-3}
LIMIT = 1.5  # low enough to cut many of the values


def router(E: int, k: int, vocab: int = 0, bias: bool = False, renormalise: bool = True) -> Router:
    wide = torch.stack([torch.randperm(E) for _ in range(vocab)]) if vocab else None
    table = None if wide is None else wide[:, :k]  # rows further apart than they are long
    return Router(k, 1.5, renormalise, torch.randn(E) if bias else None, table)


def moved(r: Router) -> Router:
    bias, table = (None if t is None else t.to(DEVICE) for t in (r.bias, r.table))
    return Router(r.per_token, r.scaling, r.renormalise, bias, table)


def experts(E: int, D: int, I: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The last one is for every token."""
    return (torch.randn(E + 1, 2 * I, D) * 2 / D**0.5).to(dtype), (torch.randn(E + 1, D, I) / I**0.5).to(dtype)


def test_routing_by_hand() -> None:
    E, k = 7, 3
    logits = torch.randn(5, E) * 3
    logits[0, 0], logits[0, 1] = -60.0, 60.0  # where softplus is exp, and where it is the identity
    r = router(E, k, bias=True)
    weights, chosen = route_ref(logits, torch.zeros(5, dtype=torch.long), r)
    assert r.bias is not None
    for t in range(5):
        score = [math.sqrt(math.log1p(math.exp(v))) for v in logits[t].double().tolist()]
        best = sorted(range(E), key=lambda e: -(score[e] + r.bias[e].item()))[:k]
        assert chosen[t].tolist() == [*best, E]
        want = torch.tensor([score[e] / sum(score[i] for i in best) * 1.5 for e in best] + [1.0])
        assert_close_rms(f"weights of token {t}", want, weights[t], 1e-6)
    plain = route_ref(logits, torch.zeros(5, dtype=torch.long), router(E, k))[1]
    assert not torch.equal(plain, chosen), "the bias changed no choice"


def test_hash_layers_follow_the_token() -> None:
    E, k, tokens = 6, 2, torch.tensor([3, 0, 3])
    r, logits = router(E, k, vocab=4), torch.randn(3, E)
    weights, chosen = route_ref(logits, tokens, r)
    assert r.table is not None
    assert_same_bytes(chosen[:, :k].long(), r.table[tokens])
    assert_same_bytes(chosen[0], chosen[2])
    score = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, chosen[:, :k].long())
    assert_close_rms("weights", score / score.sum(1, keepdim=True) * 1.5, weights[:, :k], 1e-6)
    assert (weights[0] != weights[2]).any(), "the weights are the router's, not the table's"


def test_experts_by_hand() -> None:
    E, k, D, I = 5, 2, 12, 10
    gate_up, down = experts(E, D, I)
    x, r = torch.randn(7, D) * 2, router(E, k)
    weights, chosen = route_ref(torch.randn(7, E), torch.zeros(7, dtype=torch.long), r)
    got = run_experts_ref(x, weights, chosen, gate_up, down, LIMIT)
    cut = 0
    for t in range(7):
        want = torch.zeros(D, dtype=torch.float64)
        for w, e in zip(weights[t].double(), chosen[t].tolist()):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            cut += int((gate > LIMIT).sum() + (up.abs() > LIMIT).sum())
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            want += w * (down[e].double() @ (gate / (1 + (-gate).exp()) * up))
        assert_close_rms(f"token {t}", want, got[t], 3e-6)
    assert cut > 20, "the limit cut nothing"


triton = pytest.importorskip("triton")


@pytest.mark.parametrize("renormalise", (True, False))
@pytest.mark.parametrize(
    ("T", "E", "k", "kind"), ((1, 4, 2, "bias"), (6, 17, 6, "bias"), (3, 16, 1, ""), (5, 9, 3, "hash"))
)
def test_routing_kernel_equals_the_reference(T: int, E: int, k: int, kind: str, renormalise: bool) -> None:
    r = router(E, k, 11 if kind == "hash" else 0, kind == "bias", renormalise)
    logits, tokens = torch.randn(T, E) * 5, torch.randint(0, 11, (T,))
    logits[0, :2] = torch.tensor([-40.0, 30.0])
    want, got = route_ref(logits, tokens, r), route_triton(logits.to(DEVICE), tokens.to(DEVICE), moved(r))
    assert_same_bytes(want[1], got[1])
    assert_close_rms("weights", want[0], got[0], 1e-6)
    small = route_triton(torch.full((1, E), -30.0, device=DEVICE), tokens[:1].to(DEVICE), moved(r))[0]
    equal = r.scaling / k if renormalise else r.scaling * math.exp(-15)
    assert_close_rms("small scores", torch.full((1, k), equal), small[:, :k], 1e-5)


def test_nan_logits_choose_experts_that_exist_and_stay_nan() -> None:
    r, logits = moved(router(6, 2)), torch.randn(3, 6, device=DEVICE)
    logits[1] = torch.nan
    weights, chosen = route_triton(logits, torch.zeros(3, dtype=torch.long, device=DEVICE), r)
    assert ((chosen >= 0) & (chosen <= 6)).all()
    assert weights[1, :2].isnan().all() and weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("T", "k", "E"), ((1, 1, 1), (1, 3, 300), (7, 3, 5), (700, 3, 4)))
def test_pairs_are_sorted_by_expert_and_keep_their_order(T: int, k: int, E: int) -> None:
    chosen = torch.randint(0, E, (T, k), dtype=torch.int32)
    order, offsets = sort_pairs_triton(chosen.to(DEVICE), E)
    assert order.tolist() == chosen.flatten().argsort(stable=True).tolist()
    counts = torch.bincount(chosen.flatten(), minlength=E)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("T", "E", "k", "D", "I"), ((1, 4, 2, 24, 40), (9, 6, 3, 100, 33), (45, 3, 1, 16, 16)))
def test_expert_kernels_equal_the_reference(dtype: torch.dtype, T: int, E: int, k: int, D: int, I: int) -> None:
    gate_up, down = experts(E, D, I, dtype)
    x = (torch.randn(T, D) * 2).to(dtype)
    routed = route_ref(torch.randn(T, E), torch.zeros(T, dtype=torch.long), router(E, k))
    want = run_experts_ref(x.float(), *routed, gate_up.float(), down.float(), LIMIT)
    got = run_experts_triton(*(t.to(DEVICE) for t in (x, *routed, gate_up, down)), LIMIT)
    assert got.dtype == dtype
    assert_close_rms("experts", want, got, BOUND[dtype])


def test_all_tokens_at_one_expert_and_one_token_of_nan() -> None:
    E, k, D, I, T = 4, 2, 16, 16, 40
    gate_up, down = experts(E, D, I)
    x, weights = torch.randn(T, D), torch.rand(T, k + 1)
    chosen = torch.tensor([1, 2, E], dtype=torch.int32).repeat(T, 1)
    x[5] = torch.nan
    want = run_experts_ref(x, weights, chosen, gate_up, down, LIMIT)
    got = run_experts_triton(*(t.to(DEVICE) for t in (x, weights, chosen, gate_up, down)), LIMIT)
    keep = torch.arange(T) != 5
    assert_close_rms("the others", want[keep], got[keep], BOUND[torch.float32])
    assert got[5].isnan().all() and want[5].isnan().all()


def test_no_token() -> None:
    gate_up, down = (t.to(DEVICE) for t in experts(4, 8, 8))
    nobody = torch.zeros(0, dtype=torch.long, device=DEVICE)
    weights, chosen = route_triton(torch.zeros(0, 4, device=DEVICE), nobody, moved(router(4, 2)))
    assert weights.shape == chosen.shape == (0, 3)
    x = torch.zeros(0, 8, device=DEVICE)
    assert run_experts_triton(x, weights, chosen, gate_up, down, LIMIT).shape == (0, 8)
    assert run_experts_ref(x, weights, chosen, gate_up, down, LIMIT).shape == (0, 8)
