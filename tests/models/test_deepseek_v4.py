"""DeepSeek-V4 gives transformers' logits, whichever way the tokens go in and whoever else is in the batch."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tiny_v4
import torch
from long_form import more
from numerics import assert_same_bytes, logit_gap, rel_rms
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import CompressedHandle
from hybridkv.kernels.formats.page_format import fake_quantise, store_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.v4 import flush_entry
from hybridkv.kernels.v4 import window_ring as window
from hybridkv.models import deepseek_v4
from hybridkv.models.deepseek_family import cache_schema

KINDS = ("select", "all", "mini")
# around the edges of CSA entries (4), of the window, of HCA entries and of pages (128)
LENGTHS = (1, 3, 4, 5, 8, 63, 127, 128, 129, 131, 255, 256, 257, 300, 700)
BOUND = 5e-5  # of the logits' scale: f32 noise of four layers is a few 1e-6


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tiny_v4.Oracle]:
    return cache(lambda kind: tiny_v4.Oracle(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def open_v4(oracle: Callable) -> Callable[..., LLM]:
    """`open_v4(kind, dtype="float32", kv="f32", index="auto")`: kept for the file."""

    @cache
    def build(kind: str, dtype: str = "float32", kv: str = "f32", index: str = "auto") -> LLM:
        settings = CacheConfig(kv_dtype=kv, index_dtype=index)
        folder = str(oracle(kind).folder)
        return LLM(model=folder, device="cpu", dtype=dtype, cache=settings, max_requests=4, max_context=1024)

    return build


def check(name: str, ref: Tensor, got: Tensor, bound: float = BOUND) -> None:
    gap = logit_gap(ref, got)
    assert gap <= bound, f"{name}: logits differ by {gap:.2e} of their scale, over {bound:.0e}"  # a NaN fails this too


def run(llm: LLM, streams: dict[str, list[int]], steps: list[list[tuple[str, int]]]) -> dict[str, Tensor]:
    """Logits of each stream, fed as the steps say: (stream, tokens) side by side, those with one token first."""
    manager, runner, done = llm.engine.manager, llm.engine.runner, dict.fromkeys(streams, 0)
    found: dict[str, list[Tensor]] = {key: [] for key in streams}
    for key in streams:
        manager.admit_request(key)
    try:
        for plan in steps:
            tokens = [streams[key][done[key] : done[key] + n] for key, n in plan]
            step = manager.prepare_forward(plan)
            out = runner.forward(runner.inputs(tokens, range(sum(n for _, n in plan)), step))
            manager.commit(plan)
            for (key, n), part in zip(plan, out.split([n for _, n in plan])):
                found[key].append(part)
                done[key] += n
        return {key: torch.cat(parts) for key, parts in found.items()}
    finally:
        for key in streams:
            manager.release_request(key)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_prompt(kind: str, length: int, oracle: Callable, open_v4: Callable) -> None:
    ids = oracle(kind).ids[:length]
    got = open_v4(kind).logits(ids)
    assert got.shape == (length, tiny_v4.VOCAB) and got.dtype == torch.float32
    check(f"{kind}, {length} tokens at once", oracle(kind).logits[:length], got)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "chunk", "length"),
    (
        ("mini", 1, 37),
        ("mini", 3, 70),
        ("select", 1, 131),
        ("all", 3, 137),
        *more(*((kind, c, 137) for kind in ("select", "all") for c in (1, 3))),
        *((kind, c, n) for kind in KINDS for c, n in ((50, 300), (128, 700))),
    ),
)
def test_a_prompt_in_chunks(kind: str, chunk: int, length: int, oracle: Callable, open_v4: Callable) -> None:
    got = open_v4(kind).logits(oracle(kind).ids[:length], chunk=chunk)
    check(f"{kind}, {length} tokens in chunks of {chunk}", oracle(kind).logits[:length], got)


@pytest.mark.parametrize("cuts", ((129, 127, 130, 1, 1, 126, 186), (2, 1, 4, 5, 120, 7, 200, 1, 60)))
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_chunks_and_steps_between_them(
    kind: str, cuts: tuple[int, ...], oracle: Callable, open_v4: Callable
) -> None:
    got = run(open_v4(kind), {"a": oracle(kind).ids}, [[("a", n)] for n in cuts])["a"]
    check(f"{kind}, {cuts}", oracle(kind).logits[: sum(cuts)], got)


@pytest.mark.parametrize("length", (5, 9, 131, 260, 300))
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_then_steps(kind: str, length: int, oracle: Callable, open_v4: Callable) -> None:
    got = open_v4(kind).logits(oracle(kind).ids[:length], prefill=max(1, length - 9), chunk=100)
    check(f"{kind}, the last of {length} one by one", oracle(kind).logits[:length], got)


@pytest.mark.parametrize("kind", ("select", "mini"))
def test_greedy_tokens_are_those_of_transformers(kind: str, oracle: Callable, open_v4: Callable) -> None:
    prompts = [oracle(kind).ids[:n] for n in (2, 123)]
    done = open_v4(kind).generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))
    for prompt, got in zip(prompts, done):
        ids = torch.tensor([prompt])
        how = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            want = oracle(kind).model.generate(ids, **how)
        assert list(got.token_ids) == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ("select", "mini"))
def test_requests_at_different_positions_do_not_meet(kind: str, oracle: Callable, open_v4: Callable) -> None:
    streams = {name: tiny_v4.token_ids(180, seed) for name, seed in (("a", 11), ("b", 12), ("c", 13))}
    with torch.no_grad():
        refs = dict(zip(streams, oracle(kind).model(torch.tensor([*streams.values()]), use_cache=False).logits))
    steps = [
        [("a", 126)],
        [("a", 1), ("b", 130)],
        [("a", 1), ("b", 1), ("c", 7)],
        [("b", 1), ("a", 5), ("c", 121)],
        [("c", 1), ("b", 1), ("a", 1)],
        [("a", 3), ("c", 4), ("b", 2)],
        [("b", 1), ("c", 1)],
    ]
    for name, got in run(open_v4(kind), streams, steps).items():
        assert len(got) > 130
        check(f"request {name}", refs[name][: len(got)], got)


@pytest.mark.parametrize("kind", ("mini", "hashed"))
def test_only_the_rows_that_are_asked_for(kind: str, oracle: Callable, open_v4: Callable) -> None:
    llm, ids = open_v4(kind), oracle(kind).ids[:40]
    manager, runner = llm.engine.manager, llm.engine.runner
    manager.admit_request("a")
    try:
        for rows in ([], [39, 0]):
            step = manager.prepare_forward([("a", 40)])  # not committed: the same tokens again
            got = runner.forward(runner.inputs([ids], rows, step))
            assert got.shape == (len(rows), tiny_v4.VOCAB) and got.dtype == torch.float32
        check("two rows", oracle(kind).logits[[39, 0]], got)
    finally:
        manager.release_request("a")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of layer called each part of its handle; `left out`: entries that a selection passed over."""
    count: Counter[str] = Counter()

    def watched(name: str, real: Callable) -> Callable:
        def call(handle: CompressedHandle, *args: Any, **more: Any) -> Any:
            count[f"{handle.schema.kind} {name}"] += 1
            out = real(handle, *args, **more)
            if name == "select" and out is not None:
                visible = (handle.index.positions + 1) // handle.schema.ratio
                count["left out"] += int((visible - (out >= 0).sum(-1)).sum())
            return out

        return call

    for name in ("write_swa", "maybe_flush_csa", "maybe_flush_hca"):
        monkeypatch.setattr(CompressedHandle, name, watched(name, getattr(CompressedHandle, name)))
    for name in ("select", "attend"):
        monkeypatch.setattr(deepseek_v4, name, watched(name, getattr(deepseek_v4, name)))
    return count


