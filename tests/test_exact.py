"""Exact mode: the same tokens give the same bits however they are cut into steps and whoever runs beside them.

A prompt is driven through the cache's own verbs, once whole and once in another pattern, and everything that came of it
is compared: attention outputs, logits, K/V bytes read through the page table, recurrent state, captured queries,
scores, keep lists, and the decode steps after eviction. Neighbours are other requests in the same steps.
"""

import pytest
import tiny
from exactness import BUDGET, STEPS, Models, differing, drive
from torch import Tensor

from hybridkv import SamplingParams
from hybridkv.kernels.linear import exact as linear_file
from hybridkv.kernels.linear.linear import Linear

KINDS = ("llama", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("exact"), "cpu")


FORMATS = (
    ("float32", "f32", BUDGET),
    ("bfloat16", "bf16", BUDGET),
    ("bfloat16", "bf16", None),
    ("float32", "fp8", BUDGET),
)
CASES = [(kind, *fmt) for kind in ("llama", "qwen3_5") for fmt in FORMATS]
CASES += [("qwen3_5_moe", *fmt) for fmt in FORMATS[:2]]  # its attention and cache are those of qwen3_5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "kv", "budget"), CASES)
def test_any_cut_and_any_company_give_the_same_bits(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, kv: str, budget: int | None
) -> None:
    llm, ids = models.open(kind, dtype, kv, budget), tiny.token_ids(150)
    whole = drive(llm, ids, [150], monkeypatch)
    layers = len(llm.config.attention_layers)
    assert whole.rows[:layers] == [150] * layers and len(whole.rows) == layers * (1 + STEPS)
    ones = [*range(1, 71), 150]  # one token at a time, past the edges of pages, tiles and DeltaNet's chunks of 64
    for cuts, company in (([87, 150], False), (ones, False), ([1, 18, 140, 141, 150], True)):
        other = drive(llm, ids, cuts, monkeypatch, company)
        assert sum(other.rows) >= layers * (150 + STEPS)
        assert differing(whole, other) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "kv"), [("llama", "float32", "f32"), ("qwen3_5", "bfloat16", "bf16")])
def test_the_same_bits_past_4096_tokens(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, kv: str
) -> None:
    llm, ids = models.open(kind, dtype, kv, BUDGET, context=4352), tiny.token_ids(4200)
    whole = drive(llm, ids, [4200], monkeypatch)
    assert whole.rows[0] == 4200
    assert differing(whole, drive(llm, ids, [1709, 4190, *range(4191, 4201)], monkeypatch, company=True)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_fast_mode_does_not_promise_that(models: Models, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    llm, ids = models.open(kind, "float32", "f32", None, exact=False), tiny.token_ids(150)
    whole, ones = (drive(llm, ids, cuts, monkeypatch) for cuts in ([150], list(range(1, 151))))
    assert not whole.rows
    found = differing(whole, ones)
    assert "logits" in found and any(name.startswith("attention") for name in found)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_and_fast_mode_agree(models: Models, kind: str) -> None:
    ids = tiny.token_ids(150)
    exact, fast = (models.open(kind, "float32", "f32", None, exact=mode).logits(ids) for mode in (True, False))
    assert (exact - fast).abs().max() < (1e-3 if tiny.is_moe(kind) else 1e-4) * fast.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_runs_in_tiles_of_one_size(models: Models, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rows, product, plain = [], Linear._product, linear_file.linear_ref

    def watched(self: Linear, x: Tensor) -> Tensor:
        rows.append(len(x))
        return product(self, x)

    def watched_plain(x: Tensor, *args: Tensor | None) -> Tensor:
        rows.append(len(x))
        return plain(x, *args)

    monkeypatch.setattr(Linear, "_product", watched)
    monkeypatch.setattr(linear_file, "linear_ref", watched_plain)
    models.open(kind, "float32", "f32", None).logits(tiny.token_ids(40), prefill=38)
    assert len(rows) > 3 * 4 * 3 and set(rows) == {16}


def test_answers_do_not_depend_on_the_batch(models: Models) -> None:
    llm = models.open("qwen3_5", "bfloat16", "bf16", BUDGET)
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3)
    prompts = [tiny.token_ids(n, seed=n) for n in (200, 131, 9)]
    together = llm.generate(prompts, params)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = llm.generate([prompt], params)
        assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
