"""DeepSeek-V4 with its weights in the codes they are released in: the logits and tokens of the dequantised model."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_v4
import torch
from block_cases import FP4, FP8
from long_form import more
from numerics import logit_gap
from torch import Tensor
from triton_interpreter import INTERPRETED
from v4_files import VOCAB, Made, write
from v4_released import released_model

from hybridkv import LLM, SamplingParams
from hybridkv.errors import HybridKVError, ModelFileError
from hybridkv.kernels.backend import HAS_TRITON
from hybridkv.kernels.linear import block_linear
from hybridkv.kernels.linear.block_linear import BlockLinear
from hybridkv.kernels.linear.block_scaled import LARGEST_SCALE, BlockScaled
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe import block_experts
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.fingerprint import model_fingerprint
from hybridkv.planner import model_bytes

BOUND = 5e-5  # of the logits' scale, as for plain weights in f32
WIDE = {"head_dim": 128, "partial_rotary_factor": 8 / 128, "q_lora_rank": 128, "o_lora_rank": 128, "hidden_size": 256}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp4": (FP4, {}),  # blocks are ragged, and reach over projections
    "fp8": (FP8, {}),
    "wide": (FP4, WIDE),  # whole blocks, joined projections
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    @cache
    def make(kind: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(kind)
        experts, changes = KINDS[kind]
        return released_model(folder, experts, **changes), folder

    return make


def opened(folder: Path, weight_dtype: str = "released", dtype: str = "float32") -> LLM:
    return LLM(folder, "cpu", dtype, max_requests=2, max_context=128, weight_dtype=weight_dtype, reuse=None)


def tensors_of(part: object) -> list[Tensor]:
    """Every tensor of a model, each once."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, tuple | list):
        return [t for item in part for t in tensors_of(item)]
    if isinstance(part, BlockLinear):
        return tensors_of((part.parts, part.bias))
    if isinstance(part, Linear):
        return tensors_of((part.weight, part.bias))
    if dataclasses.is_dataclass(part):
        return [t for item in vars(part).values() for t in tensors_of(item)]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_on_the_dequantised_values(kind: str, made: Callable) -> None:
    model, folder = made(kind)
    ids, llm = tiny_v4.token_ids(60), opened(folder)
    want = tiny_v4.reference_logits(model, ids)
    assert logit_gap(want, llm.logits(ids, prefill=41, chunk=17)) <= BOUND
    layer: Any = llm.model.layers[2]
    held = layer.experts.gate_up, layer.experts.shared.down, layer.attention.group_out, *layer.attention.inputs.parts
    assert [isinstance(part, BlockScaled) for part in held].count(True) >= 4
    assert isinstance(layer.attention.queries, BlockLinear) and isinstance(layer.attention.out, BlockLinear)
    assert all(part.codes.dtype == torch.uint8 for part in held if isinstance(part, BlockScaled))
    assert llm.weight_form == "released"


@pytest.mark.parametrize("kind", ("fp4", *more("fp8", "wide")))
@pytest.mark.long
def test_tokens_and_logits_are_those_of_the_widened_model(kind: str, made: Callable) -> None:
    folder = made(kind)[1]
    prompts = [tiny_v4.token_ids(n, seed=n) for n in (3, 30)]
    codes, plain = opened(folder), opened(folder, "auto")
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    assert logit_gap(plain.logits(prompts[1]), codes.logits(prompts[1])) <= BOUND
    tokens = [[out.token_ids for out in llm.generate(prompts, greedy)] for llm in (codes, plain)]
    assert tokens[0] == tokens[1] and len(tokens[0][0]) == 6
    assert codes.model.nbytes < 0.75 * plain.model.nbytes


@pytest.mark.parametrize(("dtype", "base"), (("float32", False), ("bfloat16", True)))
def test_bytes_planned_are_bytes_held(dtype: str, base: bool, tmp_path: Path) -> None:
    """Odd widths, FP4 and FP8 experts, scales of both kinds."""
    folder = write(tmp_path, Made(base).stored)
    model: Any = opened(folder, dtype=dtype).model
    with open_checkpoint(folder) as checkpoint:
        config, forms = ModelConfig.from_dict(checkpoint.config), checkpoint.block_forms()
        planned = model_bytes(config, checkpoint.__contains__, dtype, "cpu", blocks=forms)
    tables = model.window_freq.nbytes + model.compress_freq.nbytes
    assert planned == model.nbytes - tables
    # and counted once more, by the memory of the tensors themselves: oneDNN's own layouts have none to look at
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(model) if not t.is_mkldnn
    }
    opaque = sum(t.numel() * t.element_size() for t in tensors_of(model) if t.is_mkldnn)
    assert sum(storages.values()) + opaque == model.nbytes
    assert len(forms) == 3 * 10 + 1  # five projections, two stacks and a shared expert's three; one indexer's queries


