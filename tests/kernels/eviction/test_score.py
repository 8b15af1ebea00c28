"""The score kernels against softmax by its definition in float64; what they must not read is NaN."""

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from score_cases import CASES, make, on_other_pages
from triton_interpreter import DEVICE

from hybridkv.kernels.eviction.score import CONFIGS, ScoreBlocks, window_scores_ref, window_scores_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages

pytest.importorskip("triton")

# Inputs are exact in both forms, products are summed in f32: errors of a few 2^-24 in a score, which a weight takes
# over as they are. Seen 3e-7; the bound leaves room for the order of the sums.
BOUND = 1e-5
# Against keys that were not quantised: an FP8 key is off by up to 1/16 a value, about 2.6 % RMS, so a score of
# variance 1 moves by about 0.026 and a weight by as much.
FP8_BOUND = 0.06


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
        on_other_pages(c, P)
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
