"""Exact mode on the GPU: the same bits from any cut of a prompt and in any company, and its kernels at real sizes."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from exactness import BUDGET, Models, differing, drive
from numerics import assert_close_rms, assert_same_bytes

from hybridkv.kernels.gdn.rule_exact import gated_delta_exact_torch, gated_delta_scan
from hybridkv.kernels.linear.exact import linear_exact

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("exact"), "cuda")


@pytest.mark.parametrize(
    ("dtype", "kv", "budget"),
    [("float32", "f32", BUDGET), ("bfloat16", "bf16", BUDGET), ("bfloat16", "bf16", None), ("bfloat16", "fp8", BUDGET)],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_any_cut_and_any_company_give_the_same_bits(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, kv: str, budget: int | None
) -> None:
    llm, ids = models.open(kind, dtype, kv, budget), tiny.token_ids(150)
    whole = drive(llm, ids, [150], monkeypatch)
    assert whole.rows[0] == 150
    for cuts, company in (([87, 150], False), (list(range(1, 151)), False), ([1, 18, 140, 141, 150], True)):
        assert differing(whole, drive(llm, ids, cuts, monkeypatch, company)) == []


@pytest.mark.parametrize(("dtype", "kv"), [("float32", "f32"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_same_bits_past_4096_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, kv: str
) -> None:
    llm, ids = models.open(kind, dtype, kv, BUDGET, context=4352), tiny.token_ids(4200)
    whole = drive(llm, ids, [4200], monkeypatch)
    assert whole.rows[0] == 4200
    assert differing(whole, drive(llm, ids, [1709, 4190, *range(4191, 4201)], monkeypatch, company=True)) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_fast_mode_does_not_promise_that(models: Models, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    llm, ids = models.open(kind, "float32", "f32", None, exact=False), tiny.token_ids(150)
    whole, ones = (drive(llm, ids, cuts, monkeypatch) for cuts in ([150], list(range(1, 151))))
    assert not whole.rows and "logits" in differing(whole, ones)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(("inputs", "rows"), [(64, 33), (5120, 1024), (2048, 1), (1536, 6144)])
def test_a_row_of_a_product_is_the_same_among_any_rows(
    dtype: torch.dtype, bound: float, inputs: int, rows: int
) -> None:
    x = torch.randn(1000, inputs, device="cuda").to(dtype)
    weight = (torch.randn(rows, inputs, device="cuda") / inputs**0.5).to(dtype)
    whole = linear_exact(x, weight)
    assert_close_rms("product", F.linear(x.double(), weight.double()), whole, bound)
    for part in (slice(0, 1), slice(999, 1000), slice(5, 12), slice(63, 500)):
        assert_same_bytes(linear_exact(x[part], weight), whole[part])


def test_the_scan_is_the_same_however_it_is_cut() -> None:
    B, T, H, K, V = 2, 300, 48, 128, 128
    q, k = (F.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(B, T, H, V, device="cuda"), -torch.rand(B, T, H, device="cuda"), torch.rand(B, T, H).cuda()
    start = torch.randn(B, H, K, V, device="cuda")
    inputs, state, want_state, by_parts = (q, k, v, g, beta), start.clone(), start.clone(), start.clone()
    whole = gated_delta_scan(*inputs, state)
    want = gated_delta_exact_torch(*inputs, want_state)
    assert_close_rms("out", want.double(), whole, 1e-5)
    assert_close_rms("state", want_state.double(), state, 1e-5)
    cuts = [0, 1, 2, 50, 163, 300]
    parts = [
        gated_delta_scan(*(x[b : b + 1, i:j] for x in inputs), by_parts[b : b + 1])
        for i, j in zip(cuts, cuts[1:], strict=False)
        for b in range(B)
    ]
    assert_same_bytes(torch.cat([torch.cat(parts[i : i + B]) for i in range(0, len(parts), B)], 1), whole)
    assert_same_bytes(by_parts, state)
