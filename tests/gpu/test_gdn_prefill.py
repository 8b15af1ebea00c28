"""A Gated DeltaNet layer over a prompt, compiled, at the sizes of the released models."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from gdn_cases import BOUND, chunked, delta_in_float64, make_net, make_x, one_prompt, start, unchunked
from numerics import assert_close_rms, assert_same_bytes

from hybridkv.kernels.backend import has_gluon
from hybridkv.kernels.gdn import prefill as module
from hybridkv.kernels.gdn.chunk import delta_chunks
from hybridkv.kernels.gdn.prefill import gdn_prefill, gdn_prefill_ref

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16
# the whole layer against the reference, which rounds nothing on the way: see tests/kernels/gdn/test_prefill.py
LAYER = {F32: 5e-6, BF16: 8e-3}
HEADS = (16, 48, 128, 128), (2, 4, 64, 32)


@pytest.mark.parametrize("decays", (0.0, 0.02, 1.0))
@pytest.mark.parametrize(("heads", "dtype"), [(HEADS[0], BF16), (HEADS[0], F32), (HEADS[1], BF16)])
def test_the_delta_rule_is_the_recurrence(heads: tuple[int, ...], dtype: torch.dtype, decays: float) -> None:
    """With and without forgetting; a strong decay inside a chunk does not blur the tokens behind it."""
    (Hk, Hv, K, V), T = heads, 320
    q, k = (F.normalize(torch.randn(T, Hk, K, device="cuda"), dim=-1).to(dtype) for _ in range(2))
    v, beta = torch.randn(T, Hv, V, device="cuda").to(dtype), torch.rand(T, Hv, device="cuda")
    g = -F.softplus(2 * torch.randn(T, Hv, device="cuda") - 2) * decays
    if decays:
        g[5], g[70] = -300.0, -3000.0
    state = torch.randn(Hv, K, V, device="cuda") * 0.3
    want, want_state = delta_in_float64(q, k, v, g, beta, state)
    got = unchunked(delta_chunks(q, k, chunked(v), g, beta, state[None], one_prompt(T, q.device)))
    assert_close_rms("output", want, got, BOUND[dtype])
    assert_close_rms("state", want_state, state, BOUND[dtype])


@pytest.mark.parametrize(("heads", "dtype"), [(HEADS[0], BF16), (HEADS[0], F32), (HEADS[1], BF16)])
@pytest.mark.parametrize(("T", "state_dtype"), [(1, F32), (2, F32), (65, BF16), (1000, F32)])
def test_the_layer_is_the_reference(
    T: int, heads: tuple[int, ...], state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    net = make_net(*heads, device="cuda")
    x, (conv_state, state) = make_x(T, net, dtype), start(net, state_dtype)
    conv_state = conv_state.to(dtype)  # as the cache keeps it
    own_conv_state, own_state = conv_state.clone(), state.clone()
    want, got = gdn_prefill_ref(x, net, conv_state, state), gdn_prefill(x, net, own_conv_state, own_state)
    assert got.dtype == dtype and own_state.dtype == state_dtype
    assert_close_rms("output", want, got, LAYER[dtype])
    assert_close_rms("state", state, own_state, LAYER[dtype] if state_dtype == F32 else LAYER[BF16])
    assert_same_bytes(conv_state, own_conv_state)


def test_parts_of_a_long_prompt_give_what_the_prompt_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut at whole chunks, elsewhere, and where the op itself cuts."""
    net = make_net(16, 48, 128, 128, device="cuda")
    x, begin = make_x(4100, net, BF16), start(net)
    held = [tuple(t.clone() for t in begin) for _ in range(4)]
    outs = []
    for cuts, (conv_state, state) in zip(([], [64, 2048], [1, 63, 1000], []), held, strict=True):
        if len(outs) == 3:
            monkeypatch.setattr(module, "PIECE", 1024)
        parts = itertools.pairwise([0, *cuts, len(x)])
        outs.append(torch.cat([gdn_prefill(x[a:b], net, conv_state, state) for a, b in parts]))
    for out, (conv_state, state) in zip(outs[1:], held[1:], strict=True):
        assert_close_rms("output", outs[0], out, LAYER[BF16])
        assert_close_rms("state", held[0][1], state, LAYER[BF16])
        assert_same_bytes(held[0][0], conv_state)


def test_hopper_has_a_kernel_of_its_own() -> None:
    """Rows that its copies cannot read take the other kernels; run after run gives the same bits."""
    net, T = make_net(16, 48, 128, 128, device="cuda"), 1000
    x, begin = make_x(T, net, BF16), start(net)
    wide = torch.zeros(T, x.shape[1] + 9, device="cuda", dtype=BF16)
    shifted = wide[:, 1 : 1 + x.shape[1]].copy_(x)
    assert module.suits_hopper(x, net) == has_gluon(x.device)
    assert not module.suits_hopper(shifted, net) and not module.suits_hopper(x.float(), net)
    runs = []
    for given in (x, x, x, shifted):
        conv_state, state = (t.clone() for t in begin)
        runs.append((gdn_prefill(given, net, conv_state, state), conv_state, state))
    for other in runs[1:3]:
        for a, b in zip(runs[0], other, strict=True):
            assert_same_bytes(a, b)
    for a, b in zip(runs[0], runs[3], strict=True):
        assert_close_rms("the general kernels", b, a, LAYER[BF16])
