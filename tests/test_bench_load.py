"""The load benchmark on tiny models on a CPU: what is asked, how it is served, and the numbers made of it."""

import importlib.util
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridkv.bench import load, load_peers, load_serve
from hybridkv.bench.__main__ import main as bench_main
from hybridkv.bench.decode import StepWork, read_bytes
from hybridkv.bench.load_floor import counted_floor
from hybridkv.bench.load_mixed import measure_mixed, settled, usual_size
from hybridkv.bench.load_samples import Limits, Sample, curve, percentile, summary
from hybridkv.bench.load_serve import StepSeen, StepTimes, serve, warm_up, watched
from hybridkv.bench.load_workload import Asked, Mix, Range, arrivals, sampling
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.prefill import prefill_flops
from hybridkv.bench.shapes import Shape, find_shape, make_shape
from hybridkv.bench.standin import fill_pages, make_engine
from hybridkv.bench.suite import run_bench
from hybridkv.bench.timing import Ceilings
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.models.decoder import Model
from hybridkv.models.random_weights import random_decoder

TINY = BenchOptions(model_shape="tiny", device="cpu", skip_peers=True)
DENSE: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=128, hidden_size=64, num_hidden_layers=2, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_theta=1e6, tie_word_embeddings=True,
)  # fmt: skip
PLOT = Path(__file__).parents[1] / "bench" / "plot_load.py"


@pytest.fixture(scope="module")
def tiny() -> tuple[Shape, Model]:
    shape = find_shape("tiny", device="cpu")
    return shape, random_decoder(shape.config, "cpu", torch.float32)


@pytest.fixture
def engine(tiny: tuple[Shape, Model]) -> Iterator[Engine]:
    made = make_engine(tiny[1], CacheConfig(kv_dtype="f32"), "cpu", torch.float32, 4, 512, step_tokens=64)
    yield made
    assert made.idle
    made.manager.check_integrity()


# ---- what is asked


def test_the_default_workload_is_the_one_of_nano_vllm() -> None:
    asked = Mix(Range(100, 1024), Range(100, 1024)).draw(256, 151936, seed=0)
    assert sum(a.answer for a in asked) == 133_966, "its README names this many output tokens"
    assert sum(len(a.prompt) for a in asked) == 142_827
    assert max(max(a.prompt) for a in asked) <= 10000


@pytest.mark.parametrize("spread", ["uniform", "log"])
def test_a_seed_asks_the_same_again(spread: str) -> None:
    mix = Mix(Range(20, 120), Range(4, 12), spread)
    first = mix.draw(20, 128, seed=3)
    assert mix.draw(20, 128, seed=3) == first and mix.draw(20, 128, seed=4) != first
    assert all(20 <= len(a.prompt) <= 120 and 4 <= a.answer <= 12 and max(a.prompt) < 128 for a in first)


def test_means_of_lengths_are_those_of_many_draws() -> None:
    for spread in ("uniform", "log"):
        mix = Mix(Range(500, 16384), Range(1, 1), spread)
        lengths = [len(a.prompt) for a in mix.draw(400, 2, seed=0)]
        # 400 draws: the mean of the wider spread is off by 12 % of its size (three sigmas) in one case of 300
        assert sum(lengths) / 400 == pytest.approx(mix.prompts.mean(spread), rel=0.15)
    assert Range(7, 7).mean("log") == 7


