"""FP8 weights: what the codes stand for, products with them, and a model that is the one with rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from numerics import assert_close_rms, assert_same_bytes, logit_gap
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridkv import LLM
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.errors import HybridKVError
from hybridkv.kernels.formats.fp8 import fp8_decode_ref, fp8_encode_ref
from hybridkv.kernels.linear import fp8 as file
from hybridkv.kernels.linear.fp8 import encode_weight, linear_fp8, linear_fp8_ref, linear_fp8_rounded, round_weight_
from hybridkv.kernels.linear.linear import Linear
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import weight_bytes
from hybridkv.models.known import KNOWN
from hybridkv.planner import model_bytes, planned_tensors

TIGHT = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # sums of a few hundred f32 products; one rounding to bf16
LOOSE = 0.03  # a code has three bits of mantissa: off by 1/16 at most, and by 0.026 RMS over a binade


def weights(N: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes."""
    return (torch.randn(N, K) * torch.logspace(-6, 6, N).unsqueeze(1)).to(dtype)


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("T", [1, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_with_codes(dtype: torch.dtype, T: int, bias: bool) -> None:
    weight, x = weights(37, 130, dtype), torch.randn(T, 130).to(dtype)
    added = torch.randn(37).to(dtype) if bias else None
    codes, scale = encode_weight(weight)
    assert codes.dtype == torch.uint8 and scale.shape == (37,)
    layer = Linear(codes, added, scale=scale)
    assert layer.nbytes == 37 * 130 + 37 * 4 + (37 * dtype.itemsize if bias else 0)
    rounded = fp8_decode_ref(codes, scale).double()
    assert_close_rms("weights", weight.double() / scale.double().unsqueeze(1), codes.view(torch.float8_e4m3fn), LOOSE)
    want = x.double() @ rounded.T + (added.double() if added is not None else 0)
    size = x.double().norm(dim=1, keepdim=True) * rounded.norm(dim=1) + want.abs()  # what an element is summed from
    for got in (linear_fp8_ref(x, codes, scale, added), linear_fp8(x, codes, scale, added), layer(x)):
        assert got.dtype == dtype
        assert ((got.double() - want).abs() <= TIGHT[dtype] * size).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N", [16, 17, 31, 40])
def test_rounded_rows_times_codes_whose_rows_fill_no_tile(N: int, bias: bool) -> None:
    """As on a GPU: torch multiplies codes on a CPU, too."""
    weight, x = weights(N, 64, torch.bfloat16), torch.randn(50, 64).to(torch.bfloat16)
    added = torch.randn(N).to(torch.bfloat16) if bias else None
    codes, scale = encode_weight(weight)
    rounded = fp8_decode_ref(*fp8_encode_ref(x))
    want = linear_fp8_ref(rounded.float(), codes, scale, None if added is None else added.float())
    got = linear_fp8_rounded(x, codes, scale, added)
    assert got.shape == (50, N) and got.dtype == torch.bfloat16
    size = rounded.float().norm(dim=1, keepdim=True) * fp8_decode_ref(codes, scale).norm(dim=1) + want.abs()
    assert ((got.float() - want).abs() <= TIGHT[torch.bfloat16] * size).all()


def test_the_largest_weight_of_a_row_is_kept_and_zero_stays() -> None:
    weight = torch.tensor([[0.0, -3.0, 1.0], [0.0, 0.0, 0.0], [1e30, 1.0, -1e30]])
    codes, scale = encode_weight(weight)
    assert scale.tolist() == pytest.approx([3 / 448, 1.0, 1e30 / 448])
    assert fp8_decode_ref(codes, scale)[:, 0].tolist() == pytest.approx([0.0, 0.0, 1e30])
    assert codes[0, 1] == 0xFE  # -448


def test_a_row_with_nan_gives_nan_and_no_other_does() -> None:
    weight = torch.randn(5, 48)
    weight[2, 7] = torch.nan
    got = linear_fp8(torch.randn(3, 48), *encode_weight(weight))
    assert got.isnan().any(0).tolist() == [False, False, True, False, False]


def test_rows_are_encoded_alike_in_any_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(23, 40)
    whole = encode_weight(weight)
    monkeypatch.setattr(file, "BLOCK", 100)  # two rows at once
    for a, b in zip(whole, encode_weight(weight), strict=True):
        assert_same_bytes(a, b)
    kept = weight.clone()
    assert_same_bytes(round_weight_(weight), fp8_decode_ref(*whole))
    assert not torch.equal(weight, kept)


def save_rounded(folder: Path, kind: str) -> None:
    """The tiny model with every matrix that a projection multiplies by rounded by hand."""
    tied = tiny.save(kind, folder).config.tie_word_embeddings
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, weight in stored.items():
        if (
            name.endswith("proj.weight")
            or name.endswith(("qkv.weight", "_z.weight", "_b.weight", "_a.weight"))
            or (name == "lm_head.weight" and not tied)
        ):
            scale = weight.abs().amax(1, keepdim=True) * (1 / 448)
            stored[name] = (weight * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    save_file(stored, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "exact"), [("llama_tied", False), ("llama_bias", False), ("llama", True), ("qwen3_5", False)]
)
def test_a_model_with_fp8_weights_is_the_model_with_rounded_weights(tmp_path: Path, kind: str, exact: bool) -> None:
    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    tiny.save(kind, plain)
    save_rounded(rounded, kind)
    settings: dict[str, Any] = dict(device="cpu", dtype="float32", exact=exact, max_requests=1, max_context=256)
    ids = tiny.token_ids(40)
    true, by_hand = (LLM(str(folder), **settings).logits(ids, 30) for folder in (plain, rounded))
    llm = LLM(str(plain), weight_dtype="fp8", **settings)
    got = llm.logits(ids, 30)
    assert_same_bytes(by_hand, got)
    assert logit_gap(true, got) > 1e-3
    assert len(llm.generate([ids])[0].token_ids) > 0


def test_a_model_in_bf16_too(tmp_path: Path) -> None:
    tiny.save("qwen3_5", tmp_path)
    settings: dict[str, Any] = dict(device="cpu", dtype="bfloat16", max_requests=1, max_context=256)
    want, got = (LLM(str(tmp_path), weight_dtype=w, **settings).logits(tiny.token_ids(20)) for w in ("auto", "fp8"))
    assert logit_gap(want, got) > 1e-3


def test_bytes_are_those_of_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device computes with codes: what the plan says, and what a loaded model has."""
    monkeypatch.setattr("hybridkv.checkpoint.loader.keeps_codes", lambda device, dtype: dtype == torch.bfloat16)
    for kind in ("llama", "llama_tied", "qwen3_5", "qwen3_5_moe"):
        model = tiny.build(kind)
        config = ModelConfig.from_dict(model.config.to_dict())
        stored = {name: tensor for name, tensor in model.state_dict().items() if not tiny._is_tied_head(model, name)}
        loader = Loader(InMemory(stored), torch.device("cpu"), torch.bfloat16, fp8=True)
        loaded = FAMILIES[config.architecture].load(config, loader)
        held = weight_bytes(loaded) - loaded.inv_freq.nbytes
        if isinstance(loaded.head.weight, Tensor) and loaded.head.packed:  # on a CPU a tied head is a second copy
            held -= loaded.head.nbytes
        assert held == model_bytes(config, stored.__contains__, torch.bfloat16, "cuda", True)
    raw = KNOWN["Qwen3.5-27B"]
    config = ModelConfig.from_dict(raw)
    plain, codes = (
        model_bytes(config, planned_tensors(config, raw), torch.bfloat16, "cuda", fp8) for fp8 in (False, True)
    )
    assert plain / 2 + 1.27e9 < codes < plain / 2 + 1.35e9  # the embedding stays


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    for wrong in ("fp4", "bf16", None, 8):
        with pytest.raises(HybridKVError, match="weight_dtype .* is not supported; choose auto or fp8"):
            LLM(str(tmp_path), device="cpu", weight_dtype=wrong)  # type: ignore[arg-type]
