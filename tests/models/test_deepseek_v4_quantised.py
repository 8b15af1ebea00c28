"""DeepSeek-V4 on FP8 and FP4 pages equals transformers whose window rows, entries, index keys and queries are rounded.

Rounding amplifies noise: a value 1e-7 from the middle of two codes goes either way, and every later layer sees it. So
the reference is led along: at each place where something is stored, the reference rounds its own number, which must be
what our pages hold, but for values on the edge, and then goes on with ours. What is left at the end is float32 noise:
the same bound as without rounding holds.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny_v4
import torch
from numerics import assert_same_bytes, logit_gap, rel_rms
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling
from v4_encoder import ENCODERS
from v4_layer import stored_vectors
from v4_rounding import count_flips, key_rounding, query_rounding, row_rounding

from hybridkv import LLM, CacheConfig
from hybridkv.cache import CompressedHandle, CompressedSpec, KVCacheManager, compressed_handle, compressed_schema
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format

BOUND = 5e-5  # of the logits' scale, as for f32 pages
FLIPS = 5e-4  # of stored values: f32 noise of 1e-6 against codes 2^-8 (BF16) or 2^-4 apart
LENGTHS = {"mini": 90, "select": 150}
WIDE = {**tiny_v4.KINDS["mini"], "head_dim": 512, "partial_rotary_factor": 64 / 512, "index_head_dim": 128}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tiny_v4.Oracle]:
    return cache(lambda kind: tiny_v4.Oracle(kind, tmp_path_factory.mktemp(kind)))


class Run:
    """A request through our model, with a ring of any size: one as long as the request keeps all of its tokens."""

    def __init__(
        self, llm: LLM, kv: str, index: str, ids: list[int], chunks: list[int], ring: int, block: int = 128
    ) -> None:
        v, c = llm.config.v4, llm.config
        assert v is not None
        sizes = (v.window, v.csa_ratio, v.hca_ratio)
        spec = CompressedSpec(v.kinds, c.heads, c.head_dim, v.rope, v.index_dim, *sizes)
        schema = compressed_schema(spec, kv, index, block, ring=ring)
        self.manager = KVCacheManager(schema, schema.pool_pages(1, len(ids)), 1, len(ids))
        self.manager.admit_request(0)
        self.handles: dict[int, CompressedHandle] = {}
        parts, at = [], 0
        for n in chunks:
            step = self.manager.prepare_forward([(0, n)])
            self.handles = self.manager.acquire(step)  # type: ignore[assignment]
            tokens, positions = torch.tensor(ids[at : at + n]), torch.arange(at, at + n)
            parts.append(llm.model.forward(tokens, positions, self.handles, torch.arange(n)))
            self.manager.commit([(0, n)])
            at += n
        self.T, self.logits = at, torch.cat(parts)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Name of the format, and vectors, in the order in which the reference makes them."""
        for handle in self.handles.values():
            for what, vectors in stored_vectors(handle, self.T).items():
                fmt = handle.schema.index if what == "keys" else handle.schema.entries
                assert fmt is not None
                yield fmt.name, vectors


@torch.no_grad()
def rounded_logits(
    model: Any, ids: list[int], index: str, change: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch
) -> Tensor:
    """Logits of transformers with rounded index queries, and `change` made to all that would be stored.

    Everything that is stored, and nothing else of one head, is rotated last.
    """
    turn, config = modeling.apply_rotary_pos_emb, model.config

    def turn_and_round(x: Tensor, *angles: Tensor) -> Tensor:
        y = turn(x, *angles)
        if y.shape[1] == 1:
            return change(y[0, 0])[None, None].to(y.dtype)
        if y.shape[1] == config.index_n_heads:
            return query_rounding(index)(y).to(y.dtype)
        return y

    with patch.context() as patched:
        patched.setattr(modeling, "apply_rotary_pos_emb", turn_and_round)
        return tiny_v4.reference_logits(model, ids)


