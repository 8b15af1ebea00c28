"""A folder of saved conversations over several ranks: what they save is what one process saves, and each goes on with
what the other has saved.
"""

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from long_form import few
from numerics import assert_same_bytes
from tiny_ranks import saved_model

from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams
from hybridkv.cache import manifest
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.errors import HybridKVError, RequestError
from server.running import SECONDS
from server.test_command import port_of, started
from server.test_killed import ROUTE, SAID, post, turn
from test_ranks_end import followers_of

pytestmark = pytest.mark.usefixtures("ready_ranks")
HOW: dict[str, Any] = dict(
    device="cpu", dtype="float32", exact=True, max_requests=3, max_context=512, step_tokens=64, reuse=None
)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
KV_HEADS = {"llama": 1, "qwen3_5": 4}  # one that both ranks have; two a rank
CACHES: dict[str, dict[str, Any]] = {"whole": {}, "evicted": dict(budget=24, window=8, recent=8, policy="auto")}


def opened(folder: Path, store: Path, tp: int, cache: dict[str, Any] | None = None, **more: Any) -> LLM:
    config = CacheConfig(**{"kv_dtype": "f32", "page_size": 8, **(cache or {})})
    return LLM(folder, tp=tp, cache=config, disk_cache=store, **{**HOW, **more})


def say(talk: Conversation, text: str, params: SamplingParams = GREEDY) -> tuple[list[int], float]:
    """The answer's tokens, and how many of the prompt's were there."""
    talk.params = params
    list(talk.send(text))
    assert talk.last is not None
    return talk.last.token_ids, talk.last.stats["cached_tokens"]


def turns(talk: Conversation) -> list[tuple[list[int], float]]:
    return [say(talk, "And now?", SEEDED), say(talk, "Go on")]


def expected(talk: Conversation) -> torch.Tensor:
    """Logits of what could follow: a small model says the same with another state, too."""
    fork = talk.fork()
    request = fork._request
    assert request is not None
    found = talk.llm.owner.run(lambda engine: engine.score_after(request, [7, 8, 9]))
    fork.close()
    return found


def begun(llm: LLM) -> Conversation:
    talk = Conversation(llm, "Be brief, but say all that there is to say of it.", GREEDY)
    say(talk, "Hello, how are you? I am well."), say(talk, "Really?")
    return talk


def assert_nothing_left(llm: LLM) -> None:
    """Of what nobody has any more, on any rank: they compare their free pages before each step."""
    gc.collect()
    llm.generate([5, 6, 7], GREEDY)
    llm.owner.run(assert_nothing_held)
    if isinstance(llm.engine, LockStepEngine):
        assert not llm.engine._there and not llm.engine._gone


