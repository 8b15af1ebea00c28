"""A model over two, four or eight ranks that share one GPU: NCCL's sums inside captured steps, launched ahead.

NCCL takes the processes for as many hosts (NCCL_HOSTID) and sends by sockets: slow, but the same calls, captures and
replays as between GPUs. What needs a second GPU is not here: NVLink, peer access, any speed.

Logits in f32 are compared with those of one rank on a CPU. A single GPU differs from that by up to 1e-4 of their scale
(test_graphs.py); sums in two parts add as much again. A router near a tie turns noise into more, in few rows. Models of
real widths compute in bfloat16 and are compared with themselves on one rank: roundings of partial sums to 8 bits add up
as the square root of the layers does (0.025 of the logits for one, `rounding` of bench/report.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_rank_jobs
import pytest
import ranks
import torch
from numerics import rel_rms
from qwen_fp8 import fp8_model
from torch import Tensor
from v4_released import released_model

from hybridkv import LLM, SamplingParams
from hybridkv.bench.report import rounding
from hybridkv.bench.tiny_folder import write_tiny
from hybridkv.config import CacheConfig
from hybridkv.parallel.launch import DEVICES

pytestmark = pytest.mark.gpu
ON, ROOT = "cuda", Path(__file__).parents[2]
FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v4", "v4 in codes", "v4, whole experts")
USUAL, MOST = 2e-4, 5e-3  # of the logits' scale: the median row, and nine rows of ten
CLEAR = 1e-2  # by which a token's logit must be above the next one's for rounding not to choose: ten times what differs


def assert_alike(want: Tensor, got: Tensor) -> None:
    rows = (want - got).abs().amax(1) / want.abs().max()
    assert float(rows.median()) <= USUAL and float(rows.quantile(0.9)) <= MOST, rows


def assert_same_answers(kind: str, found: list[list[int]]) -> None:
    """Up to where one rank itself has nearly chosen otherwise."""
    compared = 0
    _, answers, gaps = gpu_rank_jobs.reference(kind)
    for want, got, gap in zip(answers, found, gaps, strict=True):
        sure = next((i for i, each in enumerate(gap) if each < CLEAR), len(gap))
        assert got[:sure] == want[:sure] and len(got) == len(want)
        compared += sure
    assert compared > 0.6 * sum(map(len, answers)), "the answers are all near ties: choose other weights"


@pytest.mark.parametrize("size", [2, 4])
def test_every_family_answers_on_several_ranks_as_on_one(size: int) -> None:
    """Captured and launched ahead; one request is aborted in the middle, others sample, one comes late. All families in
    one test: one group of processes runs them. On four ranks each KV head lies on two.
    """
    found = ranks.run(size, "families", on=ON, kinds=FAMILIES)
    for kind in FAMILIES:
        first, *others = (rank[kind] for rank in found)
        for rank in (first, *others):
            check_captured(kind, rank)
            assert_same_steps(kind, first, rank)
        assert_same_answers(kind, first["answers"])


def assert_same_steps(kind: str, first: dict[str, Any], other: dict[str, Any]) -> None:
    """Two ranks of a group have computed the same."""
    assert torch.equal(first["logits"], other["logits"]), f"{kind}: ranks do not compute with the same numbers"
    assert first["tokens"] == other["tokens"] and len(first["tokens"]) == 9, kind
    for what in ("replays", "keys", "ahead"):
        assert first[what] == other[what], (kind, what)


def check_captured(kind: str, found: dict[str, Any]) -> None:
    """A rank's logits, and that its steps were replayed."""
    assert_alike(gpu_rank_jobs.reference(kind)[0], found["logits"])
    assert found["scored"] == 10, f"{kind}: single steps were not replayed"
    assert found["replays"]["decode"] > 5 and found["ahead"] > 10, (kind, found["replays"], found["ahead"])
    assert (found["replays"]["mixed"] > 0) == ("v4" not in kind), kind  # whose prompts are not captured
    assert not found["said"], kind


def test_one_rank_of_a_group_of_one_is_captured_and_leaves_in_order() -> None:
    (rank,) = ranks.run(1, "families", on=ON, kinds=("qwen3_5",))
    check_captured("qwen3_5", rank["qwen3_5"])
    assert_same_answers("qwen3_5", rank["qwen3_5"]["answers"])


