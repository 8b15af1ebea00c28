"""Loading takes memory for the weights and little more: the kernel's own account of a process of its own."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import sys
import torch
from hybridkv import LLM

def resident(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

torch.zeros(8, 8) @ torch.zeros(8, 8)
before = resident("VmRSS")
llm = LLM(sys.argv[1], device="cpu", dtype="bfloat16", max_requests=1, max_context=64)
print(llm.model.nbytes, resident("VmHWM") - before)
"""


def test_the_peak_while_loading_stays_near_the_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="200MB")
    finally:
        torch.set_default_dtype(torch.float32)
    run = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300)
    weights, peak = map(int, done.stdout.split())
    assert weights > 400 << 20
    # 64 MiB of the file may be mapped, and one tensor exists up to three times: as read, joined, and packed
    assert peak < 1.2 * weights + (64 << 20) + 3 * (2 * 2816 * 1024 * 2) + (48 << 20)
