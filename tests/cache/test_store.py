"""The store of saved caches: what it writes, what it refuses, and what is left when it fails at any step."""

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.driving import assert_nothing_held, prompt, run
from engine.test_interrupts import model_of
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.cache.holding import holding
from hybridkv.cache.manifest import MANIFEST_BYTES
from hybridkv.cache.store import Store
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.engine.storing import load_request, save_request
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import Evictor
from hybridkv.models import cache_schema
from hybridkv.request import Request

ASK = SamplingParams(max_tokens=9)
KEY = {"architecture": "tiny", "weights": "random", "dtype": "float32", "kv_dtype": "f32", "mode": "fast"}
PLAIN = dict(kv_dtype="f32", page_size=4)
EVICTING = PLAIN | dict(budget=12, window=4, recent=4)


def opened(kind: str = "qwen3_5", pool: int = 256, slots: int = 3, context: int = 256, **cache: Any) -> EngineOwner:
    model, config = model_of(kind), CacheConfig(**{**PLAIN, **cache})
    schema = cache_schema(model.config, config, torch.float32)
    manager = KVCacheManager(schema, schema.pool_pages(1, pool), slots, context)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    engine = Engine(model, manager, step_tokens=64, evictor=evictor)
    owner = EngineOwner(engine)
    owner.engine = engine  # type: ignore[attr-defined]  # which it refers to weakly
    return owner


def ask(owner: EngineOwner, words: int, after: Request | None = None) -> Request:
    def turn(engine: Engine) -> Request:
        said = after.tokens if after is not None else []
        found = engine.add(said + prompt(words, words), ASK, hold=True, after=after)
        run(engine)
        return found

    return owner.run(turn)


def save(owner: EngineOwner, store: Store, request: Request | None, name: str = "talk", **key: str) -> int:
    return save_request(owner, store, name, request, {"said": "hello"}, KEY | key)


def load(owner: EngineOwner, store: Store, name: str = "talk", **key: str) -> Request:
    request = load_request(owner, store, name, KEY | key)[0]
    assert request is not None
    return request


def contents(owner: EngineOwner, request: Request) -> dict[Any, bytes]:
    def read(engine: Engine) -> dict[Any, bytes]:
        held = holding(engine.manager, request.key)
        found: dict[Any, Any] = held.states()
        for name, lengths in held.lengths.items():
            found |= {(name, key): t for key, t in held.read(name, 0 * lengths, lengths).items()}
        found |= {("length", name): torch.from_numpy(lengths) for name, lengths in held.lengths.items()}
        return {key: t.contiguous().view(torch.uint8).numpy().tobytes() for key, t in found.items()}

    return owner.run(read)


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[EngineOwner, Request, Request]]:
    """An engine with a short conversation that is held, and one that was evicted twice."""
    owner = opened(**EVICTING)
    first = ask(owner, 21)
    yield owner, ask(owner, 40, ask(owner, 40)), first
    owner.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def parts(store: Store) -> list[Path]:
    return sorted((store.path / "parts").glob("*.safetensors"))


# ---- what is written


def test_what_comes_back_has_the_bits_of_what_was_saved(source: tuple, store: Store) -> None:
    owner, request, _ = source
    assert request.evictions
    save(owner, store, request)
    there = opened(**EVICTING | dict(page_size=8))  # other pages
    back = load(there, store)
    assert contents(there, back) == contents(owner, request)
    assert back.tokens == request.tokens and back.evictions.keys() == request.evictions.keys()
    assert ask(there, 7, back).tokens == ask(owner, 7, owner.run(lambda e: e.fork_held(request))).tokens
    there.run(lambda engine: engine.manager.check_integrity())
    there.close()


