"""DeepSeek-V4 in transformers, the peer of v4_model.py."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Meter, sync


class V4Peer:
    def __init__(self, shape: Shape) -> None:
        self.model = build(shape)

    def config(self) -> dict[str, Any]:
        return self.model.config.to_dict()

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """[T, vocab] f32 after each of tokens [T]."""
        return self.model(input_ids=tokens[None], use_cache=False).logits[0].float()

    @torch.inference_mode()
    def run(self, tokens: Tensor, chunk: int, steps: int) -> tuple[Meter, float]:
        """The prompt in chunks, and the median seconds of a decode step."""
        from transformers import DynamicCache

        device = tokens.device.type
        cache = DynamicCache(config=self.model.config)
        out: Any = None
        with Meter(device) as prefill:
            for a in range(0, len(tokens), chunk):
                out = self.model(input_ids=tokens[None, a : a + chunk], past_key_values=cache, logits_to_keep=1)
        times = []
        for _ in range(steps):
            sync(device)
            begin = time.perf_counter()
            out = self.model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=cache)
            sync(device)
            times.append(time.perf_counter() - begin)
        return prefill, sorted(times)[len(times) // 2]


def build(shape: Shape) -> Any:
    """transformers' model; what it starts at zero is drawn too."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(**{k: v for k, v in shape.raw.items() if k not in ("model_type", "dtype")})
    torch.set_default_dtype(shape.dtype)
    try:
        with torch.device(shape.device):
            model = DeepseekV4ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    experts = config.n_routed_experts
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("sinks", "position_bias")):
            p.data.normal_()
        elif name.endswith(("base", "e_score_correction_bias")):
            p.data.normal_(0, 0.3)
        elif name.endswith("tid2eid"):
            p.data.copy_(torch.rand(p.shape[0], experts, device=p.device).topk(p.shape[1]).indices)
        elif p.ndim >= 2 and p.is_floating_point():
            p.data.mul_(2.0)  # the start of 0.02 leaves every softmax flat
    return model
