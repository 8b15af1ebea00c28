"""peak_scores against softmax by its definition in float64: reference and kernel. What they must not read is NaN."""

import pytest
import torch
from long_form import few
from numerics import assert_close_rms, assert_same_bytes
from score_cases import CASES, Case, make, on_other_pages
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction import peak
from hybridkv.kernels.eviction.peak import peak_scores, peak_scores_ref, peak_scores_triton
from hybridkv.kernels.eviction.score import CONFIGS, ScoreBlocks
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytest.importorskip("triton")

BOUND = 1e-5  # f32 sums of exact products: errors of a few 2^-24 in a score, which a weight takes over
SHAPES = {
    **{name: CASES[name] for name in CASES if name != "the largest window"},
    "SmolLM2's heads": dict(W=20, R=3, D=64, P=16, lengths=(70, 41, 12)),
    "three blocks of queries": dict(W=131, R=2, D=16, P=8, lengths=(140, 9)),
}


def forms(c: Case, lse: Tensor | None = None, out: Tensor | None = None) -> list[Tensor]:
    """Of the reference and of the kernel; each gets an `out` of its own."""
    got = []
    for form, device in ((peak_scores_ref, "cpu"), (peak_scores_triton, DEVICE)):
        sums, before = (None if t is None else t.clone().to(device) for t in (lse, out))
        peaks = form(*c.on(device), sums, before)
        assert before is None or peaks is before
        got.append(peaks.cpu())
    return got


@pytest.mark.long
@few("shape, kind", [*SHAPES], ("f32", "bf16", "bf16-f32", "fp8"))
def test_peaks_equal_their_definition(shape: str, kind: str) -> None:
    """Also where the sums are known, as a slice of a wider row."""
    c = make(kind, **SHAPES[shape])  # type: ignore[arg-type]
    wide = torch.full((c.q.shape[0], c.q.shape[1] + 3), torch.nan)
    wide[:, 1:-2] = c.sums()
    want = c.peaks(c.keys)
    for lse in (None, wide[:, 1:-2]):
        for got in forms(c, lse):
            assert got.dtype == torch.float32
            assert_close_rms("peaks", want, got, BOUND)
            assert (got[c.positions < 0] == 0).all()


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_launch_configuration_agrees(kind: str, config: ScoreBlocks) -> None:
    c = make(kind, W=16, R=2, D=48, P=16, lengths=(150, 91))
    assert_close_rms(str(config), c.peaks(c.keys), peak_scores_triton(*c.on(DEVICE), config=config).cpu(), BOUND)


@pytest.mark.parametrize("known", (False, True))
def test_a_text_that_comes_in_parts_gives_the_bits_of_the_whole(known: bool) -> None:
    c = make("bf16", W=100, R=2, D=32, P=16, lengths=(120, 77))
    lse = c.sums() if known else None
    whole = forms(c, lse)
    for form, device, want in ((peak_scores_ref, "cpu", whole[0]), (peak_scores_triton, DEVICE, whole[1])):
        q, when, *rest = c.on(device)
        out = None
        for rows in (slice(0, 64), slice(64, 100)):
            out = form(q[rows], when[rows], *rest, None if lse is None else lse[rows].to(device), out)
        assert out is not None
        assert_same_bytes(want, out.cpu())


def test_what_stands_in_out_is_only_raised() -> None:
    c = make("f32", W=3, R=1, D=16, P=16, lengths=(20,))
    before = torch.zeros(1, 20)
    before[0, 4], before[0, 5] = 2.0, torch.nan
    for got in forms(c, out=before):
        assert got[0, 4] == 2 and got[0, 5].isnan()
        got[0, 4:6] = c.peaks(c.keys)[0, 4:6]
        assert_close_rms("the others", c.peaks(c.keys), got, BOUND)


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
def test_page_size_and_page_order_change_no_bit(kind: str) -> None:
    outs = []
    for P in (2, 16, 53):
        torch.manual_seed(1)
        c = make(kind, W=4, R=2, D=32, P=16, lengths=(150,))
        on_other_pages(c, P)
        outs.append(forms(c))
    for ref, kernel in outs[1:]:
        assert_same_bytes(outs[0][0], ref)
        assert_same_bytes(outs[0][1], kernel)


def test_a_query_that_sees_no_key_and_a_key_that_no_query_sees() -> None:
    c = make("f32", W=3, R=1, D=16, P=16, lengths=(20,))
    c.positions = c.positions + 18  # keys 18 .. 37, queries 17, 18, 19
    known = c.sums()
    assert known[0].isneginf().all()
    for got in forms(c) + forms(c, known):
        assert_close_rms("peaks", c.peaks(c.keys), got, BOUND)
        assert got[0, 0].item() == pytest.approx(1) and got[0, 1] > 0 and (got[0, 2:] == 0).all()


@pytest.mark.parametrize("kind", ("f32", "bf16", "fp8"))
def test_a_key_that_is_nan_is_not_hidden(kind: str) -> None:
    c = make(kind, W=2, R=2, D=16, P=16, lengths=(20,))
    page = int(c.table[0, 0])
    lse = c.sums()
    if isinstance(c.pages, Fp8Pages):
        c.pages.values[page, 3, 0] = 0x7F
    else:
        c.pages[page, 3, 0] = torch.nan
    for got in forms(c, lse):
        assert got[0].isnan().nonzero().tolist() == [[3]]


def test_no_key_and_no_query_give_nothing() -> None:
    for W, L in ((3, 0), (0, 4)):
        for form, device in ((peak_scores_ref, "cpu"), (peak_scores_triton, DEVICE)):
            pages, table = torch.zeros(1, 4, 8, device=device), torch.zeros(1, 2, dtype=torch.int32, device=device)
            q, when = torch.randn(W, 2, 8, device=device), torch.arange(W, device=device)
            rest = (q, when, pages, table, torch.arange(L, device=device)[None], 1.0)
            out = form(*rest)
            assert out.shape == (1, L) and (out == 0).all()
            assert (form(*rest, None, torch.ones(1, L, device=device)) == 1).all()


def test_the_public_function_picks_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    c = make("f32", W=1, R=1, D=8, P=2, lengths=(1,))
    assert_same_bytes(peak_scores(*c.on("cpu")), peak_scores_ref(*c.on("cpu")))
    monkeypatch.setattr(peak, "use_triton", lambda x: True)
    monkeypatch.setattr(peak, "peak_scores_triton", lambda *args: args[-1])
    assert peak_scores(*c.on("cpu"), None, torch.ones(1, 1)).item() == 1
