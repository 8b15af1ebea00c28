"""Products that read FP8 and FP4 codes, on the GPU: at V4-Flash's widths, in a captured graph, and in a whole model.

The small cases are in tests/kernels/linear and tests/kernels/moe, which run here too, compiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_v4
import torch
from numerics import assert_close_rms, assert_same_bytes, logit_gap
from qwen_fp8 import fp8_model
from qwen_mxfp4 import WRITERS, mxfp4_model
from torch import Tensor
from v4_released import released_model

from hybridkv import LLM, SamplingParams
from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.linear import block_linear
from hybridkv.kernels.linear.block_form import RELEASED_FP4, RELEASED_FP8, BlockForm
from hybridkv.kernels.linear.block_linear import linear_blocks, linear_blocks_ref
from hybridkv.kernels.linear.block_scaled import BlockScaled, empty_blocks
from hybridkv.kernels.moe import block_experts, block_experts_one
from hybridkv.kernels.moe.block_experts import ExpertStack, run_block_experts, run_block_experts_ref
from hybridkv.kernels.moe.block_experts_one_hopper import LEAST_SCALE, MOST_SCALE

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
D, I, E, K = 4096, 2048, 16, 6  # V4-Flash with fewer experts
# the reference multiplies in bf16 too and rounds where the kernels do: 2^-9 of a value at most and 1.6e-3 RMS each
BOUND = 6.5e-3


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are made on the GPU, and the public functions must not fall back to the references."""
    for file in (block_linear, block_experts):
        monkeypatch.setattr(file, "use_triton", lambda x: x.is_cuda or pytest.fail("a tensor is on the CPU"))
    with torch.device("cuda"):
        yield


def random_codes(form: BlockForm, *shape: int) -> BlockScaled:
    """Random codes without NaN, values of about 1 / sqrt(columns)."""
    out = empty_blocks(form, shape, torch.device("cuda"))
    out.codes.random_(0, 256)
    if form.bits == 8:
        out.codes[out.codes & 127 == 127] = 0
    middle = 127 - (13 if form.bits == 8 else 8)
    powers = torch.randint(middle - 1, middle + 2, out.scales.shape)
    out.scales.copy_(powers if form.scale_bytes == 1 else 1.5 * 2.0 ** (powers - 127))
    return out


@pytest.mark.parametrize("T", (1, 7, 16, 17, 40, 64, 65, 300))
@pytest.mark.parametrize(
    ("form", "rows", "columns", "groups"),
    ((RELEASED_FP8, 40960, 1024, 1), (RELEASED_FP8, 4096, 8192, 1), (RELEASED_FP8, 8192, 4096, 8),
     (RELEASED_FP4, 4096, 2048, 1),
     # parts of Pro on sixteen ranks, whose borders lie inside of blocks; scales of Qwen
     (replace(RELEASED_FP8, columns=64), 7168, 192, 1), (replace(RELEASED_FP8, scale_bytes=4), 4096, 2048, 1)),
)  # fmt: skip
def test_matrices(form: BlockForm, rows: int, columns: int, groups: int, T: int, on_the_gpu: None) -> None:
    weight, x = random_codes(form, rows, columns), torch.randn(T, groups * columns).to(BF16)
    assert_close_rms("bf16", linear_blocks_ref(x, weight, groups), linear_blocks(x, weight, groups), BOUND)
    f32, rounded = torch.float32, form.scale_bytes == 4  # the reference rounds values, products of few rows do not
    want, got = linear_blocks_ref(x, weight, groups, f32), linear_blocks(x, weight, groups, f32)
    assert_close_rms("f32", want, got, 4e-3 if rounded else 1e-3)


def case(T: int) -> tuple[Tensor, Tensor, Tensor, list[ExpertStack]]:
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    chosen = torch.cat((chosen, torch.full((T, 1), E, dtype=torch.int32)), 1)
    stacks = [
        ExpertStack(random_codes(form, n, 2 * I, D), random_codes(form, n, D, I))
        for form, n in ((RELEASED_FP4, E), (RELEASED_FP8, 1))
    ]
    return torch.randn(T, D).to(BF16), torch.rand(T, K + 1), chosen, stacks


@pytest.mark.parametrize("T", (1, 5, 30, 64, 150, 700))
def test_experts(T: int, on_the_gpu: None) -> None:
    x, weights, chosen, stacks = case(T)
    want = run_block_experts_ref(x, weights, chosen, stacks, 10.0)
    assert_close_rms("experts", want, run_block_experts(x, weights, chosen, stacks, 10.0), BOUND)


BASE = replace(RELEASED_FP8, scale_bytes=4)