def test_a_graph_that_one_rank_cannot_have_is_had_by_none() -> None:
    found = ranks.run(2, "refused", on=ON, kind="llama")
    for number, rank in enumerate(found):
        assert rank["replays"] == {"decode": 0, "mixed": 0} and not rank["keys"]
        why = "planted: no memory" if number == 1 else "rank 1 has no memory for it"
        assert rank["said"] and all(why in said for said in rank["said"])
    assert found[0]["tokens"] == found[1]["tokens"]
    assert_same_answers("llama", found[0]["answers"])


@pytest.mark.parametrize(
    "size, kinds", [(2, ("27b", "flash", "flash in codes")), (4, ("27b", "flash", "flash in codes")), (8, ("27b",))]
)
def test_real_widths_on_several_ranks_give_the_logits_of_one(size: int, kinds: tuple[str, ...]) -> None:
    """12, 6 and 3 query heads of 24, 8, 4 and 2 DeltaNet key heads of 16, and as much of all widths; Flash: a part of
    the heads, groups and experts' widths, in bf16 and with its weights in codes. Then answers, captured and launched
    ahead, with an abort; the 27B's evict.
    """
    check_wide(ranks.run(size, "wide", on=ON, kinds=kinds), kinds)


def test_the_whole_27b_on_two_ranks_gives_the_logits_of_one() -> None:
    """All 64 layers, 25 GiB of weights on each rank."""
    check_wide(ranks.run(2, "wide", on=ON, kinds=["whole 27b"]), ("whole 27b",))


