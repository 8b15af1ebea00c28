"""The sampler against brute force in float64, transformers' processors, and the distribution it should draw from."""

import json
import math
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.driving import prompt, run
from hybridkv.config import SamplingParams
from hybridkv.engine import workspace
from hybridkv.engine.runner import StepInputs
from hybridkv.engine.sampler import Filters, sample
from hybridkv.kernels.sampling.rows import SampleRow, seen_tokens
from hybridkv.kernels.sampling.sample import adjusted_ref, passing_ref
from hybridkv.request import Request, Status
from hybridkv.text.stream import TextStream


def sample_tokens(logits: Tensor, requests: list[Request]) -> list[int]:
    return sample(logits, requests).wait()[0]


def request(tokens: list[int] | None = None, **params: Any) -> Request:
    made = SamplingParams(**params).resolved()
    return Request(0, 0, tokens or [0], 1, made, TextStream(None), made.seed or 0)


def draws(logits: Tensor, row: Request, count: int) -> list[int]:
    """As many tokens, each after the one before it, of the same logits."""
    found = []
    for _ in range(count):
        found.append(sample_tokens(logits, [row])[0])
        row.tokens.append(found[-1])
    return found


def filter_scores(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores [vocab] with all tokens at -inf that may not be drawn."""
    ids = passing_ref(scores.max() - scores, SampleRow(*Filters.of(params.resolved())))
    return scores if ids is None else torch.full_like(scores, -torch.inf).scatter(0, ids, scores[ids])


def kept(scores: Tensor) -> set[int]:
    return set(scores.isfinite().nonzero().flatten().tolist())


# ---- greedy


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = torch.randn(5, 50)
    assert sample_tokens(logits, [request() for _ in range(5)]) == [int(row.argmax()) for row in logits]


def test_greedy_rows_beside_sampling_rows_stay_greedy() -> None:
    logits = torch.randn(4, 50)
    rows = [request(), request(temperature=5.0, seed=1), request(), request(temperature=5.0, seed=2)]
    tokens = sample_tokens(logits, rows)
    assert [tokens[0], tokens[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]


@pytest.mark.parametrize("temperature", (1e-4, 1e-10, 1e-40, 5e-324))
@pytest.mark.parametrize("extra", ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}))
def test_a_temperature_near_zero_is_greedy(temperature: float, extra: dict) -> None:
    """Scores divided by such a temperature overflow; the best token must win all the same."""
    logits = 10 * torch.randn(20, 50)
    rows = [request(temperature=temperature, seed=i, **extra) for i in range(20)]
    assert sample_tokens(logits, rows) == logits.argmax(-1).tolist()


# ---- which tokens may be drawn


@pytest.mark.parametrize("k", (0, 1, 2, 49, 50, 51, 10**6))
def test_top_k_keeps_the_k_best(k: int) -> None:
    scores = torch.randn(50)
    best = sorted(range(50), key=lambda i: -float(scores[i]))[: k or 50]
    assert kept(filter_scores(scores, SamplingParams(top_k=k))) == set(best)


def test_top_k_keeps_k_and_of_equal_scores_the_lower_ids() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(filter_scores(scores, SamplingParams(top_k=2))) == {1, 2}


def brute_top_p(scores: Tensor, p: float) -> set[int]:
    """The fewest best tokens whose probabilities add up to p."""
    probs = scores.double().softmax(-1).tolist()
    chosen, mass = set(), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        chosen.add(i)
        mass += probs[i]
        if mass >= p:
            break
    return chosen


@pytest.mark.parametrize("p", (1e-9, 0.05, 0.3, 0.7, 0.95, 0.999))
def test_top_p_keeps_the_fewest_tokens_with_that_mass(p: float) -> None:
    for _ in range(20):
        scores = 2 * torch.randn(50)
        assert kept(filter_scores(scores, SamplingParams(top_p=p))) == brute_top_p(scores, p)
    assert kept(filter_scores(scores, SamplingParams(top_p=1.0))) == set(range(50))


@pytest.mark.parametrize("p", (0.0, 0.01, 0.3, 1.0))
def test_min_p_keeps_tokens_near_the_best(p: float) -> None:
    for _ in range(20):
        scores = torch.randn(50)
        probs = scores.double().softmax(-1)
        want = {i for i in range(50) if probs[i] >= p * probs.max()}
        assert kept(filter_scores(scores, SamplingParams(min_p=p))) == want


def test_filters_follow_each_other_on_what_is_left() -> None:
    for _ in range(20):
        scores = 2 * torch.randn(50)
        best = torch.full((50,), -torch.inf)
        top = scores.topk(10).indices
        best[top] = scores[top]
        left = brute_top_p(best, 0.8)
        probs = best.double().softmax(-1)
        want = {i for i in left if probs[i] >= 0.2 * probs.max()}
        assert kept(filter_scores(scores, SamplingParams(top_k=10, top_p=0.8, min_p=0.2))) == want


def test_filters_agree_with_transformers() -> None:
    for _ in range(10):
        scores = 2 * torch.randn(1, 97)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        for params, theirs in (
            (SamplingParams(top_k=7), TopKLogitsWarper(7)),
            (SamplingParams(top_p=0.7), TopPLogitsWarper(0.7)),
            (SamplingParams(min_p=0.1), MinPLogitsWarper(0.1)),
        ):
            assert_same_bytes(theirs(ids, scores.clone())[0], filter_scores(scores[0], params))


@pytest.mark.parametrize("params", ({"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}))
def test_the_best_token_always_stays(params: dict) -> None:
    for scores in (torch.randn(50), torch.zeros(50).index_fill(0, torch.tensor([7]), 1e30)):
        assert int(scores.argmax()) in kept(filter_scores(scores, SamplingParams(**params)))


def test_only_kept_tokens_are_drawn() -> None:
    logits = torch.randn(1, 20)
    allowed = set(logits[0].topk(3).indices.tolist())
    row = request(temperature=10.0, top_k=3, seed=5)
    assert set(draws(logits, row, 300)) == allowed


# ---- repetition penalty


@pytest.mark.parametrize("penalty", (0.5, 1.0, 1.3, 10.0))
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, seen = torch.randn(97), [3, 5, 5, 90, 3]
    logits[5] = 0.0
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())[0]
    before = logits.clone()
    row = SampleRow(repetition=penalty, seen=seen_tokens(97, seen[:2], seen[2:], torch.device("cpu")))
    assert_same_bytes(theirs, adjusted_ref(logits[None], row))
    assert_same_bytes(before, logits)  # the logits themselves, which logprobs report, do not change


def test_repetition_penalty_works_greedily_on_prompt_and_answer() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 6] = 2.0, 1.5
    assert sample_tokens(logits, [request([4, 1], repetition_penalty=2.0)]) == [6]
    assert sample_tokens(logits, [request([0, 1], repetition_penalty=2.0)]) == [4]


def test_a_drawn_token_is_seen_before_the_host_knows_it() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 6] = 2.0, 1.5
    row = request([0, 1], repetition_penalty=2.0)
    first = sample(logits, [row])
    second = sample(logits, [row])
    assert first.wait()[0] == [4] and second.wait()[0] == [6]
    row.tokens += [4, 6]
    assert sample_tokens(logits, [row]) == [4]  # 2 / 2 against 1.5 / 2


# ---- randomness


def test_the_draws_follow_the_distribution() -> None:
    """4000 draws; chi-square of 5 degrees of freedom exceeds 36 once in a million (the seed is fixed)."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0]])
    row, n = request(temperature=0.7, seed=11), 4000
    drawn = draws(logits, row, n)
    counts = [drawn.count(i) for i in range(6)]
    want = (logits[0].double() / 0.7).softmax(-1).tolist()
    assert sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, want)) < 36, counts
    flat = logits[0].double().softmax(-1).tolist()  # guard: a forgotten temperature is seen
    assert sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, flat)) > 100