def test_kernels_give_the_model_the_same_logits(made: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of codes by the kernels, in the interpreter; the rest of the model as before."""
    if not INTERPRETED or not HAS_TRITON:
        pytest.skip("kernels on CPU tensors need the interpreter; tests/gpu has the model on a GPU")
    folder, ids = made("fp4")[1], tiny_v4.token_ids(5)
    llm, ran = opened(folder), []
    want = llm.logits(ids)
    for file, name in ((block_linear, "linear_blocks_triton"), (block_experts, "run_block_experts_triton")):
        op = getattr(file, name)
        monkeypatch.setattr(file, "use_triton", lambda x: True)
        monkeypatch.setattr(file, name, lambda *given, op=op: ran.append(op.__name__) or op(*given))
    got = llm.logits(ids)
    assert set(ran) == {"linear_blocks_triton", "run_block_experts_triton"}
    assert logit_gap(want, got) <= BOUND


def test_a_code_that_is_changed_changes_the_logits(made: Callable) -> None:
    """The comparisons above read the codes: one scale of one expert that is used, off by a factor of two, shows."""
    folder = made("fp4")[1]
    llm, ids = opened(folder), tiny_v4.token_ids(30)
    before, name = llm.logits(ids), model_fingerprint(llm.model)
    layer: Any = llm.model.layers[0]
    layer.experts.down.scales[:, 0, 0] += 1
    assert logit_gap(before, llm.logits(ids)) > BOUND
    assert model_fingerprint(llm.model) != name


def test_a_model_of_values_has_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(HybridKVError, match="has none that are read; use 'auto' or 'plain'"):
        opened(write(tmp_path, Made().values, {"tie": False}))


@pytest.mark.parametrize("which", ("scale", "large scale", "code"))
def test_damaged_codes_are_refused(which: str, tmp_path: Path) -> None:
    made = Made()
    if which != "code":
        byte = 255 if which == "scale" else LARGEST_SCALE[4] + 1
        made.stored["layers.1.ffn.experts.2.w2.scale"].view(torch.uint8)[3, 1] = byte
    else:
        made.stored["layers.1.attn.wo_b.weight"].view(torch.uint8)[3, 1] = 0x7F
    with pytest.raises(ModelFileError, match="layers.1.*holds NaN among its codes or scales, or scales that no model"):
        opened(write(tmp_path, made.stored))
    ids = [1] * 3
    assert len(ids) < VOCAB and opened(write(tmp_path / "good", Made().stored)).logits(ids).isfinite().all()


def test_blocks_that_products_do_not_read_are_widened(tmp_path: Path) -> None:
    """Blocks of 100 columns: their matrices become values, the experts stay codes."""
    made = Made()
    for name, tensor in list(made.stored.items()):
        if tensor.dtype == torch.float8_e4m3fn:
            scale = name.removesuffix(".weight") + ".scale"
            shape = -(-tensor.shape[0] // 100), -(-tensor.shape[1] // 100)
            made.stored[scale] = torch.full(shape, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    quantised = {"quant_method": "fp8", "weight_block_size": [100, 100]}
    folder = write(tmp_path, made.stored, {"quantization_config": quantised})
    codes, plain = opened(folder), opened(folder, "plain")
    layer: Any = codes.model.layers[1]
    assert isinstance(layer.experts.down, BlockScaled) and isinstance(layer.experts.shared.down, Tensor)
    assert not isinstance(layer.attention.queries, BlockLinear)
    ids = list(range(12))
    assert logit_gap(plain.logits(ids), codes.logits(ids)) <= BOUND


def test_too_little_memory_names_the_smaller_form(tmp_path: Path) -> None:
    folder = write(tmp_path, Made().stored)
    with pytest.raises(HybridKVError, match="use weight_dtype='released', a smaller model"):
        LLM(folder, "cpu", "float32", memory=1 << 20, max_context=64)
    with pytest.raises(HybridKVError, match="in their released form, the limit is 512.0 KiB; use dtype='bfloat16', a"):
        LLM(folder, "cpu", "float32", memory=1 << 19, max_context=64, weight_dtype="released")
