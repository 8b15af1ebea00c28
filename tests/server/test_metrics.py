"""`/metrics`: every name, exact counts, and the series that vLLM's dashboards read."""

import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import write_tokenizer
from engine.reusing import drive_out
from hybridkv import LLM
from hybridkv.cache.checkpoints import KINDS
from server.running import HI, Running, post_bytes, serving, until
from server.saying import CALL, TOOL, saying
from server.test_life import end_all, forward, slowly
from server.test_tools import token_server  # noqa: F401

CHAT = "/v1/chat/completions"
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
LABEL = '{model_name="tiny"}'
# what the expressions of vLLM's three Grafana boards are made of
HISTOGRAMS = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
              "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
              "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
              "iteration_tokens_total")  # fmt: skip
PLAIN = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting",
         "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
         "num_preemptions_total")  # fmt: skip


def values_of(running: Running) -> dict[str, float]:
    """Series with their labels -> values."""
    status, headers, text = running.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_ten_requests_are_counted_exactly(tiny_llm: LLM) -> None:
    with serving(tiny_llm, names=("tiny",), metrics_prefix="vllm:") as running:
        usages = [running.chat(max_tokens=1 + i % 3, ignore_eos=True)["usage"] for i in range(10)]
        values = values_of(running)
    prompt, answer = 10 * len(tiny_llm.encode_chat(HI)), 1 + 3 * (1 + 2 + 3)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    for name, expected in (
        (f"prompt_tokens_total{LABEL}", prompt),
        (f"generation_tokens_total{LABEL}", answer),
        (f"prefix_cache_queries_total{LABEL}", prompt),
        (f"prefix_cache_hits_total{LABEL}", cached),
        (f"prompt_tokens_cached_total{LABEL}", cached),
        ('request_success_total{finished_reason="length",model_name="tiny"}', 10),
        ('http_requests_total{code="200",route="/v1/chat/completions"}', 10),
        (f"request_prompt_tokens_sum{LABEL}", prompt),
        (f"request_generation_tokens_sum{LABEL}", answer),
        (f"request_max_num_generation_tokens_sum{LABEL}", answer),
        (f"inter_token_latency_seconds_count{LABEL}", answer - 10),
        (f"iteration_tokens_total_sum{LABEL}", prompt - cached + answer - 10),  # an answer's last token is never run
        (f"iteration_tokens_total_count{LABEL}", answer),  # a step for each token, one request at a time
        (f"num_requests_running{LABEL}", 0),
        (f"num_requests_waiting{LABEL}", 0),
        (f"num_preemptions_total{LABEL}", 0),
    ):
        assert values[f"vllm:{name}"] == expected, name
    for name in HISTOGRAMS:
        buckets = [series for series in values if series.startswith(f"vllm:{name}_bucket{{")]
        assert len(buckets) > 5 and all('model_name="tiny"' in series for series in buckets)
        assert f"vllm:{name}_sum{LABEL}" in values
        if name not in ("inter_token_latency_seconds", "iteration_tokens_total"):
            assert values[f"vllm:{name}_count{LABEL}"] == 10, name
    assert all(f"vllm:{name}{LABEL}" in values for name in PLAIN)
    [info] = [series for series in values if series.startswith("vllm:cache_config_info{")]
    assert f'block_size="{tiny_llm.cache_config.page_size}"' in info and "num_gpu_blocks=" in info


def test_every_name_is_on_its_page_and_every_name_of_the_page_is_there(tiny_one: Running) -> None:
    tiny_one.chat(max_tokens=1)
    _, _, text = tiny_one.ask("GET", "/metrics")
    found = set(re.findall(r"^# TYPE hybridkv_(\S+)", text, re.MULTILINE))
    found = {name for name in found if not name.endswith("_created")}
    written = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert found == written


