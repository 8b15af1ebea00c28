"""`LLM(tp=2)`: the answers of one process, what is refused, and what happens when a worker ends."""

import gc
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_v4
import torch
import torch.distributed as dist
from listening import listening
from long_form import LONG, more
from tiny_ranks import build
from v4_released import released_model

from hybridkv import LLM, CacheConfig, Conversation, EvictionConfig, ReuseConfig, SamplingParams
from hybridkv.cache.store import Store
from hybridkv.cli import main
from hybridkv.commands.display import kept_line
from hybridkv.engine.engine import INHERIT
from hybridkv.engine.storing import save_request
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import Ada, Policy, SnapKV
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.parallel.group import GroupError, UnlikeRanks, free_port
from server.running import until

HOW: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=4, max_context=256)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("ready_ranks")


class Own(Policy):
    """Code, which no rank sends to another."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    build("qwen3_5", 9).save_pretrained(place)
    return place


def gone(llm: LLM) -> bool:
    assert llm.ranks is not None and llm.ranks.place.workers
    return all(worker.poll() is not None for worker in llm.ranks.place.workers)


def test_it_answers_as_one_process_does_and_says_what_it_cannot(folder: Path) -> None:
    prompts = [tiny.token_ids(length, seed=length) for length in (3, 17, 40, 5, 80, 9)]
    params = [GREEDY] * 4 + [SamplingParams(max_tokens=8, temperature=0.8, seed=5, n=2)] * 2
    with LLM(folder, **HOW) as llm:
        want = llm.generate(prompts, params)
        whole = llm.plan.pool_bytes["attention"]
    before = listening(os.getpid())
    with LLM(folder, tp=2, **HOW) as llm:
        assert llm.ranks is not None
        listens = listening(os.getpid(), llm.ranks.place.workers[0].pid)
        assert {listens[inode] for inode in listens.keys() - before.keys()} == {"127.0.0.1"}
        found = llm.generate(prompts, params)
        for one, two in zip(want, found, strict=True):
            assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in two.samples]
            for name in ("kv_bytes_full", "kv_bytes_kept", "state_bytes"):  # of the whole model
                assert one.stats[name] == two.stats[name] > 0
        assert llm.manager.memory_bytes() == llm.plan.nbytes
        assert llm.plan.pool_bytes["attention"] / llm.plan.max_tokens <= whole / 256  # of half the heads
        with pytest.raises(RequestError, match="policy Own is code of your own"):
            llm.generate([[1, 2]], eviction=EvictionConfig(64, policy=Own()))
        with pytest.raises(HybridKVError):  # there is no tokenizer
            llm.generate([[1, 2]], SamplingParams(max_tokens=2, structured_outputs={"choice": ["a"]}))
        long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        answers = llm.as_completed(prompts[:2], [GREEDY, long])
        assert next(answers)[0] == 0
        answers.close()  # an abort, which the workers must hear of
        assert llm.generate(prompts[0], GREEDY)[0].token_ids == want[0].token_ids
    assert gone(llm) and [worker.returncode for worker in llm.ranks.place.workers] == [0]
    assert not dist.is_initialized()
    with pytest.raises(HybridKVError, match="policy Own is code of your own"):
        LLM(folder, tp=2, cache=CacheConfig(budget=64, policy=Own()), **HOW)
    for size, said in ((3, "3 ranks do not divide its 8 attention heads; use 2, 4 or 1"), (0, "from 1 to 64")):
        with pytest.raises(HybridKVError, match=said):
            LLM(folder, tp=size, **HOW)
    for seconds in ("abc", "0", "-5", "1.5", "nan", "inf", "1e300"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYBRIDKV_TP_TIMEOUT", seconds)
            with pytest.raises(HybridKVError, match=f"HYBRIDKV_TP_TIMEOUT takes .* from 2 to 86400.* not '{seconds}'"):
                LLM(folder, tp=2, **HOW)
    with pytest.raises(HybridKVError, match="KiB are needed|weights take"):  # after the workers were started
        LLM(folder, tp=2, memory="100KiB", **HOW)
    assert not dist.is_initialized()


def test_weights_as_released_are_cut_and_answer_as_one_process_does(tmp_path: Path) -> None:
    prompts = [tiny_v4.token_ids(length, seed=length) for length in (3, 40)]
    released_model(tmp_path, num_attention_heads=8, o_groups=4, index_topk=512, moe_intermediate_size=40)
    found = []
    for tp in (1, 2):
        with LLM(tmp_path, tp=tp, weight_dtype="released", **HOW) as llm:
            found.append([answer.token_ids for answer in llm.generate(prompts, GREEDY)])
            assert llm.weight_form == "released" and llm.engine.about["weights"] == "released"
            layer: Any = llm.model.layers[1]
            held = layer.experts.part if tp > 1 else layer.experts
            assert isinstance(held.down, BlockScaled) and held.down.shape == (4, 64, 40 if tp == 1 else 32)
            assert llm.manager.memory_bytes() == llm.plan.nbytes
            if tp > 1:
                with pytest.raises(
                    RequestError, match="over several ranks a folder of saved caches of compressed entr"
                ):
                    save_request(llm.owner, Store(tmp_path / "store"), "talk", None, {}, llm.cache_key())
    assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [8, 8]
    for settings, said in (
        (
            dict(tp=2, disk_cache=tmp_path),
            "over several ranks a folder of saved caches of deepseek_v4 is not available",
        ),
        (dict(tp=2, exact=True), "exact mode is not available for deepseek_v4"),
        (dict(tp=3), "3 ranks do not divide its 8 attention heads; use 2, 4 or 1"),
    ):
        with pytest.raises(HybridKVError, match=said):
            LLM(tmp_path, weight_dtype="released", **HOW, **settings)
    assert not dist.is_initialized()


def test_experts_answer_in_exact_mode_with_the_bits_of_one_process(tmp_path: Path) -> None:
    prompts = [tiny.token_ids(length, seed=length) for length in (3, 41)]
    build("qwen3_5_moe", 8, moe_intermediate_size=37, hidden_size=101).save_pretrained(tmp_path)
    found = []
    for tp in (1, 2):
        with LLM(tmp_path, tp=tp, exact=True, **HOW) as llm:
            answers = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
            found.append((answers, llm.logits(prompts[1], prefill=30)))
            layer: Any = llm.model.layers[0]
            assert layer.feed.gate_up.shape == (8, 2 * 37 if tp == 1 else 2 * 32, 101)
            assert layer.feed.down.shape == (8, 101 if tp == 1 else 51, 37)
            assert llm.manager.memory_bytes() == llm.plan.nbytes
    (answers, want), (others, got) = found
    assert answers == others and [len(tokens) for tokens in answers] == [8, 8]
    assert torch.equal(want, got)


@pytest.mark.slow
def test_it_evicts_as_one_process_does(folder: Path) -> None:
    """Opened with a policy that is an object and a bounded budget; a request brings another one."""
    prompts = [tiny.token_ids(length, seed=length) for length in (200, 150, 170)]
    kept: dict[str, Any] = dict(window=16, recent=8)
    asked = [INHERIT, EvictionConfig(60, **kept), EvictionConfig(32, policy="keydiff", scope="layer", **kept)]
    cache = CacheConfig(budget=40, bounded=True, policy=Ada(SnapKV(kernel=3), floor=0.1), **kept)
    found = []
    for tp in (1, 2):
        with LLM(folder, tp=tp, cache=cache, **HOW) as llm:
            answers = llm.generate(prompts, GREEDY, eviction=asked)
            names = ("kept_tokens", "kv_bytes_full", "kv_bytes_kept")
            found.append([[answer.token_ids, *(answer.stats[name] for name in names)] for answer in answers])
            with llm.stream(prompts[0], GREEDY, eviction=asked[1]) as stream:
                list(stream)
            found[-1].append(kept_line(llm, [stream.request]))
            assert llm.manager.memory_bytes() == llm.plan.nbytes
            logits = llm.logits(prompts[1], prefill=140)
            assert logits.shape == (150, llm.config.vocab)
    assert found[0] == found[1] and [round(answer[1]) for answer in found[0][:3]] == [47, 67, 39]


@pytest.mark.long
@pytest.mark.parametrize("how", (signal.SIGKILL, *more(signal.SIGSTOP)))
def test_a_worker_that_ends_or_hangs_ends_the_group(
    how: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDKV_TP_TIMEOUT", "3")
    with LLM(folder, tp=2, **HOW) as llm:
        assert llm.ranks is not None
        pid, launched = llm.ranks.place.workers[0].pid, []

        def strike(tokens: int) -> None:
            launched.append(tokens)
            if len(launched) == 3:
                os.kill(pid, how)

        llm.engine.pipeline.on_launch = strike
        with pytest.raises(GroupError, match="a worker ended, and the model with it"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=240, temperature=0, ignore_eos=True))
        assert 3 <= len(launched) < 20
        with pytest.raises(GroupError, match="open it again"):
            llm.generate([[1, 2]], GREEDY)
        assert gone(llm)
    assert not dist.is_initialized()


def test_a_worker_that_ends_while_nothing_runs_is_noticed(folder: Path) -> None:
    with LLM(folder, tp=2, **HOW) as llm:
        assert llm.ranks is not None
        llm.generate([[1, 2]], GREEDY)
        worker = llm.ranks.place.workers[0]
        worker.kill()
        worker.wait()
        with pytest.raises(GroupError, match="a worker ended"):
            llm.generate([[1, 2]], GREEDY)
    assert not dist.is_initialized()


def test_a_model_that_is_forgotten_leaves_its_group_and_one_that_was_closed_no_other(folder: Path) -> None:
    forgotten = LLM(folder, tp=2, **HOW)
    assert forgotten.ranks is not None
    workers = forgotten.ranks.place.workers
    want = forgotten.generate([[1, 2]], GREEDY)[0].token_ids
    del forgotten
    until(lambda: gc.collect() >= 0 and not dist.is_initialized())  # the engine's thread may just be letting go of it
    assert all(worker.poll() is not None for worker in workers)
    closed = LLM(folder, tp=2, **HOW)
    closed.close()
    closed.close()
    with LLM(folder, tp=2, **HOW) as llm:
        del closed
        gc.collect()
        assert llm.generate([[1, 2]], GREEDY)[0].token_ids == want
    assert gone(llm) and not dist.is_initialized()


def test_a_command_refuses_a_number_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["generate", "-m", str(folder), "--device", "cpu", "--tp", "3", "x"])
    assert leaving.value.code == 2 and "use 2, 4 or 1" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "code"), ((GroupError, 3), (UnlikeRanks, 2)))
def test_a_command_whose_group_has_ended_says_so_by_its_exit_code(
    kind: type[GroupError],
    code: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that were started otherwise than each other are a wrong argument."""

    def ended(*_: object, **__: object) -> None:
        raise kind("a worker ended")

    monkeypatch.setattr("hybridkv.llm.LLM.__init__", ended)
    with pytest.raises(SystemExit) as leaving:
        main(["generate", "-m", str(folder), "--tp", "2", "x"])
    assert leaving.value.code == code and "a worker ended" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="in the long form: three processes load SmolLM2")
