"""Keep sets of kvpress's SnapKVPress beside ours, layer by layer and head by head, on two Llama models.

kvpress 0.5.5 runs with transformers below 5.3, so it has an environment of its own:

    python -m venv kvpress-env
    kvpress-env/bin/pip install kvpress==0.5.5 transformers==5.2.0 -e .
    kvpress-env/bin/python bench/peers/kvpress_keep_sets.py

Both sides run in float32 with a window of 64 queries, average pooling of 5, and a list for each KV head. kvpress takes
the mean over the window and over the query heads of a group where we take the sum: the order is the same. Lists may
differ where two scores agree to the last bits of float32.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from kvpress import SnapKVPress
from transformers import LlamaConfig, LlamaForCausalLM

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.embedded import embedded_model
from hybridkv.eviction.policies import SnapKV
from hybridkv.models import open_checkpoint

WINDOW = 64
KeepSets = dict[tuple[int, int], list[int]]  # (layer, KV head) -> ascending positions


class Recording(SnapKVPress):
    """Writes down which entries its scores keep."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
        scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
        self.scores = {**getattr(self, "scores", {}), module.layer_idx: scores[0]}
        return scores


@torch.no_grad()
def kvpress_sets(model: LlamaForCausalLM, ids: list[int], budget: int) -> tuple[KeepSets, dict[int, torch.Tensor]]:
    press = Recording(compression_ratio=1 - (budget + 0.5) / len(ids), window_size=WINDOW, kernel_size=5)
    with press(model):
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    kept = cache.layers[0].keys.shape[2]
    assert kept == budget, f"kvpress kept {kept} entries, {budget} were asked for"
    sets = {
        (layer, g): sorted(row.topk(budget).indices.tolist())
        for layer, scores in press.scores.items()
        for g, row in enumerate(scores)
    }
    return sets, press.scores


def our_sets(folder: Path, ids: list[int], budget: int) -> KeepSets:
    config = CacheConfig("f32", budget=budget, window=WINDOW, recent=WINDOW, policy=SnapKV("avg", 5))
    llm = LLM(str(folder), device="cpu", dtype="float32", cache=config, max_requests=1, max_context=len(ids) + 64)
    request = llm.engine.add(ids, SamplingParams(max_tokens=1))
    while not llm.engine.idle:
        llm.engine.step()
    lists = request.evictions[len(ids)]
    return {(layer, g): keep.tolist() for layer, heads in enumerate(lists) for g, keep in enumerate(heads)}


def compare(name: str, model: LlamaForCausalLM, folder: Path, ids: list[int], budget: int) -> None:
    theirs, scores = kvpress_sets(model.eval(), ids, budget)
    ours = our_sets(folder, ids, budget)
    assert ours.keys() == theirs.keys()
    equal = sum(ours[key] == theirs[key] for key in ours)
    swapped, gap = 0, 0.0
    for (layer, g), keep in ours.items():
        row = scores[layer][g]
        extra, missing = (sorted(set(a) - set(b)) for a, b in ((keep, theirs[layer, g]), (theirs[layer, g], keep)))
        swapped += len(extra)
        if extra:
            worst = row[missing].max() - row[extra].min()
            gap = max(gap, float(worst / row[missing].max()))
    print(
        f"{name}: {len(ids)} tokens, budget {budget}: {equal} of {len(ours)} keep lists equal, "
        f"{swapped} of {len(ours) * budget} entries differ"
        + (f", their scores by kvpress within {gap:.1e} of each other" if swapped else "")
    )


def tiny_llama(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def smollm2(path: Path) -> LlamaForCausalLM:
    """The embedded model's weights, dequantised, in transformers' model."""
    with open_checkpoint(path) as checkpoint:
        config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"})
        weights = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    model = LlamaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def main() -> None:
    print(f"kvpress {version('kvpress')}, transformers {version('transformers')}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as place:
        model = tiny_llama(Path(place))
        for length, budget in ((300, 100), (1000, 128), (1000, 500)):
            ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            compare("tiny random Llama", model, Path(place), ids, budget)
    path = embedded_model()
    text = (Path(__file__).parents[2] / "docs" / "cache.md").read_text()
    ids = LLM(str(path), device="cpu", dtype="float32", max_requests=1, max_context=64).encode(text)[:800]
    compare("SmolLM2-135M-Instruct", smollm2(path), path, ids, 256)


if __name__ == "__main__":
    main()