def test_what_was_read_again_and_why_is_counted(tiny_llm: LLM) -> None:
    prompts = ([5] * 200, [5] * 200 + [6] * 40)  # the second goes on where the first ended

    def counts(running: Running) -> dict[str, float]:
        return {name.removeprefix("hybridkv_reuse_"): n for name, n in values_of(running).items() if "_reuse_" in name}

    with serving(tiny_llm, names=("tiny",)) as running:
        tiny_llm.forget()
        before = counts(running)
        answers = [running.post("/v1/completions", {"prompt": each, "max_tokens": 1}) for each in prompts]
        usages = [answer["usage"] for _, answer in answers]
        after = counts(running)
        new = {name: after[name] - before[name] for name in after}
        for usage in usages:
            said = usage["hybridkv"]["reuse"]
            new[f'read_again_tokens_total{{model_name="tiny",why="{said["reason"]}"}}'] -= said["read"]
        assert not any(n for name, n in new.items() if name.startswith("read_again"))
        assert new[f"lookup_tokens_total{LABEL}"] == sum(usage["prompt_tokens"] for usage in usages)
        assert new['columns{model_name="tiny",tier="device"}'] == tiny_llm.manager.reuse.columns.count > 0  # type: ignore[union-attr]
        assert [usage["hybridkv"]["reuse"]["read"] for usage in usages] == [200, 40]
        tiny_llm.forget()
        last = counts(running)
        name = 'dropped_total{model_name="tiny",what="checkpoint",why="forgotten"}'
        assert (
            last[name] > after[name]
            and last['columns{model_name="tiny",tier="device"}'] == last[f"uncovered_columns{LABEL}"] == 0
        )


def test_copies_to_the_host_and_what_they_saved_are_counted(tmp_path: Path) -> None:
    tiny.save("qwen3_5", tmp_path)
    write_tokenizer(tmp_path)
    text = [5 + i % 7 for i in range(1500)]

    def ask(running: Running) -> dict[str, Any]:
        return running.post("/v1/completions", {"prompt": text, "max_tokens": 1})[1]["usage"]

    names = ("reuse_load_seconds_count", "reuse_load_seconds_sum", "reuse_saved_seconds_total")
    with (
        LLM(tmp_path, device="cpu", dtype="float32", max_requests=1, max_context=2048) as llm,
        serving(llm, names=("tiny",)) as running,
    ):
        llm.manager.host.pages = True  # as on a GPU
        ask(running)
        speed, values = llm.manager.host.speed, values_of(running)
        assert speed > 0 and [values[f"hybridkv_{name}{LABEL}"] for name in names] == [0, 0, 0]
        here = ask(running)["prompt_tokens_details"]["cached_tokens"]
        saved = values_of(running)[f"hybridkv_{names[2]}{LABEL}"]
        assert here > 1000 and saved == pytest.approx(here / speed)
        llm.owner.run(drive_out)
        llm.manager.host.speed = speed = 1.0  # reading is slow: all is worth a copy
        usage = ask(running)
        found, took = usage["prompt_tokens_details"]["cached_tokens"], usage["hybridkv"]["reuse"]["load_ms"] / 1000
        assert usage["hybridkv"]["reuse"]["tier"] == "host"
        values, host = values_of(running), llm.manager.host
        assert values[f"hybridkv_{names[0]}{LABEL}"] == 1 and values[f"hybridkv_{names[1]}{LABEL}"] == pytest.approx(
            took
        )
        assert values[f"hybridkv_{names[2]}{LABEL}"] - saved == pytest.approx(found / speed - took, rel=1e-9)
        for way, nbytes in {("device", "host"): host.copied_down, ("host", "device"): host.copied_up}.items():
            name = f'hybridkv_reuse_copy_bytes_total{{from="{way[0]}",model_name="tiny",to="{way[1]}"}}'
            assert values[name] == nbytes > found * 16
        running.idle()


