"""A DeepSeek-V4 attention layer on the cache against the same layer one token at a time, in float64.

Bound of a whole f32 layer: the largest error is FLOAT32 of the largest output. Each of some ten steps rounds by 6e-8,
sums of 24 to 96 products add a few such errors, angles up to 300 radians are off by 1.5e-5 / 300 of a turn, and the
softmax multiplies errors of logits by their size, about 5: 5e-7 to 1.5e-6 is what all kinds show.
"""

from functools import cache

import pytest
import torch
from numerics import assert_same_bytes, logit_gap
from torch import Tensor
from v4_layer import WRONG, CachedLayer
from v4_stream import MISTAKES, LayerWeights, Shape, StreamLayer, random_weights

from hybridkv.models import v4_attention

FLOAT32 = 4e-6
KINDS = ("window", "csa", "hca")
RELEASED = Shape(topk=20)  # window 128, entries of 4 and 128 tokens; selection from token 83 on
SMALL = Shape(window=8, hca_ratio=16)  # the window wraps and both kinds flush many times in 100 tokens
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 63, 127, 128, 129, 131, 255, 256, 257, 291)


@cache
def tokens(T: int = 300, seed: int = 1) -> Tensor:
    return torch.randn(T, RELEASED.hidden, generator=torch.Generator().manual_seed(seed))


@cache
def weights(kind: str, shape: Shape = SMALL) -> LayerWeights:
    return random_weights(kind, shape)


@cache
def right(kind: str, shape: Shape = SMALL, T: int = 100, seed: int = 1) -> Tensor:
    return StreamLayer(weights(kind, shape)).run(tokens(T, seed))


def agrees(ref: Tensor, got: Tensor) -> None:
    assert logit_gap(ref, got) <= FLOAT32  # NaN fails


def pieces(T: int, size: int) -> list[int]:
    return [min(size, T - a) for a in range(0, T, size)]