def in_chunks(T: int) -> list[int]:
    """A long chunk, steps of one token, chunks that begin and end anywhere."""
    return [T // 2, 1, 1, 1, 7, 2, T - T // 2 - 17, 1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def opened(oracle: Callable) -> Callable[..., LLM]:
    @cache
    def build(kind: str, kv: str = "f32", index: str = "auto") -> LLM:
        settings = CacheConfig(kv_dtype=kv, index_dtype=index)
        return LLM(str(oracle(kind).folder), "cpu", "float32", cache=settings, max_requests=1, max_context=256)

    return build


@pytest.mark.parametrize(
    ("kind", "kv", "index"),
    [
        ("mini", "fp8", "mxfp4"),
        ("select", "fp8", "mxfp4"),
        ("mini", "fp8_entry", "nvfp4"),
        ("mini", "fp8", "fp8"),
        ("mini", "bf16", "bf16"),
    ],
)
def test_logits_are_those_of_a_rounded_transformers(
    kind: str, kv: str, index: str, oracle: Callable, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, model = LENGTHS[kind], oracle(kind).model
    ids = oracle(kind).ids[:T]
    ours = Run(opened(kind), kv, index, ids, in_chunks(T), ring=T)
    stored = ours.stored()
    values = flips = 0

    def independently(x: Tensor) -> Tensor:
        return key_rounding(index)(x) if x.shape[-1] == model.config.index_head_dim else row_rounding(kv, 8)(x)

    def lead(x: Tensor) -> Tensor:
        nonlocal values, flips
        name, held = next(stored)
        flips += count_flips(name, independently(x), held, noise=1e-5)
        values += x.numel()
        return held

    ref = rounded_logits(model, ids, index, lead, monkeypatch)
    assert next(stored, None) is None  # all that we stored was met
    assert values > 0 and flips <= FLIPS * values
    assert logit_gap(ref, ours.logits) <= BOUND
    assert rel_rms(tiny_v4.reference_logits(model, ids), ours.logits) > 100 * BOUND  # rounding really ran


@pytest.mark.parametrize(("kv", "error"), (("bf16", 0.0023), ("fp8", 0.036), ("fp8_entry", 0.036)))
def test_rounding_costs_what_it_costs_transformers(
    kv: str, error: float, oracle: Callable, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the reference goes its own way, and nothing is selected, so nothing jumps: flips alone tell the two apart.

    A stored vector has a relative RMS error of 2^-4 / sqrt(3) in E4M3 and 2^-8 / sqrt(3) in BF16 at most; four layers
    add theirs.
    """

    def store(x: Tensor) -> Tensor:
        return row_rounding(kv, 8)(x) if x.shape[-1] == 32 else x

    ids, model = oracle("all").ids[:140], oracle("all").model
    plain, rounded = tiny_v4.reference_logits(model, ids), rounded_logits(model, ids, "f32", store, monkeypatch)
    ours = Run(opened("all"), kv, "f32", ids, [100, 1, 39], ring=128).logits
    assert error / 4 < rel_rms(plain, ours) <= 6 * error
    assert rel_rms(rounded, ours) <= rel_rms(plain, ours) / 10


def test_fp8_of_the_public_face_is_this_format(oracle: Callable, opened: Callable) -> None:
    """kv_dtype='fp8' brings MXFP4 index keys, and the engine's own ring and pages give the same bits."""
    ids = oracle("mini").ids[:60]
    ours = Run(opened("mini"), "fp8", "mxfp4", ids, [20, 20, 10] + [1] * 10, ring=60)
    assert_same_bytes(ours.logits, opened("mini", "fp8").logits(ids, prefill=50, chunk=20))


def test_pages_of_a_run_are_the_584_byte_layout(
    oracle: Callable, opened: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store is made a second time, into f32 pages; an independent encoder gives the bytes of those numbers.

    Pages of n entries: n rows of 448 E4M3 and 64 BF16, then n rows of 8 bytes, 7 of them scales.
    """
    monkeypatch.setitem(tiny_v4.KINDS, "wide", WIDE)
    exact: dict[int, Tensor] = {}  # by the address of the pages; those of other memory are never asked for

    def also_exactly(store: Callable[..., None]) -> Callable[..., None]:
        def both(pages: Tensor, fmt: PageFormat, *rest: Any) -> None:
            before = [x.clone() if isinstance(x, Tensor) else x for x in rest]  # a flush changes its state too
            store(pages, fmt, *rest)
            f32 = entry_format("f32", fmt.dim, fmt.rope) if fmt.rope else index_format("f32", fmt.dim)
            found = exact.get(pages.data_ptr())
            if found is None or found.shape[:2] != pages.shape[:2]:
                found = exact[pages.data_ptr()] = torch.full((*pages.shape[:2], fmt.dim), torch.nan)
            store(found, f32, *before)

        return both

    for name in ("append_window", "flush_csa", "flush_hca"):
        monkeypatch.setattr(compressed_handle, name, also_exactly(getattr(compressed_handle, name)))
    ids = oracle("wide").ids[:38]
    run = Run(opened("wide"), "fp8", "mxfp4", ids, [19, 1, 9, 1, 1, 1, 6], ring=8, block=32)
    checked = {"window": 0, "entries": 0, "index": 0}
    keys = same_keys = 0
    for handle in run.handles.values():
        for name, pages in [("window", handle.state["window"]), *handle.paged.items()]:
            numbers = exact[pages.data_ptr()].numpy()
            n, memory = pages.shape[1], pages.flatten(1).numpy()  # [N, bytes of a page]
            kind, fmt, value, scale = ("index", "mxfp4", 64, 4) if name == "index" else ("entry", "fp8", 576, 7)
            assert memory.shape[1] == n * (68 if name == "index" else 584)
            for page, row in np.argwhere(~np.isnan(numbers[..., 0])).tolist():
                values, scales = ENCODERS[kind, fmt](numbers[page, row], 64)
                at, at_scale = row * value, n * value + row * (68 - 64 if name == "index" else 584 - 576)
                found = memory[page, at : at + value], memory[page, at_scale : at_scale + scale]
                checked[name] += 1
                if name == "index":  # sums of the transform may be rounded in another order
                    same_keys, keys = same_keys + int((found[0] == values).sum()), keys + value
                else:
                    np.testing.assert_array_equal(found[0], values)
                    np.testing.assert_array_equal(found[1], scales[:scale])
    layers = len(run.handles)
    assert checked == {"window": layers * 8, "entries": 2 * 9 + 2, "index": 2 * 9}
    assert same_keys >= 0.999 * keys
