"""A checkpoint with all the tensors of DeepSeek-V4-Flash, made small, is opened and loaded as it is."""

import json
import threading
import weakref
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_ranks import fixed_bytes
from v4_files import QUANTISED, Made, write

from hybridkv.checkpoint import checkpoint as reading
from hybridkv.checkpoint.deepseek_quant import QuantisedStore
from hybridkv.checkpoint.loader import Loader
from hybridkv.errors import ModelFileError
from hybridkv.kernels.linear.block_scaled import BlockScaled
from hybridkv.models import load_model, open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN
from hybridkv.parallel.block_parts import block_shard
from hybridkv.parallel.group import Alone
from hybridkv.parallel.loader import load_sharded
from hybridkv.parallel.rank_bytes import rank_model_bytes
from hybridkv.parallel.shard import Shard
from hybridkv.planner import model_bytes

SIZES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
SHARDS = 46  # as the released model has
# every number of layers and experts as released, every width small
SMALL = dict(
    hidden_size=64, num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_groups=2, o_lora_rank=32,
    index_n_heads=2, index_head_dim=16, moe_intermediate_size=32, vocab_size=64, quantization_config=QUANTISED,
)  # fmt: skip
Entries = dict[str, tuple[str, tuple[int, ...]]]


def layer(name: str, kind: int, hashed: bool, c: dict[str, Any]) -> Entries:
    """One layer under the released names."""
    D, H, d, q, I, Di = (c[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank",
                                       "moe_intermediate_size", "index_head_dim"))  # fmt: skip
    groups, rank, index, found = c["o_groups"], c["o_lora_rank"], c["index_n_heads"], {}

    def matrix(of: str, rows: int, columns: int, four: bool = False) -> None:
        found[f"{name}.{of}.weight"] = ("I8", (rows, columns // 2)) if four else ("F8_E4M3", (rows, columns))
        blocks = (rows, columns // 32) if four else (-(-rows // 128), -(-columns // 128))
        found[f"{name}.{of}.scale"] = "F8_E8M0", blocks

    def compressor(of: str, ratio: int, wide: int, width: int) -> None:
        found[f"{name}.{of}.wkv.weight"] = found[f"{name}.{of}.wgate.weight"] = "BF16", (wide, D)
        found[f"{name}.{of}.ape"], found[f"{name}.{of}.norm.weight"] = ("F32", (ratio, wide)), ("BF16", (width,))

    for part in ("attn", "ffn"):
        found[f"{name}.{part}_norm.weight"] = "BF16", (D,)
        for key, shape in (("fn", (24, 4 * D)), ("base", (24,)), ("scale", (3,))):
            found[f"{name}.hc_{part}_{key}"] = "F32", shape
    matrix("attn.wq_a", q, D)
    matrix("attn.wq_b", H * d, q)
    matrix("attn.wkv", d, D)
    matrix("attn.wo_a", groups * rank, H * d // groups)
    matrix("attn.wo_b", D, groups * rank)
    found |= {f"{name}.attn.q_norm.weight": ("BF16", (q,)), f"{name}.attn.kv_norm.weight": ("BF16", (d,))}
    found[f"{name}.attn.attn_sink"] = "F32", (H,)
    if kind == 128:
        compressor("attn.compressor", 128, d, d)
    if kind == 4:
        compressor("attn.compressor", 4, 2 * d, d)
        compressor("attn.indexer.compressor", 4, 2 * Di, Di)
        matrix("attn.indexer.wq_b", index * Di, q)
        found[f"{name}.attn.indexer.weights_proj.weight"] = "BF16", (index, D)
    E = c["n_routed_experts"]
    found[f"{name}.ffn.gate.weight"] = "BF16", (E, D)
    if hashed:
        found[f"{name}.ffn.gate.tid2eid"] = "I64", (c["vocab_size"], c["num_experts_per_tok"])
    else:
        found[f"{name}.ffn.gate.bias"] = "F32", (E,)
    for expert in [f"experts.{e}" for e in range(E)] + ["shared_experts"]:
        for key, rows, columns in (("w1", I, D), ("w2", D, I), ("w3", I, D)):
            matrix(f"ffn.{expert}.{key}", rows, columns, four=expert != "shared_experts")
    return found


def all_tensors(c: dict[str, Any]) -> Entries:
    D = c["hidden_size"]
    found: Entries = {"embed.weight": ("BF16", (c["vocab_size"], D)), "head.weight": ("BF16", (c["vocab_size"], D))}
    found |= {"norm.weight": ("BF16", (D,)), "hc_head_fn": ("F32", (4, 4 * D))}
    found |= {"hc_head_base": ("F32", (4,)), "hc_head_scale": ("F32", (1,))}
    ratios = c["compress_ratios"]
    for i in range(c["num_hidden_layers"]):
        found |= layer(f"layers.{i}", ratios[i], i < c["num_hash_layers"], c)
    drafts = layer("mtp.0", 0, False, c)
    for part in ("e_proj", "h_proj"):
        drafts |= {f"mtp.0.{part}.weight": ("F8_E4M3", (D, D)), f"mtp.0.{part}.scale": ("F8_E8M0", (1, 1))}
    drafts |= {f"mtp.0.{part}.weight": ("BF16", (D,)) for part in ("enorm", "hnorm", "norm")}
    return found | drafts | {f"mtp.0.{name}": entry for name, entry in found.items() if name.startswith("hc_head")}


def write_sparse(folder: Path, tensors: Entries) -> None:
    """Shards whose headers are real and whose data is a hole of zeros: finite codes, the smallest scales."""
    names, index = sorted(tensors), {}
    for shard in range(SHARDS):
        file, header, at = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors", {}, 0
        for name in names[shard::SHARDS]:
            dtype, shape = tensors[name]
            size = SIZES[dtype] * prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            index[name], at = file, at + size
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.slow
def test_all_tensors_of_flash_are_loaded(tmp_path: Path) -> None:
    raw = {**KNOWN["DeepSeek-V4-Flash"], **SMALL}
    tensors = all_tensors(raw)
    assert raw["num_hidden_layers"] == 43 and raw["n_routed_experts"] == 256
    assert len(tensors) == 69_187
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_sparse(tmp_path, tensors)
    config, seen = ModelConfig.from_dict(raw), []
    with open_checkpoint(tmp_path) as checkpoint:
        of_drafts = sum(name.startswith("mtp.") for name in tensors)
        drafts = sum(name.startswith("mtp.") and not name.endswith(".scale") for name in tensors)
        assert checkpoint.set_aside["mtp"] in (drafts, of_drafts)
        device = torch.device("cpu")
        model: Any = load_model(config, checkpoint, device, torch.bfloat16, lambda *at: seen.append(at), released=True)
        planned = model_bytes(config, checkpoint.__contains__, "bfloat16", "cpu", blocks=checkpoint.block_forms())
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]  # one step for each tensor of the model, to the last
    assert len(model.layers) == 43 and len(model.layers[42].experts.down) == 256
    assert isinstance(model.layers[42].experts.down, BlockScaled)
    assert model.nbytes - model.window_freq.nbytes - model.compress_freq.nbytes == planned


@pytest.mark.slow
def test_all_tensors_of_flash_are_loaded_by_two_ranks(tmp_path: Path) -> None:
    raw = {**KNOWN["DeepSeek-V4-Flash"], **SMALL}
    tensors = all_tensors(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_sparse(tmp_path, tensors)
    config, seen, cpu = ModelConfig.from_dict(raw), [], torch.device("cpu")
    with open_checkpoint(tmp_path) as checkpoint:
        has, forms = checkpoint.__contains__, checkpoint.block_forms()
        for rank in range(2):
            shard = block_shard(config, Shard(rank, 2), has, forms)
            seen.clear()
            model: Any = load_sharded(
                config, shard, Alone(), checkpoint, cpu, torch.bfloat16, lambda *at: seen.append(at), released=True
            )
            planned = rank_model_bytes(config, shard, has, "bfloat16", "cpu", blocks=forms)
            assert seen == [(i + 1, len(seen)) for i in range(len(seen))] and len(seen) == len(checkpoint.names())
            experts = model.layers[42].experts.part
            assert isinstance(experts.down, BlockScaled) and experts.down.shape == (256, 64, 16)
            assert model.nbytes - fixed_bytes(model) == planned


def test_experts_are_read_by_several_threads_and_few_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads meet, which one thread alone could not; and a matrix is let go before its thread reads the next."""
    raw = {**KNOWN["DeepSeek-V4-Flash"], **SMALL, "num_hidden_layers": 1, "n_routed_experts": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    write_sparse(tmp_path, all_tensors(raw))
    read, meet, held, most, threads = QuantisedStore.read_blocks, threading.Barrier(2), [], [], set()

    def watched(self: QuantisedStore, name: str, rows: Any = None) -> BlockScaled:
        threads.add(threading.get_ident())
        if len(held) < 2:
            held.append(lambda: None)
            meet.wait(timeout=60)
        found = read(self, name, rows)
        held.append(weakref.ref(found.codes))
        most.append(sum(ref() is not None for ref in list(held)))
        return found

    monkeypatch.setattr(QuantisedStore, "read_blocks", watched)
    with open_checkpoint(tmp_path) as checkpoint:
        loader = Loader(checkpoint, torch.device("cpu"), torch.float32, released=True)
        found = loader.experts("model.layers.0.mlp.experts.gate_up_proj", 64, 64, 64)
    assert isinstance(found, BlockScaled) and len(most) == 128
    assert 2 <= len(threads) <= reading.READERS and 1 <= max(most) <= reading.READERS


def test_threads_put_every_expert_in_its_place(tmp_path: Path) -> None:
    made = Made()
    with open_checkpoint(write(tmp_path, made.stored)) as checkpoint:
        loader = Loader(checkpoint, torch.device("cpu"), torch.float32, released=True)
        found = loader.experts("model.layers.1.mlp.experts.gate_up_proj", 3, 80, 144)
    assert isinstance(found, BlockScaled)
    for e in range(3):
        for part, wanted in (("weight", found.codes[e]), ("scale", found.scales[e])):
            stored = [made.stored[f"layers.1.ffn.experts.{e}.{w}.{part}"].view(torch.uint8) for w in ("w1", "w3")]
            assert torch.equal(torch.cat(stored), wanted)


def test_an_error_in_one_thread_ends_the_reading(tmp_path: Path) -> None:
    made = Made()
    made.stored["layers.1.ffn.experts.1.w2.scale"].view(torch.uint8)[0, 0] = 255
    with open_checkpoint(write(tmp_path, made.stored)) as checkpoint:
        loader = Loader(checkpoint, torch.device("cpu"), torch.float32, released=True)
        with pytest.raises(ModelFileError, match="holds NaN among its codes or scales"):
            loader.experts("model.layers.1.mlp.experts.down_proj", 3, 144, 40)
        good = loader.experts("model.layers.2.mlp.experts.down_proj", 3, 144, 40)
    assert isinstance(good, BlockScaled) and good.finite()