@pytest.mark.parametrize(("kind", "selects"), (("select", True), ("mini", True), ("all", False)))
def test_every_kind_of_layer_runs(
    kind: str, selects: bool, calls: Counter, oracle: Callable, open_v4: Callable
) -> None:
    llm = open_v4(kind)
    assert Counter(llm.config.v4.kinds) == {"window": 1, "csa": 2, "hca": 1} and llm.config.v4.hash_layers == {0, 1}
    calls.clear()
    llm.logits(oracle(kind).ids[:140], prefill=138, chunk=100)  # two chunks and two steps
    left_out = calls.pop("left out", 0)
    assert (left_out > 100) == selects, f"{left_out} entries were passed over"
    runs = {"window": 4, "csa": 8, "hca": 4}
    each = {f"{layer} {part}": n for layer, n in runs.items() for part in ("write_swa", "attend")}
    assert calls == each | {"csa maybe_flush_csa": 16, "hca maybe_flush_hca": 4, "csa select": 8}


TENSORS = (
    "sinks", "position_bias", "e_score_correction_bias", "tid2eid", "attn_hc.fn", "ffn_hc.base", "attn_hc.scale",
    "hc_head.hc_fn", "hc_head.hc_base", "self_attn.kv_norm.weight", "q_a_norm.weight", "compressor.kv_norm.weight",
    "indexer.kv_norm.weight", "indexer.gate_proj.weight", "indexer.q_b_proj.weight", "weights_proj.weight",
    "o_a_proj.weight", "shared_experts.up_proj.weight", "mlp.gate.weight",
)  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS)
def test_the_oracle_depends_on_every_kind_of_tensor(tensor: str, oracle: Callable) -> None:
    """Guard: agreement says something about a tensor only if the logits would differ without it."""
    model, changed = oracle("mini").model, 0
    whole = oracle("mini").logits[:60]  # computed when first asked for: before anything changes
    before = {name: t.clone() for name, t in model.state_dict().items() if name.endswith(tensor)}
    try:
        for name, t in model.state_dict().items():
            if name in before:
                t.copy_(t.flip(0) if t.ndim else t * 0)
                changed += 1
        gap = logit_gap(whole, tiny_v4.reference_logits(model, oracle("mini").ids[:60]))
    finally:
        model.load_state_dict(before, strict=False)
    assert changed and gap > 20 * BOUND, f"{changed} tensors changed, and the logits by {gap:.1e}"


