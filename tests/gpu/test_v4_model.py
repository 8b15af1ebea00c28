"""DeepSeek-V4 on the GPU: hyper-connections, experts and head norms at the released widths, and tiny models whole.

The small cases are in tests/kernels/v4 and tests/kernels/moe, which run here too, compiled.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tiny_v4
import torch
from numerics import assert_close_rms, logit_gap, rel_rms
from torch import Tensor

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.kernels.linear.f32_out import linear_wide
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe import grouped as grouped_file
from hybridkv.kernels.moe import v4_router as router_file
from hybridkv.kernels.moe.grouped import run_experts, run_experts_ref
from hybridkv.kernels.moe.v4_router import Router, route, route_ref
from hybridkv.kernels.v4 import hyper_connections as hyper_file
from hybridkv.kernels.v4 import norm_rope as norm_file
from hybridkv.kernels.v4.hyper_connections import (
    HyperMap,
    hyper_enter,
    hyper_enter_ref,
    hyper_exit,
    hyper_exit_ref,
    hyper_expand,
    hyper_expand_ref,
)
from hybridkv.kernels.v4.norm_rope import norm_rope, norm_rope_ref

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
# f32: sums of up to 16384 products, one part of them with operands split into three of TF32. bf16: the result is
# rounded, 2^-9 at most and 1.6e-3 RMS, after a row that was rounded before its norm.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
D, I, STREAMS, HEADS = 4096, 2048, 4, 64  # V4-Flash
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("f32", "bf16"))


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors are made on the GPU, and the public functions must not fall back to the references."""
    for file in (hyper_file, grouped_file, router_file, norm_file):
        monkeypatch.setattr(file, "use_triton", lambda x: x.is_cuda or pytest.fail("a tensor is on the CPU"))
    with torch.device("cuda"):
        yield


def hyper_map(exit: bool = False) -> HyperMap:
    rows = STREAMS if exit else STREAMS * (STREAMS + 2)
    fn = torch.randn(rows, STREAMS * D) / (STREAMS * D) ** 0.5
    return HyperMap(fn, torch.randn(rows), torch.rand(1 if exit else 3) + 0.5, torch.rand(D) + 0.5, 1e-6, 1e-6, 20)


@every_dtype
@pytest.mark.parametrize("T", (1, 16, 17, 300))
def test_hyper_connections(dtype: torch.dtype, T: int, on_the_gpu: None) -> None:
    m, out = hyper_map(), hyper_map(exit=True)
    X, f = (torch.randn(T, STREAMS, D) * 3).to(dtype), torch.randn(T, D).to(dtype)
    want, got = hyper_enter_ref(X, m), hyper_enter(X, m)
    assert_close_rms("x", want[0], got[0], BOUND[dtype])
    assert_close_rms("post", want[1], got[1], 1e-5)
    assert_close_rms("C", want[2], got[2], 1e-5)
    assert_close_rms("expanded", hyper_expand_ref(X, f, *want[1:]), hyper_expand(X, f, *want[1:]), BOUND[dtype])
    assert_close_rms("exit", hyper_exit_ref(X, out), hyper_exit(X, out), BOUND[dtype])


@every_dtype
@pytest.mark.parametrize(("T", "H", "width"), ((1, HEADS, 512), (700, HEADS, 512), (33, HEADS, 128), (700, 1, 1024)))
def test_head_norms(dtype: torch.dtype, T: int, H: int, width: int, on_the_gpu: None) -> None:
    x, angle = torch.randn(T, H * width + 64)[:, : H * width].unflatten(1, (H, width)), torch.rand(T, 32) * 1e3
    turn = None if H == 1 else (angle.cos(), angle.sin())
    weight = torch.rand(width) if H == 1 else None
    eps = None if width == 128 else 1e-6
    want, got = (op(x, dtype, eps, weight, turn) for op in (norm_rope_ref, norm_rope))
    assert_close_rms("heads", want, got, BOUND[dtype])


@pytest.mark.parametrize("kind", ("bias", "hash"))
def test_routing_over_256_experts(kind: str, on_the_gpu: None) -> None:
    T, E, k, vocab = 4096, 256, 6, 1000
    table = torch.rand(vocab, E).argsort(1)[:, :k] if kind == "hash" else None
    router = Router(k, 1.5, True, None if table is not None else torch.randn(E) * 0.1, table)
    logits, tokens = torch.randn(T, E) * 3, torch.randint(0, vocab, (T,))
    (want_w, want_e), (got_w, got_e) = (op(logits, tokens, router) for op in (route_ref, route))
    same = (want_e == got_e).all(1)
    assert same.float().mean() > 0.999, "more than near ties differ"  # of experts whose scores differ in the last bit
    assert_close_rms("weights", want_w[same], got_w[same], 1e-6)


def experts(E: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(E, 2 * I, D, dtype=dtype) * 2 / D**0.5), torch.randn(E, D, I, dtype=dtype) / I**0.5