def test_what_requests_hold_is_counted_while_they_run(tiny_llm: LLM) -> None:
    asked: dict[str, Any] = dict(messages=[{"role": "user", "content": "y" * 300}], hybridkv={"budget": 96})
    with serving(tiny_llm, names=("tiny",)) as running, forward(tiny_llm, slowly(0.01)):
        connection = running.connect()
        connection.sendall(post_bytes(CHAT, asked | {"max_tokens": 150, "ignore_eos": True, "stream": True}))
        until(lambda: b"reasoning" in connection.recv(1 << 16))  # the prompt was read, and evicted
        values = values_of(running)
        sizes = {w: values[f'hybridkv_cache_bytes{{kind="attention",model_name="tiny",what="{w}"}}']
                 for w in ("kept", "full", "capacity")}  # fmt: skip
        assert 0 < sizes["kept"] < 0.6 * sizes["full"] < sizes["full"] < sizes["capacity"]
        pages = {s: values[f'hybridkv_cache_pages{{kind="attention",model_name="tiny",state="{s}"}}']
                 for s in ("used", "later", "free")}  # fmt: skip
        assert sum(pages.values()) == tiny_llm.plan.pages["attention"] and pages["used"] > 0
        share = values[f"hybridkv_kv_cache_usage_perc{LABEL}"]
        assert share == pytest.approx(pages["used"] / sum(pages.values())) and 0 < share <= 1
        assert values[f"hybridkv_num_requests_running{LABEL}"] == 1
        connection.close()
        running.idle()
        until(lambda: values_of(running).get('hybridkv_cancelled_total{model_name="tiny",stage="decode"}') == 1)
        running.chat(**asked, max_tokens=2)
        values = values_of(running)
        evicted = [v for name, v in values.items() if name.startswith("hybridkv_evicted_tokens_total{")]
        assert len(evicted) == 1 and evicted[0] > 200
        end_all(running)


def test_what_is_kept_for_later_and_grammars_are_counted(tiny_llm: LLM) -> None:
    with serving(tiny_llm, names=("tiny",)) as running:
        before = values_of(running)
        marked = [{"type": "text", "text": "k" * 200, "cache_control": {"type": "ephemeral"}}]
        asked = {"model": "tiny", "max_tokens": 2, "system": marked, "messages": HI}
        usages = [running.post("/v1/messages", asked)[1]["usage"] for _ in range(3)]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
        running.chat(response_format=form, max_tokens=9, chat_template_kwargs={"enable_thinking": False})
        values = values_of(running)
    later = 'hybridkv_cache_pages{kind="attention",model_name="tiny",state="later"}'
    assert values[later] > before[later] and values[f"hybridkv_kv_cache_usage_perc{LABEL}"] == 0
    kinds = {name: value for name, value in values.items() if name.startswith("hybridkv_checkpoints{")}
    assert len(kinds) == len(KINDS) and sum(kinds.values()) == len(tiny_llm.manager.reuse.checkpoints.all) > 0  # type: ignore[union-attr]
    cached = [usage["cache_read_input_tokens"] for usage in usages]
    assert cached[1] > 100 and values[f"hybridkv_prompt_tokens_cached_total{LABEL}"] >= sum(cached)
    hits = f"hybridkv_checkpoint_hits_total{LABEL}"
    assert values[hits] - before[hits] >= 1
    reuse = tiny_llm.manager.reuse
    assert reuse is not None
    for tier, what, nbytes in (("device", "pages", reuse.columns.count * reuse.column_bytes), ("host", "states", 0)):
        assert values[f'hybridkv_reuse_bytes{{model_name="tiny",tier="{tier}",what="{what}"}}'] == nbytes
    assert values['hybridkv_reuse_columns{model_name="tiny",tier="device"}'] == reuse.columns.count > 0
    tiers = [values[f'hybridkv_reuse_hit_tokens_total{{model_name="tiny",tier="{t}"}}'] for t in ("device", "host")]
    assert tiers == [reuse.counts["device_hit_tokens"], 0] and tiers[0] >= sum(cached)
    assert values['hybridkv_reuse_copies_total{model_name="tiny",what="loads_failed"}'] == 0
    for phase in ("compile", "mask"):
        name = f'hybridkv_grammar_seconds_count{{model_name="tiny",phase="{phase}"}}'
        assert values[name] > before[name]


def test_calls_are_counted(token_server: Running) -> None:  # noqa: F811
    before = values_of(token_server)
    for most in (400, 60):
        with saying(token_server, f"</think>So:{CALL}"):
            token_server.post(CHAT, {"messages": HI, "tools": [TOOL], "max_tokens": most})
    after = values_of(token_server)
    for outcome in ("whole", "cut"):
        name = f'hybridkv_tool_calls_total{{format="qwen_xml",model_name="tags",outcome="{outcome}"}}'
        assert after[name] == before.get(name, 0) + 1
