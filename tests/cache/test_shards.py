"""Caches cut by head and joined: the same bytes at every number of ranks; what does not belong together is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_same_bytes

from engine.driving import assert_nothing_held, prompt, run
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager
from hybridkv.cache.facts import Compaction
from hybridkv.cache.heads import HeadCounts, Shard, check_ranks, cut_schema
from hybridkv.cache.session import Session
from hybridkv.cache.shards import cut, cut_session, join, join_sessions, to_send
from hybridkv.cache.snapshot import Snapshot, fingerprint
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import Ada, Evictor, SnapKV
from hybridkv.models import cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.models.random_weights import random_decoder
from hybridkv.models.schemas import head_counts

pytestmark = pytest.mark.usefixtures("weights_measured_once")

RANKS = (1, 2, 4)
# 2 KV heads, so that on 4 ranks each is on two; three V heads to a K head; no two sizes alike
QWEN = KNOWN["Qwen3.5-27B"] | dict(
    hidden_size=32, vocab_size=97, max_position_embeddings=512, num_hidden_layers=4, full_attention_interval=2,
    intermediate_size=48, num_attention_heads=8, num_key_value_heads=2, head_dim=8, linear_num_key_heads=4,
    linear_num_value_heads=12, linear_key_head_dim=5, linear_value_head_dim=7,
)  # fmt: skip
LLAMA = dict(
    model_type="llama", hidden_size=32, vocab_size=97, max_position_embeddings=512, num_hidden_layers=3,
    intermediate_size=48, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
)  # fmt: skip
CACHES: dict[str, dict[str, Any]] = {
    "whole": dict(kv_dtype="f32", page_size=4),
    "fp8": dict(kv_dtype="fp8", page_size=4),
    "uneven": dict(kv_dtype="f32", page_size=4, budget=12, window=4, recent=4, policy=Ada(SnapKV()), decode_every=5),
}


@cache
def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return random_decoder(ModelConfig.from_dict({"llama": LLAMA, "qwen": QWEN}[kind]), "cpu", torch.float32)


def engine_with(kind: str, name: str) -> Engine:
    model, config = model_of(kind), CacheConfig(**CACHES[name])
    schema = cache_schema(model.config, config, torch.float32)
    manager = KVCacheManager(schema, schema.pool_pages(1, 256), 3, 256)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    return Engine(model, manager, step_tokens=64, evictor=evictor)


def exported(engine: Engine, **how: Any) -> Session:
    request = engine.add(prompt(45), SamplingParams(max_tokens=77, temperature=1.0, seed=8), hold=True, **how)
    while request.answer_tokens < 13:
        engine.step()
    session = engine.export(request)
    assert session.snapshot is not None
    return session


def same(a: Snapshot, b: Snapshot) -> None:
    """All of it, byte for byte."""
    assert (a.fingerprint, a.model, a.position) == (b.fingerprint, b.model, b.position)
    assert a.lengths.keys() == b.lengths.keys() and (a.compaction is None) == (b.compaction is None)
    for name in a.lengths:
        assert np.array_equal(a.lengths[name], b.lengths[name])
    for mine, others in ((a.entries, b.entries), (a.states, b.states)):
        assert mine.keys() == others.keys()
        for key in mine:
            assert_same_bytes(mine[key], others[key])
    if a.compaction is not None and b.compaction is not None:
        assert a.compaction.position == b.compaction.position and a.compaction.kept.keys() == b.compaction.kept.keys()
        for name, kept in a.compaction.kept.items():
            assert [k.tolist() for k in kept] == [k.tolist() for k in b.compaction.kept[name]]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("kind", ("llama", "qwen"))
def test_cut_for_some_ranks_and_joined_is_the_same_at_any_other_number(kind: str, name: str) -> None:
    engine = engine_with(kind, name)
    whole, schema, counts = exported(engine), engine.manager.schema, head_counts(model_of(kind).config)
    snapshot = whole.snapshot
    assert snapshot is not None
    if name == "uneven":
        assert len(set(snapshot.lengths["attention"].tolist())) > 1 and len(whole.evictions) > 1
    for n in RANKS:
        parts = [cut_session(whole, schema, counts, Shard(rank, n)) for rank in range(n)]
        held = [part.snapshot for part in parts if part.snapshot is not None]
        assert {part.fingerprint for part in held} == {fingerprint(cut_schema(schema, counts, n))}
        assert sum(part.nbytes for part in held) >= snapshot.nbytes
        sent = [to_send(part, counts, Shard(rank, n)) for rank, part in enumerate(held)]
        assert sum(part.nbytes for part in sent) == snapshot.nbytes, "every byte once"
        once = [replace(part, snapshot=each) for part, each in zip(parts, sent, strict=True)]
        back = join_sessions(once, schema, counts)
        assert back.snapshot is not None
        same(back.snapshot, snapshot)
        same(join(held, schema, counts), snapshot)  # copies that were sent all the same change nothing
        for m in RANKS:
            for rank in range(m):
                again, direct = (cut_session(each, schema, counts, Shard(rank, m)) for each in (back, whole))
                assert again.snapshot is not None and direct.snapshot is not None
                same(again.snapshot, direct.snapshot)
                assert again.evictions.keys() == direct.evictions.keys()
                for at, record in again.evictions.items():
                    assert np.array_equal(record.lengths, direct.evictions[at].lengths)
                    assert np.array_equal(record.counts(), direct.evictions[at].counts())


@pytest.mark.parametrize("name", ("whole", "uneven"))
@pytest.mark.parametrize("ranks", (2, 4))
def test_a_joined_request_goes_on_with_the_same_tokens(ranks: int, name: str) -> None:
    here, there = engine_with("qwen", name), engine_with("qwen", name)
    whole, schema, counts = exported(here), here.manager.schema, head_counts(model_of("qwen").config)
    parts = [cut_session(whole, schema, counts, Shard(rank, ranks)) for rank in range(ranks)]
    eviction = here.scheduler.running[0].eviction  # its policy is code, and is given again
    moved = there.resume(join_sessions(parts, schema, counts), hold=True, eviction=eviction)
    run(there), run(here)
    [first] = here.scheduler.held
    assert moved.tokens == first.tokens and moved.cached_tokens == 45
    same(there.export(moved).snapshot, here.export(first).snapshot)  # type: ignore[arg-type]
    there.abort(moved)
    assert_nothing_held(there)


def test_every_number_goes_where_its_head_is() -> None:
    """Numbers that say what they are: layer, head, channel. Written out in loops, for 4 ranks and 2 KV heads."""
    engine = engine_with("qwen", "uneven")
    schema, counts, config = engine.manager.schema, head_counts(model_of("qwen").config), model_of("qwen").config
    gdn, G, D = config.gdn, config.kv_heads, config.head_dim
    lengths = np.array([3, 5, 2, 4])  # (layer, KV head)
    entries = torch.cat([torch.full((1, int(n), D), float(i)) for i, n in enumerate(lengths)], 1)
    keys = gdn.key_heads * gdn.key_dim
    conv, recurrent = torch.zeros(2, 3, gdn.channels), torch.zeros(2, 12, 5, 7)
    for head in range(gdn.key_heads):  # 100: q, 200: k, 300: v
        conv[..., head * 5 : head * 5 + 5] = 100 + head
        conv[..., keys + head * 5 : keys + head * 5 + 5] = 200 + head
    for head in range(gdn.value_heads):
        conv[..., 2 * keys + head * 7 : 2 * keys + head * 7 + 7] = 300 + head
        recurrent[:, head] = head
    queries = torch.arange(8.0)[:, None].expand(2, 4, 8, D).contiguous()
    states = {("gdn", "conv"): conv, ("gdn", "recurrent"): recurrent, ("queries", "queries"): queries}
    states["queries", "lse"] = torch.arange(8.0).expand(2, 4, 8).contiguous()
    held = {("attention", key): entries for key in ("k", "v")}
    snapshot = Snapshot(fingerprint(schema), "", 9, {"attention": lengths}, held, states, None)
    for rank in range(4):
        part, g = cut(snapshot, schema, counts, Shard(rank, 4)), rank * G // 4
        assert part.lengths["attention"].tolist() == [lengths[g], lengths[G + g]]
        assert part.entries["attention", "k"][0, :, 0].tolist() == [g] * lengths[g] + [G + g] * lengths[G + g]
        v = [3 * rank, 3 * rank + 1, 3 * rank + 2]  # the V heads of K head `rank`
        assert part.states["gdn", "recurrent"][1, :, 0, 0].tolist() == v
        want = [100 + rank] * 5 + [200 + rank] * 5 + [300 + h for h in v for _ in range(7)]
        assert part.states["gdn", "conv"][1, 2].tolist() == want
        assert part.states["queries", "queries"][0, 3, :, 0].tolist() == [2 * rank, 2 * rank + 1]
        assert part.states["queries", "lse"][1, 0].tolist() == [2 * rank, 2 * rank + 1]
        assert (to_send(part, counts, Shard(rank, 4)).lengths == {}) == (rank in (1, 3))


def test_the_sizes_that_work_are_those_of_the_released_models() -> None:
    for name, good in (
        ("Qwen3.5-0.8B", {1, 2, 4, 8}),
        ("Qwen3.5-27B", {1, 2, 4, 8}),
        ("Qwen3.5-35B-A3B", {1, 2, 4, 8, 16}),
        ("Qwen3.5-122B-A10B", {1, 2, 4, 8, 16}),
    ):
        counts = head_counts(ModelConfig.from_dict(KNOWN[name]))
        assert {n for n in range(1, 65) if counts.fits(n)} == good, name
    with pytest.raises(HybridKVError, match=r"cannot be on 4 ranks; 1, 3, 9 can"):
        check_ranks(HeadCounts(9, 3), 4)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    engine = engine_with("qwen", "uneven")
    whole, schema, counts = exported(engine), engine.manager.schema, head_counts(model_of("qwen").config)
    parts = [cut_session(whole, schema, counts, Shard(rank, 4)) for rank in range(4)]
    held = [part.snapshot for part in parts if part.snapshot is not None]
    a, b, c, d = held

    def refused(words: str, do: Callable[[], object]) -> None:
        with pytest.raises(RequestError, match=words):
            do()

    refused("rank 1 holds another", lambda: join([a, replace(b, position=b.position - 1), c, d], schema, counts))
    refused("rank 2 holds another", lambda: join([a, b, replace(c, model="x"), d], schema, counts))
    refused("rank 0 of 2", lambda: join([a, b], schema, counts))
    refused("not one of the whole schema", lambda: cut(a, schema, counts, Shard(0, 2)))
    refused("rank 0 of 4 has sent no entries", lambda: join([without(a), b, c, d], schema, counts))
    longer = replace(b, lengths={"attention": b.lengths["attention"] + [1, -1]})
    refused("same KV head", lambda: join([a, longer, c, d], schema, counts))
    broken = replace(d, states=d.states | {("gdn", "recurrent"): d.states["gdn", "recurrent"][:, 1:]})
    refused("rank 3 of 4", lambda: join([a, b, c, broken], schema, counts))
    refused("3 of 4 ranks have", lambda: join_sessions([*parts[:3], replace(parts[3], snapshot=None)], schema, counts))
    other = replace(parts[2], tokens=[*parts[2].tokens, 1])
    refused("another part of its answer", lambda: join_sessions([*parts[:2], other, parts[3]], schema, counts))


@pytest.mark.parametrize("earlier", (None, 20))
def test_a_rank_that_had_nothing_to_drop_when_others_had_is_joined_with_them(earlier: int | None) -> None:
    engine = engine_with("qwen", "whole")
    whole, schema, counts = exported(engine), engine.manager.schema, head_counts(model_of("qwen").config)
    assert whole.snapshot is not None and whole.snapshot.compaction is None

    def at(snapshot: Snapshot, position: int | None) -> Snapshot:
        """As if it had been compacted there, and nothing dropped."""
        kept = {"attention": [np.arange(position or 0)] * len(snapshot.lengths["attention"])}
        return replace(snapshot, compaction=None if position is None else Compaction(position, kept))

    a, b = (at(cut(whole.snapshot, schema, counts, Shard(rank, 2)), place) for rank, place in ((0, 30), (1, earlier)))
    same(join([a, b], schema, counts), at(whole.snapshot, 30))
    same(join([b, a], schema, counts), join([at(b, 30), a], schema, counts))
    fewer = replace(b, lengths={"attention": b.lengths["attention"] - 1})  # it was compacted, and does not say so
    with pytest.raises(RequestError, match="rank 1 holds another request than rank 0, or stands elsewhere"):
        join([a, fewer], schema, counts)


def without(part: Snapshot) -> Snapshot:
    past = part.compaction
    return replace(part, lengths={}, entries={}, compaction=past and replace(past, kept={}))
