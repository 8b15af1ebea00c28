"""The score kernels against softmax by its definition in float64; what they must not read is NaN."""

from dataclasses import dataclass

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction.score import CONFIGS, ScoreBlocks, window_scores_ref, window_scores_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_decode_ref, fp8_encode_ref
from hybridkv.kernels.formats.kv_format import Pages

pytest.importorskip("triton")

# Inputs are exact in both forms, products are summed in f32: errors of a few 2^-24 in a score, which a weight takes
# over as they are. Seen 3e-7; the bound leaves room for the order of the sums.
BOUND = 1e-5
# Against keys that were not quantised: an FP8 key is off by up to 1/16 a value, about 2.6 % RMS, so a score of
# variance 1 moves by about 0.026 and a weight by as much.
FP8_BOUND = 0.06


@dataclass
class Case:
    q: Tensor  # [W, H, D]
    when: Tensor  # [W]
    pages: Pages
    table: Tensor
    positions: Tensor
    keys: list[Tensor]  # per stream, as stored, float64
    exact: list[Tensor]  # before quantisation

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def on(self, device: str) -> tuple[Tensor, Tensor, Pages, Tensor, Tensor, float]:
        p = self.pages
        p = Fp8Pages(*(t.to(device) for t in p)) if isinstance(p, Fp8Pages) else p.to(device)
        where = (self.q, self.when, self.table, self.positions)
        q, when, table, positions = (t.to(device) for t in where)
        return q, when, p, table, positions, self.scale

    def sums(self) -> Tensor:
        """[W, H] f32: log-sum-exp of what each query sees; -inf where that is nothing."""
        W, H, _ = self.q.shape
        R, out = H // len(self.positions), torch.full((W, H), -torch.inf)
        for w, h in torch.cartesian_prod(torch.arange(W), torch.arange(H)).tolist():
            k = self.keys[h // R]
            seen = self.positions[h // R, : len(k)] <= self.when[w]
            out[w, h] = (k[seen] @ self.q[w, h].double() * self.scale).logsumexp(0)
        return out

    def truth(self, keys: list[Tensor]) -> Tensor:
        (W, H, _), (G, L) = self.q.shape, self.positions.shape
        out = torch.zeros(H, L, dtype=torch.float64)
        for h in range(H):
            k = keys[h // (H // G)]
            at = self.positions[h // (H // G), : len(k)]
            for w in range(W):
                seen = at <= self.when[w]
                if seen.any():
                    s = (k @ self.q[w, h].double() * self.scale).masked_fill(~seen, -torch.inf)
                    out[h, : len(k)] += s.softmax(0)
        return out


def make(kind: str, W: int, R: int, D: int, P: int, lengths: tuple[int, ...], gaps: bool = False) -> Case:
    """`gaps`: a compacted request, whose positions have holes and differ from stream to stream."""
    G, L = len(lengths), max(lengths)
    held = [-(-n // P) for n in lengths]
    order = iter((torch.randperm(sum(held) + 1) + 1).tolist())
    pages = torch.full((sum(held) + 3, P, D), torch.nan)
    table = torch.full((G, max(held, default=0) + 2), -1, dtype=torch.int32)
    positions = torch.full((G, L), -1, dtype=torch.int64)
    exact = []
    for g, n in enumerate(lengths):
        mine = [next(order) for _ in range(held[g])]
        table[g, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        exact.append(torch.randn(n, D))
        for i in range(n):
            pages[mine[i // P], i % P] = exact[g][i]
        at = torch.arange(n) + L - n
        positions[g, :n] = torch.randperm(3 * L)[:n].sort().values - 3 * L + L if gaps else at
    positions = torch.where(torch.arange(L) < torch.tensor(lengths)[:, None], positions.clamp(min=0), -1)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    q, when = torch.randn(W, G * R, D).to(dtype), torch.arange(L - W, L)
    stored: Pages = pages.to(dtype)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(pages)
        codes[pages.isnan()], scale[pages.isnan().any(-1)] = 0x7F, torch.nan
        stored, keys = Fp8Pages(codes, scale), [fp8_decode_ref(*fp8_encode_ref(k)).double() for k in exact]
    else:
        keys = [k.to(dtype).double() for k in exact]
    if kind == "bf16-f32":
        q = torch.randn(W, G * R, D)
    return Case(q, when, stored, table, positions, keys, [k.double() for k in exact])


CASES = {
    "one key, one query": dict(W=1, R=1, D=8, P=2, lengths=(1,)),
    "one stream is empty": dict(W=2, R=2, D=32, P=16, lengths=(0, 5)),
    "odd everything": dict(W=5, R=3, D=40, P=53, lengths=(131, 77)),
    "pages of one": dict(W=4, R=1, D=16, P=1, lengths=(70,)),
    "pages of two, window longer than the stream": dict(W=9, R=2, D=64, P=2, lengths=(67, 3)),
    "many blocks": dict(W=3, R=2, D=100, P=64, lengths=(385,)),
    "wide heads": dict(W=17, R=2, D=256, P=64, lengths=(129, 64)),
    "holes": dict(W=6, R=2, D=32, P=16, lengths=(90, 61), gaps=True),
    "the largest window": dict(W=128, R=1, D=16, P=64, lengths=(140,)),
}


@pytest.mark.parametrize("kind", ("f32", "bf16", "bf16-f32", "fp8"))
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_their_definition(case: str, kind: str) -> None:
    c = make(kind, **CASES[case])  # type: ignore[arg-type]
    got = window_scores_triton(*c.on(DEVICE)).cpu()
    assert_close_rms("scores", c.truth(c.keys), got, BOUND)
    past = c.positions < 0
    assert (got.view(len(past), -1, past.shape[1]).transpose(1, 2)[past] == 0).all()
    assert_close_rms("reference", c.truth(c.keys), window_scores_ref(*c.on("cpu")), BOUND)
    if kind == "fp8":
        assert_close_rms("scores of the keys before FP8", c.truth(c.exact), got, FP8_BOUND)


@pytest.mark.parametrize("kind", ("f32", "bf16", "bf16-f32", "fp8"))
@pytest.mark.parametrize("case", CASES)
def test_one_pass_is_enough_where_the_sums_are_known(case: str, kind: str) -> None:
    c = make(kind, **CASES[case])  # type: ignore[arg-type]
    wide = torch.full((c.q.shape[0], c.q.shape[1] + 3), torch.nan)
    wide[:, 1:-2] = c.sums()  # a slice of a wider row
    got = window_scores_triton(*c.on(DEVICE), wide.to(DEVICE)[:, 1:-2]).cpu()
    assert_close_rms("scores", c.truth(c.keys), got, BOUND)
    assert (got.view(len(c.positions), -1, got.shape[1]).transpose(1, 2)[c.positions < 0] == 0).all()
    assert_close_rms("reference", c.truth(c.keys), window_scores_ref(*c.on("cpu"), c.sums()), BOUND)


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_launch_configuration_agrees(kind: str, config: ScoreBlocks) -> None:
    c = make(kind, W=16, R=2, D=48, P=16, lengths=(150, 91))
    assert_close_rms(str(config), c.truth(c.keys), window_scores_triton(*c.on(DEVICE), config=config).cpu(), BOUND)


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
def test_page_size_and_page_order_change_no_bit(kind: str) -> None:
    outs = []
    for P in (2, 16, 53):
        torch.manual_seed(1)
        c = make(kind, W=4, R=2, D=32, P=16, lengths=(150,))
        entries = [p.view(-1, *p.shape[2:]) for p in (c.pages if isinstance(c.pages, Fp8Pages) else (c.pages,))]
        flat = c.table[0].repeat_interleave(16)[:150].long() * 16 + torch.arange(150) % 16
        N = -(-150 // P)
        order = torch.randperm(N)
        place = order[torch.arange(150) // P] * P + torch.arange(150) % P
        moved = []
        for e in entries:
            new = torch.zeros(N * P, *e.shape[1:], dtype=e.dtype)
            new[place] = e[flat]
            moved.append(new.view(N, P, *e.shape[1:]))
        c.pages, c.table = (Fp8Pages(*moved) if kind == "fp8" else moved[0]), order.int()[None]
        outs.append(window_scores_triton(*c.on(DEVICE)))
    assert_same_bytes(outs[0], outs[1])
    assert_same_bytes(outs[0], outs[2])


def test_a_query_that_sees_no_key_adds_nothing() -> None:
    c = make("f32", W=3, R=1, D=16, P=16, lengths=(20,))
    c.positions = c.positions + 18  # keys 18 .. 37, queries 17, 18, 19
    known = c.sums()
    assert known[0].isneginf().all()
    for got in (
        window_scores_triton(*c.on(DEVICE)).cpu(), window_scores_ref(*c.on("cpu")),
        window_scores_triton(*c.on(DEVICE), known.to(DEVICE)).cpu(), window_scores_ref(*c.on("cpu"), known),
    ):  # fmt: skip
        assert_close_rms("scores", c.truth(c.keys), got, BOUND)
        assert got.sum().item() == pytest.approx(2)


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
def test_a_key_that_is_nan_is_not_hidden(kind: str) -> None:
    c = make(kind, W=2, R=1, D=16, P=16, lengths=(20,))
    page = int(c.table[0, 0])
    if isinstance(c.pages, Fp8Pages):
        c.pages.values[page, 3, 0] = 0x7F
    else:
        c.pages[page, 3, 0] = torch.nan
    assert window_scores_triton(*c.on(DEVICE))[0, 3].isnan()


def test_no_key_and_no_query_give_nothing() -> None:
    pages, table = torch.zeros(1, 4, 8, device=DEVICE), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    for W, L in ((3, 0), (0, 4)):
        q, when = torch.randn(W, 2, 8, device=DEVICE), torch.arange(W, device=DEVICE)
        out = window_scores_triton(q, when, pages, table, torch.arange(L, device=DEVICE)[None], 1.0)
        assert out.shape == (2, L) and (out == 0).all()