def test_a_seed_gives_the_same_tokens_whoever_runs_beside_it() -> None:
    steps = torch.randn(30, 8, 40)

    def tokens_of(place: int, others: int) -> list[int]:
        rows = [request(temperature=1.0, seed=100 + i) for i in range(others + 1)]
        rows[place] = request(temperature=1.0, top_p=0.9, seed=42)
        out = []
        for step in steps:
            logits = step[: others + 1].clone()
            logits[place] = step[0]
            tokens = sample_tokens(logits, rows)
            out.append(tokens[place])
            for row, token in zip(rows, tokens, strict=True):
                row.tokens.append(token)
        return out

    assert tokens_of(0, 0) == tokens_of(0, 7) == tokens_of(5, 7)
    assert len(set(tokens_of(0, 0))) > 3


def test_different_seeds_give_different_tokens() -> None:
    logits = torch.zeros(1, 1000)
    drawn = {sample_tokens(logits, [request(temperature=1.0, seed=s)])[0] for s in range(20)}
    assert len(drawn) > 15


def test_rows_that_filter_differently_do_not_meet() -> None:
    """Each row alone, and all together: the same tokens, greedy ones among them."""
    asks = (
        {}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1.2, "top_k": 5, "top_p": 0.7}, {"temperature": 2.0},
        {"repetition_penalty": 1.5}, {"temperature": 1.2, "top_k": 5, "top_p": 0.9}, {"temperature": 0.5, "min_p": 0.1},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05}, {"temperature": 3.0, "top_k": 7, "repetition_penalty": 1.2},
    )  # fmt: skip
    for _ in range(20):
        logits = 3 * torch.randn(len(asks), 40)
        together = sample_tokens(logits, [request(seed=i, **ask) for i, ask in enumerate(asks)])
        alone = [sample_tokens(logits[i : i + 1], [request(seed=i, **ask)])[0] for i, ask in enumerate(asks)]
        assert together == alone


