"""What exact mode is made of: row arithmetic that does not see its neighbours, and the kernels behind it on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close_rms, assert_same_bytes
from torch import Tensor
from triton_interpreter import DEVICE

from hybridkv.kernels.exact import sigmoid_exact, silu_exact, softmax_exact, softplus_exact, tree_sum
from hybridkv.kernels.gdn.rule import causal_conv_ref, gated_delta_ref
from hybridkv.kernels.gdn.rule_exact import causal_conv_exact, gated_delta_exact
from hybridkv.kernels.linear.exact import linear_exact, linear_triton
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.norm import gated_rms_norm_exact, l2_norm_exact, rms_norm_exact
from hybridkv.kernels.rope import rope_angles, rope_exact, rope_ref
from hybridkv.kernels.row_ops import route_exact

WIDTHS = (1, 7, 20, 33, 64, 97, 576)
ROW_OPS = {
    "sigmoid": (sigmoid_exact, torch.sigmoid),
    "silu": (silu_exact, F.silu),
    "softplus": (softplus_exact, F.softplus),
    "softmax": (softmax_exact, lambda x: x.softmax(-1)),
    "rms_norm": (
        lambda x: rms_norm_exact(x, torch.ones(x.shape[-1]), 1e-6),
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    ),
    "l2_norm": (l2_norm_exact, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    "gated": (
        lambda x: gated_rms_norm_exact(x, x, torch.ones(x.shape[-1]), 1e-6),
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6) * F.silu(x),
    ),
}


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_gives_the_same_bits_alone_and_anywhere(name: str) -> None:
    exact, formula = ROW_OPS[name]
    for width in WIDTHS:
        x = torch.randn(37, width) * 3
        whole = exact(x)
        assert_close_rms(name, formula(x.double()), whole, 1e-6)
        for part in (slice(0, 1), slice(36, 37), slice(3, 9)):
            assert_same_bytes(exact(x[part]), whole[part])
            assert_same_bytes(exact(x[part].clone()), whole[part])


def test_torch_has_row_ops_that_do_not() -> None:
    """Why exact.py exists: if this fails, torch has changed and the plain operations may do."""
    x = torch.randn(37, 33)
    assert any(not torch.equal(f(x)[i], f(x[i])) for f in (torch.sigmoid, F.silu, F.softplus) for i in range(37))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 31, 64, 100])
def test_tree_sum_adds_each_element_once(n: int) -> None:
    x = torch.randint(-1000, 1000, (4, n, 3)).float()
    assert torch.equal(tree_sum(x, 1), x.sum(1, keepdim=True))
    assert torch.equal(tree_sum(x.transpose(1, 2)), x.transpose(1, 2).sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "rows"), [(64, 96), (48, 33), (576, 300), (5120, 1024), (2048, 1)])
def test_a_row_of_a_product_is_the_same_among_any_rows(inputs: int, rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(50, inputs).to(dtype), (torch.randn(rows, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(rows).to(dtype)
    forms = (Linear(weight, bias, exact=True), lambda x: linear_exact(x, weight, bias))
    for form in forms:
        whole = form(x)
        assert_close_rms("product", F.linear(x.double(), weight.double(), bias.double()), whole, 4e-3)
        for part in (slice(0, 1), slice(49, 50), slice(5, 12), slice(17, 50), slice(0, 0)):
            assert_same_bytes(form(x[part]), whole[part])


def test_rope_is_the_reference_to_rounding() -> None:
    x, angles = torch.randn(9, 3, 40), rope_angles(torch.arange(9) * 500, 10000.0 ** -(torch.arange(8) / 8))
    assert_close_rms("rope", rope_ref(x.double(), *angles).double(), rope_exact(x, *angles), 1e-6)
    assert_same_bytes(rope_exact(x, *angles)[..., 16:].contiguous(), x[..., 16:].contiguous())


def test_equal_experts_are_taken_in_their_order() -> None:
    weights, chosen = route_exact(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), 3, False)
    assert chosen.tolist() == [[1, 2, 3]] and weights[0, 0] == weights[0, 2]


def delta_inputs(B: int, T: int, H: int, K: int, V: int) -> tuple[Tensor, ...]:
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    return q, k, torch.randn(B, T, H, V), -torch.rand(B, T, H), torch.rand(B, T, H)


def test_the_exact_recurrence_is_the_recurrence() -> None:
    inputs, state = delta_inputs(2, 20, 3, 12, 10), torch.randn(2, 3, 12, 10)
    exact = state.clone()
    got = gated_delta_exact(*inputs, exact)
    for b in range(2):
        want = gated_delta_ref(*(x[b] for x in inputs), state[b])
        assert_close_rms("out", want.double(), got[b], 1e-5)
    assert_close_rms("state", state.double(), exact, 1e-5)


def test_the_exact_convolution_is_the_convolution() -> None:
    x, weight, conv_states = torch.randn(2, 11, 21), torch.randn(21, 4), torch.randn(2, 3, 21)
    exact = conv_states.clone()
    got = causal_conv_exact(x, weight, exact)
    for b in range(2):
        assert_close_rms("out", causal_conv_ref(x[b], weight, conv_states[b]).double(), got[b], 1e-6)
    assert_same_bytes(exact, conv_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_kernel_is_the_product(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    x, weight, bias = torch.randn(70, 90).to(dtype), torch.randn(75, 90).to(dtype), torch.randn(75).to(dtype)
    for added in (None, bias):
        want = F.linear(x.double(), weight.double(), None if added is None else added.double())
        got = linear_triton(x.to(DEVICE), weight.to(DEVICE), None if added is None else added.to(DEVICE)).cpu()
        assert_close_rms("product", want, got, 1e-6 if dtype == torch.float32 else 4e-3)
    assert linear_triton(x[:0].to(DEVICE), weight.to(DEVICE)).shape == (0, 75)