@pytest.mark.long
@few("kind, cache", tuple(KV_HEADS), tuple(CACHES))
def test_what_one_number_of_ranks_has_saved_goes_on_over_another(
    kind: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART_BYTES", 4 << 10)  # of several runs, and of survivors in several parts
    folder = saved_model(tmp_path / "model", kind, num_key_value_heads=KV_HEADS[kind])
    with (
        opened(folder, tmp_path / "store", 1, CACHES[cache]) as one,
        opened(folder, tmp_path / "store", 2, CACHES[cache]) as two,
    ):
        assert one.cache_key() == two.cache_key()
        talks = begun(one), begun(two)
        assert one.save(talks[0], "one") > 0 == two.save(talks[1], "two"), "other parts than those of one process"
        found = two.open_store().manifest("two")
        what = "columns" if cache == "whole" else "base/attention"
        assert len([part for part in found.parts if part.what == what]) > 1
        assert (len({*found.sizes.kept.get("attention", ())}) > 1) == (cache == "evicted"), "heads kept equally many"
        stayed = talks[1].fork()  # nothing of it was ever in a folder
        loaded = [two.load("one"), one.load("two"), two.load("two")]
        for talk in loaded:
            assert_same_bytes(expected(talk), expected(stayed))
        want = turns(stayed)
        assert all(cached > 0 for _, cached in want)
        for talk in (*loaded, *talks):
            assert turns(talk) == want and talk.messages == stayed.messages
        assert two.save(loaded[0], "again") > 0 == one.save(loaded[1], "again")
        for talk in (*loaded, *talks, stayed):
            talk.close()
        del talk, talks, loaded, stayed
        assert_nothing_left(two)
        assert_nothing_left(one)
    assert not dist.is_initialized()


def changed(store: Path, name: str, **key: str) -> None:
    """The saved cache, as if it had been computed with something else."""
    place = store / "index" / f"{name}.json"
    found = json.loads(place.read_text())
    found["key"] |= key
    place.write_text(json.dumps(found))


def test_what_is_damaged_foreign_or_too_large_is_refused_and_nothing_is_taken(tmp_path: Path) -> None:
    folder, store = saved_model(tmp_path / "model", "llama"), tmp_path / "store"
    words = dict(damaged=2, missing=3, foreign=4, tight=18, large=30, long=60)
    with opened(folder, store, 1, dict(window=8, recent=8), max_context=1024) as one:
        for name, number in words.items():
            talk = Conversation(one, params=GREEDY)
            say(talk, "word ... " * number)
            one.save(talk, name)
            talk.close()
    changed(store, "foreign", weights="0" * 64)
    even = CACHES["evicted"] | dict(policy="snapkv", bounded=True)  # so that free pages are compared
    with opened(folder, store, 2, even, max_requests=2) as two:
        for name in ("damaged", "missing"):
            [part] = [part for part in two.open_store().manifest(name).parts if part.what == "columns"]
            file = store / "parts" / f"{part.sha256}.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data) if name == "damaged" else file.unlink()
        wrong = dict(
            damaged="its part columns .* the checksum does not agree", missing="is missing", foreign="another weights"
        )
        wrong |= dict(
            tight="takes .* pages of 'attention', the pool has", large="takes .* bytes, and that of all ranks"
        )
        wrong |= dict(long="the context here holds 512", nothing="has no saved cache 'nothing'")
        talk = begun(two)
        two.save(talk, "good")
        want = say(talk, "And now?")
        talk.close()
        del talk
        for name, said in wrong.items():
            with pytest.raises(HybridKVError, match=said):
                two.load(name)
            assert_nothing_left(two)
            talk = two.load("good", GREEDY)
            assert say(talk, "And now?") == want and want[1] > 0
            talk.close()
            del talk
        assert_nothing_left(two)


@pytest.mark.slow
def test_a_cache_of_another_dtype_is_converted_as_in_one_process(tmp_path: Path) -> None:
    folder, store, other = saved_model(tmp_path / "model", "qwen3_5"), tmp_path / "store", dict(kv_dtype="fp8")
    with opened(folder, store, 1, exact=False) as one:
        one.save(begun(one), "talk")
    with opened(folder, store, 1, other, exact=False) as one, opened(folder, store, 2, other, exact=False) as two:
        with pytest.raises(RequestError, match="another kv_dtype.*convert=True"):
            two.load("talk")
        assert_nothing_left(two)
        assert one.save(one.load("talk", convert=True), "one") > 0
        talk = two.load("talk", convert=True)
        assert two.save(talk, "two") == 0, "other parts than those of one process"
        assert "kv_dtype" in two.open_store().manifest("two").converted[0]
        assert say(talk, "And now?")[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ends", ("drained", "a rank is killed"))
def test_a_conversation_of_a_server_over_ranks_outlives_it(ends: str, tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", "qwen3_5")
    how: tuple[object, ...] = ("-m", model, "--context", 512, "--device", "cpu", "--dtype", "float32", "--exact")
    how = (*how, "--budget", 24, "--window", 8, "--recent", 8, "--disk-cache", tmp_path / "store", "--tp", 2)
    with started(*how) as (process, lines):
        port = port_of(lines)
        answer, _ = turn(port, SAID, prompt_cache_key="saved")
        said = [*SAID, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
        assert turn(port, SAID, prompt_cache_key="stayed")[0] == answer
        if ends != "drained":
            post(port, ROUTE, {"name": "saved", "action": "save"})
        want = turn(port, said, prompt_cache_key="stayed")
        assert want[1] > 0
        if ends == "drained":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(*followers_of(process.pid), signal.SIGKILL)
        assert process.wait(SECONDS) == (0 if ends == "drained" else 3)
    with started(*how) as (process, lines):
        port = port_of(lines)
        assert turn(port, said, prompt_cache_key="saved") == want
        assert turn(port, said, prompt_cache_key="another")[1] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