ASKS: tuple[dict, ...] = (
    {}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_k": 2999, "top_p": 0.95, "min_p": 0.01}, {"temperature": 1.0, "min_p": 0.05},
    {"repetition_penalty": 1.3}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 20},
    {"logprobs": 100},
)  # fmt: skip


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, while they live; `peak` is the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given | self.known:
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, number = storage.nbytes(), storage._cdata
        self.live += size
        self.known.add(number)
        weakref.finalize(storage, self._forget, number, size)

    def _forget(self, number: int, size: int) -> None:
        self.known.discard(number)
        self.live -= size


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_temporaries_stay_below_a_bound_and_blocks_change_no_token(ask: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    S, V = 20, 3000
    logits = 3 * torch.randn(S, V)
    whole = [request([1, 2], seed=i, **ask) for i in range(S)]
    blocks = [request([1, 2], seed=i, **ask) for i in range(S)]
    with LiveBytes() as unbounded:
        want = [sample_tokens(logits, whole) for _ in range(2)]
    monkeypatch.setattr(workspace, "BLOCK_BYTES", 3 * V * 8)  # three rows
    with LiveBytes() as counted:
        found = [sample_tokens(logits, blocks) for _ in range(2)]
    temporary, state = 8 * 24 * V, S * (8 * V + 4 * 94)  # 8 rows of a prompt; tokens seen, biases, and bits
    assert workspace.sampling_bytes(S, V) == temporary + state + S * 65536
    assert counted.peak <= temporary + state
    assert unbounded.peak > 2 * counted.peak or "logprobs" not in ask or len(ask) > 1  # guard: the count sees blocks
    assert found == want
    assert [r.logprobs for r in whole] == [r.logprobs for r in blocks]


def test_a_block_is_never_less_than_a_row_and_plain_greedy_rows_need_none() -> None:
    state = 8 * 248320 + 248320 // 8 + 65536
    assert workspace.sampling_bytes(256, 248320) <= workspace.BLOCK_BYTES + 256 * state
    assert workspace.sampling_bytes(2, 10**8) == (8 * 24 + 2 * 8) * 10**8 + 2 * (10**8 // 8 + 65536)
    with LiveBytes() as counted:
        sample_tokens(torch.randn(40, 3000), [request() for _ in range(40)])
    assert counted.peak < 40 * 3000 * 4 + 4096  # the logits themselves


BROKEN = {"a NaN": {7: torch.nan}, "+inf": {7: torch.inf}, "all -inf": dict.fromkeys(range(50), -torch.inf)}


@pytest.mark.parametrize("ask", ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"top_p": 0.5}))
def test_broken_rows_are_reported_and_their_neighbours_are_not(ask: dict) -> None:
    logits = torch.randn(2 * len(BROKEN), 50)
    logits[:, 3] = -torch.inf  # a token that is ruled out breaks nothing
    for i, values in enumerate(BROKEN.values()):
        logits[2 * i + 1, list(values)] = torch.tensor(list(values.values()))
    rows = [request(seed=1, logprobs=50, **ask) for _ in logits]
    tokens, problems = sample(logits, rows).wait()
    assert [problem is not None for problem in problems] == [False, True] * len(BROKEN)
    assert all(0 <= token < 50 for token in tokens)
    if not ask:
        assert tokens[::2] == logits[::2].argmax(-1).tolist()
    assert [len(row.logprobs) for row in rows] == [1, 0] * len(BROKEN)
    for row in rows[::2]:
        assert len(row.logprobs[0].top) == 49 and all(map(math.isfinite, row.logprobs[0].top.values()))


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("ask", ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}))
def test_a_request_with_broken_logits_has_a_logprob_for_each_of_its_tokens(
    what: str, ask: dict, engine_of: Callable
) -> None:
    engine = engine_of("llama")
    forward = engine.runner.forward

    def broken(inputs: StepInputs) -> Tensor:
        logits = forward(inputs).clone()
        if len(first.generated) == 2:
            logits[0, list(BROKEN[what])] = torch.tensor(list(BROKEN[what].values()))
            logits[0, 50:] = -torch.inf
        return logits

    engine.runner.forward = broken
    first = engine.add(prompt(9), SamplingParams(max_tokens=6, logprobs=3, **ask))
    run(engine)
    assert first.finish_reason == "error" and "NaN or infinite" in (first.error or "")
    assert len(first.generated) == len(first.logprobs) == 2
    json.dumps([asdict(entry) for entry in first.logprobs], allow_nan=False)


