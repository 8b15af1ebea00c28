"""Tiny random DeepSeek-V4 models, made with transformers, which is the oracle of their parity tests.

What transformers starts at zero or one (sinks, biases, norms, the bases of the hyper-connections, the hash table) is
drawn again, and matrices are made larger: softmaxes that are nearly uniform hide mistakes. Many index heads keep index
scores apart; with few of them the ReLU makes exact ties of zeros, between which any choice is right.
"""

import copy
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, TOKENS = 211, 700
RATIOS = (0, 4, 128, 4)  # of each layer; 0: window only. The first two route by token id
TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
YARN = dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=len(RATIOS), num_attention_heads=4,
    head_dim=32, q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=4, partial_rotary_factor=8 / 32, o_groups=2,
    o_lora_rank=16, index_n_heads=24, index_head_dim=16, index_topk=8, sliding_window=128,
    layer_types=[TYPES[r] for r in RATIOS], num_hash_layers=2, hc_sinkhorn_iters=4, rope_scaling=YARN,
    swiglu_limit=0.6, max_position_embeddings=1048576, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
# all edges come early: a window of 8, HCA entries of 16 tokens, 3 entries picked
MINI_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
KINDS: dict[str, dict[str, Any]] = {
    "select": BASE,
    "all": {**BASE, "index_topk": 512},  # more than there are entries: nothing is left out
    "mini": {**BASE, "sliding_window": 8, "compress_rates": MINI_RATES, "index_topk": 3},
    "hashed": {**BASE, "num_hash_layers": len(RATIOS)},
}


def build(kind: str, seed: int = 0, scale: float = 6.0) -> PreTrainedModel:
    """The model in float32 on the CPU."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(KINDS[kind]))).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif name.endswith(("sinks", "position_bias")):
            parameter.data = noise
        elif name.endswith("base"):
            parameter.data = 0.5 * noise
        elif name.endswith("scale"):
            parameter.data = 1 + 0.3 * noise
        elif parameter.ndim >= 2:
            parameter.data *= scale
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            experts, k = BASE["n_routed_experts"], buffer.shape[1]
            buffer.copy_(torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(VOCAB)]))
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """[T, vocab] float32: one forward over all ids, no cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def token_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Oracle:
    """One kind with all that a comparison needs, made when first asked for."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        self.ids = token_ids(TOKENS)

    @cached_property
    def model(self) -> PreTrainedModel:
        return build(self.kind)

    @cached_property
    def folder(self) -> Path:
        self.model.save_pretrained(self.place)
        assert json.loads((self.place / "config.json").read_text())["model_type"] == "deepseek_v4"
        return self.place

    @cached_property
    def logits(self) -> Tensor:
        """[TOKENS, vocab]; causal, so the first n rows are the logits of the first n ids."""
        return reference_logits(self.model, self.ids)
