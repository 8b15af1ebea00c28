"""Queries, keys and values on their way to attention: against the ops one by one, and the bytes `append` stores."""

import math
from typing import Any

import pytest
import torch
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.attention.append import append_ref
from hybridkv.kernels.attention.inputs import attention_inputs, attention_inputs_ref, attention_inputs_triton
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.formats.kv_format import Pages
from hybridkv.kernels.rope import rope_matrices

pytest.importorskip("triton")
EPS, P, N = 1e-6, 4, 12
F32, BF16 = torch.float32, torch.bfloat16
KINDS = ("f32", "bf16", "fp8")
# H, G, D, R
SHAPES = ((1, 1, 2, 1), (3, 1, 20, 3), (4, 2, 32, 16), (6, 2, 24, 0), (2, 2, 256, 32))
BOUND = {F32: 1e-6, BF16: 1.5e-3}  # sums in another order move a bf16 value over the border of two now and then


def pages(kind: str, D: int) -> Pages:
    """Full of bits that arithmetic would not keep."""
    bits = torch.randint(0, 256, (N, P, D * 4), dtype=torch.uint8)
    if kind == "fp8":
        return Fp8Pages(bits[..., :D].contiguous(), torch.randn(N, P))
    return bits.view(F32) if kind == "f32" else bits[..., : 2 * D].contiguous().view(BF16)


def to(x: Any, device: str = "cpu") -> Any:
    """A copy there."""
    if isinstance(x, Fp8Pages):
        return Fp8Pages(*(t.clone().to(device) for t in x))
    return x.clone().to(device) if isinstance(x, Tensor) else x


def tensors(x: Pages) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, Fp8Pages) else (x,)


def case(T: int, shape: tuple[int, int, int, int], gated: bool, dtype: torch.dtype, kind: str, norm: bool) -> dict:
    H, G, D, R = shape
    turn = torch.rand(T, 1, R) * 2 * math.pi
    made: dict[str, Any] = dict(
        x=torch.randn(T, ((2 if gated else 1) * H + 2 * G) * D + 3).to(dtype)[:, 1:-2],  # rows of a wider product
        cos=turn.cos(), sin=turn.sin(), k_pool=pages(kind, D), v_pool=pages(kind, D),
        entry_index=torch.randperm(N * P)[: G * T].view(G, T), heads=H, kv_heads=G, head_dim=D, gated=gated,
    )  # fmt: skip
    if norm:
        made |= dict(q_norm=torch.randn(D), k_norm=torch.randn(D), eps=EPS)
    return made


def run(form: Any, made: dict, device: str) -> tuple[dict, Tensor]:
    """What the op was given, as it left it, and the queries."""
    given = {name: to(value, device) for name, value in made.items()}
    return given, form(**given)


def keys(given: dict) -> tuple[Tensor, Tensor]:
    """Stored keys and values [G, T, D] at the tokens' places (f32 or bf16 pages)."""
    index = given["entry_index"]
    k, v = (given[name].view(-1, given["head_dim"])[index.clamp(min=0)] for name in ("k_pool", "v_pool"))
    return k.cpu(), v.cpu()


@pytest.mark.parametrize("form", (attention_inputs, attention_inputs_triton), ids=("cpu", "kernel"))
@pytest.mark.parametrize("gated", (False, True))
def test_by_hand(form: Any, gated: bool) -> None:
    H, G, D, R, T = 2, 1, 10, 3, 3
    made = case(T, (H, G, D, R), gated, F32, "f32", True)
    given, q = run(form, made, DEVICE if form is attention_inputs_triton else "cpu")
    k, v = keys(given)
    step = 2 if gated else 1
    for t in range(T):
        row = made["x"][t].view(-1, D).double()
        heads = [(row[h * step], made["q_norm"], q[t, h]) for h in range(H)]
        heads.append((row[step * H], made["k_norm"], k[0, t]))
        for head, weight, got in heads:
            y = head / (head.square().mean() + EPS).sqrt() * weight
            for i in range(R):  # pairs (i, i + R) turn
                a, b = y[i].clone(), y[i + R].clone()
                c, s = made["cos"][t, 0, i], made["sin"][t, 0, i]
                y[i], y[i + R] = a * c - b * s, b * c + a * s
            assert_close_rms("head", y, got, 1e-6)
        assert_same_bytes(row[step * H + 1].float(), v[0, t])


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("gated", "norm", "T"), ((True, True, 1), (True, True, 9), (False, False, 5), (False, True, 0))
)
def test_kernel_equals_the_reference(
    dtype: torch.dtype, shape: tuple[int, int, int, int], gated: bool, norm: bool, T: int
) -> None:
    kind = "f32" if dtype == F32 else "bf16"
    made = case(T, shape, gated, dtype, kind, norm)
    want, q_want = run(attention_inputs_ref, made, "cpu")
    got, q = run(attention_inputs_triton, made, DEVICE)
    assert q.dtype == dtype and q.shape == (T, shape[0], shape[2]) and q.is_contiguous()
    assert_close_rms("queries", q_want, q, BOUND[dtype])
    assert_close_rms("keys", keys(want)[0], keys(got)[0], BOUND[dtype])
    assert_same_bytes(want["v_pool"], got["v_pool"])
    taken = made["entry_index"].flatten()  # all other places are as they were
    rest = [i for i in range(N * P) if i not in set(taken.tolist())]
    assert_same_bytes(made["k_pool"].view(N * P, -1)[rest], got["k_pool"].view(N * P, -1)[rest])


