"""gdn_step on the GPU at the heads of Qwen3.5-27B: the public function runs the kernels, a race would show as a wrong
conv_state, and a captured step follows the slots that are written into its input. The small cases are in tests/kernels.

Few requests overlap the kernel before, from 264 heads on a bf16 state stays narrow, many requests take Hopper's kernel.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybridkv.kernels.gdn import step as module
from hybridkv.kernels.gdn.step import gdn_step, gdn_step_ref
from hybridkv.kernels.gdn.weights import DeltaNet

pytestmark = pytest.mark.gpu
F32, BF16 = torch.float32, torch.bfloat16
OUTPUT = 3e-3  # two bf16 roundings of nearly the same number: 1.1e-3 RMS each
STATE = {F32: 1e-5, BF16: 3e-3}  # f32: sums of 128 products and exp, in another order; bf16: as the output


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def delta_net(key_heads: int = 16) -> DeltaNet:
    channels = 2 * key_heads * 128 + 48 * 128
    weights = torch.randn(channels, 4) / 2, torch.rand(48) * 4, torch.randn(48), torch.randn(128)
    return DeltaNet(key_heads, 48, 128, 128, *weights, eps=1e-6)


def pools(net: DeltaNet, slots: int, dtype: torch.dtype, conv_states: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    return torch.randn(slots, 3, net.channels).to(conv_states), torch.randn(slots, 48, 128, 128).to(dtype)


def inputs(net: DeltaNet, B: int) -> Tensor:
    """The left part of wider rows."""
    return torch.randn(B, sum(net.columns) + 8, dtype=BF16)[:, : sum(net.columns)]


def assert_close(want: Tensor, got: Tensor, bound: float) -> None:
    """Relative RMS, on the GPU: the states of a batch are gigabytes."""
    want, got = want.float(), got.float()
    error = ((got - want).square().mean() / want.square().mean()).sqrt().item()
    assert error <= bound, f"relative RMS {error:.3e} is over {bound:.3e}"  # a NaN fails this too


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("B", "key_heads", "conv_dtype", "hopper"),
    [(1, 16, BF16, True), (8, 16, BF16, True), (64, 16, BF16, True), (20, 48, BF16, True), (20, 16, F32, True),
     (20, 16, BF16, False)],
)  # fmt: skip
def test_steps_in_a_row_match_the_composition(
    B: int, key_heads: int, conv_dtype: torch.dtype, hopper: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hopper:  # what smaller cards run
        monkeypatch.setattr(module, "suits_hopper", lambda *given: False)
    net, N = delta_net(key_heads), B + 2
    conv_states, states = pools(net, N, dtype, conv_dtype)
    want_conv_states, want_states = conv_states.clone(), states.clone()
    for _ in range(4):
        x, slots = inputs(net, B), torch.randperm(N)[:B]
        slots[1::5] = -1
        want = gdn_step_ref(x, net, want_conv_states, want_states, slots)
        got = gdn_step(x, net, conv_states, states, slots)
        assert_close(want, got, OUTPUT)
        assert (got[1::5] == 0).all()
        assert torch.equal(want_conv_states, conv_states)
    assert_close(want_states, states, STATE[dtype])


def test_the_same_bytes_every_time() -> None:
    """Whichever program comes last. Slots past 2^31 elements of the state pool."""
    net, B, N = delta_net(), 64, 2800
    slots = torch.arange(N - B, N)
    conv_states, states = torch.randn(N, 3, net.channels, dtype=BF16), torch.empty(N, 48, 128, 128)
    before = conv_states.clone()
    first = None
    x = inputs(net, B)
    for _ in range(10):
        conv_states.copy_(before)
        states[N - B :] = torch.linspace(-1, 1, 128)
        now = gdn_step(x, net, conv_states, states, slots), conv_states, states[N - B :]
        if first is None:
            first = [t.clone() for t in now]
            assert torch.equal(before[: N - B], conv_states[: N - B])
        for a, b in zip(first, now):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_a_captured_step_follows_its_slots_and_allocates_nothing(dtype: torch.dtype) -> None:
    net, B, N = delta_net(), 8, 12
    conv_states, states = pools(net, N, dtype)
    want_conv_states, want_states = conv_states.clone(), states.clone()
    x, slots = inputs(net, B), torch.full((B,), -1)
    gdn_step(x, net, conv_states, states, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gdn_step(x, net, conv_states, states, slots)
    for real in (8, 1, 5, 8):
        x.copy_(inputs(net, B))
        slots.copy_(torch.randperm(N)[:B])
        slots[real:] = -1
        want = gdn_step_ref(x, net, want_conv_states, want_states, slots)
        held = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
        assert_close(want, out, OUTPUT)
        assert torch.equal(want_conv_states, conv_states)
    assert_close(want_states, states, STATE[dtype])