@pytest.mark.parametrize(
    ("d", "i", "forms"),
    ((4096, 2048, (RELEASED_FP4, RELEASED_FP8)), (4096, 256, (RELEASED_FP4, RELEASED_FP8)),
     (7168, 384, (RELEASED_FP4, BASE)), (640, 1152, (RELEASED_FP4,)), (2048, 512, (BASE,)),
     (128, 128, (RELEASED_FP8, RELEASED_FP4))),
)  # fmt: skip
def test_one_token_by_the_hopper_kernel(
    d: int, i: int, forms: tuple[BlockForm, ...], on_the_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns for one warp and for several, whole stages and parts of them; a choice of an expert that is not here."""
    if not has_gluon(torch.device("cuda")):
        pytest.skip("written in another Triton's Gluon")
    ran: list[bool] = []
    launch = block_experts_one.launch_one_hopper
    monkeypatch.setattr(block_experts_one, "launch_one_hopper", lambda *a, **k: ran.append(True) or launch(*a, **k))
    stacks = [ExpertStack(random_codes(f, n, 2 * i, d), random_codes(f, n, d, i)) for f, n in zip(forms, (E, 1))]
    here = sum(len(stack.down) for stack in stacks)
    for _ in range(3):
        chosen, weights = torch.randperm(here)[None, :K].int(), torch.rand(1, K)
        chosen[0, 0] = here - 1  # of the last stack
        x = torch.randn(1, d).to(BF16)
        want = run_block_experts_ref(x, weights, chosen, stacks, 10.0)
        assert_close_rms("experts", want, run_block_experts(x, weights, chosen, stacks, 10.0), BOUND)
        chosen[0, 1], weights[0, 1] = here, 0.0  # no expert of this rank
        want = run_block_experts_ref(x, weights, chosen, stacks, 10.0, others=True)
        assert_close_rms("others", want, run_block_experts(x, weights, chosen, stacks, 10.0, others=True), BOUND)
    assert len(ran) == 12


@pytest.mark.parametrize("byte", (LEAST_SCALE, MOST_SCALE))
def test_one_token_with_scales_at_the_ends(byte: int, on_the_gpu: None) -> None:
    """Nothing is lost: the result is that of scales in the middle, times the power of two between them."""
    if not has_gluon(torch.device("cuda")):
        pytest.skip("written in another Triton's Gluon")
    stack, x = random_codes(RELEASED_FP4, 2, 512, 1024), torch.randn(1, 1024).to(BF16)
    chosen, out = torch.tensor([1, 0], dtype=torch.int32), []
    for power in (127, byte):
        stack.scales.fill_(power)
        y = torch.empty(2, 512, dtype=BF16)
        block_experts_one.launch_one_hopper(x, [stack], chosen, y, 0.0, gated=False)
        out.append(y.double() * 2.0 ** (127 - power))
    assert out[0].abs().max() > 1
    assert_same_bytes(*out)


@pytest.mark.parametrize("T", (1, 4, 80))
def test_a_captured_step_follows_its_inputs(T: int, on_the_gpu: None) -> None:
    """Other tokens and other experts in the same memory: the replay has the bits of a fresh call."""
    x, weights, chosen, stacks = case(T)
    run_block_experts(x, weights, chosen, stacks, 10.0)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_block_experts(x, weights, chosen, stacks, 10.0)
    for _ in range(3):
        other = case(T)
        for kept, new in zip((x, weights, chosen), other):
            kept.copy_(new)
        graph.replay()
        assert_same_bytes(run_block_experts(x, weights, chosen, stacks, 10.0), out)


def quark_model(folder: Path, **changes: Any) -> Any:
    return mxfp4_model(folder, "quark", **changes)[0]


@pytest.mark.parametrize("make", (fp8_model, quark_model), ids=("fp8", "mxfp4"))
def test_qwen_in_codes_in_f32_is_that_of_transformers(make: Callable[..., Any], tmp_path: Path) -> None:
    model, ids = make(tmp_path, moe_intermediate_size=160, hidden_size=192), tiny.token_ids(60)
    llm = LLM(tmp_path, "cuda", "float32", max_requests=1, max_context=128, weight_dtype="released", reuse=None)
    assert logit_gap(tiny.reference_logits(model, ids), llm.logits(ids, prefill=41, chunk=17)) <= 1e-3


@pytest.mark.parametrize("writer", WRITERS)
def test_qwen_in_mxfp4_in_bf16_is_as_near_as_widened(writer: str, tmp_path: Path) -> None:
    """To transformers in f32: by the kernels of many rows, and of one token. In the median row: where rounding lets the
    router choose another expert, a row is far off in either form.
    """
    (model, _), ids = mxfp4_model(tmp_path, writer, moe_intermediate_size=128, hidden_size=256), tiny.token_ids(60)
    want, gaps = tiny.reference_logits(model, ids), {}
    for form in ("auto", "plain"):
        llm = LLM(tmp_path, "cuda", "bfloat16", max_requests=1, max_context=128, weight_dtype=form, reuse=None)
        got = llm.logits(ids, prefill=33, chunk=1).float().cpu()
        gaps[llm.weight_form] = float(((got - want).abs().amax(1) / want.abs().max()).median())
    assert gaps["released"] < 2 * gaps["bfloat16"] < 0.2


@pytest.mark.parametrize("make", (fp8_model, mxfp4_model, released_model), ids=("qwen", "mxfp4", "deepseek"))
def test_auto_keeps_codes_in_bf16(make: Callable[[Path], object], tmp_path: Path) -> None:
    """Neither in f32 nor where values are asked for."""
    make(tmp_path)
    how: dict[str, Any] = dict(max_requests=2, max_context=128, reuse=None)
    forms = {}
    for dtype, form in (("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "plain")):
        llm = LLM(tmp_path, "cuda", dtype, weight_dtype=form, **how)
        forms[dtype, form] = llm.weight_form
        (out,) = llm.generate([tiny.token_ids(20)], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        assert len(out.token_ids) == 5
    assert list(forms.values()) == ["released", "float32", "bfloat16"]


def test_a_whole_model_in_f32_is_that_of_transformers(tmp_path: Path) -> None:
    model, ids = released_model(tmp_path), tiny_v4.token_ids(60)
    llm = LLM(tmp_path, "cuda", "float32", max_requests=1, max_context=128, weight_dtype="released", reuse=None)
    assert logit_gap(tiny_v4.reference_logits(model, ids), llm.logits(ids, prefill=41, chunk=17)) <= 1e-3
