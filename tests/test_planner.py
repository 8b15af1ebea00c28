"""The plan: what it predicts is what gets allocated, byte for byte, and it needs no files to predict it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch

from hybridkv import LLM
from hybridkv.bench.capacity import planned
from hybridkv.cache import CacheSchema, KVCacheManager, StateSchema, StreamSchema, TensorSpec
from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.cli import main
from hybridkv.commands.plan_estimate import Estimate
from hybridkv.config import CacheConfig, EngineConfig, ReuseConfig, SamplingParams
from hybridkv.engine.workspace import workspace
from hybridkv.errors import HybridKVError
from hybridkv.eviction import query_buffers_for
from hybridkv.models import cache_schema, with_query_buffer
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN, known_config
from hybridkv.planner import longest_context, matrix_elements, model_bytes, most_requests, plan_cache, planned_tensors

MIB = 1 << 20
KV = ("f32", "bf16", "fp8")
# name -> MiB of KV at 4096 tokens in f32, MiB of state (one decimal), billions of weights
PUBLISHED = {
    "SmolLM2-135M-Instruct": (180, 0.0, 0.13),
    "Qwen3.5-0.8B": (96, 19.3, 0.75),
    "Qwen3.5-4B": (256, 50.2, 4.2),
    "Qwen3.5-9B": (256, 50.2, 9.0),
    "Qwen3.5-27B": (512, 149.6, 26.9),
    "Qwen3.5-35B-A3B": (160, 62.8, 34.7),
    "Qwen3.5-122B-A10B": (192, 149.1, 122.1),
    "Qwen3.5-397B-A17B": (240, 186.3, 396.3),
    "Qwen3-Next-80B-A3B": (192, 75.4, 79.7),
}


def schema_of(name: str, kv_dtype: str = "f32", page_size: int = 64, dtype: torch.dtype = torch.float32) -> CacheSchema:
    return cache_schema(ModelConfig.from_dict(KNOWN[name]), CacheConfig(kv_dtype, page_size), dtype)


def weights_of(raw: dict, dtype: torch.dtype, device: str) -> int:
    config = ModelConfig.from_dict(raw)
    return model_bytes(config, planned_tensors(config, raw), dtype, device)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as leaving:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert leaving.value.code == 0, err
    return out


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_sizes(name: str) -> None:
    kv, state, weights = PUBLISHED[name]
    assert schema_of(name).kv_bytes(4096) == kv * MIB
    assert schema_of(name, "bf16").kv_bytes(4096) == kv * MIB // 2
    assert round(schema_of(name).slot_bytes / MIB, 1) == state
    digits = 2 if weights < 1 else 1
    assert round(weights_of(KNOWN[name], torch.bfloat16, "cuda") / 2e9, digits) == weights


def test_the_table_of_the_27b_model_shows_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "plan", "--model", "Qwen3.5-27B", "--context", 4096, "--dtype", "bfloat16").splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "attention pages 16 64 4096 4096 512.0 MiB 256.0 MiB 130.0 MiB" in rows
    assert "gdn state 48 146.8 MiB 146.8 MiB 146.8 MiB" in rows


@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize(("requests", "context"), [(1, 4096), (3, 1000)])
def test_the_27b_plan_is_what_the_manager_allocates(kv_dtype: str, requests: int, context: int) -> None:
    schema = schema_of("Qwen3.5-27B", kv_dtype)
    plan = plan_cache(schema, requests, context, None)
    manager = KVCacheManager(plan.schema, plan.pages, plan.slots, plan.max_tokens, "meta")
    ids = 64 * -(-context // 64) * 4  # of the pages of one request
    assert manager.memory_bytes() == plan.nbytes == requests * (schema.kv_bytes(context) + schema.slot_bytes + ids)


@pytest.mark.parametrize(("more", "query_buffers"), [({}, 8), ({"bounded": True}, 100), ({"decode_every": 64}, 100)])
def test_a_budget_of_the_27b_model_takes_rings_for_those_who_read(more: dict, query_buffers: int) -> None:
    cache = CacheConfig("bf16", budget=2048, **more)
    schema = cache_schema(ModelConfig.from_dict(KNOWN["Qwen3.5-27B"]), cache, torch.bfloat16)
    plan = plan_cache(schema, 100, 16384, None, query_buffers=query_buffers_for(cache, 4096, 100))
    assert plan.query_buffers == query_buffers and plan.table_bytes == 100 * 64 * 256 * 4
    assert plan.state_bytes == 100 * schema.slot_bytes + query_buffers * 16 * 64 * 24 * (256 * 2 + 4)
    manager = KVCacheManager(schema, plan.pages, plan.slots, plan.max_tokens, "meta", query_buffers=plan.query_buffers)
    assert manager.memory_bytes() == plan.nbytes


def test_four_times_as_many_requests_of_16384_tokens_are_resident_with_a_budget() -> None:
    config, room = ModelConfig.from_dict(KNOWN["Qwen3.5-27B"]), 80 * 2**30
    room -= weights_of(KNOWN["Qwen3.5-27B"], torch.bfloat16, "cuda")
    found = []
    for cache in (CacheConfig("bf16"), CacheConfig("bf16", budget=2048)):
        found.append(planned(cache_schema(config, cache, torch.bfloat16), room, 16384, cache))
    assert found == [26, 107]


def test_none_waits_for_a_ring_where_prompts_are_just_long_enough_to_be_cut() -> None:
    cache = CacheConfig(budget=192)  # prompts of 257 tokens
    assert query_buffers_for(cache, 4096, 512) == 1 + 15 + 1 and query_buffers_for(cache, 4096, 12) == 12
    assert (
        query_buffers_for(CacheConfig(), 4096, 512) == 0 and query_buffers_for(CacheConfig(budget=2048), 512, 512) == 8
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize(("requests", "context"), [(1, 64), (2, 100), (5, 511)])
def test_a_tiny_plan_is_what_gets_allocated(
    kind: str, kv_dtype: str, requests: int, context: int, oracle: Callable[[str], tiny.Oracle], open_llm: Callable
) -> None:
    llm = open_llm(oracle(kind).folder, kv_dtype=kv_dtype, max_requests=requests, max_context=context)
    raw = json.loads((oracle(kind).folder / "config.json").read_text())
    config = ModelConfig.from_dict(raw)
    cache = with_query_buffer(config, CacheConfig(kv_dtype, 64))
    schema = cache_schema(config, cache, torch.float32)
    rows, buffers = ReuseConfig().rows(schema.slot_bytes, None, cpu=True), query_buffers_for(cache, 512, requests)
    plan = plan_cache(schema, requests, context, None, query_buffers=buffers, checkpoints=rows)
    assert rows == (0 if kind == "llama" else ReuseConfig.MOST_ROWS_CPU)
    assert llm.manager.memory_bytes() == plan.nbytes == llm.plan.nbytes
    assert plan.query_buffers == 1 and plan.schema.query_buffer_bytes > 0  # for requests that bring a budget
    held = sum(t.nbytes for table in llm.manager.tables.values() for t in table.pool.tensors.values())
    assert held == sum(plan.pool_bytes.values())
    assert llm.manager.memory_bytes() - held == plan.state_bytes + plan.table_bytes + plan.checkpoint_bytes


@pytest.mark.parametrize("kind", sorted(tiny.KINDS))
def test_weights_counted_from_the_config_are_those_in_memory(
    kind: str, oracle: Callable[[str], tiny.Oracle], open_llm: Callable
) -> None:
    raw = json.loads((oracle(kind).folder / "config.json").read_text())
    model = open_llm(oracle(kind).folder).model
    assert weights_of(raw, torch.float32, "cpu") == model.nbytes - model.inv_freq.nbytes


def test_biases_are_counted_where_the_config_has_them(oracle: Callable[[str], tiny.Oracle]) -> None:
    raw = json.loads((oracle("llama_bias").folder / "config.json").read_text())
    rows = raw["head_dim"] * (raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) + raw["hidden_size"]
    without = weights_of(raw | {"attention_bias": False}, torch.float32, "cpu")
    assert weights_of(raw, torch.float32, "cpu") - without == raw["num_hidden_layers"] * rows * 4


def test_half_the_weights_in_bfloat16_but_norms_stay_whole() -> None:
    one = weights_of(KNOWN["SmolLM2-135M-Instruct"], torch.float32, "cuda")
    half = weights_of(KNOWN["SmolLM2-135M-Instruct"], torch.bfloat16, "cuda")
    norms = (30 * 2 + 1) * 576
    assert one == 134_515_008 * 4  # the number of parameters that the model's makers give
    assert 2 * half == one + 4 * norms


# ratios of 4 and 128 tokens an entry, layers that share a stream, and state: nothing that runs yet has all of them
MIXED = CacheSchema(
    streams=(
        StreamSchema("full", (0, 5), (TensorSpec("k", (8,), torch.float32),), 16, heads=2),
        StreamSchema("by4", (1, 3), (TensorSpec("kv", (24,), torch.uint8),), 8, shared=True, tokens_per_entry=4),
        StreamSchema("by128", (2, 4), (TensorSpec("kv", (24,), torch.uint8),), 2, shared=True, tokens_per_entry=128),
    ),
    states=(StateSchema("ring", (1, 2), (TensorSpec("ring", (10, 3), torch.float32, init=-1.0),)),),
)


@pytest.mark.parametrize("room", [0, 1, 5_000, 12_345, 100_000, 1_000_000])
@pytest.mark.parametrize("requests", [1, 3])
def test_the_longest_context_fits_and_one_more_token_does_not(room: int, requests: int) -> None:
    def need(tokens: int) -> int:
        return MIXED.bytes(MIXED.pool_pages(requests, tokens), requests, tokens)

    longest = longest_context(MIXED, room, requests, 3000)
    by_hand = [tokens for tokens in range(1, 3001) if need(tokens) <= room]
    assert longest == max(by_hand, default=0)


@pytest.mark.parametrize("context", [1, 64, 700])
def test_as_many_requests_as_fit_and_not_one_more(context: int) -> None:
    room = 1_000_000
    most = most_requests(MIXED, room, context)
    assert MIXED.bytes(MIXED.pool_pages(most, context), most, context) <= room
    assert MIXED.bytes(MIXED.pool_pages(most + 1, context), most + 1, context) > room
    assert most_requests(MIXED, -1, context) == 0


def test_what_a_refused_cache_needs_is_named_and_adds_up() -> None:
    lent = StateSchema("lent", (0,), (TensorSpec("queries", (64, 32), torch.float32),), lent=True)
    schema, sizes = replace(MIXED, states=(*MIXED.states, lent)), {"B": 1, "KiB": 1024, "MiB": 1 << 20}
    with pytest.raises(HybridKVError) as refused:
        plan_cache(schema, 3, 1000, 5000, query_buffers=2)
    found = re.findall(r"([\d.]+) (B|KiB|MiB) (are needed|for [^,)]+)", str(refused.value))
    assert [what for _, _, what in found] == [
        "are needed", "for one context of 1000 tokens", "for the state of 3 requests",
        "for the page tables of 3 requests", "for the last queries of 2 requests",
    ]  # fmt: skip
    need, *parts = (float(n) * sizes[unit] for n, unit, _ in found)
    assert need == pytest.approx(sum(parts), abs=0.05 * 1024 * len(found))  # each is rounded to a tenth of a KiB


def test_a_mixed_schema_is_allocated_as_planned() -> None:
    plan = plan_cache(MIXED, 3, 1000, None)
    assert KVCacheManager(MIXED, plan.pages, plan.slots, plan.max_tokens).memory_bytes() == plan.nbytes


def test_a_config_alone_gives_the_same_plan_as_the_whole_model(
    oracle: Callable[[str], tiny.Oracle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = oracle("qwen3_5").folder
    alone = tmp_path / folder.name
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    plans = [
        run(capsys, "plan", "-m", path, "--context", 300, "--json") for path in (folder, alone, alone / "config.json")
    ]
    assert plans[0] == plans[1] == plans[2]


def test_the_plan_says_what_fits_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "-m", "Qwen3.5-9B", "--context", 4096, "--dtype", "bfloat16", "--device", "cpu", "--json")
    found = json.loads(run(capsys, *arguments, "--kv-dtype", "bf16", "--memory", "18GiB"))
    [choice] = found["choices"]
    each = choice["kv_bytes"] + choice["state_bytes"] + choice["table_bytes"]
    beside = choice["workspace_bytes"]
    all_of_it = found["weights_bytes"] + each + beside + choice["checkpoint_bytes"]
    assert choice["cache_bytes"] == each and choice["total_bytes"] == all_of_it
    estimate = Estimate(ModelConfig.from_dict(KNOWN["Qwen3.5-9B"]), CacheConfig("bf16"), "bfloat16", gpu=False)
    assert estimate.need(1, 4096).nbytes == each + beside
    room, most = 18 * 2**30 - found["weights_bytes"], choice["most_requests"]
    assert choice["fits"] is True and estimate.need(most, 4096).nbytes <= room < estimate.need(most + 1, 4096).nbytes
    just_short = choice["total_bytes"] - choice["checkpoint_bytes"] - 1  # without these, it would do
    [choice] = json.loads(run(capsys, *arguments, "--kv-dtype", "bf16", "--memory", just_short))["choices"]
    assert choice["fits"] is False and choice["most_requests"] == 0
    assert 4096 - 64 <= choice["longest_context"] < 4096  # not a page less: eviction scores each token


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], {}),
        (["--no-reuse"], {"reuse": None}),
        (["--checkpoints", "1MiB"], {"reuse": ReuseConfig("1MiB")}),
        (["--checkpoints", "0"], {"reuse": ReuseConfig(0)}),
        (["--checkpoint-dtype", "bf16"], {"reuse": ReuseConfig(checkpoint_dtype="bf16")}),
        (
            ["--checkpoints", "1MiB", "--checkpoint-dtype", "bf16"],
            {"reuse": ReuseConfig("1MiB", checkpoint_dtype="bf16")},
        ),
    ],
)
def test_what_reuse_takes_is_planned_to_the_byte(
    kind: str,
    flags: list[str],
    settings: dict,
    oracle: Callable[[str], tiny.Oracle],
    open_llm: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With all the memory, with less than all checkpoints take, and with none left for them."""
    if kind == "llama" and flags[:1] == ["--checkpoints"]:
        return  # it has no state, and a size that holds no checkpoint is refused
    folder = oracle(kind).folder
    words = ["plan", folder, "--device", "cpu", "--dtype", "float32", "--kv-dtype", "f32", "--context", 256]
    words += ["--weight-dtype", "plain", "--requests", 2, *flags, "--json"]
    whole = json.loads(run(capsys, *words))
    [choice] = whole["choices"]
    least = choice["total_bytes"] - (0 if flags[:1] == ["--checkpoints"] else choice["checkpoint_bytes"])
    seen = set()
    for memory in (choice["total_bytes"] + (1 << 30), least + 5 * whole["checkpoint_bytes_each"], least):
        found = json.loads(run(capsys, *words, "--memory", memory))
        [planned] = found["choices"]
        llm = open_llm(folder, max_requests=2, max_context=256, memory=memory, weight_dtype="plain", **settings)
        rows = llm.manager.state
        state = sum(t.nbytes for t in (*rows.tensors.values(), *rows.rounded.values()))
        pools = sum(t.nbytes for table in llm.manager.tables.values() for t in table.pool.tensors.values())
        assert planned["fits"] is True and llm.plan.checkpoints == planned["checkpoints"]
        assert planned["kv_bytes"] == pools and planned["state_bytes"] + planned["checkpoint_bytes"] == state
        assert llm.manager.memory_bytes() == planned["cache_bytes"] + planned["checkpoint_bytes"]
        beside = found["weights_bytes"] + llm.plan.workspace
        assert planned["total_bytes"] == beside + llm.manager.memory_bytes() <= memory
        assert planned["staging_bytes"] == llm.plan.staging == llm.manager.host.staging == 0  # on a CPU there is none
        seen.add(planned["checkpoints"])
    assert len(seen) == (3 if kind != "llama" and flags[:1] in ([], ["--checkpoint-dtype"]) else 1), seen