@pytest.mark.parametrize(("gated", "norm", "T"), ((False, False, 1), (False, True, 4), (True, True, 2)))
def test_rotation_by_matrices_changes_nothing(gated: bool, norm: bool, T: int) -> None:
    made = case(T, (4, 2, 32, 16), gated, F32, "f32", norm)
    want, q_want = run(attention_inputs_ref, made, "cpu")
    got, q = run(attention_inputs, made | dict(turn=rope_matrices(made["cos"], made["sin"])), "cpu")
    assert_close_rms("queries", q_want, q, BOUND[F32])
    assert_close_rms("keys", keys(want)[0], keys(got)[0], BOUND[F32])
    assert_same_bytes(want["v_pool"], got["v_pool"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", (1, 3))
def test_a_step_that_stores_all_tokens_need_not_be_looked_through(T: int, kind: str) -> None:
    made = case(T, (4, 2, 32, 16), False, F32, kind, True)
    want, q_want = run(attention_inputs, made, "cpu")
    got, q = run(attention_inputs, made | dict(all_stored=True), "cpu")
    assert_same_bytes(q_want, q)
    for name in ("k_pool", "v_pool"):
        for a, b in zip(tensors(want[name]), tensors(got[name])):
            assert_same_bytes(a, b)


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ((3, 2, 20, 3), (2, 1, 256, 32)))
def test_pages_hold_the_bytes_of_append(dtype: torch.dtype, kind: str, shape: tuple[int, int, int, int]) -> None:
    """Keys as the op itself turns them, taken from pages of the dtype, then appended."""
    made = case(5, shape, True, dtype, "f32" if dtype == F32 else "bf16", True)
    plain, _ = run(attention_inputs_triton, made, DEVICE)
    k, v = (t.transpose(0, 1) for t in keys(plain))  # [T, G, D]
    made |= dict(k_pool=pages(kind, shape[2]), v_pool=pages(kind, shape[2]))
    want = to(made["k_pool"]), to(made["v_pool"])
    append_ref(*want, k, v, made["entry_index"])
    got, _ = run(attention_inputs_triton, made, DEVICE)
    for a, b in zip(want, (got["k_pool"], got["v_pool"])):
        for x, y in zip(tensors(a), tensors(b)):
            assert_same_bytes(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_stored_whatever_it_holds(kind: str) -> None:
    T, shape, pads = 11, (3, 2, 20, 3), [0, 4, 5, 10]
    made = case(T, shape, True, F32, kind, True)
    good = [t for t in range(T) if t not in pads]
    clean, q_clean = run(attention_inputs_triton, made | dict(entry_index=_skip(made["entry_index"], pads)), DEVICE)
    made["x"][pads[:2]], made["x"][pads[2:]] = torch.nan, torch.inf
    made["cos"][pads], made["sin"][pads] = torch.nan, torch.inf
    made["entry_index"] = _skip(made["entry_index"], pads)
    got, q = run(attention_inputs_triton, made, DEVICE)
    assert_same_bytes(q_clean[good], q[good])
    for name in ("k_pool", "v_pool"):
        for a, b in zip(tensors(clean[name]), tensors(got[name])):
            assert_same_bytes(a, b)
    made["entry_index"] = torch.full_like(made["entry_index"], -1)
    got, _ = run(attention_inputs_triton, made, DEVICE)
    for name in ("k_pool", "v_pool"):
        for a, b in zip(tensors(made[name]), tensors(got[name])):
            assert_same_bytes(a, b)


def _skip(index: Tensor, pads: list[int]) -> Tensor:
    return index.index_fill(1, torch.tensor(pads), -1)


@pytest.mark.parametrize("form", (attention_inputs, attention_inputs_triton), ids=("cpu", "kernel"))
@pytest.mark.parametrize(("dtype", "buffer_dtype"), ((F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32)))
def test_the_last_queries_go_to_the_buffer(form: Any, dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    T, (H, G, D, R), slots, W = 7, (3, 2, 20, 3), 2, 5
    made = case(T, (H, G, D, R), True, dtype, "f32", True)
    made["query_buffer"] = torch.randn(slots, W, H, D).to(buffer_dtype)
    made["query_rows"] = torch.tensor([-1, 3, -1, 9, 0, 4, -1])
    given, q = run(form, made, DEVICE if form is attention_inputs_triton else "cpu")
    want = made["query_buffer"].clone().view(slots * W, H, D)
    kept = [1, 3, 4, 5]
    want[made["query_rows"][kept]] = q.cpu()[kept].to(buffer_dtype)
    assert_same_bytes(want.view(slots, W, H, D), given["query_buffer"])


def test_channels_that_do_not_turn_keep_an_infinity_to_themselves() -> None:
    made = case(1, (1, 1, 8, 2), False, F32, "f32", False)
    made["x"][0, 6] = torch.inf  # of the query; 4 to 7 do not turn
    _, q = run(attention_inputs_triton, made, DEVICE)
    assert q[0, 0, 6] == torch.inf and q[0, 0, [0, 1, 2, 3, 4, 5, 7]].isfinite().all()


def test_the_bound_would_see_a_missing_norm() -> None:
    made = case(3, (3, 2, 20, 3), True, F32, "f32", True)
    _, normed = run(attention_inputs_triton, made, DEVICE)
    del made["q_norm"], made["k_norm"]
    _, plain = run(attention_inputs_triton, made, DEVICE)
    assert not torch.allclose(normed, plain, rtol=0.1)
