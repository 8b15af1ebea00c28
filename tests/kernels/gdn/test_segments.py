"""The prompt chunks of a step in one launch: each as if alone, whatever lies beside it."""

import itertools

import pytest
import torch
from gdn_cases import make_net, make_x, start
from numerics import assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.gdn import prefill as module
from hybridkv.kernels.gdn.prefill import gdn_prefill, gdn_prefill_torch, gdn_prefill_triton
from hybridkv.kernels.gdn.segments import Segments, most_parts, pieces
from hybridkv.kernels.gdn.weights import DeltaNet

SLOTS = 7
# (slot, tokens) of each prompt; -1: padding
STEPS = (
    [(3, 70)],
    [(3, 65), (0, 1), (5, 2), (-1, 9)],
    [(1, 64), (2, 0), (6, 128), (-1, 0)],
    [(-1, 5)],
    [(-1, 66), (4, 3)],
)


def spans_of(step: list[tuple[int, int]], first: int = 0) -> list[tuple[int, int, int]]:
    ends = list(itertools.accumulate((n for _, n in step), initial=first))
    return [(slot, a, b) for (slot, _), (a, b) in zip(step, itertools.pairwise(ends))]


def on_device(net: DeltaNet) -> DeltaNet:
    return DeltaNet(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in vars(net).values()))


def states_of(net: DeltaNet) -> tuple[Tensor, Tensor]:
    made = [start(net) for _ in range(SLOTS)]
    return torch.stack([conv for conv, _ in made]).to(DEVICE), torch.stack([state for _, state in made]).to(DEVICE)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", (gdn_prefill_torch, gdn_prefill_triton))
@pytest.mark.parametrize("graph", (False, True))
def test_each_prompt_is_as_if_alone(form, step: list[tuple[int, int]], graph: bool) -> None:  # type: ignore[no-untyped-def]
    """Two decoding rows come first, which are not touched; padding holds NaN and gives zeros; other slots stay."""
    first, net = 2, on_device(make_net(1, 2, 16, 16))
    spans = spans_of(step, first)
    T = spans[-1][2]
    x, (convs, states) = make_x(T, net, torch.float32).to(DEVICE), states_of(net)
    for slot, a, b in spans:
        if slot < 0:
            x[a:b] = torch.nan
    before = convs.clone(), states.clone()
    starts = torch.tensor([first, *(b for _, _, b in spans)], device=DEVICE)
    slots = torch.tensor([slot for slot, _ in step], device=DEVICE)
    segments = Segments.make(slots, starts, most_parts(T, len(step)), None if graph else spans)
    out = torch.full((T, 32), 7.0, device=DEVICE)
    form(x, net, convs, states, segments, out)
    assert (out[:first] == 7).all()
    for slot, a, b in spans:
        if slot < 0:
            assert not out[a:b].any()
            continue
        conv, state, alone = before[0][slot].clone(), before[1][slot].clone(), torch.empty(b - a, 32, device=DEVICE)
        if b > a:
            form(x[a:b], net, conv[None], state[None], Segments.of([(0, 0, b - a)], x.device), alone)
        assert_same_bytes(alone, out[a:b])
        assert_same_bytes(conv, convs[slot])
        assert_same_bytes(state, states[slot])
    others = [slot for slot in range(SLOTS) if slot not in dict(step)]
    assert_same_bytes(before[0][others], convs[others])
    assert_same_bytes(before[1][others], states[others])


def test_parts_cover_every_token_once() -> None:
    starts, slots = torch.tensor([3, 103, 103, 106, 300]), torch.tensor([4, 1, 0, -1])
    found = Segments.make(slots, starts, most_parts(297, 4))
    tokens = [t for _, _, end, first in found.parts.tolist() for t in range(first, min(first + 64, end))]
    assert tokens == list(range(3, 300))
    assert found.ends.tolist() == [2, 2, 3, 7]
    there = [(slot, begin, end) for slot, begin, end, first in found.parts.tolist() if first < end]
    assert there == [(4, 3, 103)] * 2 + [(0, 103, 106)] + [(-1, 106, 300)] * 4
    assert all(slot == -1 for slot, _, end, first in found.parts.tolist() if first >= end)


@pytest.mark.parametrize("most", (64, 128, 4096))
def test_pieces_hold_no_more_than_they_may_and_cut_prompts_at_whole_chunks(most: int) -> None:
    spans = spans_of([(2, 300), (1, 5), (0, 0), (3, 64), (4, 200)])
    found = pieces(spans, most)
    assert all(part[-1][2] - part[0][1] <= most for part in found)
    assert [t for part in found for _, a, b in part for t in range(a, b)] == list(range(569))
    begins = {slot: a for slot, a, _ in spans}
    assert all((a - begins[slot]) % 64 == 0 for part in found for slot, a, _ in part)
    assert all(len({slot for slot, _, _ in part}) == len(part) for part in found)


def test_long_steps_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits stay: a piece ends where a chunk does."""
    net, step = on_device(make_net()), [(3, 130), (0, 40), (5, 70)]
    spans, found = spans_of(step), []
    x, begin = make_x(240, net, torch.float32).to(DEVICE), states_of(net)
    for piece in (1 << 15, 64):
        monkeypatch.setattr(module, "PIECE", piece)
        convs, states = (t.clone() for t in begin)
        out = torch.empty(240, 32, device=DEVICE)
        gdn_prefill_triton(x, net, convs, states, Segments.of(spans, x.device), out)
        found.append((out, convs, states))
    for name, a, b in zip(("output", "conv", "state"), *found, strict=True):
        # a convolution adds what lies in the conv_state last
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_public_function_takes_one_prompt_or_many() -> None:
    net = make_net()
    x, (convs, states) = make_x(30, net, torch.float32), states_of(make_net())
    one, two = (convs.cpu().clone(), states.cpu().clone()), (convs.cpu().clone(), states.cpu().clone())
    alone = gdn_prefill(x, net, one[0][2], one[1][2])
    many = gdn_prefill(x, net, *two, Segments.of([(2, 0, 30)], x.device))
    assert_same_bytes(alone, many)
    assert_same_bytes(one[1], two[1])
