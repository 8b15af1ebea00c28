"""Fingerprints of models: the same for the same weights and rope, another for any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

from hybridkv.models import load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model, weight_bytes
from hybridkv.models.fingerprint import SAMPLES, _weights, fingerprint_of, model_fingerprint

KINDS = ("llama", "llama_tied", "qwen3_5", "qwen3_5_moe", "qwen3_next")


def load(folder: Path, dtype: torch.dtype = torch.float32, **form: bool) -> Model:
    with open_checkpoint(folder) as checkpoint:
        return load_model(ModelConfig.from_dict(checkpoint.config), checkpoint, torch.device("cpu"), dtype, **form)


def edited(folder: Path, place: Path, **changes: object) -> Path:
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            config[key].update(value)
        else:
            config[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_checkpoint_has_the_same_fingerprint_and_others_have_not(
    kind: str, oracle: Callable, tmp_path: Path
) -> None:
    folder = oracle(kind).folder
    first = model_fingerprint(load(folder))
    assert len(first) == 64 and first == model_fingerprint(load(folder))
    tiny.build(kind, seed=1).save_pretrained(tmp_path / "seed")
    others = [
        load(tmp_path / "seed"),
        load(edited(folder, tmp_path / "rope", rope_parameters={"rope_theta": 12345.0})),
        load(edited(folder, tmp_path / "eps", rms_norm_eps=1e-4)),
        load(folder, torch.bfloat16),
    ]
    found = {first, *map(model_fingerprint, others)}
    assert len(found) == 1 + len(others)
    longer = edited(folder, tmp_path / "longer", max_position_embeddings=8192, eos_token_id=3)
    assert model_fingerprint(load(longer)) == first  # no cached value depends on these


def test_every_weight_counts(oracle: Callable) -> None:
    """A change of one tensor in any place is seen, be it one that a CPU keeps in a layout of its own."""
    model = load(oracle("qwen3_5").folder)
    named = dict(_weights(model, "model"))
    assert len(named) > 30 and any(t.is_mkldnn for t in named.values())
    first = model_fingerprint(model)
    plain = [t for t in named.values() if not t.is_mkldnn]
    assert weight_bytes(model) > sum(t.nbytes for t in plain)  # guard: the rest are the packed ones
    for tensor in plain:
        tensor.view(-1)[-1] += 1
        assert model_fingerprint(model) != first
        tensor.view(-1)[-1] -= 1
    linear = model.layers[0].feed.down  # type: ignore[attr-defined]
    weight = linear.weight.to_dense()
    weight[-1, -1] += 1
    linear.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    assert model_fingerprint(model) != first


def test_it_is_computed_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("hybridkv.models.fingerprint.model_fingerprint", lambda model: calls.append(model) or "x")
    named = fingerprint_of("a model")  # type: ignore[arg-type]
    assert not calls
    assert named() == named() == "x" and calls == ["a model"]


def test_a_wide_matrix_is_sampled_from_its_first_to_its_last_value() -> None:
    from hybridkv.models.fingerprint import _sample

    weight = torch.arange(10**6, dtype=torch.float32).view(1000, 1000)
    found = _sample(weight).view(torch.float32)
    assert len(found) == SAMPLES and found[0] == 0 and found[-1] == 10**6 - 1 and len(found.unique()) == SAMPLES
    assert torch.equal(_sample(weight.t().contiguous().t()), _sample(weight))  # strides do not matter
    assert len(_sample(torch.empty(0, 3))) == 0 and len(_sample(torch.tensor(1.0))) == 4
