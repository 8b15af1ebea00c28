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
from numerics import assert_close_rms, logit_gap, rel_rms
from torch import Tensor
from v4_layer import CachedLayer, stored_vectors
from v4_rounding import count_flips
from v4_stream import LayerWeights, Rounding, Shape, StreamLayer, random_weights

T, FLOAT32, FLIPS = 200, 4e-6, 5e-4
SHAPE = Shape(topk=8, hca_ratio=32)
FORMATS = (("bf16", "bf16"), ("fp8", "mxfp4"), ("fp8_entry", "nvfp4"), ("fp8", "fp8"))
KINDS = ("window", "csa", "hca")
# relative RMS of a stored vector, from uniform errors within a step: E4M3 at most 2^-4 / sqrt(3), BF16 2^-8 / sqrt(3)
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
        assert layer.handle is not None and layer.handle.schema.entries.name == kv
        self.out, self.vectors = torch.cat(parts), stored_vectors(layer.handle, T)


@cache
def stored(kind: str, kv: str, index: str) -> Stored:
    return Stored(kind, kv, index)


@cache
def rounded(kind: str, kv: str, index: str) -> tuple[StreamLayer, Tensor]:
    stream = StreamLayer(weights(kind), rounding=Rounding.of(kv, index, SHAPE.rope))
    return stream, stream.run(tokens())


def vectors_of(stream: StreamLayer) -> dict[str, Tensor]:
    found = {"rows": torch.stack(stream.rows)}
    for name, compressor in (("entries", stream.main), ("keys", stream.index)):
        if compressor is not None:
            found[name] = torch.stack(compressor.entries)
    return found


def replayed(ours: Stored, index: str) -> Rounding:
    """Storage that ignores what it is given and holds our vectors."""
    rows, entries, keys = (
        iter(ours.vectors.get(name, torch.empty(0)).double()) for name in ("rows", "entries", "keys")
    )
    queries = Rounding.of("f32", index, SHAPE.rope).queries
    return Rounding(lambda _: next(rows), lambda _: next(entries), lambda _: next(keys), queries)


@pytest.mark.parametrize(("kv", "index"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_what_an_independent_rounding_gives(kind: str, kv: str, index: str) -> None:
    ours, want = stored(kind, kv, index).vectors, vectors_of(rounded(kind, kv, index)[0])
    assert ours.keys() == want.keys()
    for name, vectors in want.items():
        flips = count_flips(index if name == "keys" else kv, vectors, ours[name], noise=1e-6)
        assert flips <= 3 + FLIPS * vectors.numel()


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
    for name, vectors in vectors_of(exact).items():
        if name != "keys":
            assert bound / 4 < rel_rms(vectors, ours.vectors[name]) <= bound
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
