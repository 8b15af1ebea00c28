"""sample_rows: the definition against brute force, the kernels against the definition, token for token."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from long_form import LONG, few
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.best_tokens import best_tokens_ref
from hybridkv.kernels.sampling import launch
from hybridkv.kernels.sampling.launch import sample_rows_triton
from hybridkv.kernels.sampling.noise import gumbel_ref, random_words_ref, weights_ref
from hybridkv.kernels.sampling.rows import MAX_LISTED_K, SampleRow, seen_tokens, seen_words
from hybridkv.kernels.sampling.sample import sample_rows, sample_rows_ref

pytest.importorskip("triton")
FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.7, "min_p": 0.05}, {"top_p": 0.3},
    {"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 10**6, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 200, "top_p": 0.5}, {"top_p": 0.999, "min_p": 1e-30},
)  # fmt: skip


def brute_force(x: list[float], ask: dict[str, Any], seed: int, position: int, temperature: float) -> int:
    """One token after the other, in Python. Distances, weights and noise are taken from the definition."""
    distance = (max(x) - torch.tensor(x)) * (1 / temperature)
    d, w = distance.tolist(), weights_ref(distance).tolist()
    noise = gumbel_ref(random_words_ref(seed, position, len(x))).tolist()
    order = sorted(range(len(x)), key=lambda i: (d[i], i))
    left = order[: ask.get("top_k") or len(x)]
    if ask.get("top_p", 1) < 1:
        total, before, kept = sum(w[i] for i in left), 0, []
        for i in left:
            if before >= math.ceil(ask["top_p"] * float(total)):
                break
            kept.append(i)
            before += w[i]
        left = kept
    if ask.get("min_p"):
        left = [i for i in left if torch.tensor(d[i]) <= torch.tensor(-math.log(ask["min_p"]))]
    assert order[0] in left
    return max(left, key=lambda i: (torch.tensor(noise[i]) - torch.tensor(d[i]), -i))


def tokens_of(form: Callable, logits: Tensor, rows: Sequence[SampleRow], **more: Any) -> Tensor:
    """[2, n] on the host."""
    found = best_tokens_ref(logits)[:, [row.row for row in rows]].contiguous()
    for i, row in enumerate(rows):
        row.out = i
    form(logits, rows, found, **more)
    return found.cpu()


def tied(V: int) -> Tensor:
    """Few different values, -0.0 and -inf among them."""
    values = torch.tensor([-torch.inf, -3.0, -1.5, -0.0, 0.0, 1.0, 1.0, 1.25])
    return values[torch.randint(0, len(values), (V,))]


@pytest.mark.parametrize("ask", FILTERS, ids=str)
def test_the_definition_is_brute_force(ask: dict[str, Any]) -> None:
    for case in range(12):
        V = 1 + case * 17
        x = tied(V) if case % 2 else 2 * torch.randn(V)
        x[case] = 1.5 if case < V else x[0]
        temperature = (0.5, 1.0, 3.0)[case % 3]
        row = SampleRow(temperature, seed=case, position=case * 5, **ask)
        found = tokens_of(sample_rows_ref, x[None], [row])
        assert found.tolist() == [[brute_force(x.tolist(), ask, case, case * 5, temperature)], [0]]


def asked(V: int, penalties: bool, number: int) -> list[SampleRow]:
    """A row for each kind of filter, greedy ones among them; always the same for a number."""
    made = []
    for i, ask in enumerate((*FILTERS, {"top_k": MAX_LISTED_K + 1, "top_p": 0.8}, {"top_k": V - 1}, None, {})):
        more: dict[str, Any] = {}
        if penalties and i % 3:
            more = dict(repetition=1.3, frequency=0.4 * (i % 2), presence=-0.3)
            more["seen"] = seen_tokens(V, [0, 31 % V, V - 1], [2 % V, 2 % V, 32 % V], torch.device(DEVICE))
        if penalties and i % 4 == 1:
            more["bias"] = torch.linspace(-2, 2, V, device=DEVICE).flip(0)
        if penalties and i % 4 == 2:
            more["forbidden"] = [V // 2, 0, V // 2]
        temperature = 0.0 if ask is None else (0.8, 1.0, 2.5)[i % 3]
        row = SampleRow(temperature, seed=(number << 40) + i, position=number + i, row=i % 7, **(ask or {}), **more)
        made.append(row)
    return made


@pytest.mark.long
@pytest.mark.parametrize(("V", "block"), ((4, 128), (257, 128), (2048, 256), (4099, 1024)))
@few("dtype, penalties", (torch.float32, torch.bfloat16), (False, True))
def test_the_kernels_choose_the_same_tokens(V: int, block: int, dtype: torch.dtype, penalties: bool) -> None:
    for number in range(1 + LONG):
        wide = (2 * torch.randn(7, V + 3)).to(dtype).to(DEVICE)
        wide[2, 1:-2] = tied(V).to(dtype)
        wide[3, 1:-2] = 1.0
        wide[3, 1 + V // 3 :: 2] = -2.0
        wide[:, 0], wide[:, -2:] = torch.nan, torch.nan  # beside the rows, where nothing may read
        logits = wide[:, 1 : 1 + V]
        want, kernel = asked(V, penalties, number), asked(V, penalties, number)
        expected = tokens_of(sample_rows_ref, logits, want)
        found = tokens_of(sample_rows_triton, logits, kernel, block=block, listed=256)
        assert expected.tolist() == found.tolist()
        assert len(set(found[0].tolist())) > 3 or V == 4
        for a, b, token in zip(want, kernel, found[0].tolist()):
            if a.seen is not None and b.seen is not None:  # and take note of them
                assert torch.equal(a.seen, b.seen)
                assert int(b.seen[seen_words(V) + token]) >= 3 and int(b.seen[token >> 5]) >> (token & 31) & 1


def test_a_list_that_is_too_short_changes_nothing() -> None:
    """All logits equal, and more candidates than the list holds: the row is searched by itself."""
    logits = torch.cat((torch.zeros(3, 700), torch.randn(3, 700))).to(DEVICE)
    asks = ({"top_k": 300}, {"top_k": 300, "top_p": 0.5}, {"top_k": 65, "min_p": 0.5})
    made = [[SampleRow(1.0, seed=i, row=i, **asks[i % 3]) for i in range(6)] for _ in range(3)]
    want = tokens_of(sample_rows_ref, logits, made[0])
    assert tokens_of(sample_rows_triton, logits, made[1], block=128, listed=64).tolist() == want.tolist()
    assert tokens_of(sample_rows_triton, logits, made[2], block=128, listed=1024).tolist() == want.tolist()
    assert all(token < 300 for token in want[0, :2].tolist())  # of equals the lower ids


def test_zeros_of_both_signs_are_equal() -> None:
    """The best logits are -0 and 0, as where a hook rules out all others; -0 - 0 is -0, which has the bits of less."""
    logits = torch.zeros(2, 256, device=DEVICE)
    logits[:, :128], logits[1, ::3] = -0.0, -torch.inf
    for ask in ({"top_k": 5, "top_p": 0.5}, {"top_k": 100, "top_p": 1e-12}):
        # so many rows that a program has a whole one
        one, other = ([SampleRow(0.5, seed=i, row=i % 2, **ask) for i in range(16)] for _ in range(2))
        want = tokens_of(sample_rows_ref, logits, one)
        assert tokens_of(sample_rows_triton, logits, other, block=128, listed=256).tolist() == want.tolist()


def test_tokens_that_do_not_pass_top_p_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small p most first draws fail, and some rows need more rounds than are launched. More rows fail than are
    drawn again at once.
    """
    monkeypatch.setattr(launch, "LEFT_ROWS", 3)
    monkeypatch.setattr(launch, "LEFT_PIECES", 2)
    logits = torch.randn(1, 600, device=DEVICE)
    made = [[SampleRow(2.0, top_p=0.02, seed=i, position=i) for i in range(12)] for _ in range(4)]
    want = tokens_of(sample_rows_ref, logits, made[0])
    for i, rounds in enumerate((2, 1, 5)):
        monkeypatch.setattr(launch, "ROUNDS", rounds)
        assert tokens_of(sample_rows_triton, logits, made[i + 1], block=128).tolist() == want.tolist()
    free = tokens_of(sample_rows_ref, logits, [SampleRow(2.0, seed=i, position=i) for i in range(12)])
    assert (free[0] != want[0]).sum() > 6  # guard: they do fail


