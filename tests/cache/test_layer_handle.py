"""A step of several requests through a layer's handle: each gets what it would get alone; other rows do not change."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes

from hybridkv import cache
from hybridkv.cache.handle import ForwardStep, LayerHandle, StreamView
from hybridkv.kernels.activation import sigmoid_mul
from hybridkv.kernels.attention.append import append
from hybridkv.kernels.attention.decode import attention_decode
from hybridkv.kernels.attention.prefill import attention_prefill
from hybridkv.kernels.gdn.prefill import gdn_prefill
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.step_index import HostIndex, StepIndex
from hybridkv.models import attention
from hybridkv.models.attention import attend
from hybridkv.models.deltanet import delta_net

SLOTS = 8
# slots of the step and tokens of each: steps alone in one run of rows, out of order, with gaps, beside chunks
STEPS = (
    ([2, 3, 4], [1, 1, 1]),
    ([4, 3, 2], [1, 1, 1]),
    ([0, 2, 7], [1, 1, 1]),
    ([5], [1]),
    ([1, 2, 6, 0], [1, 1, 70, 3]),
    ([6, 1, 3, 0], [1, 1, 2, 129]),
    ([7, 3], [5, 64]),
)


def step_of(slots: list[int], counts: list[int], streams: dict[str, StreamView] | None = None) -> ForwardStep:
    host = HostIndex(np.array(slots), np.zeros(len(slots), np.int64), np.array(counts))
    index = StepIndex.make(slots, [0] * len(slots), counts)
    return ForwardStep(host, index, streams or {}, torch.empty(0))


@pytest.mark.parametrize(("slots", "counts"), STEPS)
def test_state_of_other_slots_stays_bit_for_bit(slots: list[int], counts: list[int]) -> None:
    step, Hk, Hv, K, V = step_of(slots, counts), 1, 3, 8, 6
    conv, decay, bias = torch.randn(2 * Hk * K + Hv * V, 4), torch.rand(Hv), torch.randn(Hv)
    net = DeltaNet(Hk, Hv, K, V, conv, decay, bias, torch.rand(V), 1e-6)
    # this layer's rows are a view of the pool of all layers
    tails, states = torch.randn(2, SLOTS, 3, net.channels), torch.randn(2, SLOTS, Hv, K, V)
    before = tails.clone(), states.clone()
    x = torch.randn(sum(counts), sum(net.columns))
    out = delta_net(LayerHandle(step, None, slice(0), {}, {"conv": tails[1], "recurrent": states[1]}), x, net)
    for slot, a, b in zip(slots, step.query_start_loc, step.query_start_loc[1:]):
        tail, state = before[0][1, slot].clone(), before[1][1, slot].clone()
        alone = gdn_prefill(x[a:b], net, tail, state)
        assert_close_rms(f"slot {slot}", alone, out[a:b], 1e-5)  # f32, batches may be summed otherwise
        assert_same_bytes(tail, tails[1, slot])
        assert_close_rms(f"state of slot {slot}", state, states[1, slot], 1e-5)
        assert not torch.equal(before[1][1, slot], states[1, slot])
    others = [s for s in range(SLOTS) if s not in slots]
    for was, now in zip(before, (tails, states)):
        assert_same_bytes(was[1, others], now[1, others])
        assert_same_bytes(was[0], now[0])


@pytest.mark.parametrize("counts", ([1, 1, 1], [1, 1, 5, 9], [4, 7]))
def test_a_layer_appends_to_and_attends_over_its_own_streams(counts: list[int]) -> None:
    """Two layers of two heads share the pool; the handle of the second sees rows 2 and 3 of the tables."""
    B, T, P, D, heads = len(counts), sum(counts), 4, 16, 2
    after = np.array([[n + 3 * b + s for s in range(4)] for b, n in enumerate(counts)])
    width = -(-int(after.max()) // P)
    table = torch.randperm(B * 4 * width).view(B, 4, width).int()
    owner = np.repeat(np.arange(B), counts)
    inside = np.concatenate([np.arange(n) for n in counts])
    index = torch.empty(4, T, dtype=torch.int64)
    for s in range(4):
        for t in range(T):
            entry = int(after[owner[t], s]) - counts[owner[t]] + int(inside[t])
            index[s, t] = int(table[owner[t], s, entry // P]) * P + entry % P
    pools = {name: torch.randn(B * 4 * width, P, D) for name in ("k", "v")}
    want = {name: pool.clone() for name, pool in pools.items()}
    starts = [0, *np.cumsum(counts).tolist()]
    slots = list(range(B, 0, -1))  # rows of the manager's table, which has one more
    mirror = torch.full((B + 1, 4, width), -1, dtype=torch.int32)
    mirror[slots] = table
    view = StreamView(mirror, after, torch.from_numpy(after), index, int(after.max()))
    handle = LayerHandle(step_of(slots, counts), view, slice(2, 4), pools, {})
    k, v, q = torch.randn(T, heads, D), torch.randn(T, heads, D), torch.randn(T, 6, D)
    handle.append(k, v)
    append(want["k"], want["v"], k, v, index[2:])
    for name in pools:
        assert_same_bytes(want[name], pools[name])
    out = attend(handle, q, 0.25)
    for b, (begin, end) in enumerate(zip(starts, starts[1:])):
        args = (want["k"], want["v"], table[b : b + 1, 2:], after[b : b + 1, 2:])
        part = q[begin:end]
        if counts[b] == 1:
            alone = attention_decode(part, *args, 0.25)
        else:
            alone = attention_prefill(part, *args, [0, counts[b]], 0.25)
        assert_close_rms(f"request {b}", alone, out[begin:end], 1e-6)
    gate = torch.randn(T, 6, 2 * D)[..., D:]
    assert_same_bytes(sigmoid_mul(out, gate).view_as(out), attend(handle, q, 0.25, gate=gate))


def test_single_tokens_are_launched_for_what_the_step_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    after, table = np.array([[3, 5], [9, 2]]), torch.arange(16).view(2, 2, 4).int()
    view, said = StreamView(table, after, torch.from_numpy(after), None, 11), []
    original = attention.attention_decode
    monkeypatch.setattr(attention, "attention_decode", lambda *a, **k: said.append(k["keys"]) or original(*a, **k))
    pools = {name: torch.randn(16, 4, 16) for name in ("k", "v")}
    attend(LayerHandle(step_of([0, 1], [1, 1]), view, slice(0, 2), pools, {}), torch.randn(2, 6, 16), 0.25)
    assert said == [11]


@pytest.mark.parametrize("tail", (0, 1, 3, 64))
@pytest.mark.parametrize(
    ("counts", "window"), (([1, 5, 9], None), ([1, 5, 9], 2), ([1, 5, 9], 7), ([8], 1), ([1, 1], 2))
)
def test_of_the_last_layer_only_tails_are_computed(
    counts: list[int], window: int | None, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wanted and the sums of the window's queries are those of the whole; no other query is looked at."""
    B, T, P, D = len(counts), sum(counts), 4, 16
    after = np.array([[n + 3] * 2 for n in counts])
    table = torch.randperm(B * 2 * 4).view(B, 2, 4).int()
    pools = {name: torch.randn(B * 8, P, D) for name in ("k", "v")}
    view, step, state = StreamView(table, after, torch.from_numpy(after), None, 12), step_of(list(range(B)), counts), {}
    if window is not None:
        made = HostIndex(np.arange(B), np.full(B, 3), np.array(counts)).query_rows(window, np.arange(B))
        step = replace(step, query_rows=torch.from_numpy(made))
        state = {"lse": torch.zeros(B, window, 6)}
    handle, q, gate = LayerHandle(step, view, slice(0, 2), pools, state), torch.randn(T, 6, D), torch.randn(T, 6, D)
    whole, sums = attend(handle, q, 0.25, True, gate), {name: x.clone() for name, x in state.items()}
    for x in state.values():
        x.zero_()
    ran, least = [], 2
    monkeypatch.setattr(attention, "TAIL", least)
    original = attention.attention_prefill
    monkeypatch.setattr(attention, "attention_prefill", lambda q, *a, **k: ran.append(len(q)) or original(q, *a, **k))
    got = attend(LayerHandle(replace(step, tail=tail), view, slice(0, 2), pools, state), q, 0.25, True, gate)
    assert got.shape == whole.shape
    few = [n if n == 1 else min(n, tail) for n in counts]
    for end, n in zip(step.query_start_loc[1:], few):
        assert_close_rms("output", whole[end - n : end], got[end - n : end], 1e-6)
    for name in state:
        assert_close_rms("sums", sums[name], state[name], 1e-6)
    assert sum(ran) == sum(min(n, max(tail, least, window or 0)) for n in counts if n > 1)


def test_the_cache_runs_no_attention_and_no_delta_rule() -> None:
    """Handles show what is stored and write entries; the mixers of models/ compute."""
    computing = re.compile(r"hybridkv\.(models|kernels\.(gdn|attention\.(?!append)|v4\.(sparse|indexer)|topk))")
    files = sorted(Path(cache.__file__).parent.glob("*.py"))
    assert len(files) > 10
    assert [f.name for f in files if computing.search(f.read_text())] == []
    assert computing.search(Path(attention.__file__).read_text())  # guard: the pattern finds such an import