# ---- logprobs


def test_logprobs_are_those_of_the_model_itself_in_order() -> None:
    logits = 3 * torch.randn(1, 50)
    row = request(temperature=2.0, top_k=3, seed=1, logprobs=5, repetition_penalty=1.5)
    token = sample_tokens(logits, [row])[0]
    exact = logits[0].double().log_softmax(-1)
    found = row.logprobs[0]
    assert math.isclose(found.token, float(exact[token]), rel_tol=1e-5)
    assert list(found.top) == logits[0].topk(5).indices.tolist()
    values = list(found.top.values())
    assert values == sorted(values, reverse=True)
    assert_close_rms("top", exact[list(found.top)], torch.tensor(values), 1e-6)


def test_all_logprobs_add_up_to_one_and_none_may_be_asked_for() -> None:
    logits = torch.randn(1, 50)
    row = request(logprobs=100)  # more than there are tokens
    sample_tokens(logits, [row])
    assert math.isclose(sum(map(math.exp, row.logprobs[0].top.values())), 1.0, rel_tol=1e-5)
    row = request(logprobs=0)
    token = sample_tokens(logits, [row])[0]
    assert row.logprobs[0].top == {}
    assert math.isclose(row.logprobs[0].token, float(logits[0].log_softmax(-1)[token]), rel_tol=1e-6)
    row = request()
    sample_tokens(logits, [row])
    assert row.logprobs == []


def test_a_request_that_ended_meanwhile_gets_no_logprobs() -> None:
    rows = [request(logprobs=1), request(logprobs=1)]
    sampled = sample(torch.randn(2, 50), rows)
    rows[0].status = Status.FINISHED
    sampled.wait()
    assert [len(r.logprobs) for r in rows] == [0, 1]


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    logits = torch.randn(4, 50)
    rows = [request(logprobs=2), request(), request(temperature=1.0, logprobs=0), request(logprobs=4)]
    tokens = sample_tokens(logits, rows)
    assert [len(r.logprobs) for r in rows] == [1, 0, 1, 1]
    for i in (0, 2, 3):
        found = rows[i].logprobs[0]
        assert math.isclose(found.token, float(logits[i].log_softmax(-1)[tokens[i]]), rel_tol=1e-6)
        assert list(found.top) == logits[i].topk(rows[i].params.logprobs or 0).indices.tolist()
