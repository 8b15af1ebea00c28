"""Every kernel of DeepSeek-V4 and of Gated DeltaNet compiles for a Hopper GPU, at the released widths, without one.

The launchers themselves run, with a driver that has no device: what they launch is compiled and not run. The
interpreter of the other tests takes more than the compiler does.
"""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper GPU
COMPILE = """
import torch
from long_form import more
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Nothing:
    def __getattr__(self, name):
        return lambda *args, **more: (0,) * 8


class NoDevice:
    utils, launcher_cls = Nothing(), None

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name):
        return "x"


driver.set_active(NoDevice())
run = JITFunction.run


def compile_only(self, *args, grid, warmup, **more):
    print(self.__name__, run(self, *args, grid=grid, warmup=True, **more).metadata.shared)


JITFunction.run = compile_only

from hybridkv.kernels.v4 import flush_csa
from hybridkv.kernels.v4 import flush_hca
from hybridkv.kernels.v4 import running_pool
from hybridkv.kernels.v4 import gather
from hybridkv.kernels.gdn import prefill as gdn_prefill
from hybridkv.kernels.gdn.segments import Segments
from hybridkv.kernels.gdn import step as gdn_step
from hybridkv.kernels.v4 import hyper_connections as hyper
from hybridkv.kernels.v4 import indexer
from hybridkv.kernels.moe import grouped, v4_router
from hybridkv.kernels import topk
from hybridkv.kernels.v4 import norm_rope
from hybridkv.kernels.v4 import window_ring as window
from hybridkv.kernels.v4.sparse import Entries, attention_sparse_triton
from hybridkv.kernels.gdn.weights import DeltaNet
from hybridkv.kernels.formats.page_layout import entry_format, index_format
from hybridkv.kernels.step_index import StepIndex

B, D, C = 64, 512, 128
decode, prompt = StepIndex.make([*range(B)], [127] * B, [1] * B), StepIndex.make([0], [1000], [2048])
whole = torch.zeros(B, dtype=torch.int64)
for file in (window, topk, flush_csa, flush_hca, running_pool):
    file.can_overlap = lambda x, max_tokens=None: True


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


angles = {T: (zeros(T, 32), zeros(T, 32)) for T in (len(decode.token_to_req), len(prompt.token_to_req))}
table = zeros(B, 4, dtype=torch.int32)
running = [zeros(B, 1, D) for _ in range(3)]
for name in ("fp8", *more("bf16", "fp8_entry")):  # f32 a GPU runs
    fmt = entry_format(name, D, 64)
    ring, longer, pages = (zeros(*shape, fmt.width, dtype=fmt.dtype) for shape in ((B, 128), (1, 4096), (4, 32)))
    for index in (decode, prompt):
        T = len(index.token_to_req)
        window.append_window_triton(ring, fmt, zeros(T, D), zeros(D), 1e-6, *angles[T], index)
        q = zeros(T, 64, D, dtype=torch.bfloat16)
        for entries, splits in ((None, 1), (Entries(pages, table, 4, zeros(T, 512, dtype=torch.int32)), 4)):
            rest = (128, zeros(64), 1.0, *angles[T], index, entries)
            attention_sparse_triton(q, ring, fmt, index.slots, *rest, splits=splits)
    window.copy_window_triton(ring, longer, fmt, prompt, whole[:1], 127)
    gather.gather_entries_triton(pages, fmt, zeros(4, 128, dtype=torch.int64))
    rows = [zeros(B, 8, 2 * D) for _ in range(2)]
    p, z, bias, norm = zeros(B, 2 * D), zeros(B, 2 * D), zeros(4, 2 * D), (zeros(D), 1e-6)
    for longest in (1, 2):
        flush_csa.flush_csa_triton(pages, fmt, whole, p, z, *rows, bias, *norm, *angles[B], decode, 4, longest)
    p, z, bias = zeros(B, D), zeros(B, D), zeros(128, D)
    flush_hca.flush_hca_triton(pages, fmt, whole, p, z, *running, bias, *norm, *angles[B], decode, 128)
running_pool.save_running_triton(*running, p, z, bias, decode, 128)
for name in ("f32", "mxfp4", *more("bf16", "fp8", "nvfp4")):
    fmt = index_format(name, C)
    pages, rows = zeros(4, 32, fmt.width, dtype=fmt.dtype), [zeros(B, 8, 2 * C) for _ in range(2)]
    p, z, bias = zeros(B, 2 * C), zeros(B, 2 * C), zeros(4, 2 * C)
    flush_csa.flush_csa_triton(pages, fmt, whole, p, z, *rows, bias, zeros(C), 1e-6, *angles[B], decode, 4, 1)
    for index in (decode, prompt):
        T = len(index.token_to_req)
        q = zeros(T, 64, C, dtype=torch.bfloat16)
        indexer.index_logits_triton(q, zeros(T, 64), pages, fmt, table, index, 4, 128, 0)
for T, width in ((1, 262144), (B, 4096)):
    topk.top_entries_triton(zeros(T, width), whole[:T], 512)
gather.flat_entries_triton(table, whole, whole, 32)
norm_rope.norm_rope_triton(zeros(B, 64, D), torch.bfloat16, 1e-6, None, angles[B])
streams = zeros(B, 4, 4096, dtype=torch.bfloat16)
x, post, comb = hyper.hyper_enter_triton(
    streams, hyper.HyperMap(zeros(24, 4 * 4096), zeros(24), zeros(3), zeros(4096), 1e-6, 1e-6, 20)
)
hyper.hyper_expand_triton(streams, x, post, comb)
gate_up, down = zeros(5, 512, 4096, dtype=torch.bfloat16), zeros(5, 4096, 256, dtype=torch.bfloat16)
for T in (1, 4096):
    x, tokens = zeros(T, 4096, dtype=torch.bfloat16), zeros(T, dtype=torch.int64)
    for bias, experts in ((zeros(4), None), (None, zeros(99, 2, dtype=torch.int64))):
        weights, chosen = v4_router.route_triton(zeros(T, 4), tokens, v4_router.Router(2, 1.5, True, bias, experts))
    grouped.run_experts_triton(x, weights, chosen, gate_up, down, 10.0)
net = DeltaNet(16, 48, 128, 128, zeros(10240, 4), zeros(48), zeros(48), zeros(128), 1e-6)
for dtype in (torch.float32, *more(torch.bfloat16)):
    conv_states, states = zeros(9, 3, 10240, dtype=torch.bfloat16), zeros(9, 48, 128, 128, dtype=dtype)
    for hopper in (False, True):
        gdn_step.suits_hopper = lambda *given: hopper
        x = zeros(9, sum(net.columns), dtype=torch.bfloat16)
        gdn_step.gdn_step_triton(x, net, conv_states, states, whole[:1].expand(9))
segments = Segments.of([(0, 0, 9)], x.device)
out = zeros(9, 6144, dtype=x.dtype)
gdn_prefill.gdn_prefill_triton(x, net, zeros(1, 3, 10240), zeros(1, 48, 128, 128), segments, out)
"""
KERNELS = {
    "append_fp8_kernel", "append_window_kernel", "attention_sparse_kernel", "combine_kernel", "copy_window_kernel",
    "decode_logits_kernel", "enter_kernel", "expand_kernel", "expert_down_kernel", "expert_up_kernel",
    "flat_entries_kernel", "flush_csa_kernel", "flush_hca_kernel", "gather_kernel", "gdn_inputs_kernel",
    "gdn_norm_kernel", "gdn_scan_kernel", "gdn_solve_kernel", "gdn_step_hopper_kernel", "gdn_step_kernel",
    "group_largest_kernel", "join_sparse_kernel", "norm_rope_kernel", "order_kernel", "plain_logits_kernel",
    "prefill_logits_kernel", "project_kernel", "round_queries_kernel", "route_kernel", "save_rows_kernel",
    "save_running_kernel", "top_entries_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_every_launch_compiles_and_fits() -> None:
    """Every kernel in one format; the long form has them all. In a process without the interpreter, which would take
    the place of the compiler.
    """
    printed = compile_alone(COMPILE)
    built = [line.split() for line in printed.splitlines()]
    assert {name for name, _ in built} >= KERNELS, KERNELS - {name for name, _ in built}
    assert max(int(shared) for _, shared in built) <= SHARED_MEMORY