def test_files_are_private_and_any_safetensors_reader_reads_them(source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    for path in (store.path, store.path / "parts", store.path / "index"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in [*parts(store), store.path / "index" / "talk.json"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    names = {name for path in parts(store) for name in load_file(path)}
    assert {"tokens", "attention/k", "attention/v", "attention/kept"} <= names
    manifest = json.loads((store.path / "index" / "talk.json").read_text())
    assert manifest["format"] == "hybridkv-cache" and manifest["version"] == 2
    assert sum(path.stat().st_size for path in parts(store)) == store.bytes == store.manifest("talk").bytes


def test_runs_of_columns_stay_when_a_conversation_grows(store: Store) -> None:
    owner = opened("llama", pool=4096, context=4096)
    first = ask(owner, 1500)
    new = save(owner, store, first)
    before = set(parts(store))
    again = save(owner, store, ask(owner, 600, first))
    assert again < new and before & set(parts(store)), "the first run was written again"
    assert [p.begin for p in store.manifest("talk").parts if p.what == "columns"] == [0, 1024, 2048]
    owner.close()


def test_a_request_without_a_cache_or_without_words_is_saved_too(source: tuple, store: Store) -> None:
    owner, _, _ = source
    save(owner, store, None)
    assert load_request(owner, store, "talk", KEY)[0] is None
    there = opened()
    given_up = ask(there, 9)
    there.run(lambda engine: engine.scheduler.give_up(given_up))
    save(there, store, given_up)
    back = load(there, store)
    assert back.tokens == given_up.tokens and ask(there, 4, back).cached_tokens == 0
    there.close()


def test_what_no_manifest_names_is_collected(source: tuple, store: Store) -> None:
    owner, request, other = source
    save(owner, store, request, "a"), save(owner, store, request, "b"), save(owner, store, other, "c")
    (store.path / "parts" / ".new-123").write_bytes(b"left over")
    every = len(parts(store))
    assert store.remove("a") == len(b"left over") and len(parts(store)) == every, "b has the same parts"
    assert store.remove("b") > 0 and store.remove("c") > 0 and not parts(store)
    with pytest.raises(HybridKVError, match="no saved cache 'a'; there is nothing"):
        store.remove("a")


def test_a_limit_of_bytes_is_kept_and_what_was_there_stays(source: tuple, store: Store) -> None:
    owner, request, other = source
    save(owner, store, other)
    small = Store(store.path, store.bytes + 100)
    with pytest.raises(HybridKVError, match="may hold"):
        save(owner, small, request, "second")
    assert [each.name for each in store.saved()] == ["talk"] and not store.verify("talk")
    assert store.bytes == store.manifest("talk").bytes


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-a", "a\n", "a" * 101, "é", None, 3])
def test_odd_names_are_refused(name: Any, source: tuple, store: Store) -> None:
    with pytest.raises(HybridKVError, match="cannot be called"):
        save(source[0], store, None, name)
    assert not store.path.exists()


# ---- damaged and foreign files


def changed(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[:-1]
    elif how == "longer":
        data += b"x"
    elif how == "flipped":
        data[-1] ^= 1
    elif how == "header flipped":
        data[12] ^= 1
    elif how == "missing":
        path.unlink()
        return
    elif how == "link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
        return
    elif how == "folder":
        path.unlink()
        path.mkdir()
        return
    elif how == "fifo":
        path.unlink()
        os.mkfifo(path)
        return
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["truncated", "longer", "flipped", "header flipped", "missing", "link", "folder", "fifo", "foreign"]
)
def test_a_bad_part_is_refused_by_name_and_nothing_is_taken(how: str, source: tuple, store: Store) -> None:
    owner, request, other = source
    save(owner, store, request)
    there = opened(**EVICTING)
    for part in store.manifest("talk").parts[::3]:
        path = store.path / "parts" / f"{part.sha256}.safetensors"
        data = path.read_bytes()
        if how == "foreign":  # the bytes of another part, of the same size where there is one
            path.write_bytes(os.urandom(len(data)))
        else:
            changed(path, how)
        with pytest.raises(HybridKVError, match=f"'talk': its part {part.what} .*{part.sha256[:12]}"):
            load(there, store)
        assert_nothing_held(there.engine)
        there.run(lambda engine: engine.manager.check_integrity())
        if path.is_dir():
            path.rmdir()
        save(owner, store, request)  # writes it again
        assert not store.verify("talk") and path.read_bytes() == data
    there.close()


MANIFESTS: dict[str, tuple[Callable[[dict], None], str]] = {
    "newer": (lambda m: m.update(version=3), "version 3.*a newer program"),
    "another format": (lambda m: m.update(format="other"), "format"),
    "position": (lambda m: m["sizes"].update(position=m["sizes"]["position"] + 1), "part|position|further"),
    "huge": (lambda m: m["sizes"].update(position=1 << 39, tokens=1 << 39), "part|runs"),
    "negative": (lambda m: m["sizes"].update(position=-1), "whole number"),
    "true": (lambda m: m["sizes"].update(tokens=True), "whole number"),
    "part left out": (lambda m: m["parts"].pop(), "evictions|records|part"),
    "part twice": (lambda m: m["parts"].append(m["parts"][0]), "no place"),
    "name of a path": (lambda m: m["parts"][0].update(sha256="../../../etc/passwd"), "sha256"),
    "bytes": (lambda m: m["parts"][0].update(bytes=8), "bytes"),
    "kept": (lambda m: m["sizes"]["kept"].update(attention=[1]), "kept"),
    "no schema": (lambda m: m.update(schema=None), "schema"),
    "odd dtype": (lambda m: m["schema"]["streams"][0]["tensors"][0].__setitem__(1, "object"), "dtype"),
    "more heads": (lambda m: m["schema"]["streams"][0].update(heads=1 << 15), "streams are others"),
    "prompt": (lambda m: m["request"].update(prompt_tokens=10**6), "prompt"),
    "chain": (lambda m: next(p for p in m["parts"] if p["what"] == "columns").update(chain="0" * 64), "not those of"),
    "words": (lambda m: m.update(key=["a"]), "key"),
}


@pytest.mark.parametrize("how", MANIFESTS)
def test_an_odd_manifest_is_refused_before_anything_is_taken(how: str, source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    path = store.path / "index" / "talk.json"
    manifest = json.loads(path.read_text())
    change, match = MANIFESTS[how]
    change(manifest)
    path.write_text(json.dumps(manifest))
    there = opened(**EVICTING)
    with pytest.raises(HybridKVError, match=f"(?s)talk.*({match})"):
        load(there, store)
    assert_nothing_held(there.engine)
    there.close()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": NaN}', "[" * 100_000, '{"a": 1, "a": 2}', " " * (MANIFEST_BYTES + 1)]
)
def test_a_manifest_that_is_no_plain_json_is_refused(text: str, source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    (store.path / "index" / "talk.json").write_text(text)
    with pytest.raises(HybridKVError, match="talk"):
        load(owner, store)
    assert store.saved()[0].manifest is None


def test_a_folder_that_is_a_link_is_not_followed(source: tuple, store: Store, tmp_path: Path) -> None:
    owner, request, _ = source
    save(owner, store, request)
    (store.path / "parts").rename(tmp_path / "elsewhere")
    (store.path / "parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HybridKVError, match="no store"):
        load(owner, store)


@pytest.mark.parametrize("part", KEY)
def test_a_key_that_differs_is_refused_by_the_part_that_does(part: str, source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    with pytest.raises(RequestError, match=f"another {part} .*{KEY[part]} there, other here"):
        load(owner, store, **{part: "other"})


@pytest.mark.parametrize("other", [dict(kv_dtype="bf16"), dict(kind="llama"), dict(window=8), dict(kv_dtype="fp8")])
def test_a_cache_that_stores_other_things_refuses(other: dict, source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    there = opened(**{**EVICTING, **other})
    with pytest.raises(RequestError, match="its (streams|states|last queries) are others"):
        load(there, store)
    assert_nothing_held(there.engine)
    there.close()


def test_without_room_it_is_refused_and_the_oldest_caches_make_room(source: tuple, store: Store) -> None:
    owner, request, _ = source
    save(owner, store, request)
    with pytest.raises(RequestError, match="context here holds 64"):
        load(opened(**EVICTING | dict(context=64)), store)
    with pytest.raises(RequestError, match="the pool has"):
        load(opened(**EVICTING | dict(pool=16)), store)
    there = opened(**EVICTING | dict(pool=48))
    old = [ask(there, 9) for _ in range(2)]
    load(there, store)
    assert there.engine.scheduler.counts["given_up"] > 0 and old[0] not in there.engine.scheduler.held
    there.close()


# ---- a disk that is full, and a process that is killed

CALLS = ("open", "write", "fdatasync", "rename", "fsync", "mkdir", "unlink", "fchmod")


def test_a_disk_that_is_full_at_any_call_leaves_what_was_there(
    source: tuple, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call that changes the disk fails, for every n there is."""
    owner, request, other = source
    save(owner, store, other)
    want, calls, n = contents(owner, load(owner, store)), 0, 0
    real = {name: getattr(os, name) for name in ("write", "fdatasync", "rename", "fsync")}

    def failing(name: str) -> Callable:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= n:  # and it stays full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*arguments, **more)

        return call

    while True:
        n, calls = n + 1, 0
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, failing(name))
            try:
                save(owner, store, request)
            except HybridKVError as problem:
                assert "No space left on device" in str(problem)
                if "not certain" in str(problem):  # the manifest has its name
                    break
            else:
                raise AssertionError("the last call to the disk makes it certain")
        if n % 7 == 1 or n > 30:
            back = load(owner, store)
            assert contents(owner, back) == want and store.bytes == store.manifest("talk").bytes
            owner.run(lambda engine, r=back: engine.abort(r))
    assert n > 20
    back = load(owner, store)
    assert contents(owner, back) == contents(owner, request)


def test_a_process_killed_between_any_two_steps_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """One process for each call that touches the disk: it is killed just before that."""
    owner = opened()
    other = ask(owner, 21)
    request = ask(owner, 9, owner.run(lambda engine: engine.fork_held(other)))
    save(owner, Store(tmp_path / "first"), other)
    save(owner, Store(tmp_path / "second"), request)
    total = _killed_saves(tmp_path)
    assert total > 25
    old, new = (contents(owner, each) for each in (other, request))
    seen = set()
    for i in range(1, total + 1):
        store = Store(tmp_path / str(i))
        back = load(owner, store)
        found = contents(owner, back)
        assert found in (old, new), f"killed at call {i}"
        seen.add(found == new)
        owner.run(lambda engine, r=back: engine.abort(r))
        save(owner, store, request)  # a later save finds its way, and removes what was left over
        assert store.bytes == store.manifest("talk").bytes and not list((store.path / "parts").glob(".new*"))
    assert seen == {False, True}
    owner.close()


def _killed_saves(folder: Path) -> int:
    """How many calls a save makes; folder/i has the store of a process that was killed before its i-th."""
    script, root = folder / "killer.py", Path(__file__).parents[2]
    script.write_text(KILLER.format(root=str(root), calls=CALLS))
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


# saves anew what FOLDER/second has, over and over: in copies of FOLDER/first, each time killed one call later
KILLER = """
import os, shutil, signal, sys
sys.path.insert(0, {root!r})
import hybridkv.cache.store as module
from hybridkv.cache.manifest import schema_of
from hybridkv.cache.schema import CacheSchema

module.THREADS = 1  # the same order of calls each time
source, folder = module.Store(sys.argv[1] + "/second"), sys.argv[1]
manifest = source.manifest("talk")
listed = manifest.check_parts(schema_of(manifest.schema, CacheSchema()))
parts = []
source.read("talk", listed, lambda form, part, tensors: parts.append((form, tensors, part.chain)))

count, at = 0, 0
def watch(name):
    real = getattr(os, name)
    def call(*a, **k):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*a, **k)
    setattr(os, name, call)

while True:
    at += 1
    there = folder + "/" + str(at)
    shutil.copytree(folder + "/first", there)
    pid = os.fork()
    if not pid:
        for name in {calls!r}:
            watch(name)
        count = 0
        module.Store(there).save("talk", manifest, iter(parts))
        os._exit(0)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        break
print(at)
"""
