"""Policies compared: how often is a number still found, when a text has been cut to a budget?

python examples/compare_policies.py [MODEL [PROMPTS]]      a folder or .gguf file; without one, the small embedded model
"""

import random
import sys
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.eviction import LayerCache, Policy, SnapKV

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Neighbours(Policy):
    """A token matters as much as the best of its neighbours: a number is read digit by digit."""

    width: int = 15

    def score(self, layer: LayerCache) -> Tensor:  # [G, L]: the higher, the more the entry matters
        seen = SnapKV(pooling="none").score(layer)
        return F.max_pool1d(seen, self.width, stride=1, padding=self.width // 2)


def make_prompts(llm: LLM, count: int, repeats: int) -> tuple[list[list[int]], list[str]]:
    """Prompts with one number each, at different depths, and the numbers."""
    draw = random.Random(0)
    prompts, numbers = [], []
    for i in range(count):
        number = str(draw.randrange(100_000, 1_000_000))
        before = (i * repeats) // count
        text = NOISE * before + f"The magic number is {number}. " + NOISE * (repeats - before)
        question = f"{text}\n\nWhat is the magic number in the text?"
        prompts.append(llm.encode_chat([{"role": "user", "content": question}]))
        numbers.append(number)
    return prompts, numbers


def main(model: str | None = None, count: int = 16, repeats: int = 24, budget: int = 160) -> dict[str, int]:
    llm = LLM(model, cache=CacheConfig(budget=budget), max_requests=4, max_context=4096)
    prompts, numbers = make_prompts(llm, count, repeats)
    print(f"{count} prompts of {len(prompts[0])} tokens, budget {budget}")
    found = {}
    policies = {"all kept": None, "snapkv": "snapkv", "keydiff": "keydiff", "mine": Neighbours(), "auto": "auto"}
    for name, policy in policies.items():
        eviction = None if policy is None else EvictionConfig(budget=budget, policy=policy)
        answers = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0), eviction=eviction)
        found[name] = sum(number in answer.text for number, answer in zip(numbers, answers, strict=True))
        print(f"{name:9} {found[name]:3} of {count}, {answers[0].stats['kv_bytes_kept'] / 2**20:.1f} MiB", flush=True)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
