"""Snapshots: out of one cache and into another without changing a bit; what does not fit is refused."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from numerics import assert_same_bytes
from safetensors import safe_open
from torch import Tensor

from cache.machine_model import snapshot as facts
from eviction.harness import Run
from hybridkv import LLM
from hybridkv.cache.manager import Compaction
from hybridkv.cache.snapshot import Snapshot, fingerprint, restore_request, snapshot_request
from hybridkv.cache.snapshot_file import with_checksum
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError, OutOfPages, RequestError

KINDS = ("llama", "qwen3_5")
DTYPES = ("f32", "bf16", "fp8")


@pytest.fixture(scope="session")
def run_of(oracle: Callable, open_llm: Callable) -> Callable[..., Run]:
    def build(kind: str, pool: int = 1024, slots: int = 3, context: int = 512, **config: object) -> Run:
        config = {"kv_dtype": "f32", "page_size": 16, "window": 16, "recent": 8, "budget": 40, **config}
        even = {"policy": "snapkv:pooling=none", **config}  # streams of one length
        return Run(open_llm(oracle(kind).folder).model, CacheConfig(**even), context, slots, pool)  # type: ignore

    return build


def dirty(run: Run) -> None:
    """Other requests came and went: pages in another order, full of their bytes, other slots taken."""
    rng = np.random.default_rng(3)
    for key, n in (("x", 90), ("y", 50)):
        run.admit(key)
        run.feed(tiny.token_ids(n, seed=n), key=key)
    run.manager.release_request("x")
    free = run.manager.tables["attention"].allocator
    free._put(rng.permutation(free._stack[: free._top]), np.arange(free._top))


def taken(run: Run, compacted: bool = True, more: int = 5) -> Snapshot:
    run.admit()
    ids = tiny.token_ids(150)
    run.feed(ids, 64)
    if compacted:
        run.evict(ids)
    run.feed(tiny.token_ids(more, seed=9), 1)
    return snapshot_request(run.manager, "r")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compacted", (True, False), ids=("compacted", "whole"))
@pytest.mark.parametrize("kind", KINDS)
def test_decode_after_restore_is_bit_equal(
    kind: str, compacted: bool, dtype: str, run_of: Callable, tmp_path: Path
) -> None:
    run = run_of(kind, kv_dtype=dtype)
    snapshot = taken(run, compacted)
    snapshot.save(tmp_path / "a.safetensors")
    want = run.feed(tiny.token_ids(20, seed=4), 1)
    for source in (snapshot, Snapshot.load(tmp_path / "a.safetensors")):
        other = run_of(kind, kv_dtype=dtype)
        dirty(other)
        slot = restore_request(other.manager, source, "back")
        other.manager.check_integrity()
        assert other.manager.slot_of["back"] == slot and other.manager.position("back") == 155
        assert (slot, other.manager.tables["attention"].pages[slot].tolist()) != (
            run.manager.slot_of["r"],
            run.manager.tables["attention"].pages[run.manager.slot_of["r"]].tolist(),
        )
        assert_same_bytes(want, other.feed(tiny.token_ids(20, seed=4), 1, "back"))
        other.manager.check_integrity()


def test_a_restored_request_can_be_compacted_forked_and_taken_again(run_of: Callable) -> None:
    run = run_of("qwen3_5")
    snapshot = taken(run)
    other = run_of("qwen3_5")
    dirty(other)
    restore_request(other.manager, snapshot, "back")
    again = snapshot_request(other.manager, "back")
    for a, b in ((snapshot.entries, again.entries), (snapshot.states, again.states)):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bytes(a[key], b[key])
    at = [p.tolist() for p in run.manager.entry_positions("r", "attention")]
    assert at == [p.tolist() for p in other.manager.entry_positions("back", "attention")]
    keep = {layer: [np.arange(0, 45, 3)] * 2 for layer in run.layers}
    more = tiny.token_ids(5, seed=8)
    for each, key in ((run, "r"), (other, "back")):
        each.manager.compact_request(key, keep)
        each.manager.fork_request(key, "fork")
    assert_same_bytes(run.feed(more, 1, "fork"), other.feed(more, 1, "fork"))


def test_another_page_size_holds_the_same_entries(run_of: Callable) -> None:
    run = run_of("llama")
    snapshot = taken(run)
    other = run_of("llama", page_size=7)
    restore_request(other.manager, snapshot, "back")
    back = snapshot_request(other.manager, "back")
    for key in snapshot.entries:
        assert_same_bytes(snapshot.entries[key], back.entries[key])
    assert other.manager.held_pages("back")["attention"] == sum(-(-int(n) // 7) for n in snapshot.lengths["attention"])


def test_taking_a_snapshot_changes_nothing_and_later_writes_do_not_reach_it(run_of: Callable) -> None:
    run = run_of("qwen3_5")
    snapshot = taken(run)
    before = facts(run.manager)
    again = snapshot_request(run.manager, "r")
    assert facts(run.manager) == before
    run.feed(tiny.token_ids(30))
    for key in snapshot.entries:
        assert_same_bytes(snapshot.entries[key], again.entries[key])
    for key in snapshot.states:
        assert_same_bytes(snapshot.states[key], again.states[key])


def test_restoring_is_all_or_nothing(run_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = taken(run_of("llama"), compacted=False)
    small = run_of("llama", pool=128)
    before = facts(small.manager)
    with pytest.raises(OutOfPages):
        restore_request(small.manager, snapshot, "back")
    assert facts(small.manager) == before

    run = run_of("llama", slots=1)
    run.admit("x")
    before = facts(run.manager)
    with pytest.raises(HybridKVError, match="slots"):
        restore_request(run.manager, snapshot, "back")
    with pytest.raises(HybridKVError, match="resident"):
        restore_request(run.manager, snapshot, "x")
    assert facts(run.manager) == before

    run = run_of("llama")
    monkeypatch.setattr(run.manager.host, "put", _no_memory)
    with pytest.raises(MemoryError):
        restore_request(run.manager, snapshot, "back")
    run.manager.check_integrity()
    assert run.manager.tables["attention"].allocator.held == 0 and not run.manager.slot_of


def _no_memory(*args: object) -> None:
    raise MemoryError


def test_a_request_that_is_not_there_cannot_be_taken(run_of: Callable) -> None:
    with pytest.raises(RequestError, match="not resident"):
        snapshot_request(run_of("llama").manager, "nobody")


@pytest.mark.parametrize("other", (dict(kv_dtype="bf16"), dict(kv_dtype="fp8"), dict(window=8), dict(budget=None)))
def test_a_cache_that_stores_other_things_refuses(other: dict, run_of: Callable) -> None:
    snapshot, run = taken(run_of("llama")), run_of("llama", **other)
    before = facts(run.manager)
    with pytest.raises(RequestError, match="other things|queries"):
        restore_request(run.manager, snapshot, "back")
    with pytest.raises(RequestError, match="other things"):
        restore_request(run_of("qwen3_5").manager, snapshot, "back")
    assert facts(run.manager) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_with_an_eviction_window_takes_what_one_without_stored(kind: str, run_of: Callable) -> None:
    """As files from before every LLM had a window: all else is the same, and last queries may be missing."""
    run, other = run_of(kind, budget=None), run_of(kind)
    snapshot = taken(run, compacted=False)
    slot = restore_request(other.manager, snapshot, "back")
    assert other.manager.query_buffers.of[slot] == -1 and other.manager.query_buffers.count
    more = tiny.token_ids(20, seed=4)
    assert_same_bytes(run.feed(more, 1), other.feed(more, 1, "back"))
    other.manager.check_integrity()


def test_a_snapshot_past_the_context_is_refused(run_of: Callable) -> None:
    snapshot = taken(run_of("llama"))
    with pytest.raises(RequestError, match="context"):
        restore_request(run_of("llama", context=154).manager, snapshot, "back")


def test_a_snapshot_that_contradicts_itself_is_refused(run_of: Callable) -> None:
    snapshot, run = taken(run_of("llama")), run_of("llama")
    past = snapshot.compaction
    assert past is not None
    kept = past.kept["attention"]
    longer = {name: n + 1 for name, n in snapshot.lengths.items()}
    name = ("attention", "k")
    bad = (
        replace(snapshot, lengths=longer),
        replace(snapshot, lengths={}),
        replace(snapshot, position=snapshot.position + 1),
        replace(snapshot, position=-1),
        replace(snapshot, compaction=None),
        replace(snapshot, compaction=Compaction(past.position, {"attention": [k[::-1] for k in kept]})),
        replace(snapshot, compaction=Compaction(past.position, {"attention": [k + 500 for k in kept]})),
        replace(snapshot, compaction=Compaction(past.position, {"attention": kept[:-1]})),
        replace(snapshot, entries={**snapshot.entries, name: snapshot.entries[name][:, 1:]}),
        replace(snapshot, entries={**snapshot.entries, name: snapshot.entries[name].double()}),
        replace(snapshot, entries={}),
        replace(snapshot, states=dict([*snapshot.states.items()][1:])),
    )
    before = facts(run.manager)
    for each in bad:
        with pytest.raises(RequestError):
            restore_request(run.manager, each, "back")
        assert facts(run.manager) == before


def test_a_snapshot_without_state_is_refused_where_state_is_not_lent(run_of: Callable) -> None:
    """What is left out may be last queries, which are lent; the state of DeltaNet layers may not."""
    run = run_of("qwen3_5")
    before = facts(run.manager)
    with pytest.raises(RequestError, match="does not fit"):
        restore_request(run.manager, replace(taken(run_of("qwen3_5")), states={}), "back")
    assert facts(run.manager) == before
    run = run_of("llama")
    snapshot = taken(run_of("llama"))
    assert snapshot.states
    slot = restore_request(run.manager, replace(snapshot, states={}), "back")
    assert run.manager.query_buffers.of[slot] == -1 and run.manager.query_buffers.count
    run.manager.check_integrity()


def test_another_model_of_the_same_shapes_refuses(run_of: Callable, oracle: Callable, tmp_path: Path) -> None:
    """Other weights, or another rope: the entries would be taken for what they are not."""
    tiny.build("llama", seed=1).save_pretrained(tmp_path / "weights")
    config = json.loads((oracle("llama").folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10001.0
    (tmp_path / "rope").mkdir()
    (tmp_path / "rope" / "config.json").write_text(json.dumps(config))
    (tmp_path / "rope" / "model.safetensors").symlink_to(oracle("llama").folder / "model.safetensors")

    def open_with_cache(folder: Path) -> LLM:
        return LLM(folder, device="cpu", dtype="float32", cache=CacheConfig("f32", 16), max_context=256)

    source = open_with_cache(oracle("llama").folder)
    source.manager.admit_request("r")
    snapshot_request(source.manager, "r").save(tmp_path / "a")
    snapshot = Snapshot.load(tmp_path / "a")
    restore_request(open_with_cache(oracle("llama").folder).manager, snapshot, "back")
    for other in ("weights", "rope"):
        manager = open_with_cache(tmp_path / other).manager
        before = facts(manager)
        with pytest.raises(RequestError, match="another model computed it"):
            restore_request(manager, snapshot, "back")
        assert facts(manager) == before
    with pytest.raises(RequestError, match="here it is not known"):
        restore_request(run_of("llama", window=64).manager, snapshot, "back")


# ---- files with a right checksum and contents that are not well-formed


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> Path:
    """A copy of the file with its contents changed and a checksum that agrees."""
    with safe_open(path, "pt") as file:
        tensors, meta = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, meta)
    del meta["sha256"]
    path = path.with_name("changed")
    path.write_bytes(b"".join(with_checksum({name: t.contiguous() for name, t in tensors.items()}, meta)))
    return path


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(d): lambda t, d=d: t.float().to(d) for d in (torch.float64, torch.bfloat16, torch.int8, torch.bool)},
    "int32": lambda t: t.to(torch.int32),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "2-D": lambda t: t.reshape(1, -1),
    "0-D": lambda t: t.reshape(-1)[0],
    "flat": lambda t: t.reshape(-1),
    "empty": lambda t: t[:0],
    "shorter": lambda t: t[1:],
    "longer": lambda t: torch.cat((t, t[:1])),
    "negative": lambda t: -t.float().to(t.dtype) - 1,
    "plus one": lambda t: (t.float() + 1).to(t.dtype),
    "huge": lambda t: torch.full_like(t, torch.iinfo(t.dtype).max if not t.is_floating_point() else 3e38),
    "reversed": lambda t: t.flip(0),
    "moved": lambda t: t + torch.eye(1, len(t))[0].to(t.dtype) - torch.eye(1, len(t))[0].flip(0).to(t.dtype),
}
NUMBERS = ("", "x", "-1", "1.5", "nan", "1_0", " 7", "٣", "9" * 18, "9" * 30, "9" * 5000, "154", "156", "0")


def assert_refused_or_whole(path: Path, run: Run) -> str:
    """The file is refused in words, at load or at restore, and nothing is held; or what it says can be restored."""
    before = facts(run.manager)
    try:
        snapshot = Snapshot.load(path)
        restore_request(run.manager, snapshot, "back")
    except HybridKVError as problem:
        assert facts(run.manager) == before
        return str(problem)
    run.manager.check_integrity()
    run.manager.release_request("back")
    return ""


@pytest.fixture(scope="module")
def saved(run_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    path = tmp_path_factory.mktemp("saved") / "a"
    taken(run_of("llama")).save(path)
    return path, run_of("llama")


@pytest.mark.parametrize("how", VALUES)
@pytest.mark.parametrize("name", ("lengths/attention", "kept/attention", "kept_lengths/attention"))
def test_bookkeeping_of_a_wrong_form_is_refused_at_load(name: str, how: str, saved: tuple[Path, Run]) -> None:
    path, run = saved

    def change(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        tensors[name] = VALUES[how](tensors[name])

    changed = rewritten(path, change)
    if how in ("int32", "flat") or (how == "reversed" and name != "kept/attention"):  # the same numbers
        assert assert_refused_or_whole(changed, run) == ""
    elif (name, how) == ("lengths/attention", "moved"):  # seen only by a cache
        assert "do not agree" in assert_refused_or_whole(changed, run)
    else:
        with pytest.raises(HybridKVError, match="is not well-formed: "):
            Snapshot.load(changed)


@pytest.mark.parametrize("group", ("lengths", "kept", "kept_lengths", "entries", "state"))
def test_a_missing_or_renamed_group_is_refused(group: str, saved: tuple[Path, Run]) -> None:
    path, run = saved

    def without(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith(f"{group}/")]:
            del tensors[name]

    def renamed(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith(f"{group}/")]:
            tensors[name.replace("attention", "other").replace("queries/", "")] = tensors.pop(name)

    found = assert_refused_or_whole(rewritten(path, without), run)
    assert "not well-formed" in found or (group == "state" and not found)  # last queries may be left out
    assert "not well-formed" in assert_refused_or_whole(rewritten(path, renamed), run)


def _set(key: str, value: str, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta[key] = value


@pytest.mark.parametrize("key", ("position", "compacted_at", "fingerprint", "model"))
def test_metadata_that_is_missing_or_odd_is_refused(key: str, saved: tuple[Path, Run]) -> None:
    path, run = saved
    assert "not well-formed" in assert_refused_or_whole(rewritten(path, lambda _, meta: meta.pop(key) and None), run)
    for value in NUMBERS:
        found = assert_refused_or_whole(rewritten(path, partial(_set, key, value)), run)
        assert found or (key == "model" and value == "")  # as it was


def test_any_mixture_of_odd_contents_is_refused_in_words(saved: tuple[Path, Run]) -> None:
    path, run = saved
    rng = random.Random(0)

    def change(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        for _ in range(rng.randint(1, 4)):
            name = rng.choice(sorted(tensors))
            what = rng.random()
            if what < 0.1:
                meta[rng.choice(("position", "compacted_at"))] = rng.choice(NUMBERS)
            elif what < 0.2:
                del tensors[name]
            elif what < 0.3:
                tensors[rng.choice(("x", "entries/", "state/x", "/", "kept/attention", name + "/y"))] = tensors[
                    name
                ].clone()
            elif tensors[name].ndim and len(tensors[name]):
                try:
                    tensors[name] = VALUES[rng.choice(sorted(VALUES))](tensors[name])
                except RuntimeError:  # this change is not for such a tensor
                    continue

    refused = sum(bool(assert_refused_or_whole(rewritten(path, change), run)) for _ in range(400))
    assert 300 < refused < 400


def test_a_damaged_file_is_refused_wherever_it_is_damaged(run_of: Callable, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    taken(run_of("llama")).save(path)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    broken = tmp_path / "b.safetensors"
    for cut in (0, 4, 8, 20, 8 + header - 1, 8 + header, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:cut])
        with pytest.raises(HybridKVError):
            Snapshot.load(broken)
    rng = np.random.default_rng(0)
    places = [*range(0, 8), *rng.integers(8, 8 + header, 60), *rng.integers(8 + header, len(whole), 60), len(whole) - 1]
    for at in places:
        altered = bytearray(whole)
        altered[at] ^= 1 << int(rng.integers(0, 8))
        broken.write_bytes(altered)
        with pytest.raises(HybridKVError):
            Snapshot.load(broken)
    broken.write_bytes(whole + b"\0")
    with pytest.raises(HybridKVError):
        Snapshot.load(broken)
    assert Snapshot.load(path).position == 155


def test_what_is_not_a_snapshot_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(HybridKVError, match="cannot be read"):
        Snapshot.load(tmp_path / "none")
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(HybridKVError, match="not a snapshot"):
        Snapshot.load(tmp_path / "other")
    for version, words in (("1", "does not say which model"), ("4", "reads versions 2 and 3")):
        save_file({"x": torch.zeros(3)}, tmp_path / "other", {"format": "hybridkv-snapshot", "version": version})
        with pytest.raises(HybridKVError, match=words):
            Snapshot.load(tmp_path / "other")
    (tmp_path / "deep").write_bytes((100000).to_bytes(8, "little") + b"[" * 100000)
    with pytest.raises(HybridKVError, match="not a snapshot"):
        Snapshot.load(tmp_path / "deep")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    run_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    snapshot = taken(run_of("llama"))
    snapshot.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", _no_memory)
    with pytest.raises(MemoryError):
        snapshot.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_file_holds_what_the_request_holds_and_little_more(run_of: Callable, tmp_path: Path) -> None:
    snapshot = taken(run_of("llama"))
    snapshot.save(tmp_path / "a")
    assert snapshot.nbytes < (tmp_path / "a").stat().st_size < snapshot.nbytes + 16384
    assert len(snapshot.fingerprint) == 64 and fingerprint(run_of("llama").manager.schema) == snapshot.fingerprint
