"""A DeepSeek-V4 attention layer on FP8, FP4 and BF16 pages against the same layer with independently rounded numbers.

Two float32 and float64 computations of one number differ by about 1e-6 of it. Where such a number lies that close to
the middle of two codes they round to neighbours: a flip. Neighbours are 2^-8 of the value apart in BF16, and 2^-4 or
more in the others, so BF16 flips once in some thousand values, and the rest once in some ten thousand.

    stored vectors     the independent rounding's, but for flips, by one step each: FLIPS of all values, and three
    outputs            the stream's on those very vectors, to float32 rounding
    against f32 pages  no farther than the error that the format itself has
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from hybridkv.kernels.gather import flat_entries
from hybridkv.kernels.page_format import load_entries_ref
from numerics import assert_close_rms, logit_gap, rel_rms
from v4_layer import CachedLayer
from v4_stream import LayerWeights, Rounding, Shape, StreamLayer, random_weights

T, FLOAT32, FLIPS = 200, 4e-6, 5e-4
SHAPE = Shape(topk=8, hca_ratio=32)
FORMATS = (("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4"), ("fp8", "fp8"))
KINDS = ("window", "csa", "hca")
# the largest distance of neighbours, over the largest value of a group; scales that are powers of two leave up to half
# of the codes unused
STEP = {"bf16": 2**-7, "fp8": 32 / 224, "fp8_entry": 32 / 448, "mxfp4": 2 / 3, "nvfp4": 2 / 5}
# relative RMS of a stored vector, from uniform errors within a step: E4M3 at most 2^-4 / sqrt(3), BF16 2^-9 / sqrt(3)
ROW_ERROR = {"bf16": 0.0023, "fp8": 0.036, "fp8_entry": 0.036}
# the same of a sum of products; E2M1 2^-2 / sqrt(3), and in mxfp4 queries are rounded too
SCORE_ERROR = {"bf16": 0.0023, "fp8": 0.036, "mxfp4": 0.21, "nvfp4": 0.145}


@cache
def tokens() -> Tensor:
    return torch.randn(T, SHAPE.hidden, generator=torch.Generator().manual_seed(1))


@cache
def weights(kind: str) -> LayerWeights:
    return random_weights(kind, SHAPE)


class Stored:
    """A layer that has run, and all vectors its pages hold."""

    def __init__(self, kind: str, kv: str, index: str) -> None:
        self.layer = layer = CachedLayer(weights(kind), kv, index, max_tokens=T, ring=T).admit(0)
        parts: list[Tensor] = []
        self.chosen: list[list[int]] = []  # of each token
        for x in tokens().split([1, 90, 1, 1, 1, 3, 50, T - 147]):
            parts.append(layer.step({0: x})[0])
            for i in range(len(x) if layer.w.ratio else 0):
                seen = range((len(self.chosen) + 1) // layer.w.ratio)
                self.chosen.append([j for j in (seen if layer.chosen is None else layer.chosen[i].tolist()) if j >= 0])
        self.out, handle = torch.cat(parts), layer.handle
        assert handle is not None and handle.schema.entries.name == kv
        self.rows = load_entries_ref(handle.state["window"], handle.schema.entries, torch.arange(T))
        self.entries = self.keys = torch.empty(0)
        if kind == "window":
            return
        self.entries = handle.gather_all_compressed_kv(torch.float32)[0]
        if handle.schema.index is not None:
            view, pages = handle.read_indexer_view(), handle.paged["index"]
            number = torch.arange(int(view.lengths[0]))
            flat = flat_entries(view.table, view.slots.expand(len(number)), number, pages.shape[1])
            self.keys = load_entries_ref(pages, handle.schema.index, flat)


@cache
def stored(kind: str, kv: str, index: str) -> Stored:
    return Stored(kind, kv, index)


@cache
def rounded(kind: str, kv: str, index: str) -> tuple[StreamLayer, Tensor]:
    stream = StreamLayer(weights(kind), rounding=Rounding.of(kv, index, SHAPE.rope))
    return stream, stream.run(tokens())


def same_but_flips(name: str, ref: list[Tensor], got: Tensor) -> None:
    want = torch.stack(ref)
    assert want.shape == got.shape
    largest, away = want.abs().amax(-1, keepdim=True), (want - got).abs()
    flipped = int((away > 1e-6 * largest).sum())  # 1e-6: scales of f32 may differ in their last bit
    assert flipped <= 3 + FLIPS * want.numel()
    assert (away <= STEP[name] * largest).all()


def replayed(ours: Stored, index: str) -> Rounding:
    """Storage that ignores what it is given and holds our vectors."""
    rows, entries, keys = (iter(x.double()) for x in (ours.rows, ours.entries, ours.keys))
    queries = Rounding.of("f32", index, SHAPE.rope).queries
    return Rounding(lambda _: next(rows), lambda _: next(entries), lambda _: next(keys), queries)


@pytest.mark.parametrize(("kv", "index"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_what_an_independent_rounding_gives(kind: str, kv: str, index: str) -> None:
    ours, (stream, _) = stored(kind, kv, index), rounded(kind, kv, index)
    same_but_flips(kv, stream.rows, ours.rows)
    if stream.main is not None:
        same_but_flips(kv, stream.main.entries, ours.entries)
    if stream.index is not None:
        same_but_flips(index, stream.index.entries, ours.keys)


@pytest.mark.parametrize(("kv", "index"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_stored_vectors(kind: str, kv: str, index: str) -> None:
    """The same entries chosen, the same attention, for every token; and near the stream that rounds on its own."""
    ours = stored(kind, kv, index)
    stream = StreamLayer(weights(kind), rounding=replayed(ours, index))
    out = stream.run(tokens())
    assert stream.chosen == ours.chosen
    assert logit_gap(out, ours.out) <= FLOAT32
    # a flip moves one channel of one of some hundred vectors that a token reads
    assert_close_rms("the rounded stream", rounded(kind, kv, index)[1], ours.out, 1e-3)


@pytest.mark.parametrize("kv", ROW_ERROR)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_costs_what_the_format_says(kind: str, kv: str) -> None:
    """Index keys stay f32: both read the same entries. Keys and values are off by the format's error each."""
    exact, ours = StreamLayer(weights(kind)), stored(kind, kv, "f32")
    out, bound = exact.run(tokens()), ROW_ERROR[kv]
    vectors = [(exact.rows, ours.rows)]
    if exact.main is not None:
        vectors.append((exact.main.entries, ours.entries))
    for ref, got in vectors:
        assert bound / 4 < rel_rms(torch.stack(ref), got) <= bound
    assert bound / 4 < rel_rms(out, ours.out) <= 2 * bound


@pytest.mark.parametrize("index", SCORE_ERROR)
def test_rounded_index_keys_choose_almost_the_same(index: str) -> None:
    """An entry is missed only where scores lie closer than their error: about that part of them."""
    exact, ours = StreamLayer(weights("csa")), stored("csa", "f32", index)
    exact.run(tokens())
    error = rel_rms(torch.cat(exact.scores), torch.cat(rounded("csa", "f32", index)[0].scores))
    assert SCORE_ERROR[index] / 4 < error <= SCORE_ERROR[index]
    chosen = [(set(a), set(b)) for a, b in zip(exact.chosen, ours.chosen, strict=True) if len(a) == SHAPE.topk]
    missed = sum(len(a - b) for a, b in chosen) / (SHAPE.topk * len(chosen))
    assert 0 < missed <= 2 * error