def test_checkpoints_in_bf16_are_more_in_the_same_bytes(
    oracle: Callable[[str], tiny.Oracle], open_llm: Callable
) -> None:
    """Nearly twice as many: the convolution's inputs stay as they are, and are a fifth of the tiny model's state."""
    folder, size = oracle("qwen3_5").folder, 1 << 20
    made = [open_llm(folder, reuse=ReuseConfig(size, checkpoint_dtype=dtype)) for dtype in ("auto", "bf16")]
    [wide, narrow] = [llm.plan.schema for llm in made]
    [conv, recurrent] = wide.states[0].tensors
    layers = len(wide.states[0].layers)
    assert wide.checkpoint_bytes == wide.slot_bytes == narrow.slot_bytes == layers * (conv.nbytes + recurrent.nbytes)
    assert narrow.checkpoint_bytes == layers * (conv.nbytes + recurrent.nbytes // 2)
    for llm in made:
        each = llm.plan.schema.checkpoint_bytes
        assert llm.plan.checkpoints == llm.manager.checkpoints == size // each
        assert llm.plan.checkpoint_bytes == size // each * each > size - each
    few, many = (llm.plan.checkpoints for llm in made)
    assert many > 1.6 * few


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_where_no_state_can_be_rounded_it_is_said_once_if_it_was_asked_for(
    kind: str, oracle: Callable[[str], tiny.Oracle], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, asked = oracle(kind).folder, ReuseConfig(checkpoint_dtype="bf16")
    cache = CacheConfig("f32", state_dtype="bf16" if kind == "qwen3_5" else "f32")
    why = (
        "the model has no Gated DeltaNet state" if kind == "llama" else "its recurrent state is stored in bf16 already"
    )
    plans = {}
    for reuse in (ReuseConfig(), asked):
        with LLM(str(folder), "cpu", "float32", cache=cache, max_requests=2, max_context=256, reuse=reuse) as llm:
            llm.generate([[5] * 40, [5] * 41], SamplingParams(max_tokens=1))
            plans[reuse] = llm.plan
        note = f"hybridkv: checkpoint_dtype='bf16' changes nothing: {why}\n"
        assert capsys.readouterr().err.count(note) == (reuse is asked)
    assert plans[asked] == plans[ReuseConfig()]


def test_exact_mode_keeps_states_as_they_are(oracle: Callable[[str], tiny.Oracle]) -> None:
    asked = ReuseConfig(checkpoint_dtype="bf16")
    with pytest.raises(HybridKVError, match="leave out checkpoint_dtype='bf16', or exact"):
        LLM(str(oracle("qwen3_5").folder), "cpu", "float32", exact=True, max_context=256, reuse=asked)
    with pytest.raises(HybridKVError, match="checkpoint_dtype must be auto or bf16, not 'fp8'"):
        ReuseConfig(checkpoint_dtype="fp8")


def test_a_known_name_may_have_an_owner_and_any_case() -> None:
    assert known_config("Qwen/qwen3.5-27b") == ("Qwen3.5-27B", KNOWN["Qwen3.5-27B"])
    assert known_config("Qwen3.5-28B") is None


# ---- what a dtype and a budget buy


def buys(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[tuple, dict]:
    found = json.loads(run(capsys, "plan", *arguments, "--dtype", "bfloat16", "--device", "cpu", "--json"))
    return {(b["kv_dtype"], b["budget"], b["bounded"]): b for b in found["buys"]} | {(): found}


def test_a_budget_of_2048_makes_the_27b_cache_eight_times_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    found = buys(capsys, "-m", "Qwen3.5-27B", "--context", 16384, "--memory", "64GiB")
    for kv_dtype, full in (("f32", 2048), ("bf16", 1024), ("fp8", 520)):
        schema = schema_of("Qwen3.5-27B", kv_dtype, dtype=torch.bfloat16)
        whole, cut, bounded = (found[kv_dtype, *rest] for rest in ((None, False), (2048, False), (2048, True)))
        assert whole["held_bytes"] == whole["peak_bytes"] == schema.kv_bytes(16384) == full * MIB
        assert cut["held_bytes"] == bounded["held_bytes"] == schema.kv_bytes(2048) == full * MIB // 8
        assert cut["peak_bytes"] == whole["peak_bytes"]  # pages go back when the prompt has been read
        assert bounded["peak_bytes"] == schema.kv_bytes(2048 + 512)
        # the last queries are kept too: without a budget for one request, which may bring one
        assert cut["state_bytes"] == whole["state_bytes"] > schema.slot_bytes


@pytest.mark.parametrize("requests", [1, 3])
def test_what_a_budget_buys_fits_and_no_more_does(requests: int, capsys: pytest.CaptureFixture[str]) -> None:
    context, budget, memory = 8192, 1024, 20 * 2**30
    flags = ("-m", "Qwen3.5-9B", "--context", context, "--requests", requests, "--memory", memory, "--budget", budget)
    found = buys(capsys, *flags)
    room = memory - found[()]["weights_bytes"]
    for kv_dtype in KV:
        for cut, bounded in ((None, False), (budget, False), (budget, True)):
            settings = CacheConfig(kv_dtype, budget=cut, bounded=bounded)
            config = ModelConfig.from_dict(KNOWN["Qwen3.5-9B"])
            settings = with_query_buffer(config, settings)
            schema = cache_schema(config, settings, torch.bfloat16)

            def need(
                many: int,
                tokens: int,
                config: ModelConfig = config,
                settings: CacheConfig = settings,
                schema: CacheSchema = schema,
            ) -> int:
                cut, bounded = settings.budget, settings.bounded
                held = schema.kv_bytes(min(tokens, cut or tokens))
                peak = schema.kv_bytes(min(tokens, budget + 512) if bounded else tokens)
                query_buffers = 1 if cut is None else many if bounded else min(many, 8)
                each = schema.slot_bytes + schema.streams[0].pages(tokens) * 4
                beside = workspace(config, schema, settings, EngineConfig(many), tokens, torch.bfloat16, False)
                cache = (many - 1) * held + peak + many * each + query_buffers * schema.query_buffer_bytes
                return cache + beside.nbytes

            b = found[kv_dtype, cut, bounded]
            most, longest = b["most_requests"], b["longest_context"]
            assert need(most, context) <= room < need(most + 1, context)
            assert need(requests, longest) <= room
            assert longest == config.max_positions or need(requests, longest + 1) > room


def test_a_gguf_says_how_many_ffn_layers_the_saved_bytes_hold(
    oracle: Callable[[str], tiny.Oracle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf.write_gguf_llama(oracle("llama").model, tmp_path / "tiny.gguf")
    with GgufFile(path) as file:
        sizes = [
            sum(t.nbytes for name, t in file.tensors.items() if name.startswith(f"blk.{i}.ffn_") and "norm" not in name)
            for i in range(8)
        ]
    found = buys(capsys, "-m", path, "--memory", "1GiB", "--budget", 64, "--window", 1)
    assert found[()]["ffn_layer_bytes"] == max(sizes) > 0
    base = found["f32", None, False]
    layers = sum(size > 0 for size in sizes)
    for key, b in found.items():
        if key:
            saved = base["peak_bytes"] + base["state_bytes"] - b["peak_bytes"] - b["state_bytes"]
            assert b["ffn_layers"] == min(max(saved, 0) // max(sizes), layers)
    assert found["f32", None, False]["ffn_layers"] == 0 < found["fp8", 64, True]["ffn_layers"]


def test_the_ffn_layer_of_the_27b_file_is_the_published_one() -> None:
    # gate and up in Q4_K (144 bytes for 256 weights), down in Q6_K (210): what a Q4_K_M file stores
    weights = 5120 * 17408
    layer = 2 * weights * 144 // 256 + weights * 210 // 256
    assert round(layer / MIB, 2) == 165.35
    saved = schema_of("Qwen3.5-27B", "f32").kv_bytes(4096) - schema_of("Qwen3.5-27B", "bf16").kv_bytes(4096)
    assert saved == 256 * MIB and saved // layer == 1


def test_the_second_table_comes_with_memory_or_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("plan", "-m", "Qwen3.5-27B", "--context", 4096, "--device", "cpu")
    assert "buy" not in run(capsys, *common)
    out = run(capsys, *common, "--budget", 1024)
    assert "1024, bounded" in out and "longest" not in out and "FFN" not in out
    assert "longest" in run(capsys, *common, "--memory", "64GiB")


def test_a_token_is_multiplied_by_the_experts_it_goes_to_alone() -> None:
    """The names say how many parameters are active: 3 of 35 billion, 17 of 397."""
    for name, active in (("Qwen3.5-27B", 25.6e9), ("Qwen3.5-35B-A3B", 3.0e9), ("Qwen3.5-397B-A17B", 16.5e9)):
        assert matrix_elements(ModelConfig.from_dict(KNOWN[name])) == pytest.approx(active, rel=0.03)
