"""A policy of your own in ten lines: rare directions stay. Each value far from the mean value of its head is kept.

python examples/own_policy.py [MODEL]      a folder or .gguf file; without one, the small embedded model
"""

import sys
from dataclasses import dataclass

from torch import Tensor

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.eviction import LayerCache, Policy


@dataclass(frozen=True)
class ValueDistance(Policy):
    power: float = 1.0

    def score(self, layer: LayerCache) -> Tensor:  # [G, L]: the higher, the more the entry matters
        here = (layer.positions >= 0).unsqueeze(-1)
        mean = layer.values.sum(1, keepdim=True) / here.sum(1, keepdim=True)
        return (layer.values - mean).norm(dim=-1) ** self.power


def main(model: str | None = None, prompt: str | list[int] | None = None, budget: int = 128) -> None:
    prompt = prompt or "The lighthouse keeper wrote in his log every evening. " * 30 + "Tonight he wrote:"
    llm = LLM(model, cache=CacheConfig(budget=budget, policy=ValueDistance()), max_context=1024, max_requests=1)
    answer = llm.generate(prompt, SamplingParams(max_tokens=24))[0]
    kept, full = answer.stats["kv_bytes_kept"], answer.stats["kv_bytes_full"]
    print(answer.text or answer.token_ids)
    print(f"{answer.prompt_tokens} prompt tokens, cache {kept / 2**20:.2f} of {full / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
