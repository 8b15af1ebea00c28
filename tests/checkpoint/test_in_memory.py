"""A model from tensors at hand is the model from its folder."""

from pathlib import Path

import tiny_v4
import torch
import torch.nn.functional as F

from hybridkv import LLM, CacheConfig
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig


def test_a_bias_follows_its_rows() -> None:
    weight, bias, rows = torch.randn(6, 4), torch.randn(6), torch.tensor([2, 0, 3, 1])
    tensors = {"a.weight": weight[:4], "a.bias": bias[:4], "b.weight": weight[4:], "b.bias": bias[4:]}
    layer = Loader(InMemory(tensors), torch.device("cpu"), torch.float32).linear(4, ("a", rows), ("b", 2))
    x, order = torch.randn(3, 4), [2, 0, 3, 1, 4, 5]
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias)[:, order])


def test_tensors_in_memory_are_the_folder(tmp_path: Path) -> None:
    oracle = tiny_v4.Oracle("mini", tmp_path)
    llm = LLM(str(oracle.folder), "cpu", "float32", cache=CacheConfig(kv_dtype="f32"), max_context=64)
    config = ModelConfig.from_dict(oracle.model.config.to_dict())
    loader = Loader(InMemory(oracle.model.state_dict()), torch.device("cpu"), torch.float32)
    model = FAMILIES[config.architecture].load(config, loader)
    loader.finish()
    ids = oracle.ids[:40]
    want = llm.logits(ids)
    llm.engine.runner.model = model
    assert torch.equal(llm.logits(ids), want) and model.nbytes == llm.model.nbytes
