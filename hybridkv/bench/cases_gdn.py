"""Cases of a Gated DeltaNet layer: one token a request, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridkv.bench.cases import Case, Listed, Peers, Setup
from hybridkv.bench.report import check, installed
from hybridkv.bench.timing import copies
from hybridkv.kernels.gdn.rule import CHUNK

if TYPE_CHECKING:
    from hybridkv.kernels.gdn.weights import DeltaNet
    from hybridkv.models.config import GdnConfig

# results rounded to bf16; a state in bf16 is rounded once more
STEP_BOUND = 1e-2
# the chunked form multiplies in bf16 what the reference multiplies in f32
PREFILL_BOUND = 2e-2
CHECKED = 512  # of a long prompt's tokens; the rule is causal, and the reference goes token by token


def gdn_cases(s: Setup) -> Iterator[Listed]:
    if s.shape.config.gdn is None:
        return
    for state in (torch.float32, torch.bfloat16):
        name = {torch.float32: "f32", torch.bfloat16: "bf16"}[state]
        for B in s.some((1, 8, 64, 256), (1, 64), (2,)):
            yield Listed("gdn_step", f"{name} state B={B}", partial(step_case, s, state, B))
    for T in s.some((2 << 10, 4 << 10, 16 << 10, 128 << 10), (2 << 10,), (96,)):
        yield Listed("gdn_prefill", f"T={T}", partial(prefill_case, s, T))
    for B, T in s.some([(1, 1), (64, 1), (256, 1), (1, 2 << 10), (1, 16 << 10)], [(1, 1), (1, 2 << 10)], [(2, 1)]):
        yield Listed("gdn_exact", f"B={B} T={T}", partial(exact_case, s, B, T))


def make_net(s: Setup) -> DeltaNet:
    from hybridkv.kernels.gdn.weights import DeltaNet

    d = s.shape.config.gdn
    assert d is not None
    f32 = torch.float32
    return DeltaNet(
        d.key_heads, d.value_heads, d.key_dim, d.value_dim,
        conv=s.randn(d.channels, d.kernel_width, dtype=f32) * 0.5,
        decay=(s.randn(d.value_heads, dtype=f32) * 0.5).exp(),
        dt_bias=s.randn(d.value_heads, dtype=f32) * 0.5 - 3,  # decays as trained models have: some hundred tokens
        norm=s.randn(d.value_dim, dtype=f32) * 0.1 + 1,
        eps=1e-6,
    )  # fmt: skip


def step_case(s: Setup, dtype: torch.dtype, B: int) -> Case:
    from hybridkv.kernels.gdn.step import gdn_step, gdn_step_ref

    net, d = make_net(s), s.shape.config.gdn
    assert d is not None
    state = d.value_heads * d.key_dim * d.value_dim * dtype.itemsize
    width, size = sum(net.columns), s.shape.dtype.itemsize
    tail = (d.kernel_width - 1) * d.channels * size
    moved = B * (2 * state + 2 * tail + (width + d.value_heads * d.value_dim) * size)
    count = copies(moved, s.device)
    states = s.randn(count * B, d.value_heads, d.key_dim, d.value_dim, dtype=dtype) * 0.1
    tails = s.randn(count * B, d.kernel_width - 1, d.channels)
    inputs = [(s.randn(B, width), torch.arange(B, device=s.device) + i * B) for i in range(count)]

    def verify() -> float:
        (x, slots), got_s, got_t = inputs[-1], states.clone(), tails.clone()
        want_s, want_t = states.clone(), tails.clone()
        got, want = gdn_step(x, net, got_t, got_s, slots), gdn_step_ref(x, net, want_t, want_s, slots)
        check("gdn_step state", got_s, want_s, STEP_BOUND)
        check("gdn_step tails", got_t, want_t, 1e-6)
        return check(f"gdn_step B={B}", got, want, STEP_BOUND)

    peers = fla_peers(s, "fused_recurrent_gated_delta_rule", B, 1) if dtype == torch.float32 else {}
    return Case(
        lambda x: gdn_step(x[0], net, tails, states, x[1]),
        inputs, verify, moved, torch=lambda x: gdn_step_ref(x[0], net, tails, states, x[1]), peers=peers,
    )  # fmt: skip


def chunk_flops(s: Setup, T: int) -> float:
    """Products of the rule in chunks of 64 (see kernels/gdn/rule.py)."""
    d = s.shape.config.gdn
    assert d is not None
    K, V = d.key_dim, d.value_dim
    return T * d.value_heads * (2 * CHUNK * (3 * K + 2 * V) + 6 * K * V)


def prefill_case(s: Setup, T: int) -> Case:
    from hybridkv.kernels.gdn.prefill import gdn_prefill, gdn_prefill_ref

    net, d = make_net(s), s.shape.config.gdn
    assert d is not None
    shape = d.value_heads, d.key_dim, d.value_dim
    width, size = sum(net.columns), s.shape.dtype.itemsize
    moved = T * (width + d.value_heads * d.value_dim) * size
    inputs = [
        (s.randn(T, width), s.randn(d.kernel_width - 1, d.channels), s.randn(*shape, dtype=torch.float32) * 0.1)
        for _ in range(min(4, copies(moved, s.device)))
    ]  # fmt: skip

    def verify() -> float:
        (x, *state), few = inputs[0], min(T, CHECKED)
        mine = [t.clone() for t in state]
        got = gdn_prefill(x, net, mine[0], mine[1])
        ours, theirs = [t.clone() for t in state], [t.clone() for t in state]
        want = gdn_prefill_ref(x[:few], net, *theirs)
        gdn_prefill(x[:few], net, ours[0], ours[1])
        check("gdn_prefill state", ours[1], theirs[1], PREFILL_BOUND)
        return check(f"gdn_prefill T={T}", got[:few], want, PREFILL_BOUND)

    peers = fla_peers(s, "chunk_gated_delta_rule", 1, T)
    return Case(lambda x: gdn_prefill(x[0], net, x[1], x[2]), inputs, verify, moved, chunk_flops(s, T), peers=peers)


def exact_case(s: Setup, B: int, T: int) -> Case:
    """T tokens of each of B requests by the form whose results depend on a token and its past alone, the fast one
    beside it.
    """
    from hybridkv.kernels.gdn.exact import Requests, gdn_exact, gdn_exact_torch
    from hybridkv.kernels.gdn.prefill import gdn_prefill
    from hybridkv.kernels.gdn.step import gdn_step

    net, d = make_net(s), s.shape.config.gdn
    assert d is not None
    size, moved = s.shape.dtype.itemsize, 8 * B * d.value_heads * d.key_dim * d.value_dim
    moved += B * T * (sum(net.columns) + d.value_heads * d.value_dim) * size + 6 * B * d.channels * size
    tails, states = s.randn(B, d.kernel_width - 1, d.channels), s.randn(B, *d_state(d), dtype=torch.float32) * 0.1
    slots, starts = torch.arange(B, device=s.device), torch.arange(0, B * T + 1, T, device=s.device)
    requests, inputs = Requests(slots, starts, slots.repeat_interleave(T)), [s.randn(B * T, sum(net.columns))]

    def verify() -> float:
        few = min(T, CHECKED)
        x = inputs[0].view(B, T, -1)[:, :few].reshape(B * few, -1)
        own = Requests(slots, torch.arange(0, B * few + 1, few, device=s.device), slots.repeat_interleave(few))
        got, want = (
            form(x, net, tails.clone(), states.clone(), own) for form in (gdn_exact, gdn_exact_torch)
        )  # fmt: skip
        return check(f"gdn_exact B={B} T={T}", got, want, STEP_BOUND)

    def fast(x: Tensor) -> Tensor:
        return gdn_step(x, net, tails, states, slots) if T == 1 else gdn_prefill(x, net, tails[0], states[0])

    return Case(
        lambda x: gdn_exact(x, net, tails, states, requests), inputs, verify, moved, peers={"fast": (fast, inputs)}
    )


def d_state(d: GdnConfig) -> tuple[int, int, int]:
    return d.value_heads, d.key_dim, d.value_dim


def fla_peers(s: Setup, name: str, B: int, T: int) -> Peers:
    """The delta rule alone in fla: no convolution, gates or output norm; keys repeated for their value heads before."""
    if s.device != "cuda" or not installed("fla"):
        return {}
    import fla.ops.gated_delta_rule as rules  # type: ignore[import-not-found]

    d = s.shape.config.gdn
    assert d is not None
    H, K, V = d.value_heads, d.key_dim, d.value_dim
    op, f32 = getattr(rules, name), torch.float32
    moved = 2 * B * H * K * V * 4 + B * T * H * (2 * K + 2 * V) * 2
    inputs = [
        (s.randn(B, T, H, K), s.randn(B, T, H, K), s.randn(B, T, H, V), -torch.rand(B, T, H, device=s.device),
         torch.rand(B, T, H, device=s.device, dtype=s.shape.dtype), s.randn(B, H, K, V, dtype=f32) * 0.1)
        for _ in range(min(4, copies(moved)))
    ]  # fmt: skip

    def rule(x: Any) -> Tensor:
        q, k, v, g, beta, state = x
        # a prompt begins without a state, as transformers' does: what is tuned here serves that too
        more = {"initial_state": state if T == 1 else None, "output_final_state": True}
        return op(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **more)[0]

    return {"fla (rule alone)": (rule, inputs)}