# ---- any length, any chunking


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_any_length_and_what_is_decoded_after_it(kind: str) -> None:
    ref = right(kind, RELEASED, 300)
    for prompt in LENGTHS:
        layer = CachedLayer(weights(kind, RELEASED)).admit(0)
        agrees(ref[: prompt + 6], layer.run(tokens()[: prompt + 6], [prompt] + [1] * 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chunks", ([300], [1] * 140, pieces(140, 3), pieces(300, 50), [128, 128, 44], [127, 2, 1, 126, 4, 40]), ids=len
)
def test_any_chunking(kind: str, chunks: list[int]) -> None:
    layer, T = CachedLayer(weights(kind, RELEASED)).admit(0), sum(chunks)
    agrees(right(kind, RELEASED, 300)[:T], layer.run(tokens()[:T], chunks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", (1, 2, 5, 9, 100))
def test_any_chunking_where_everything_wraps_often(kind: str, size: int) -> None:
    agrees(right(kind), CachedLayer(weights(kind)).admit(0).run(tokens(100), pieces(100, size)))


# ---- several requests


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_one_step_do_not_meet(kind: str) -> None:
    """Three requests in random chunks, one-token ones first; a slot is released and used again by a shorter request."""
    layer, done = CachedLayer(weights(kind), slots=3), dict.fromkeys(range(6), 0)
    length = {0: 60, 1: 90, 2: 37, 3: 3, 4: 70, 5: 26}
    waiting, resident = list(done), []
    out: dict[int, list[Tensor]] = {r: [] for r in done}
    random = torch.Generator().manual_seed(3)
    while waiting or resident:
        while waiting and len(resident) < 3:
            resident.append(waiting.pop(0))
            layer.admit(resident[-1])
        sizes = torch.randint(0, 14, (len(resident),), generator=random).tolist()
        plan = {r: min(max(n - 4, 1), length[r] - done[r]) for r, n in zip(resident, sizes)}
        plan = dict(sorted(plan.items(), key=lambda item: item[1] > 1))
        given = {r: tokens(100, seed=r)[done[r] : done[r] + n] for r, n in plan.items()}
        for r, y in layer.step(given).items():
            out[r].append(y)
            done[r] += plan[r]
            if done[r] == length[r]:
                layer.manager.release_request(r)
                resident.remove(r)
        layer.manager.check_integrity()
    for r, parts in out.items():
        agrees(right(kind, seed=r)[: length[r]], torch.cat(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_are_zeros_and_leave_no_trace(kind: str) -> None:
    """Their tokens are NaN; slots and pages that nobody holds keep their bytes."""
    layer, x = CachedLayer(weights(kind), slots=3).admit("a", "b"), {"a": tokens(100), "b": tokens(100, seed=2)}
    spare = [state[:, 2] for state in layer.manager.state.tensors.values()]  # slots 0 and 1 are taken
    for state in spare:
        state.fill_(7.0)
    layer.step({"a": x["a"][:30], "b": x["b"][:30]})
    for t in range(30, 60):
        out = layer.step({r: rows[t : t + 1] for r, rows in x.items()}, rows=5)
        agrees(right(kind)[t : t + 1], out["a"])
        agrees(right(kind, seed=2)[t : t + 1], out["b"])
        assert not layer.out[2:].any()
    assert all((state == 7.0).all() for state in spare)
    for table in layer.manager.tables.values():
        free = torch.from_numpy(table.allocator.refs == 0)
        assert free.any() and all(t[:, free].isnan().all() for t in table.pool.tensors.values())  # as they were made


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_taken_back_leave_no_trace(kind: str) -> None:
    """Up to 5 wrong tokens after each right one or two, then back, at every phase of windows and entries."""
    layer, x, out, t = CachedLayer(weights(kind), drafts=5).admit(0), tokens(100), [], 0
    wrong = tokens(100, seed=99)
    while t < 100:
        n = min(1 + t % 2, 100 - t)
        out.append(layer.step({0: x[t : t + n]})[0])
        t += n
        layer.step({0: wrong[t % 90 : t % 90 + 1 + t % 5]})
        layer.manager.truncate_request(0, t)
    agrees(right(kind), torch.cat(out))


@pytest.mark.parametrize("kind", KINDS)
def test_forks_share_the_past_and_nothing_else(kind: str) -> None:
    layer, x, y = CachedLayer(weights(kind), slots=2).admit(0), tokens(100), tokens(100, seed=2)
    first = layer.step({0: x[:48]})[0]
    layer.manager.fork_request(0, 1)
    parts = [layer.step({0: x[t : t + 4], 1: y[t : t + 4]}) for t in range(48, 100, 4)]
    agrees(right(kind), torch.cat((first, *(p[0] for p in parts))))
    both = StreamLayer(weights(kind)).run(torch.cat((x[:48], y[48:])))
    agrees(both, torch.cat((first, *(p[1] for p in parts))))


# ---- what is stored


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_gathers_give_what_the_stream_holds(kind: str) -> None:
    stream, layer = StreamLayer(weights(kind)), CachedLayer(weights(kind), slots=2).admit("a", "b")
    stream.run(tokens(100)[:77])
    layer.step({"b": tokens(100, seed=5)[:3]})
    for part in tokens(100)[:77].split([30, 40, 7]):
        layer.step({"a": part})
    handle = layer.handle
    assert handle is not None and (handle.num_query_heads, handle.head_dim) == (3, 96)
    agrees(torch.stack(stream.window), handle.gather_swa_kv(torch.float32)[0])
    view = handle.read_swa_view()
    assert sorted(view.positions[0].tolist()) == list(range(69, 77))
    agrees(torch.stack(stream.rows)[view.positions[0]], view.ring[view.slots[0]])
    if stream.main is None:
        with pytest.raises(ValueError, match="no compressed entries"):
            handle.read_classical_view()
        return
    entries = torch.stack(stream.main.entries)
    assert handle.read_classical_view().lengths.tolist() == [len(entries)]
    agrees(entries, handle.gather_all_compressed_kv(torch.float32)[0])
    hostile = [1, 0, -1, len(entries) - 1, len(entries), 2**31 - 1, -(2**31), 2]
    found = handle.gather_compressed_kv(torch.tensor([hostile] * 7, dtype=torch.int32), torch.float32)
    want = torch.stack([entries[j] if 0 <= j < len(entries) else torch.zeros(96) for j in hostile])
    agrees(want.expand(7, -1, -1), found)
    if stream.index is not None:
        assert handle.read_indexer_view().lengths.tolist() == [len(stream.index.entries)]


@pytest.mark.parametrize("kind", ("csa", "hca"))
def test_a_gate_of_minus_1e9_is_as_good_as_minus_infinity(kind: str) -> None:
    """exp(-1e9) is 0 in every format: nothing changes by a bit."""
    a, b = (StreamLayer(weights(kind), missing=gate).run(tokens(100)) for gate in (-torch.inf, -1e9))
    assert_same_bytes(a, b)
    plain, finite = (CachedLayer(weights(kind)).admit(0) for _ in range(2))
    changed = 0
    for state in finite.manager.state.tensors.values():
        empty = state == -torch.inf
        changed += int(empty.sum())
        state[empty] = -1e9
    assert changed
    assert_same_bytes(plain.run(tokens(100), pieces(100, 3)), finite.run(tokens(100), pieces(100, 3)))


def test_scores_too_many_for_one_piece_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's index scores are made some tokens at a time where they would take too much room."""
    layers = [CachedLayer(weights("csa"), slots=2).admit("a", "b") for _ in range(2)]
    x = {"a": tokens(100), "b": tokens(100, seed=2)[:71]}
    at_once = layers[0].step(x)
    monkeypatch.setattr(v4_attention, "MAX_LOGITS", 25 * 13)  # 13 tokens of 25 entries
    in_pieces = layers[1].step(x)
    for r, seed in (("a", 1), ("b", 2)):
        agrees(right("csa", seed=seed)[: len(x[r])], at_once[r])
        agrees(right("csa", seed=seed)[: len(x[r])], in_pieces[r])


# ---- mistakes


@pytest.mark.parametrize(("mistake", "kind"), [(m, k) for m, kinds in MISTAKES.items() for k in kinds])
def test_a_plausible_mistake_is_far_from_what_the_cache_computes(mistake: str, kind: str) -> None:
    """The stream with one mistake is more than 1% off, thousands of times what is allowed."""
    ours = cached_small(kind)
    agrees(right(kind), ours)
    assert logit_gap(ours, StreamLayer(weights(kind), mistake).run(tokens(100))) > 0.01


@cache
def cached_small(kind: str) -> Tensor:
    return CachedLayer(weights(kind)).admit(0).run(tokens(100), [41, 1, 1, 57])


@pytest.mark.parametrize(("wrong", "kind"), [(m, k) for m, kinds in WRONG.items() for k in kinds])
@pytest.mark.parametrize("chunks", ([48], [1] * 48), ids=("prefill", "decode"))
def test_a_mistake_made_on_the_cache_is_seen(wrong: str, kind: str, chunks: list[int]) -> None:
    layer = CachedLayer(weights(kind), wrong=wrong).admit(0)
    for table in layer.manager.tables.values():
        for tensor in table.pool.tensors.values():
            tensor.zero_()  # pages as a fresh GPU allocation often has them, not poisoned
    assert logit_gap(right(kind)[:48], layer.run(tokens(100)[:48], chunks)) > 0.01