@pytest.mark.parametrize("form", (sample_rows, sample_rows_triton))
@pytest.mark.parametrize("temperature", (1e-4, 1e-10, 1e-40, 5e-324))
def test_a_temperature_near_zero_is_greedy(form: Callable, temperature: float) -> None:
    logits = 10 * torch.randn(len(FILTERS), 300, device=DEVICE)
    rows = [SampleRow(temperature, seed=i, row=i, **ask) for i, ask in enumerate(FILTERS)]
    assert tokens_of(form, logits, rows)[0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("form", (sample_rows, sample_rows_triton))
def test_broken_rows_are_told_apart_from_those_that_were_ruled_out(form: Callable) -> None:
    V = 200
    logits = torch.randn(5, V, device=DEVICE)
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    nan = torch.zeros(V, device=DEVICE).index_fill(0, torch.tensor([3], device=DEVICE), torch.nan)
    for ask in ({}, *({"temperature": 1.0, **ask} for ask in FILTERS)):
        rows = [SampleRow(row=i, seed=i, **ask) for i in range(5)]
        rows += [SampleRow(row=0, forbidden=range(V), **ask), SampleRow(row=0, own=nan, **ask)]
        rows += [SampleRow(row=0, forbidden=range(1, V), **ask), SampleRow(row=1, forbidden=[7], **ask)]
        found = tokens_of(form, logits, rows)
        assert found[1].tolist() == [0, 1, 1, 1, 0, 2, 2, 0, 1]
        assert int(found[0, 7]) == 0 and ((found[0] >= 0) & (found[0] < V)).all()


@pytest.mark.parametrize("form", (sample_rows, sample_rows_triton))
def test_own_logits_take_the_place_of_the_rows(form: Callable) -> None:
    logits, own = torch.randn(2, 500, device=DEVICE), torch.randn(500, device=DEVICE)
    for ask in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.0, "top_p": 0.5}):
        rows = [SampleRow(row=1, seed=3, own=own, forbidden=[1], **ask), SampleRow(row=0, seed=3, **ask)]
        again = [SampleRow(row=0, seed=3, **ask), SampleRow(row=1, seed=3, **ask)]
        want = tokens_of(form, torch.stack((own, logits[0])), again)
        assert tokens_of(form, logits, rows).tolist() == want.tolist()


@pytest.mark.parametrize("form", (sample_rows, sample_rows_triton))
def test_no_rows(form: Callable) -> None:
    found = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    form(torch.zeros(0, 50, device=DEVICE), [], found)


def test_draws_follow_the_distribution_of_what_passes() -> None:
    """Positions 0 to 3999 of one seed: always the same numbers. Chi-square of 4 degrees of freedom exceeds 36 three
    times in ten million."""
    x = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -2.5]], device=DEVICE)
    n, counts = 4000, [0] * 7
    for begin in range(0, n, 500):
        rows = [SampleRow(0.7, top_k=6, top_p=0.99, seed=11, position=begin + i) for i in range(500)]
        for token in tokens_of(sample_rows, x, rows)[0].tolist():
            counts[token] += 1
    want = (x[0, :5].double() / 0.7).softmax(-1).tolist()
    assert counts[5:] == [0, 0]
    assert sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, want)) < 36, counts
    flat = x[0, :5].double().softmax(-1).tolist()  # guard: a forgotten temperature is seen
    assert sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, flat)) > 100