def choices(T: int, E: int, k: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token, the last expert for all."""
    return route(torch.randn(T, E - 1), torch.zeros(T, dtype=torch.long), Router(k, 1.5, True, None, None))


@every_dtype
@pytest.mark.parametrize("T", (1, 6, 64, 900))
def test_experts(dtype: torch.dtype, T: int, on_the_gpu: None) -> None:
    """16 experts: 900 tokens give each several tiles of rows, one token gives most of them none."""
    (gate_up, down), (weights, chosen) = experts(17, dtype), choices(T, 17, 6)
    x = torch.randn(T, D).to(dtype)
    want = run_experts_ref(x.float(), weights, chosen, gate_up.float(), down.float(), 10.0)
    got = run_experts(x, weights, chosen, gate_up, down, 10.0)
    # bf16: three roundings, 1.6e-3 RMS each
    assert_close_rms("experts", want, got, 1e-5 if dtype == torch.float32 else 4e-3)


def test_experts_past_two_to_the_31_elements(on_the_gpu: None) -> None:
    gate_up, down = experts(257, torch.bfloat16)
    assert gate_up.numel() > 1 << 31 and down.numel() > 1 << 31
    weights = torch.rand(3, 3)
    chosen = torch.tensor([[255, 0, 256], [254, 255, 256], [1, 253, 256]], dtype=torch.int32)
    x = torch.randn(3, D, dtype=torch.bfloat16)
    want = run_experts_ref(x, weights, chosen, gate_up, down, 10.0)
    assert_close_rms("experts", want, run_experts(x, weights, chosen, gate_up, down, 10.0), 6e-3)


def test_wide_products_are_not_rounded(on_the_gpu: None) -> None:
    x, weight = torch.randn(37, D, dtype=torch.bfloat16), torch.randn(200, D, dtype=torch.bfloat16)
    want = x.double() @ weight.double().T
    got = linear_wide(x, Linear(weight))
    assert got.dtype == torch.float32
    assert_close_rms("product", want, got, 1e-5)


def test_a_captured_sub_layer_replays_on_new_inputs(on_the_gpu: None) -> None:
    """Nothing in it waits for the device or depends on what the first inputs were."""
    dtype, T = torch.bfloat16, 8
    m, (gate_up, down), gate = hyper_map(), experts(17, dtype), Linear(torch.randn(16, D, dtype=dtype) / D**0.5)
    router, tokens = Router(6, 1.5, True, torch.randn(16), None), torch.zeros(T, dtype=torch.long)

    def layer(X: Tensor) -> Tensor:
        x, post, comb = hyper_enter(X, m)
        weights, chosen = route(linear_wide(x, gate), tokens, router)
        return hyper_expand(X, run_experts(x, weights, chosen, gate_up, down, 10.0), post, comb)

    X = torch.randn(T, STREAMS, D, dtype=dtype)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer(X)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(X)
    for seed in range(3):
        torch.manual_seed(seed)
        X.copy_(torch.randn(T, STREAMS, D, dtype=dtype) * (seed + 1))
        graph.replay()
        torch.testing.assert_close(out, layer(X), rtol=0, atol=0)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tiny_v4.Oracle]:
    return cache(lambda kind: tiny_v4.Oracle(kind, tmp_path_factory.mktemp(kind)))


def open_v4(oracle: tiny_v4.Oracle, dtype: str, kv: str, requests: int = 2) -> LLM:
    settings = CacheConfig(kv_dtype=kv)
    return LLM(str(oracle.folder), "cuda", dtype, cache=settings, max_requests=requests, max_context=1024)


@pytest.mark.parametrize("kind", tuple(tiny_v4.KINDS))
def test_float32_logits_agree_with_transformers(kind: str, oracle: Callable) -> None:
    llm = open_v4(oracle(kind), "float32", "f32")
    for length, prefill, chunk in ((1, None, None), (5, None, None), (131, 122, 50), (300, 290, 128), (700, None, 256)):
        ref, got = oracle(kind).logits[:length], llm.logits(oracle(kind).ids[:length], prefill=prefill, chunk=chunk)
        assert got.device.type == "cuda" and got.isfinite().all()
        gaps = (got.cpu() - ref).abs().amax(1) / ref.abs().max()
        # where two index scores or two experts are as good as equal the other may be picked, which later tokens see
        assert (gaps < 1e-4).float().mean() > 0.95, f"{kind} {length}: {gaps.quantile(0.95):.1e}"


def test_bfloat16_is_near_the_cpu(oracle: Callable) -> None:
    ids, ref = oracle("all").ids[:200], oracle("all").logits[:200]
    with torch.device("cpu"):
        on_cpu = LLM(str(oracle("all").folder), "cpu", "bfloat16", cache=CacheConfig(kv_dtype="bf16"), max_context=1024)
    theirs = on_cpu.logits(ids, prefill=190, chunk=64)
    ours = open_v4(oracle("all"), "bfloat16", "bf16").logits(ids, prefill=190, chunk=64).cpu()

    def median_error(got: Tensor) -> float:
        return torch.tensor([rel_rms(r, g) for r, g in zip(ref, got)]).median().item()

    assert median_error(theirs) > 1e-3, "bfloat16 was not used"
    assert median_error(ours) <= 2 * median_error(theirs), f"{median_error(ours):.2e}, CPU {median_error(theirs):.2e}"


def test_a_batch_gives_the_tokens_of_each_request_alone(oracle: Callable) -> None:
    llm = open_v4(oracle("select"), "float32", "f32", requests=4)
    prompts = [tiny_v4.token_ids(n, seed=n) for n in (1, 5, 126, 257)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    together = [list(out.token_ids) for out in llm.generate(prompts, params)]
    assert together == [list(llm.generate([p], params)[0].token_ids) for p in prompts]


def test_the_same_twice(oracle: Callable) -> None:
    llm = open_v4(oracle("select"), "bfloat16", "fp8")
    first, again = (llm.logits(oracle("select").ids[:300], prefill=290, chunk=128) for _ in range(2))
    assert logit_gap(first.cpu(), again.cpu()) == 0
