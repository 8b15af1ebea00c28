"""Norms, gates, attention inputs, experts and the sampler on the GPU: the public functions run the kernels, at real
sizes and past 2^31 elements, and in a CUDA graph. The small cases are in tests/kernels, which run here too, compiled.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor

from hybridkv.config import SamplingParams
from hybridkv.engine.sampler import sample
from hybridkv.kernels.activation import sigmoid_mul, sigmoid_mul_ref, silu_mul, silu_mul_ref
from hybridkv.kernels.attention.append import append
from hybridkv.kernels.attention.inputs import attention_inputs, attention_inputs_ref
from hybridkv.kernels.best_tokens import best_tokens, best_tokens_ref
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.formats.kv_format import Pages
from hybridkv.kernels.moe.expert_loop import loop_experts, run_softmax_experts
from hybridkv.kernels.moe.shared_expert import add_shared, add_shared_ref
from hybridkv.kernels.moe.softmax_router import route_softmax, route_softmax_ref
from hybridkv.kernels.norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from hybridkv.request import Request
from hybridkv.text.stream import TextStream

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
H, G, D, R, P = 24, 4, 256, 32, 64  # Qwen3.5-27B
BOUND = {F32: 1e-6, BF16: 1e-3}  # sums in another order move a bf16 value over the border of two now and then


@pytest.fixture(autouse=True)
def on_the_gpu() -> Any:
    with torch.device("cuda"):
        yield


def captured(op: Callable[[], Tensor]) -> Tensor:
    """The result of a replay; nothing may wait for the host."""
    op()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op()
    out.fill_(7)
    graph.replay()
    return out


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("T", (1, 300))
def test_norms(T: int, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(T, 5120).to(dtype) for _ in range(2))
    weight = torch.randn(5120)
    want, normed = add_rms_norm_ref(x, delta, weight, 1e-6)
    total, got = add_rms_norm(x, delta, weight, 1e-6)
    assert_same_bytes(want, total)
    assert_close_rms("norm", normed, got, BOUND[dtype])
    assert_same_bytes(got, captured(lambda: add_rms_norm(x, delta, weight, 1e-6)[1]))
    assert_same_bytes(rms_norm(total, weight, 1e-6), got)


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("T", (1, 33))
def test_gates(T: int, dtype: torch.dtype) -> None:
    wide = torch.randn(T, 2 * 17408).to(dtype)
    assert_close_rms("silu", silu_mul_ref(wide), silu_mul(wide), BOUND[dtype])
    assert_same_bytes(silu_mul(wide), captured(lambda: silu_mul(wide)))
    x, gate = torch.randn(T, H, D).to(dtype), torch.randn(T, H, 2 * D).to(dtype)[..., D:]
    assert_close_rms("sigmoid", sigmoid_mul_ref(x, gate), sigmoid_mul(x, gate), BOUND[dtype])


def pages(kind: str, N: int) -> Pages:
    if kind == "fp8":
        return Fp8Pages(torch.randint(0, 256, (N, P, D), dtype=torch.uint8), torch.randn(N, P))
    return torch.randn(N, P, D).to(F32 if kind == "f32" else BF16)


def copy(x: Pages) -> Any:
    return Fp8Pages(*(t.clone() for t in x)) if isinstance(x, Fp8Pages) else x.clone()


def same(a: Pages, b: Pages) -> None:
    for x, y in zip(a, b) if isinstance(a, Fp8Pages) else ((a, b),):
        assert_same_bytes(x, y)


def angles(T: int) -> tuple[Tensor, Tensor]:
    turn = torch.rand(T, 1, R) * 2 * math.pi
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("T", (1, 7, 300))
def test_attention_inputs(T: int, kind: str) -> None:
    N = G * T // P + 3
    x, turn = torch.randn(T, (2 * H + 2 * G) * D).to(BF16), angles(T)
    weights, index = (torch.rand(D) + 0.5, torch.rand(D) + 0.5, 1e-6), torch.randperm(N * P)[: G * T].view(G, T)
    pads = torch.arange(T) % 5 == 4
    index[:, pads], x[pads] = -1, torch.nan
    rows = torch.where(torch.arange(T) % 3 == 0, torch.arange(T), -1)

    def run(op: Any, k_pool: Pages, v_pool: Pages, ring: Tensor) -> Tensor:
        return op(x, *turn, k_pool, v_pool, index, H, G, D, True, *weights, ring, rows)

    plain, ring = (torch.zeros(N, P, D, dtype=BF16) for _ in range(2)), torch.zeros(T, 1, H, D, dtype=BF16)
    k, v = plain
    q = run(attention_inputs, k, v, ring)
    want_k, want_v, want_ring = (torch.zeros_like(t) for t in (k, v, ring))
    want_q = run(attention_inputs_ref, want_k, want_v, want_ring)
    assert_close_rms("queries", want_q[~pads], q[~pads], BOUND[BF16])
    assert_close_rms("keys", want_k, k, BOUND[BF16])
    assert_same_bytes(want_v, v)
    kept = (rows >= 0) & ~pads
    assert_same_bytes(q[kept], ring[kept, 0])
    assert (ring[rows < 0] == 0).all()
    # pages of any kind: the bytes that append stores of these very keys
    before = pages(kind, N), pages(kind, N)
    got, want = [copy(p) for p in before], [copy(p) for p in before]
    places = index.clamp(min=0)
    append(*want, *(t.view(-1, D)[places].transpose(0, 1) for t in (k, v)), index)
    run(attention_inputs, *got, ring)
    for a, b in zip(want, got):
        same(a, b)
    again = [copy(p) for p in before]
    assert_same_bytes(q[~pads], captured(lambda: run(attention_inputs, *again, ring))[~pads])
    for a, b in zip(want, again):
        same(a, b)


def test_more_than_two_to_the_31_elements() -> None:
    T = 153_000
    x = torch.randn(1000, (2 * H + 2 * G) * D).to(BF16).repeat(T // 1000, 1)
    assert x.numel() > 1 << 31
    turn = [a.repeat(T // 1000, 1, 1) for a in angles(1000)]
    index = torch.full((G, T), -1)
    index[:, -1] = torch.arange(G)
    k_pool, v_pool = (torch.zeros(1, P, D, dtype=BF16) for _ in range(2))
    q = attention_inputs(x, *turn, k_pool, v_pool, index, H, G, D, True)
    last, spare = (x[-2:], *(a[-2:] for a in turn)), (torch.zeros_like(k_pool) for _ in range(2))
    assert_close_rms("last", attention_inputs_ref(*last, *spare, index[:, -2:], H, G, D, True), q[-2:], BOUND[BF16])
    assert_same_bytes(x[-1, -G * D :].view(G, D), v_pool[0, :G])
    del q
    weight = torch.ones(x.shape[1])
    assert_close_rms("norm", rms_norm_ref(x[-2:], weight, 1e-6), rms_norm(x, weight, 1e-6)[-2:], BOUND[BF16])
    assert_close_rms("silu", silu_mul_ref(x[-2:]), silu_mul(x)[-2:], BOUND[BF16])


def test_a_chain_of_overlapping_kernels_waits_for_its_inputs() -> None:
    """Each reads what the one before wrote, products of the library among them; the same chain, synchronised."""
    weight, w = torch.rand(2560) + 0.5, (torch.randn(5120, 2560) / 50).to(BF16)
    start, delta = torch.randn(3, 2560).to(BF16), torch.randn(3, 2560).to(BF16)

    def chain(after: Callable[[], None]) -> Tensor:
        h, x = start, delta
        for _ in range(20):
            h, x = add_rms_norm(h, x, weight, 1e-6)
            after()
            x = silu_mul(x @ w.T)
            after()
            x = sigmoid_mul(x.view(3, 10, 256), h.view(3, 10, 256))
            after()
        return add_rms_norm(h, x, weight, 1e-6)[1]

    want = chain(torch.cuda.synchronize)
    for _ in range(3):
        assert_same_bytes(want, chain(lambda: None))
        assert_same_bytes(want, captured(lambda: chain(lambda: None)))


@pytest.mark.parametrize("S", (1, 64))
def test_best_token(S: int) -> None:
    logits = torch.randn(S, 248320)
    logits[0, [248000, 100000]] = 99.0
    want = best_tokens_ref(logits)
    want[0, 0] = 100000
    assert_same_bytes(want, best_tokens(logits))
    assert_same_bytes(want, captured(lambda: best_tokens(logits)))
    logits[-1, 248319] = torch.nan
    assert best_tokens(logits)[1].tolist() == [0] * (S - 1) + [1]


@pytest.mark.parametrize("T", (1, 64))
def test_experts(T: int) -> None:
    E, k, width, inner = 64, 8, 512, 128
    x, logits = torch.randn(T, width).to(BF16), torch.randn(T, E)
    gate_up, down = torch.randn(E, 2 * inner, width) / width**0.5, torch.randn(E, width, inner) / inner**0.5
    gate_up, down, gate = (w.to(BF16) for w in (gate_up, down, torch.randn(1, width) / width**0.5))
    weights, chosen = route_softmax(logits, k, True)
    want_weights, want_chosen = route_softmax_ref(logits, k, True)
    assert torch.equal(want_chosen, chosen)
    assert_close_rms("weights", want_weights, weights, 1e-6)
    routed = loop_experts(x, weights, chosen, gate_up, down)
    want = add_shared_ref(routed, x, x, gate)

    def run() -> Tensor:
        found = route_softmax(logits, k, True)
        return add_shared(run_softmax_experts(x, *found, gate_up, down), x, x, gate)

    assert_close_rms("experts", want, captured(run), 6e-3)  # the loop rounds gate, up, silu and product to bf16


def request(**params: Any) -> Request:
    made = SamplingParams(**params).resolved()
    return Request(0, 0, [1, 2, 3], 3, made, TextStream(None), made.seed or 0)


ASKS = (
    {}, {"temperature": 0.7, "top_k": 20, "top_p": 0.95}, {"temperature": 1.0}, {"repetition_penalty": 1.3},
    {"temperature": 0.6, "top_p": 0.9, "logprobs": 3}, {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.1},
    {"logprobs": 0}, {"temperature": 1e-9, "top_k": 50},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5}, {"temperature": 1.0, "logit_bias": {7: 2.0}, "min_tokens": 2},
)  # fmt: skip


def test_sampling_waits_for_nothing_and_rows_do_not_meet() -> None:
    steps, V = 3, 248320
    logits = 2 * torch.randn(steps, len(ASKS), V)
    logits[:, :, 4] = logits[:, :, 5] = 12.0
    rows = [request(seed=i, **ask) for i, ask in enumerate(ASKS)]
    sample(logits[0], [request(seed=i, **ask) for i, ask in enumerate(ASKS)]).wait()  # to warm up
    torch.use_deterministic_algorithms(False)  # which has slower forms of its own
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = [sample(step, rows) for step in logits]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    together = [d.wait() for d in sampled]
    assert all(not any(bad) for _, bad in together)
    assert [tokens[0] for tokens, _ in together] == [4] * steps and together[0][0][7] in (4, 5)
    for i, ask in enumerate(ASKS):
        row = request(seed=i, **ask)
        assert [sample(step[i : i + 1], [row]).wait()[0][0] for step in logits] == [tokens[i] for tokens, _ in together]
        assert len(rows[i].logprobs) == (steps if "logprobs" in ask else 0)
