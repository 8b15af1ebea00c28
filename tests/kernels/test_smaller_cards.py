"""A 27B model's kernels compile for an RTX 40 card: 99 KiB of shared memory, and nothing that only Hopper has."""

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

COMPILE = """
import torch
from long_form import LONG, more
from no_device import built
from hybridkv.kernels.attention import decode
from hybridkv.kernels.attention import exact
from hybridkv.kernels.attention import prefill
from hybridkv.kernels.gdn import chunk
from hybridkv.kernels.gdn.segments import Segments
from hybridkv.kernels.formats.fp8 import Fp8Pages
from hybridkv.kernels.eviction.peak import peak_scores_triton
from hybridkv.kernels.eviction.peak_pool import pool_peaks_triton
from hybridkv.kernels.eviction.score import window_scores_triton
from hybridkv.kernels.eviction.select_shared import select_shared_triton
from hybridkv.kernels.eviction.value_norms import value_norms_triton

decode.on_gpu = lambda q: True
decode.shared_memory = prefill.shared_memory = chunk.shared_memory = lambda device: 99 * 1024
exact.shared_memory = lambda device: 99 * 1024
bf16, G = torch.bfloat16, 4
table, lengths = torch.zeros(2, G, 3, dtype=torch.int32), torch.zeros(2, G, dtype=torch.int64)
for H, D in ((24, 256), (8, 512), *more((256, 256))):  # the model's, wide heads, many heads a KV head
    plain = torch.zeros(4, 64, D, dtype=bf16)
    codes = Fp8Pages(torch.zeros(4, 64, D, dtype=torch.uint8), torch.zeros(4, 64))
    for pool in (codes, *more(plain)) if H == 24 else (plain,):
        q = torch.zeros(2, H, D, dtype=bf16)
        decode.attention_decode_triton(q, pool, pool, table, None, 1.0, lengths)
        prefill.attention_prefill_triton(q, pool, pool, table, None, [0, 1, 2], 1.0, lengths)
        for by_split in (False, True) if H == 24 else (True, *more(False)):
            exact.attention_exact_triton(
                q, pool, pool, table, lengths, [0, 1, 2], 1.0, lengths[:, 0], 5000, q.clone(), by_split=by_split
            )
window, D = 256, 256
q, pool = torch.zeros(window, 24, D, dtype=bf16), torch.zeros(4, 64, D, dtype=bf16)
positions = torch.zeros(G, 9, dtype=torch.int64)
if LONG:  # the kernels of peak_scores, with less to hold
    window_scores_triton(q, torch.arange(window), pool, table[0], positions, 1.0)
peak_scores_triton(q, torch.arange(window), pool, table[0], positions, 1.0)
value_norms_triton(pool, table[0], lengths[0], 9)
pool_peaks_triton(torch.zeros(G, 9), lengths[0], 2, 15, True)
select_shared_triton(torch.zeros(G, 16384), *[lengths[0]] * 3, 1, lengths[0, :1])
N, Hk, Hv, K, V = 2, 16, 48, 128, 128
q, v = torch.zeros(N * 64, Hk, K, dtype=bf16), torch.zeros(N, Hv, V, 64, dtype=bf16)
gates = torch.zeros(N, Hv, 64)
chunk.delta_chunks(q, q, v, gates, gates, torch.zeros(1, Hv, K, V), Segments.of([(0, 0, N * 64)], q.device))
for name, kernel in built:
    assert kernel.metadata.shared <= 99 * 1024, (name, kernel.metadata.shared)
    assert "griddepcontrol" not in kernel.asm["ptx"] and ".target sm_89" in kernel.asm["ptx"], name
print(*sorted({name for name, _ in built}))
"""


@pytest.mark.slow
@pytest.mark.long
def test_kernels_fit_a_card_with_little_shared_memory() -> None:
    """In a process without the interpreter."""
    printed = compile_alone(COMPILE, COMPILE_FOR="89")
    built = "attention_decode attention_exact attention_prefill chunk_sums gdn_scan gdn_solve join_parts join_splits "
    built += "pool_peaks score_combine score_lse score_weights select_shared value_norms"
    assert printed.split() == [f"{name}_kernel" for name in built.split()]
