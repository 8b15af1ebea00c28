"""A model from tensors at hand is the model from its folder."""

from pathlib import Path

import torch

import tiny_v4
from hybridkv import LLM, CacheConfig
from hybridkv.models import FAMILIES
from hybridkv.models.config import ModelConfig
from hybridkv.models.in_memory import InMemory
from hybridkv.models.loader import Loader


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