def test_chunks_of_a_mixed_step_are_those_that_came_again_and_again() -> None:
    """A graph that is captured on the way may change how prompts are cut, so the largest may have come once."""
    assert usual_size([496, 16, 496, 16, 480, 32, 480, 32, 480, 32]) == 480
    assert usual_size([45, 3] * 8) == 45 and usual_size([512, 448]) == 512
    assert settled([9.0, 9.0, 1.0, 1.0, 1.0]) == [1.0] * 3 and settled([2.0, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize("only", ("[", "nonsense"))
def test_a_pattern_that_picks_nothing_is_refused_before_anything_is_made(only: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as leaving:
        bench_main(["load", "--model-shape", "tiny", "--device", "cpu", "--only", only])
    assert not capsys.readouterr().out
    assert ("is no pattern" if only == "[" else "picks nothing of load; there is offline, sampled") in str(
        leaving.value
    )


def test_arrivals_are_poisson() -> None:
    found = arrivals(50.0, 200.0, seed=1)
    gaps = [b - a for a, b in zip([0.0, *found], found, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    # 10,000 exponential gaps: mean and deviation are both 1 / rate, to 1 and 1.4 % (one sigma)
    assert mean == pytest.approx(1 / 50, rel=0.05) and deviation == pytest.approx(1 / 50, rel=0.07)
    assert found == arrivals(50.0, 200.0, seed=1) != arrivals(50.0, 200.0, seed=2)
    scaled = arrivals(100.0, 100.0, seed=1)
    assert scaled == pytest.approx([at / 2 for at in found]), "the same pattern at another rate"
    assert max(found) <= 200.0 and arrivals(1e-9, 1.0, seed=0) == [0.0]


# ---- how it is served


def test_every_request_gets_its_tokens_and_each_step_is_counted(engine: Engine) -> None:
    asked = Mix(Range(20, 120), Range(4, 12)).draw(7, 128, seed=0)  # more than there are slots
    served = serve(engine, asked, sampling([a.answer for a in asked], False, 0))
    served.check()
    assert [r.answer_tokens for r in served.requests] == [a.answer for a in asked]
    assert served.answer_tokens == sum(a.answer for a in asked)
    assert served.prompt_tokens == sum(len(a.prompt) for a in asked)
    table = served.steps.table()
    assert set(table) == {"decode", "mixed", "prompt"} and not served.steps.open_kinds
    assert 0 < served.prompt_s <= served.seconds
    assert "next_step" not in vars(engine.pipeline), "the engine is as it was"


def test_a_request_that_is_cut_short_is_not_timed(engine: Engine) -> None:
    asked = [Asked([1] * 500, 40)]  # of a context of 512
    served = serve(engine, asked, sampling([40], False, 0))
    with pytest.raises(RuntimeError, match=r"ended with 12 of 40 tokens \(length\)"):
        served.check()


def test_requests_come_when_it_is_time(engine: Engine) -> None:
    asked = [Asked([1, 2, 3], 3), Asked([4, 5, 6], 3)]
    served = serve(engine, asked, sampling([3, 3], False, 0), at=[0.0, 0.3])
    served.check()
    first, second = served.samples
    assert second.started is not None and second.started >= 0.3
    assert served.seconds >= 0.3 and [len(s.times) for s in served.samples] == [3, 3]
    assert first.times == sorted(first.times) and first.batches[1:] == [1, 1]


def test_a_run_that_is_out_of_time_stops_and_leaves_nothing(engine: Engine) -> None:
    asked = [Asked([1] * 30, 400)] * 6
    served = serve(engine, asked, sampling([400] * 6, False, 0), until=0.0)
    assert served.stopped and engine.idle and all(r.finish_reason == "abort" for r in served.requests)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_warm_up_meets_every_batch_and_mixed_steps(
    engine: Engine, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mix(Range(20, 120), Range(4, 12)).draw(7, 128, seed=0)
    seen: list[StepSeen] = []
    with watched(engine) as watch:
        step = engine.step

        def noted() -> Any:
            updates = step()
            seen.extend([watch.last] if watch.last is not None else [])
            return updates

        monkeypatch.setattr(engine, "step", noted)
        assert warm_up(engine, asked, sampled, lambda _: None) > 0
    assert {1, 2, 4} <= {s.decoding for s in seen if s.kind == "decode"}
    assert any(s.kind == "mixed" for s in seen) and any(s.kind == "prompt" for s in seen)


def test_a_step_that_is_not_waited_for_counts_with_the_next() -> None:
    times = StepTimes()
    times.add("prompt", 0.001, False)
    times.add("prompt", 0.005, True)
    times.add("decode", 0.002, True)
    assert times.seconds == {"decode": [0.002], "mixed": [], "prompt": [0.003, 0.003]}
    assert times.table()["prompt"] == pytest.approx({"steps": 2, "s": 0.006, "ms": 3.0, "p99_ms": 3.0})


def test_a_mixed_step_is_one(engine: Engine) -> None:
    fill_pages(engine.manager)
    found = measure_mixed(engine, 3, 70, chunk=48)
    assert found.tokens == 48 and found.device_of_sum is None
    assert found.of_sum == pytest.approx(found.both.wall / (found.decode.wall + found.chunk.wall))
    assert min(found.both.wall, found.decode.wall, found.chunk.wall) > 0


# ---- the numbers


def test_percentiles() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5 and percentile([7], 99) == 7 and percentile([], 50) == 0
    assert percentile(list(range(101)), 99) == 99


def test_numbers_of_requests_by_hand() -> None:
    own, step = curve({10: 0.1, 20: 0.2}), curve({1: 0.01, 3: 0.03})
    assert own(15) == pytest.approx(0.15) and own(99) == 0.2 and step(2) == pytest.approx(0.02)
    good = Sample(10, 3, 1.0, 1.05, [1.2, 1.21, 1.22], [1, 1, 1])  # ttft 0.2 = 2 x own, gaps 1 x the step
    slow = Sample(20, 3, 2.0, 2.9, [3.5, 3.53, 3.56], [3, 3, 3])  # ttft 1.5 = 7.5 x own
    rough = Sample(20, 2, 2.0, 2.0, [2.2, 2.3], [2, 2])  # a gap of 5 x the step
    cut = Sample(10, 5, 4.0, 4.0, [4.1], [1])  # 1 of 5 tokens
    never = Sample(10, 5, 5.0)
    found = summary([good, slow, rough, cut, never], 10.0, own, step, Limits())
    assert found["good"] == pytest.approx(1 / 5) and found["good_tok_s"] == pytest.approx(0.3)
    assert found["tok_s"] == pytest.approx(0.9) and found["req_s"] == pytest.approx(0.3) and found["unfinished"] == 2
    assert found["ttft_ms"] == pytest.approx(200) and found["wait_ms"] == pytest.approx(25)  # 0.1, 0.2, 0.2, 1.5
    assert found["ttft_times"] == pytest.approx(1.5)  # 2, 7.5, 1, 1
    assert found["wait_times"] == pytest.approx(0.25)  # 0.5, 4.5, 0, 0
    assert found["ms"] == pytest.approx(30)  # 10, 10, 30, 30, 100
    assert found["p99_ms"] == pytest.approx(97.2)  # between 30 and 100
    assert found["tbt_times"] == pytest.approx(4.84)  # 1, 1, 1, 1, 5
    assert found["batch"] == pytest.approx(2.0) and found["step_ms"] == pytest.approx(20)
    for limits, share in (
        (Limits(ttft_ms=2000, tbt_ms=1000), 3 / 5), (Limits(ttft_ms=2000, tbt_ms=50), 2 / 5),
        (Limits(ttft_ms=100, tbt_ms=1000), 0.0), (Limits(tbt_ms=200), 2 / 5),
    ):  # fmt: skip
        assert summary([good, slow, rough, cut, never], 10.0, own, step, limits)["good"] == pytest.approx(share)


def test_a_floor_counted_by_hand(tiny: tuple[Shape, Model]) -> None:
    shape, model = tiny
    engine = make_engine(model, CacheConfig(kv_dtype="f32"), "cpu", torch.float32, 2, 256)
    schema, config = engine.manager.schema, shape.config
    ceilings = Ceilings(tb_s=1e-6, tflop_s=1e9)  # a byte a microsecond, products for nothing
    asked = [Asked([1] * 10, 3), Asked([1] * 20, 2)]
    floor = counted_floor(model, schema, ceilings, asked)
    entry = 2 * config.head_dim * 4  # K and V of one head in f32
    streams = len(config.attention_layers) * config.kv_heads
    gdn = config.gdn
    assert gdn is not None
    conv = (gdn.kernel_width - 1) * gdn.channels * 4
    state = len(config.gdn_layers) * (gdn.value_heads * gdn.key_dim * gdn.value_dim * 4 + conv)
    both = read_bytes(model) + (11 + 21) * streams * entry + 2 * 2 * state  # second tokens of both
    last = read_bytes(model) + 12 * streams * entry + 2 * state  # the third token of the first
    assert floor.steps == 2 and floor.decode_s * 1e6 == pytest.approx(both + last)
    kept = counted_floor(model, schema, ceilings, asked, budget=16)
    assert (floor.decode_s - kept.decode_s) * 1e6 == pytest.approx(4 * streams * entry)
    # products alone: every prompt once, every decoded token once
    rate = Ceilings(tb_s=1e12, tflop_s=1.0)
    floor, work = counted_floor(model, schema, rate, asked), StepWork.of(model, schema)
    assert floor.prompts_s * 1e12 == pytest.approx(prefill_flops(config, 10) + prefill_flops(config, 20))
    flops = 3 * work.row_flops + (11 + 21 + 12) * streams * work.entry_flops
    assert floor.decode_s * 1e12 == pytest.approx(flops)


# ---- the whole


def test_parts_that_are_asked_for_run(capsys: pytest.CaptureFixture[str]) -> None:
    for only, ops in (
        ("^offline", {"offline greedy"}), ("sampled", {"offline sampled"}), ("mixed", {"mixed step"}),
    ):  # fmt: skip
        result = run_bench("load", BenchOptions(**{**vars(TINY), "only": only}))
        assert {row["op"] for row in result["rows"]} == ops and not result["failures"]
    rate = BenchOptions(**{**vars(TINY), "only": "online", "rate": (30.0,), "seconds": 0.3})
    result = run_bench("load", rate)
    assert {row["op"] for row in result["rows"]} == {"prefill alone", "decode by batch", "online"}
    online = result["rows"][-1]
    assert online["case"] == "30 requests/s" and online["requests"] == len(arrivals(30.0, 0.3, 0))


def test_what_others_keep_is_measured_but_never_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with reuse reads every prompt whole, although the warm-up has read them all. Without forgetting, the
    run is reported as wrong.
    """
    options = BenchOptions(
        **{**vars(TINY), "only": "^offline", "reuse": True, "prompt_tokens": "1100:1200", "answer_tokens": "5"}
    )
    result = run_bench("load", options)
    assert result["reuse"] is True and not result["failures"]
    assert [row["op"] for row in result["rows"]][:1] == ["offline greedy"]
    monkeypatch.setattr("hybridkv.bench.load_serve.forget", lambda engine: None)
    [failure] = run_bench("load", options)["failures"]
    assert "were not read, but found" in str(failure)


def test_prompts_with_a_budget_are_evicted_and_compared_with_one_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = BenchOptions(
        **{
            **vars(TINY),
            "only": "^offline",
            "budget": 64,
            "prompt_tokens": "200:260",
            "answer_tokens": "5",
            "requests": 3,
        }
    )
    result = run_bench("load", options)
    row = result["rows"][0]
    assert not result["failures"] and row["budget"] == 64 and row["answer_tokens"] == 15
    assert row["alone"] == pytest.approx(row["prompt_tok_s"] / row["alone_tok_s"], rel=1e-3)
    assert any(note.startswith("warm-up, greedy") for note in result["notes"])


def test_a_bench_that_is_stopped_gives_the_rows_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "arrivals", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        bench_main(["load", "--model-shape", "tiny", "--device", "cpu", "--only", "online", "--skip-peers"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["op"] for row in result["rows"]} == {"offline greedy", "prefill alone", "decode by batch"}
    assert result["notes"][-1] == "stopped before the end" and result["capacity_req_s"] > 0


def test_transformers_batches_a_dense_model_on_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    shape = make_shape("tiny", DENSE, "cpu", torch.float32)
    report = load.run(shape, BenchOptions(model_shape="tiny", device="cpu", only="peers"), Ceilings(0.03, 0.1))
    assert not report.failures
    assert [row["op"] for row in report.rows] == ["offline beside peers", "transformers batching"]
    assert len({row["answer_tokens"] for row in report.rows}) == 1


def test_transformers_says_why_it_does_not_batch_a_hybrid(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench("load", BenchOptions(model_shape="tiny", device="cpu", only="peers"))
    assert not result["failures"]
    assert [row["op"] for row in result["rows"]] == ["offline beside peers", "transformers static"]
    assert any("does not run qwen3_5: ValueError" in note for note in result["notes"])


def test_nothing_is_compared_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_peers, "installed", lambda _: False)
    result = run_bench("load", BenchOptions(model_shape="tiny", device="cpu", only="peers"))
    assert not result["failures"] and not result["rows"] and "transformers is not installed: no peer" in result["notes"]


def test_pictures_are_drawn_from_the_json_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_serve, "SHOWN_EVERY", 0.01)
    out = tmp_path / "x.jsonl"
    given = ["load", "--model-shape", "tiny", "--device", "cpu", "--skip-peers", "--only", "online|mixed"]
    with pytest.raises(SystemExit):
        bench_main([*given, "--load", "0.2,0.4", "--seconds", "0.2", "--json", str(out)])
    spec = importlib.util.spec_from_file_location("plot_load", PLOT)
    assert spec is not None and spec.loader is not None
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    monkeypatch.setattr(sys, "argv", ["plot_load.py", str(out), "--out", str(tmp_path)])
    plot.main()
    rate, batch = ((tmp_path / name).read_text() for name in ("load_rate.svg", "load_batch.svg"))
    assert rate.count("<circle") == 2 * 4 and "first token, p99" in rate and "between tokens, p99" in rate
    assert "its floor" in batch and "decode + chunk of 48" in batch
    assert plot.ticks(0, 1.62, False) == pytest.approx([0, 0.5, 1, 1.5]) and plot.ticks(9, 900, True)[:3] == [
        10,
        20,
        50,
    ]
