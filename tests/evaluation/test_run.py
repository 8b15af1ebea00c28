"""A run of an evaluation on small random models: one reading serves every cut, as if each had been read by itself; the
same records twice; a stopped run goes on; nothing is left behind.

What a random model answers is nonsense, but the same nonsense each time: tokens are compared, not scores.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from long_form import spread

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.cuts import FULL, Cut, Reader, divergence
from hybridkv.evaluation.run import CONTINUATION, DIVERGENCE, Record, Run, units
from hybridkv.evaluation.settings import EvalSettings

KINDS = ("llama", "qwen3_5")
POLICIES = ("auto", "peak:spread=all", "snapkv:pooling=none", "keydiff:recent=32:first=8")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model with a tokenizer of single characters."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("evaluation") / kind
            tiny.save(kind, made[kind])
            write_tokenizer(made[kind], TEMPLATE)
        return made[kind]

    return make


def settings(folder: Path, **more: object) -> EvalSettings:
    small = dict(tasks=("niah_single_1",), policies=("auto",), ratios=(4,), lengths=(640,), samples=2, divergence=0)
    asked = {**small, "all_tasks": True, "device": "cpu", "dtype": "float32", "max_requests": 2, **more}
    return EvalSettings(model=str(folder), **asked)  # type: ignore[arg-type]


def records_of(asked: EvalSettings, earlier: list[Record] | None = None) -> list[Record]:
    """What a run writes, but for its first record, which says what was asked of what."""
    found: list[Record] = []
    assert Run(asked, earlier or ()).go(found.extend, lambda *_: None)
    assert [r["kind"] for r in found].count("run") == 1 and found[0]["kind"] == "run"
    return found[1:]


@pytest.fixture(scope="module")
def small(folder_of: Callable) -> Callable[[str], LLM]:
    """A model that many tests use: 6 slots, a query buffer for each."""
    opened: dict[str, LLM] = {}

    def make(kind: str) -> LLM:
        if kind not in opened:
            cache = CacheConfig("f32", page_size=16, query_buffers=6)
            opened[kind] = LLM(str(folder_of(kind)), "cpu", "float32", False, cache, 6, 1024)
        return opened[kind]

    return make


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_cut_by_hand_answers_as_a_request_with_that_budget(kind: str, policy: str, small: Callable) -> None:
    llm, cut = small(kind), Cut(policy, 4)
    prompts = [tiny.token_ids(n, seed=n) for n in (400, 333)]
    with llm.engine.owned():
        reader = Reader(llm.engine)
        read = reader.read(prompts)
        forks = [reader.fork(request, cut, seen=True) for request in read]
        kept = [reader.held(fork) for fork in forks]
        whole = reader.held(read[0])
        given = [request.tokens[-1:] for request in read]
        answers = reader.answer(forks, [p + g for p, g in zip(prompts, given, strict=True)], [9, 9], hold=False)
        reader.release(read)
        assert_nothing_held(llm.engine)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    for i, prompt in enumerate(prompts):
        [want] = llm.generate([prompt], params, eviction=cut.eviction(len(prompt)))
        assert given[i] + answers[i].generated == want.token_ids
        assert kept[i].kept <= len(prompt) / 4 + 1 and want.policy == answers[i].policy is not None
    assert whole.kept == whole.tokens == 400 and kept[0].kv_bytes < whole.kv_bytes / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_cut_before_its_question_answers_as_a_conversation_does(kind: str, small: Callable) -> None:
    llm, cut = small(kind), Cut("keydiff", 3)
    document, question = tiny.token_ids(300), tiny.token_ids(20, seed=3)
    with llm.engine.owned():
        reader = Reader(llm.engine)
        read = reader.read([document])
        fork = reader.fork(read[0], cut, seen=False)
        [answer] = reader.answer([fork], [document + question], [8], hold=False)
        first = llm.engine.add(document, SamplingParams(max_tokens=1), hold=True, eviction=cut.eviction(300))
        reader.run()
        second = llm.engine.add(document + question, SamplingParams(max_tokens=8), after=first, eviction=None)
        reader.run()
        assert second.cached_tokens == 300 and answer.generated == second.generated
        assert answer.policy == "keydiff"
        reader.release(read)
        assert_nothing_held(llm.engine)


def test_a_cache_that_finds_no_room_is_told_and_nothing_stays(folder_of: Callable) -> None:
    cache = CacheConfig("f32", page_size=16, query_buffers=1)  # below: one slot, and no host to rest on
    llm = LLM(str(folder_of("llama")), "cpu", "float32", False, cache, 1, 512, host_cache=0)
    with llm.engine.owned():
        reader = Reader(llm.engine)
        read = reader.read([tiny.token_ids(200)])
        with pytest.raises(HybridKVError, match="could not be held for want of memory; .*--max-requests"):
            reader.fork(read[0], Cut("auto", 4), seen=True)
        reader.release(read)
        assert_nothing_held(llm.engine)
    llm.close()


@spread("task, mode", ("niah_single_1", "two_questions", DIVERGENCE), ("seen", "unseen"))
def test_a_unit_gives_a_record_of_each_cut_and_leaves_nothing_behind(task: str, mode: str, folder_of: Callable) -> None:
    tasks = ("niah_single_1",) if task == DIVERGENCE else (task,)
    policies = ("auto", "streaming:bounded=yes") if task == "niah_single_1" else ("auto",)
    # a question of two_questions is longer than the rest of a short text
    length = 1600 if task == "two_questions" else 640
    asked = settings(
        folder_of("qwen3_5"), tasks=tasks, policies=policies, modes=(mode,), lengths=(length,), divergence=1
    )
    run = Run(asked)
    run._open("auto", "f32")
    assert run.llm is not None
    unit = next(u for u in units(asked, 2) if u.task == task)
    found = run._divergence(unit) if task == DIVERGENCE else run._answers(unit)
    with run.llm.engine.owned():
        assert_nothing_held(run.llm.engine)
    run.close()
    questions = 2 if task == "two_questions" else 1
    cuts = [(FULL.policy, 1), *((policy, 4) for policy in policies)]
    want = {(policy, ratio, n, q) for policy, ratio in cuts for n in range(unit.count) for q in range(questions)}
    assert {(r["policy"], r["ratio"], r["number"], r.get("question", 0)) for r in found} == want
    assert len(found) == len(want)
    for record in found:
        assert record["unit"] == unit.key and record["mode"] == mode and record["task"] == task
        share = record["kept"] / record["tokens"]
        assert share == 1 if record["policy"] == "full" else share <= 0.26
        assert 0 < record["kv_bytes"] <= record["peak_bytes"] and record["state_bytes"] > 0
        if task == DIVERGENCE:
            exact = record["kl"] == record["kl_999"] == 0 and record["top1"] == 1
            assert exact == (record["policy"] == "full"), "the cut changes the distributions, the full cache does not"
            assert record["tokens"] == length and CONTINUATION > 1
        else:
            assert 0 <= record["score"] <= 1 and record["answer_tokens"] > 0


def test_the_same_settings_give_the_same_records_and_a_stopped_run_goes_on(folder_of: Callable) -> None:
    asked = settings(folder_of("qwen3_5"), samples=3, max_requests=1, modes=("seen",), divergence=1)
    whole = records_of(asked)
    assert records_of(asked) == whole
    assert [u.first for u in units(asked, 1)] == [0, 1, 2, 0]

    stopped: list[Record] = []
    run = Run(asked)

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.go(stopped.extend, stop)
    assert run.llm is None, "the model was given back"
    assert stopped.pop(0)["kind"] == "run"
    assert stopped == [r for r in whole if r["unit"] in {u.key for u in list(units(asked, 1))[:2]}]
    rest = records_of(asked, stopped)
    assert stopped + rest == whole
    nothing: list[Record] = []
    assert Run(asked).go(nothing.extend, lambda *_: None, limit=0) is False
    assert [r["kind"] for r in nothing] == ["run"], "no unit was begun"


def test_a_task_that_the_full_cache_cannot_do_is_not_cut(folder_of: Callable) -> None:
    """A random model finds no needle: what a cut costs cannot be seen."""
    asked = settings(folder_of("llama"), modes=("seen",), samples=2, all_tasks=False)
    found = records_of(asked)
    assert {r["policy"] for r in found} == {"full"} and sum(r["score"] for r in found) == 0
    cut = records_of(replace(asked, all_tasks=True))
    assert [r for r in cut if r["policy"] == "full"] == found and len(cut) == 2 * len(found)


def test_what_a_cut_asks_for() -> None:
    found = Cut("peak:pooling=31:recent=16:first=8", 4).eviction(400)
    assert (found.policy, found.budget, found.recent, found.first) == ("peak:pooling=31", 100, 16, 8)
    assert Cut("auto", 16).eviction(400).recent == 12, "half of a small budget is for the most recent"
    assert Cut("auto:bounded=yes", 4).eviction(400).bounded and not Cut("auto", 4).eviction(400).bounded
    with pytest.raises(HybridKVError, match="recent takes a whole number, not 'many'"):
        Cut("peak:recent=many", 4).eviction(400)


def test_divergence_is_that_of_the_definition() -> None:
    torch.manual_seed(0)
    full, cut = torch.randn(50, 7), torch.randn(50, 7)
    assert divergence(full, full) == (0.0, 0.0, 1.0)
    kl, most, top = divergence(full, cut)
    p, q = full.double().softmax(-1), cut.double().softmax(-1)
    each = [sum(float(a * (a / b).log()) for a, b in zip(x, y)) for x, y in zip(p, q)]
    assert kl == pytest.approx(sum(each) / 50, rel=1e-5)
    assert sorted(each)[-2] < most <= max(each) * (1 + 1e-6)
    assert top == pytest.approx(sum(int(x.argmax() == y.argmax()) for x, y in zip(p, q)) / 50)


def test_a_setting_of_replay_that_would_not_count_is_refused() -> None:
    with pytest.raises(HybridKVError, match="leave out chunk"):
        _ = Cut("replay:chunk=64", 4).replays
    assert Cut("replay:floor=0.5", 4).replays and not Cut("peak", 4).replays