def test_a_conversation_on_three_ranks_is_that_of_one(tmp_path: Path) -> None:
    """A budget, old turns, a fork, a file, and an answer that fits a grammar."""
    params = SamplingParams(max_tokens=12, temperature=0)
    bound = replace(params, structured_outputs={"choice": ["yes", "no"]})
    cache = CacheConfig(budget=96, window=16, recent=16, keep_turns=1, turn_budget=24)
    found = []
    for tp in (1, 3):
        how: dict[str, Any] = dict(dtype="float32", weight_dtype="plain", max_requests=3, max_context=1024)
        with LLM(tp=tp, device="cpu", cache=cache, **how) as llm:
            talk, said = Conversation(llm, params=params), []
            for text in ("Name three rivers. " * 10, "And a lake?", "And the sea?"):
                said += ["".join(talk.send(text)), talk.last.stats["kept_tokens"], talk.last.stats["cached_tokens"]]
            said.append("".join(talk.fork().send("Why?")))
            talk.save(tmp_path / f"{tp}.talk")
            again = Conversation.load(llm, tmp_path / f"{tp}.talk", params=params)
            said += ["".join(again.send("Why?")), again.last.stats["cached_tokens"]]
            said.append(llm.chat([{"role": "user", "content": "Is water wet?"}], bound).text)
        found.append(said)
    assert found[0] == found[1] and found[0][-1] in ("yes", "no") and found[0][-2] > 100
    with LLM(device="cpu", cache=cache, **how) as llm:  # one process goes on with what three ranks have saved
        again = Conversation.load(llm, tmp_path / "3.talk", params=params)
        assert "".join(again.send("Why?")) == found[1][-3] and again.last.stats["cached_tokens"] > 100


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="in the long form: two more processes import torch")
def test_processes_that_torchrun_has_started_are_used(folder: Path) -> None:
    """The same script in every process: rank 0 prints, the others follow and end with it."""
    script = (
        "import sys; from hybridkv import LLM, SamplingParams\n"
        "how = dict(device='cpu', dtype='float32', max_requests=4, max_context=256)\n"
        f"with LLM({str(folder)!r}, tp=2, **how) as llm:\n"
        "    found = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))\n"
        "    print(found[0].token_ids)\n"
    )
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    with LLM(folder, **HOW) as llm:
        assert json.loads(said[0][0]) == llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert said[1][0] == ""


def test_checkpoints_in_bf16_are_those_of_the_whole_model(folder: Path) -> None:
    """Each rank rounds its part of them, and what a prefix says of its bytes is of all parts."""
    prompt, found = tiny.token_ids(200, seed=3), []
    for tp in (1, 2):
        with LLM(folder, tp=tp, reuse=ReuseConfig(checkpoint_dtype="bf16"), **HOW) as llm:
            assert llm.plan.schema.checkpoint_bytes < llm.plan.schema.slot_bytes
            prefix = llm.prefix(prompt)
            answer = llm.generate([[*prompt, 5, 6]], GREEDY)[0]
            assert answer.stats["cached_tokens"] == prefix.tokens == 192
            found.append(prefix.bytes)
            prefix.drop()
    assert found[0] == found[1]
