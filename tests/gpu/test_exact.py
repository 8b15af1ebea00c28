"""Exact mode on the GPU: the same bits from any cut of a prompt and in any company, and its kernels at real sizes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
import torch.nn.functional as F
from exactness import BUDGET, Models, differing, drive
from numerics import assert_close_rms, assert_same_bytes

from engine.driving import run
from gpu.stepping import feed, replay_quietly
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.engine import mixed_graphs
from hybridkv.engine.graphs import Captured
from hybridkv.engine.mixed_graphs import CapturedMixed
from hybridkv.kernels.gdn.exact import Requests, gdn_exact, gdn_exact_torch
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.linear.exact import linear_exact

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("exact"), "cuda")


@pytest.mark.parametrize(
    ("dtype", "kv", "budget"),
    [("float32", "f32", BUDGET), ("bfloat16", "bf16", BUDGET), ("bfloat16", "bf16", None), ("bfloat16", "fp8", BUDGET)],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
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


@pytest.mark.parametrize(
    ("dtype", "kv", "page"), [("bfloat16", "bf16", 64), ("bfloat16", "fp8", 16), ("float32", "f32", 16)]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_crowd_in_graphs_has_the_bits_of_each_alone(
    kind: str, dtype: str, kv: str, page: int, oracle: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all lengths that come while others decode, every shape captured: logprobs to the last bit, alone and
    eagerly too.
    """
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)
    replays: list[type] = []
    for kept in (CapturedMixed, Captured):
        replay = kept.replay
        monkeypatch.setattr(kept, "replay", lambda self, *a, r=replay: replays.append(type(self)) or r(self, *a))
    settings = CacheConfig(kv_dtype=kv, page_size=page)
    llm = LLM(str(oracle(kind).folder), "cuda", dtype, True, settings, max_requests=8, max_context=1024)
    engine = llm.engine
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    asked = [
        (tiny.token_ids(n, seed=n), replace(params, seed=i, temperature=i % 2))
        for i, n in enumerate((3, 126, 250, 500, 64, 1, 700, 33, 300))
    ]

    def crowd() -> list:
        requests = [engine.add(*each) for each in asked[:3]]

        def late(step: int) -> None:
            if step % 3 == 2 and len(requests) < len(asked):
                requests.append(engine.add(*asked[len(requests)]))

        run(engine, late)
        assert len(requests) == len(asked) and not any(r.error for r in requests)
        return [(r.generated, r.logprobs) for r in requests]

    together = crowd()
    assert replays.count(CapturedMixed) > 3 and replays.count(Captured) > 3, "steps did not run through graphs"
    alone = [llm.generate([tokens], params)[0] for tokens, params in asked]
    assert [(out.token_ids, out.logprobs) for out in alone] == together
    monkeypatch.setattr(engine.runner, "graphs", None)
    monkeypatch.setattr(engine.runner, "mixed", None)
    monkeypatch.setattr(engine.scheduler, "mixed", None)
    assert crowd() == together
    llm.manager.check_integrity()


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_a_replay_moves_no_memory_and_waits_for_nothing(kind: str, oracle: Callable) -> None:
    settings = CacheConfig(kv_dtype="bf16", page_size=64)
    llm = LLM(str(oracle(kind).folder), "cuda", "bfloat16", True, settings, max_requests=4, max_context=1024)
    streams = {"a": tiny.token_ids(200), "b": tiny.token_ids(200, seed=1)}
    for key in streams:
        llm.manager.admit_request(key)
    feed(llm, streams, 0, 60, False)
    feed(llm, streams, 60, 1, True)  # captures
    replay_quietly(llm, streams, 61, 80)


def step_of(counts: dict[int, int], padding: int = 0) -> Requests:
    """Slots and their numbers of tokens, and tokens of a prompt of padding behind them."""
    tokens = torch.tensor([*counts.values(), padding])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)))
    of_token = torch.repeat_interleave(torch.arange(len(tokens)), tokens)
    return Requests(torch.tensor([*counts, -1]).cuda(), starts.cuda(), of_token.cuda())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(16, 48, 128), (2, 6, 64)])
def test_one_op_of_a_deltanet_is_the_same_however_it_is_cut(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against the plain form, and then one prompt whole, in single tokens, in chunks, and in company."""
    Hk, Hv, D = heads
    channels, T = (2 * Hk + Hv) * D, 200
    weights = torch.randn(channels, 4) / 2, torch.rand(Hv) * 4, torch.randn(Hv), torch.randn(D)
    net = DeltaNet(Hk, Hv, D, D, *(w.cuda() for w in weights), eps=1e-6)
    x, others = (torch.randn(n, sum(net.columns), device="cuda").to(dtype) for n in (T, 2 * T))
    begin = torch.randn(4, 3, channels, device="cuda").to(dtype), torch.randn(4, Hv, D, D, device="cuda")
    plain, found = [t.clone() for t in begin], []
    want = gdn_exact_torch(x, net, *plain, step_of({1: T}))
    for cuts, company in (([T], False), ([1] * T, False), ([50, 1, 1, 100, 17, 31], False), ([7, 1, 192], True)):
        states, parts, at = [t.clone() for t in begin], [], 0
        for n in cuts:
            if company:  # one that decodes before, a prompt and padding behind
                rows = torch.cat((others[at : at + 1], x[at : at + n], others[at : at + 9]))
                parts.append(gdn_exact(rows, net, *states, step_of({2: 1, 1: n, 0: 4}, 5))[1 : 1 + n])
            else:
                parts.append(gdn_exact(x[at : at + n], net, *states, step_of({1: n})))
            at += n
        found.append((torch.cat(parts), states[0][1], states[1][1]))
    bound = 1e-5 if dtype == torch.float32 else 6e-3  # bf16: v and the result are rounded, 2^-9 at most
    assert_close_rms("out", want.double(), found[0][0], bound)
    assert_close_rms("state", plain[1][1].double(), found[0][2], bound)
    assert_same_bytes(plain[0][1], found[0][1])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert_same_bytes(one, same)