def check_wide(found: list[dict[str, dict[str, Any]]], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        first, *others = (rank[kind] for rank in found)
        [whole] = (rank["whole"] for rank in (first, *others) if "whole" in rank)
        for rank in (first, *others):
            assert rank["scored"] == 10, f"{kind}: single steps were not replayed"
            assert_same_steps(kind, first, rank)
            assert first["evicted"] == rank["evicted"], kind
        assert first["replays"]["decode"] > 5 and first["ahead"] > 10 and not first["said"], kind
        layers = gpu_rank_jobs.CONFIGS[kind]["num_hidden_layers"]
        rows = sorted(rel_rms(want, got) for want, got in zip(whole, first["logits"], strict=True))
        assert rows[len(rows) // 2] <= rounding(layers), (kind, rows)
        assert rows[-1] < 0.5, (kind, rows)  # an expert near a tie; logits of something else differ by 1.4
        if gpu_rank_jobs.budget_of(kind):  # a tie among entries may go the other way, too
            [want] = (rank["whole, evicted"] for rank in (first, *others) if "whole, evicted" in rank)
            rows = sorted(rel_rms(*pair) for pair in zip(want, first["evicted_logits"], strict=True))
            assert rows[len(rows) // 2] <= 2 * rounding(layers) and rows[-1] < 0.5, (kind, rows)
            assert len(first["evicted"]) >= 1


def test_a_rank_that_ends_ends_the_group_and_frees_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the other one waits inside a replayed graph, which NCCL's own watchdog does not see."""
    monkeypatch.setattr(ranks, "LIMIT", 20.0)
    found, codes, errors = ranks.attempt(2, "die", grace=40.0, on=ON, kind="llama")
    assert codes == [0, 9], errors[0][-3000:]
    said, launched, joined, is_free = found[0]
    assert "a worker ended, and the model with it" in said and launched < 20
    assert not joined and is_free


SCRIPT = """
import json, sys
from hybridkv import LLM, CacheConfig, SamplingParams
folder, device, prompts, budget = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
cache = CacheConfig(kv_dtype="f32", recent=16, window=16)
how = dict(device=device, dtype="float32", max_requests=4, max_context=256, cache=cache, weight_dtype=sys.argv[5])
with LLM(folder, tp=2, memory="2GiB", **how) as llm:
    answers = [found.token_ids for found in llm.generate(prompts, params)]
    evicted = budget and [found.token_ids for found in llm.generate(prompts, params, eviction=budget)]
    graphs = llm.engine.runner.graphs
    captured = 0 if graphs is None else len(graphs.captured)
codes = [worker.returncode for worker in llm.ranks.place.workers]
print(json.dumps([answers, evicted, captured, codes]))
"""
BUDGET = 32


def assert_as_on_a_cpu(folder: Path, answers: list[list[int]], form: str = "auto", **how: Any) -> None:
    """One rank on a CPU says the same, up to where it has nearly chosen otherwise."""
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)
    cache = CacheConfig(kv_dtype="f32", recent=16, window=16)
    given: dict[str, Any] = dict(cache=cache, max_requests=4, max_context=256, reuse=None, weight_dtype=form)
    with LLM(folder, "cpu", "float32", **given) as llm:
        found = llm.generate(gpu_rank_jobs.prompts(), params, **how)
    compared = 0
    for want, got in zip(found, answers, strict=True):
        gaps = [first - second for first, second in (sorted(each.top.values())[::-1] for each in want.logprobs)]
        sure = next((i for i, gap in enumerate(gaps) if gap < CLEAR), len(gaps))
        assert got[:sure] == want.token_ids[:sure] and len(got) == 14
        compared += sure
    assert compared > 40


def test_llm_over_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """From files to answers, in a process of its own that starts the second rank; all processes end. Requests that
    evict answer alike too.
    """
    folder = write_tiny(tmp_path)
    answers, evicted = by_two_ranks(folder, BUDGET)
    assert_as_on_a_cpu(folder, answers)
    assert_as_on_a_cpu(folder, evicted, eviction=BUDGET)


def test_weights_as_released_over_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """From the codes of a folder to answers: DeepSeek-V4 with experts whose parts are uneven, Qwen3.5 in FP8."""
    released_model(tmp_path, num_attention_heads=8, o_groups=4, index_topk=512, moe_intermediate_size=40)
    assert_as_on_a_cpu(tmp_path, by_two_ranks(tmp_path, 0, "released")[0], "released")
    fp8_model(tmp_path, moe_intermediate_size=256, vocab_size=128)
    assert_as_on_a_cpu(tmp_path, by_two_ranks(tmp_path, 0, "released")[0], "released")


KEPT = """
import json, sys
from pathlib import Path
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams
folder, device, place, size, before = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
seeded = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
how = dict(device=device, dtype="float32", exact=True, max_requests=4, max_context=1024, memory="2GiB")
cache = CacheConfig(kv_dtype="f32", page_size=16)


def said(talk, *words):
    found = []
    for each in words:
        list(talk.send(each))
        found.append([talk.last.token_ids, talk.last.stats["cached_tokens"]])
    return found


def asked(document):
    answers = document.generate(["Which month?", "What struck?"], seeded)
    return [[each.token_ids, each.stats["kv_bytes_kept"]] for each in answers]


with LLM(folder, tp=size, cache=cache, disk_cache=place / "store", **how) as llm:
    pinned = llm.prefix(text)
    answers = llm.generate([text + "One", text + "Two"], seeded)
    found = {"prefix": [[each.token_ids, each.stats["cached_tokens"] > 0] for each in answers]}
    talk = Conversation(llm, "Be brief.", seeded)
    found["talk"] = said(talk, "Hello, how are you?", "Really?")
    llm.save(talk, str(size))
    found["next"] = said(talk, "Go on")
    talks = [llm.load(before, seeded)] if before else []
    found["loaded"] = [said(each, "Go on") for each in talks]
    with llm.compress(text, ratio=4) as document:  # by replay
        found["document"] = asked(document)
        document.save(place / f"{size}.document")
    if before:
        with llm.load_document(place / f"{before}.document") as document:
            found["loaded document"] = asked(document)
    found["graphs"] = 0 if llm.engine.runner.graphs is None else len(llm.engine.runner.graphs.captured)
    for each in (talk, *talks):
        each.close()
print(json.dumps(found))
"""


def test_what_is_kept_by_one_rank_goes_on_over_two_with_the_same_bits(tmp_path: Path) -> None:
    """Exact mode: answers after a prefix, of a conversation and to a document, and of those that the other number of
    ranks has saved.
    """
    folder = write_tiny(tmp_path)
    one = run_script(KEPT, folder, ON, tmp_path, 1, "")
    two = run_script(KEPT, folder, ON, tmp_path, 2, "1")
    again = run_script(KEPT, folder, ON, tmp_path, 1, "2")
    for found in (two, again):
        for what in ("prefix", "talk", "next", "document"):
            assert found[what] == one[what], what
        assert found["loaded"] == [one["next"]] and found["loaded document"] == one["document"]
    assert all(reused for _, reused in one["prefix"]) and all(cached for _, cached in one["next"])
    assert all(found["graphs"] for found in (one, two, again)) or ON == "cpu"


def by_two_ranks(folder: Path, budget: int, form: str = "auto") -> tuple[list[list[int]], Any]:
    """Answers of a process that starts the second rank, and what it says with a budget; 0: none."""
    prompts = json.dumps(gpu_rank_jobs.prompts())
    answers, evicted, captured, codes = run_script(SCRIPT, folder, ON, prompts, budget, form)
    assert captured > 0 and codes == [0]
    return answers, evicted


def run_script(script: str, *words: object) -> Any:
    """What a process of its own prints last."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, DEVICES: "0,0", "HYBRIDKV_TP_TIMEOUT": "60"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
