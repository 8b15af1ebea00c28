"""A DeepSeek-V4 attention layer, one token at a time, in float64: what the cache and its kernels are compared with.

Python lists hold the window, the rows that wait in a compressor, entries and index keys. `mistake` names one thing to
do wrong: each is a plausible misreading of the model, and a test that cannot tell it from the right one tests nothing.
`Rounding` is what storage does to rows, entries, index keys and index queries; nothing, unless it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from v4_rounding import Round, key_rounding, query_rounding, row_rounding, unchanged

EPS = 1e-6
MISTAKES = {  # what is wrong -> the kinds of layer it makes a difference to
    "own stream handed to the next entry": ("csa",),
    "streams swapped": ("csa",),
    "entry rotated at its last token": ("csa", "hca"),
    "entry rotated at its middle": ("csa", "hca"),
    "entry rotated at its number": ("csa", "hca"),
    "zero gates before the first token": ("csa",),
    "entry visible one token late": ("csa", "hca"),
    "all entries read": ("csa",),
    "the other kind's rotation": ("window", "csa", "hca"),
    "output not turned back": ("window", "csa", "hca"),
    "no sink": ("window", "csa", "hca"),
    "bias of the next token": ("csa", "hca"),
    "one gate for all channels": ("csa", "hca"),
    "entry not normed": ("csa", "hca"),
    "window one too short": ("window", "csa", "hca"),
    "window one too long": ("window", "csa", "hca"),
    "halves rotated, not pairs": ("window", "csa", "hca"),
    "query not normed": ("window", "csa", "hca"),
    "negative index products count": ("csa",),
    "index weights without sign": ("csa",),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    hidden: int = 48
    heads: int = 3
    head_dim: int = 96  # 80 in FP8: a whole group of 64, and a short one
    rope: int = 16
    q_rank: int = 24
    index_heads: int = 16  # fewer make ties at zero likely
    index_dim: int = 64  # two groups of 32
    topk: int = 5
    window: int = 128
    csa_ratio: int = 4
    hca_ratio: int = 128


def frequencies(rope: int, theta: float, yarn: tuple[float, float, float, float] | None = None) -> Tensor:
    """Turns of a token [rope / 2] in radians, closed form; yarn: factor, original context, beta fast, beta slow."""
    plain = [theta ** (-2 * i / rope) for i in range(rope // 2)]
    if yarn is None:
        return torch.tensor(plain, dtype=torch.float64)
    factor, context, fast, slow = yarn

    def pair(turns: float) -> float:  # the pair that makes so many turns in the context
        return rope * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), rope - 1)
    ramp = [min(max((i - low) / (high - low or 0.001), 0), 1) for i in range(rope // 2)]
    return torch.tensor([f * (1 - r) + f / factor * r for f, r in zip(plain, ramp)], dtype=torch.float64)


def rotate(x: Tensor, angle: Tensor, halves: bool = False) -> Tensor:
    """The last channels of x [..., D], in pairs (2i, 2i + 1), by angle [..., r/2]; halves: pairs (i, i + r/2)."""
    r = 2 * angle.shape[-1]
    still, turned = x[..., : x.shape[-1] - r], x[..., x.shape[-1] - r :]
    a, b = turned.chunk(2, -1) if halves else (turned[..., 0::2], turned[..., 1::2])
    a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat((still, torch.cat((a, b), -1) if halves else torch.stack((a, b), -1).flatten(-2)), -1)


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@dataclass(frozen=True)
class CompressorWeights:
    content: Tensor  # [streams * c, hidden]
    gate: Tensor  # [streams * c, hidden]
    bias: Tensor  # [ratio, streams * c]
    norm: Tensor  # [c]


@dataclass(frozen=True)
class LayerWeights:
    kind: str  # window | csa | hca
    shape: Shape
    turns: Tensor  # [rope / 2] of this kind of layer
    other_turns: Tensor  # of the other kind
    q_down: Tensor  # [q_rank, hidden]
    q_norm: Tensor  # [q_rank]
    q_up: Tensor  # [heads * head_dim, q_rank]
    kv: Tensor  # [head_dim, hidden]
    kv_norm: Tensor  # [head_dim]
    sink: Tensor  # [heads]
    main: CompressorWeights | None = None
    index: CompressorWeights | None = None
    index_q: Tensor | None = None  # [index_heads * index_dim, q_rank]
    index_weights: Tensor | None = None  # [index_heads, hidden]

    @property
    def ratio(self) -> int:
        return {"window": 0, "csa": self.shape.csa_ratio, "hca": self.shape.hca_ratio}[self.kind]

    def cast(self, dtype: torch.dtype) -> LayerWeights:
        def changed(x: object) -> object:
            if isinstance(x, CompressorWeights):
                return CompressorWeights(*(getattr(x, f.name).to(dtype) for f in fields(x)))
            return x.to(dtype) if isinstance(x, Tensor) else x

        return LayerWeights(**{f.name: changed(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]


def random_weights(kind: str, shape: Shape, seed: int = 0) -> LayerWeights:
    """Numbers of float32, in float64; attention and gates far from uniform, all norms, biases and sinks at work."""
    g, s = torch.Generator().manual_seed(seed), shape

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=g) * gain * columns**-0.5).double()

    def norm(n: int, gain: float = 1.0) -> Tensor:
        return (gain * (1 + 0.3 * torch.randn(n, generator=g))).double()

    def compressor(streams: int, c: int, ratio: int) -> CompressorWeights:
        content, gate = matrix(streams * c, s.hidden), matrix(streams * c, s.hidden, 1.5)
        content[-c:] *= 1.4  # the streams differ in size too
        return CompressorWeights(content, gate, torch.randn(ratio, streams * c, generator=g).double(), norm(c, 1.5))

    plain, scaled = frequencies(s.rope, 1e4), frequencies(s.rope, 1.6e5, (16, 1024, 32, 1))
    turns = (plain, scaled) if kind == "window" else (scaled, plain)
    common = (
        matrix(s.q_rank, s.hidden), norm(s.q_rank), matrix(s.heads * s.head_dim, s.q_rank),
        matrix(s.head_dim, s.hidden), norm(s.head_dim, 1.5), torch.randn(s.heads, generator=g).double() + 2,
    )  # fmt: skip
    if kind == "window":
        return LayerWeights(kind, s, *turns, *common)
    if kind == "hca":
        return LayerWeights(kind, s, *turns, *common, compressor(1, s.head_dim, s.hca_ratio))
    main, index = (compressor(2, c, s.csa_ratio) for c in (s.head_dim, s.index_dim))
    index_q, index_weights = matrix(s.index_heads * s.index_dim, s.q_rank), matrix(s.index_heads, s.hidden)
    return LayerWeights(kind, s, *turns, *common, main, index, index_q, index_weights)


@dataclass(frozen=True)
class Rounding:
    rows: Round = unchanged  # of the window
    entries: Round = unchanged
    keys: Round = unchanged
    queries: Round = unchanged

    @staticmethod
    def of(kv: str, index: str, rope: int) -> Rounding:
        stored = row_rounding(kv, rope)
        return Rounding(stored, stored, key_rounding(index), query_rounding(index))


class StreamCompressor:
    """Entries of one request: `open` holds the rows of the window that is not full, `before` those of the last one."""

    def __init__(self, weights: CompressorWeights, turns: Tensor, store: Round, mistake: str, missing: float) -> None:
        self.weights, self.turns, self.store, self.mistake, self.missing = weights, turns, store, mistake, missing
        self.ratio, self.overlap = len(weights.bias), weights.bias.shape[1] == 2 * len(weights.norm)
        self.open: list[tuple[Tensor, Tensor]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.entries: list[Tensor] = []

    def push(self, x: Tensor, t: int) -> None:
        w, late = self.weights, self.mistake == "bias of the next token"
        self.open.append((w.content @ x, w.gate @ x + w.bias[(t + late) % self.ratio]))
        if len(self.open) == self.ratio:
            self.entries.append(self.store(self.finished(self.pooled(), t)))
            self.before, self.open = self.open, []

    def pooled(self) -> Tensor:
        c = len(self.weights.norm)
        after, own = slice(0, c), slice(c, 2 * c)  # channels for the next entry, and for the window's own
        if self.mistake == "streams swapped":
            after, own = own, after
        if self.mistake == "own stream handed to the next entry":
            after = own
        rows = [(p[own], z[own]) for p, z in self.open] if self.overlap else self.open
        if self.overlap:
            gone = 0.0 if self.mistake == "zero gates before the first token" else self.missing
            nothing = torch.zeros(c, dtype=torch.float64), torch.full((c,), gone, dtype=torch.float64)
            rows = ([(p[after], z[after]) for p, z in self.before] or [nothing] * self.ratio) + rows
        content, gates = (torch.stack(part) for part in zip(*rows))
        if self.mistake == "one gate for all channels":
            gates = gates.mean(1, keepdim=True)
        return (gates.softmax(0) * content).sum(0)

    def finished(self, entry: Tensor, t: int) -> Tensor:
        first = t + 1 - self.ratio
        at = {
            "entry rotated at its last token": t,
            "entry rotated at its middle": (first + t) / 2,
            "entry rotated at its number": first // self.ratio,
        }.get(self.mistake, first)
        if self.mistake != "entry not normed":
            entry = normed(entry, self.weights.norm)
        return rotate(entry, at * self.turns, self.mistake == "halves rotated, not pairs")


class StreamLayer:
    """The layer of one request. `missing`: the gate of tokens before the first."""

    def __init__(
        self, weights: LayerWeights, mistake: str = "", rounding: Rounding | None = None, missing: float = -math.inf
    ) -> None:
        assert not mistake or weights.kind in MISTAKES[mistake]
        self.w, self.mistake, self.rounding = weights, mistake, rounding or Rounding()
        self.turns = weights.other_turns if mistake == "the other kind's rotation" else weights.turns
        self.width = weights.shape.window + {"window one too short": -1, "window one too long": 1}.get(mistake, 0)
        stores = (self.rounding.entries, self.rounding.keys)
        self.main, self.index = (
            StreamCompressor(c, self.turns, store, mistake, missing) if c is not None else None
            for c, store in zip((weights.main, weights.index), stores)
        )
        self.window: list[Tensor] = []  # the last `width` rows
        self.rows: list[Tensor] = []  # all of them, to compare with
        self.chosen: list[list[int]] = []  # of each token, the entries it reads
        self.scores: list[Tensor] = []  # of each token, one for every entry it could read

    def turned(self, x: Tensor, t: int, sign: int = 1) -> Tensor:
        return rotate(x, sign * t * self.turns, self.mistake == "halves rotated, not pairs")

    def choose(self, x: Tensor, q_low: Tensor, t: int, visible: int) -> list[int]:
        s, w = self.w.shape, self.w
        if self.index is None:
            return list(range(visible))
        assert w.index_q is not None and w.index_weights is not None
        self.scores.append(torch.zeros(0))
        if visible <= s.topk or self.mistake == "all entries read":
            return list(range(visible))
        q = self.rounding.queries(self.turned((w.index_q @ q_low).view(s.index_heads, -1), t))
        products = q @ torch.stack(self.index.entries[:visible]).T
        if self.mistake != "negative index products count":
            products = products.relu()
        weights = w.index_weights @ x
        if self.mistake == "index weights without sign":
            weights = weights.abs()
        self.scores[-1] = (weights[:, None] * products).sum(0) * (s.index_heads * s.index_dim) ** -0.5
        return sorted(self.scores[-1].topk(s.topk).indices.tolist())

    def step(self, x: Tensor) -> Tensor:
        """x [hidden] of the next token -> [heads, head_dim], before the output projection."""
        s, w, t = self.w.shape, self.w, len(self.rows)
        q_low = normed(w.q_down @ x, w.q_norm)
        q = (w.q_up @ q_low).view(s.heads, s.head_dim)
        q = self.turned(q if self.mistake == "query not normed" else normed(q), t)
        self.rows.append(self.rounding.rows(self.turned(normed(w.kv @ x, w.kv_norm), t)))
        self.window = [*self.window, self.rows[-1]][-self.width :]
        keys = list(self.window)
        if self.main is not None:
            self.main.push(x, t)
            if self.index is not None:
                self.index.push(x, t)
            seen = t if self.mistake == "entry visible one token late" else t + 1
            self.chosen.append(self.choose(x, q_low, t, seen // w.ratio))
            keys += [self.main.entries[j] for j in self.chosen[-1]]
        k = torch.stack(keys)
        logits = q @ k.T * s.head_dim**-0.5
        sink = torch.full_like(w.sink, -math.inf) if self.mistake == "no sink" else w.sink
        o = torch.cat((logits, sink[:, None]), 1).softmax(1)[:, :-1] @ k
        return o if self.mistake == "output not turned back" else self.turned(o, t, -1)

    def run(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, heads, head_dim]."""
        return torch.stack([self.step(row) for row in x.double()])
