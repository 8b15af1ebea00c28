"""Benchmarks of ranks on CPUs: one alone, and several that run an engine together."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_runs import TINY, Run, runner
from numerics import assert_close_rms

from hybridkv.bench import over_ranks
from hybridkv.bench.ranks import Silent
from hybridkv.bench.shapes import find_shape
from hybridkv.bench.standin import make_engine
from hybridkv.bench.suite import run_bench
from hybridkv.config import CacheConfig
from hybridkv.parallel.random_part import RandomTensors, random_part, random_whole
from hybridkv.parallel.shard import Shard


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


def test_a_rank_alone_runs_at_its_own_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts of a model, neither of which hears of the other: its own heads, its own floor."""
    rows = run_bench("ranks", replace(TINY, only="decode|prefill", batches=(1,)))["rows"]
    assert [(row["op"], row["ranks"]) for row in rows] == [("decode", 1), ("prefill", 1), ("decode", 2), ("prefill", 2)]
    assert [row["bar"] for row in rows] == [None, None, 1.10, 1.10] and rows[0]["of_part"] == rows[1]["of_part"] == 1
    assert 0.4 < rows[2]["floor_ms"] / rows[0]["floor_ms"] < 0.7  # half of the matrices, all of the norms
    shape = find_shape("tiny", device="cpu")
    tensors = RandomTensors(shape.config, torch.device("cpu"), torch.float32)
    part: Any = random_part(tensors, Shard(0, 2), Silent(2), torch.device("cpu"))
    assert (part.config.heads, part.embedding.shape[0]) == (shape.config.heads // 2, shape.config.vocab // 2)
    hidden = torch.randn(3, shape.config.hidden)
    assert part.logits(hidden).shape == (3, shape.config.vocab) and part.own_logits(hidden).shape[1] == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_a_bench_over_ranks_measures_an_engine_that_all_of_them_run(name: str, run: Run) -> None:
    flags = ("--model-shape", "tiny", "--device", "cpu", "--kv-dtype", "f32,bf16", "--contexts", "200,70")
    code, lines, said = run(name, "--tp", "2", *flags)
    assert code == 0, said
    result = json.loads(lines[-1])
    rows = result["rows"]
    cases = [(kind, n) for kind in ("f32", "bf16") for n in (200, 70)]
    sizes = (1, 3) if name == "decode" else (1,)
    length = "context" if name == "decode" else "tokens"
    found = [(row["kv_dtype"], row[length], row.get("batch", 1)) for row in rows]
    assert found == [(*case, batch) for case in cases for batch in sizes] and not result["failures"]
    assert result["ranks"] == 2 and all(row["ranks"] == 2 and row[result["measure"]] > 0 for row in rows)
    assert [note.split(" ")[0] for note in result["notes"]] == ["2", "f32", "bf16"], "compared with prefill"


def test_a_load_over_ranks_is_served_by_all_of_them(run: Run) -> None:
    """All requests get their tokens (`serve` checks that), in fewer slots than there are requests."""
    flags = ("--model-shape", "tiny", "--device", "cpu", "--only", "offline", "--requests", "4", "--slots", "2")
    code, lines, said = run("load", "--tp", "2", *flags, "--answer-tokens", "2:5")
    assert code == 0, said
    result = json.loads(lines[-1])
    whole, *steps = result["rows"]
    assert (whole["op"], whole["ranks"], whole["slots"]) == ("offline greedy", 2, 2) and not result["failures"]
    assert whole["answer_tokens"] >= 8 and not whole["stopped"] and whole["tok_s"] > 0 and whole["floor_s"] > 0
    assert result["ranks"] == 2 and result["requests"] == 4 and {row["op"] for row in steps} == {"offline greedy"}


def test_ranks_of_a_bench_have_parts_of_one_model_and_wrong_steps_are_not_timed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, seen, agreement = list(range(100)), [], over_ranks.RankedBench.agreement

    def noted(self: Any) -> float:
        seen.append(self.engine.score(tokens))
        return agreement(self)

    monkeypatch.setattr(over_ranks.RankedBench, "agreement", noted)
    monkeypatch.setattr(over_ranks, "rounding", lambda layers: 1e-12)
    code, lines, said = run("decode", "--tp", "2", "--model-shape", "tiny", "--device", "cpu")
    assert code != 0 and "differs from the reference" in said and not json.loads(lines[-1])["rows"]
    config, device = find_shape("tiny", device="cpu").config, torch.device("cpu")
    whole = random_whole(RandomTensors(config, device, torch.float32), device)
    engine = make_engine(whole, CacheConfig(kv_dtype="f32"), "cpu", torch.float32, 1, len(tokens))
    assert_close_rms("two ranks", engine.score(tokens), seen[0], 1e-5)  # f32, summed in another order


@pytest.mark.parametrize("when", ["as it starts", "while steps are timed"])
def test_a_bench_says_which_rank_has_ended(when: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no process behind."""
    places = []
    if when == "as it starts":
        monkeypatch.setattr(over_ranks, "MODULE", "hybridkv.bench.no_such_module")
    begin, decode_rows = over_ranks.begin, over_ranks.RankedBench.decode

    def begun(*given: Any) -> Any:
        places.append(begin(*given))
        return places[-1]

    def killed(self: Any, *given: Any) -> None:
        decode_rows(self, *given)
        places[0].workers[0].kill()

    monkeypatch.setattr(over_ranks, "begin", begun)
    monkeypatch.setattr(over_ranks.RankedBench, "decode", killed)
    code, _, said = run("decode", "--tp", "2", "--model-shape", "tiny", "--device", "cpu")
    assert code != 0 and f"rank 1 ended with exit code {1 if when == 'as it starts' else -9}" in said
    assert len(places) == (when != "as it starts")
    assert all(worker.returncode is not None for place in places for worker in place.workers)


def test_what_is_not_measured_over_ranks_is_refused(run: Run) -> None:
    tiny = ("--model-shape", "tiny", "--device", "cpu")
    for words, said in (
        (("reuse", "--tp", "2"), "--tp measures decode, prefill and load over several ranks, not reuse; `ranks` times"),
        (("load", "--tp", "2", "--only", "online"), "picks nothing of load over several ranks; there is offline and"),
        (("load", "--tp", "2", "--budget", "64"), "--budget is not for --tp, which measures all requests at once"),
        (("load", "--tp", "2", "--rate", "3"), "--reuse, --rate and --load are not for --tp"),
        (("all", "--tp", "2"), "not kernels"),
        (("decode", "--tp", "3"), "3 ranks do not divide its 4 attention heads; use 2 or 1"),
        (("decode", "--tp", "0"), "tp is a number of GPUs from 1 to 64"),
        (("decode", "--tp", "2", "--only", "batch"), "--only is not for --tp"),
        (("decode", "--tp", "2", "--weight-dtype", "q4_k"), "weights in auto or fp8"),
    ):
        code, _, error = run(*words, *tiny)
        assert code == 2 and said in " ".join(error.split()), error