@pytest.mark.parametrize(
    ("dtype", "kv", "index", "want"),
    (
        ("float32", "auto", "auto", ("f32", "f32")),
        ("bfloat16", "auto", "auto", ("bf16", "bf16")),
        ("bfloat16", "fp8", "auto", ("fp8", "mxfp4")),
        ("bfloat16", "f32", "nvfp4", ("f32", "nvfp4")),
    ),
)
def test_formats_of_entries_and_index_keys(
    dtype: str, kv: str, index: str, want: tuple[str, str], open_v4: Callable
) -> None:
    config = open_v4("mini").config
    schema = cache_schema(config, CacheConfig(kv_dtype=kv, index_dtype=index), getattr(torch, dtype))
    layers = {layer.kind: layer for layer in schema.compressed}
    assert [layer.kind for layer in schema.compressed] == list(config.v4.kinds)
    assert {layer.entries.name for layer in layers.values()} == {want[0]}
    assert layers["csa"].index.name == want[1] and layers["hca"].index is None
    assert (layers["csa"].ratio, layers["hca"].ratio, layers["window"].window) == (4, 16, 8)


def test_all_weights_are_held_once(oracle: Callable, open_v4: Callable) -> None:
    stored = sum(t.nbytes for name, t in oracle("mini").model.state_dict().items())
    tables = 2 * 4 * len(open_v4("mini").config.inv_freq)
    assert open_v4("mini").engine.runner.model.nbytes == stored + tables


@pytest.mark.parametrize(("kv", "index"), (("bf16", "bf16"), ("bf16", "fp8"), ("bf16", "nvfp4"), ("fp8", "bf16")))
def test_a_narrower_cache_differs_by_the_rounding_of_its_rows_alone(
    kv: str, index: str, oracle: Callable, open_v4: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The f32 cache, whose rows are rounded by hand before they are stored, gives the same logits."""
    ids = oracle("mini").ids[:150]
    got = open_v4("mini", kv=kv, index=index).logits(ids, prefill=140, chunk=60)
    assert logit_gap(oracle("mini").logits[:150], got) > 1e-3, "nothing was rounded"
    rounded = Counter[str]()

    def store(pages: Tensor, fmt: PageFormat, flat: Tensor, x: Tensor) -> None:
        narrow = entry_format(kv, fmt.dim, fmt.rope) if fmt.rope else index_format(index, fmt.dim)
        rounded[narrow.name] += 1
        store_entries_ref(pages, fmt, flat, fake_quantise(narrow, x))

    for file in (window, flush_entry):
        monkeypatch.setattr(file, "store_entries_ref", store)
    want = open_v4("mini").logits(ids, prefill=140, chunk=60)
    assert set(rounded) == {kv, index}
    check(f"{kv} entries, {index} index keys", want, got, 1e-5)


def test_bfloat16_is_as_good_as_transformers_bfloat16(oracle: Callable, open_v4: Callable) -> None:
    ids, ref = oracle("all").ids[:200], oracle("all").logits[:200]
    theirs = DeepseekV4ForCausalLM.from_pretrained(
        oracle("all").folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    ours = open_v4("all", dtype="bfloat16", kv="bf16").logits(ids, prefill=190, chunk=64)

    def median_error(got: Tensor) -> float:
        return torch.tensor([rel_rms(r, g) for r, g in zip(ref, got)]).median().item()

    error = median_error(tiny_v4.reference_logits(theirs, ids))
    assert error > 1e-3, "bfloat16 was not used"
    assert median_error(ours) <= 1.5 * error, f"{median_error(ours):.3e}, transformers {error:.3e}"


def test_the_same_again(oracle: Callable, open_v4: Callable) -> None:
    """A slot that was used starts empty: what a request leaves behind changes no bit of the next one."""
    llm, ids = open_v4("mini"), oracle("mini").ids
    first = llm.logits(ids[:3])
    llm.logits(ids[100:300])
    assert_same_bytes(first, llm.logits(ids[:3]))


def test_no_tensor_of_the_oracle_has_one_value_throughout(oracle: Callable) -> None:
    """Guard: what transformers leaves at zero or one would hide a mistake in its use."""
    for name, t in oracle("mini").model.state_dict().items():
        assert t.unique().numel() > 1 or (t.numel() == 1 and t != 1), name
