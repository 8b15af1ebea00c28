"""The benchmarks on a tiny model on a CPU: each prints a table and one JSON line last; wrong results are not timed."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bench_runs import TINY, Run, runner
from numerics import assert_close_rms

from hybridkv.bench import cases_attention, cases_dense, compare, decode, peers
from hybridkv.bench import eviction as eviction_bench
from hybridkv.bench.__main__ import main as bench_main
from hybridkv.bench.__main__ import parser
from hybridkv.bench.options import BENCHES, OPTIONS, V4_BENCHES, flag_of, from_json
from hybridkv.bench.report import WrongResult, check, rounded
from hybridkv.bench.shapes import find_shape
from hybridkv.bench.standin import fill_pages, fill_state, give_weights, make_engine, resident
from hybridkv.bench.suite import run_bench
from hybridkv.bench.timing import Ceilings
from hybridkv.bench.trace import short
from hybridkv.config import CacheConfig
from hybridkv.errors import HybridKVError
from hybridkv.kernels.linear.fp8 import encode_weight
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.linear.packed_dequantise import dequantise_ref
from hybridkv.kernels.linear.packed_linear import PackedLinear
from hybridkv.kernels.linear.packed_planes import BITS
from hybridkv.models.decoder import GatedMlp
from hybridkv.models.random_weights import random_decoder

OPS = {
    "append", "attention_inputs", "attention_decode", "attention_prefill", "attention_exact", "gdn_step", "gdn_prefill",
    "gdn_exact",
    "window_scores", "peak_scores", "value_norms", "key_differences", "standings", "pool_peaks", "mix_peaks",
    "select_entries", "select_shared", "compact", "to_front",
    "linear", "linear_exact", "add_rms_norm", "silu_mul", "best_tokens", "sample_rows", "sample", "mask_rows",
}  # fmt: skip
BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


QUICK = [name for name in (*BENCHES, *V4_BENCHES) if name != "start"]


@pytest.mark.parametrize("name", [*QUICK, pytest.param("start", marks=pytest.mark.slow)])
def test_a_bench_prints_a_table_and_one_json_line_last(name: str, run: Run) -> None:
    more = ["--kv-dtype", "fp8"] if name in ("decode", "eviction") else []
    code, lines, said = run(name, "--model-shape", "tiny", "--device", "cpu", "--skip-peers", *more)
    assert code == 0, said
    result = json.loads(lines[-1])
    assert result["bench"] == name and result["rows"] and result["ceilings"]["tb_s"] > 0
    keys = [(row["op"], row["case"]) for row in result["rows"]]
    assert len(set(keys)) == len(keys), "rows must be told apart"
    for row in result["rows"]:
        assert row[result["measure"]] > 0
        assert any(line.startswith(row["op"]) and row["case"] in line for line in lines[:-1])
    assert any("no CUDA graphs" in line for line in lines)
    assert not [line for line in lines[:-1] if line.startswith("{")]
    if name == "kernels":
        assert {row["op"] for row in result["rows"]} == OPS
        assert all(row["error"] < 0.05 and row["floor_us"] > 0 for row in result["rows"])


def test_only_takes_the_ops_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_bench("kernels", replace(TINY, only="add_rms|silu"))["rows"]
    assert {row["op"] for row in rows} == {"add_rms_norm", "silu_mul"}
    with pytest.raises(HybridKVError, match="matches no op"):
        run_bench("kernels", replace(TINY, only="nothing of the kind"))


def test_a_wrong_kernel_is_reported_and_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases_attention.attention_decode
    monkeypatch.setattr(cases_attention, "attention_decode", lambda *x: right(*x) * 1.05)
    code, lines, err = run("kernels", "--model-shape", "tiny", "--device", "cpu", "--only", "attention_(de|pre)")
    result = json.loads(lines[-1])
    assert code == 2 and "4 rows failed, first attention_decode " in err and len(err.splitlines()) == 1
    assert result["failures"][0]["problem"] in err, "why"
    with pytest.raises(SystemExit, match="4 rows failed, first attention_decode .*: .* differs from the reference"):
        bench_main(["kernels", "--model-shape", "tiny", "--device", "cpu", "--only", "attention_decode"])
    assert {row["op"] for row in result["rows"]} == {"attention_prefill"}, "the rest goes on"
    assert {f["op"] for f in result["failures"]} == {"attention_decode"}
    assert all("differs from the reference" in f["problem"] for f in result["failures"])
    assert sum("FAILED" in line for line in lines[:-1]) == 4


def test_an_op_that_a_tree_lacks_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object) -> None:
        raise ImportError("no such op")

    monkeypatch.setattr(cases_dense, "silu_case", absent)
    result = run_bench("kernels", replace(TINY, only="silu|add_rms"))
    assert {row["op"] for row in result["rows"]} == {"add_rms_norm"}
    assert "no such op" in result["failures"][0]["problem"]


def test_a_wrong_decode_step_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hybridkv.engine.runner import Runner

    right = Runner.forward

    def wrong(self: Runner, inputs: object) -> torch.Tensor:
        logits = right(self, inputs)  # type: ignore[arg-type]
        return logits.roll(1, -1) if inputs.step.num_decodes else logits  # type: ignore[attr-defined]

    monkeypatch.setattr(Runner, "forward", wrong)
    result = run_bench("decode", TINY)
    assert not result["rows"] and "a decode step" in result["failures"][0]["problem"]


def test_transformers_runs_beside_on_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench("decode", replace(TINY, skip_peers=False, peer_layers=4, only="peers"))
    assert not result["failures"]
    assert [row["op"] for row in result["rows"]] == ["decode beside peers", "decode transformers"]
    assert any("times ours; logits apart" in note for note in result["notes"])
    result = run_bench("prefill", replace(TINY, skip_peers=False, contexts=(96,)))
    assert not result["failures"] and "prefill transformers" in [row["op"] for row in result["rows"]]
    result = run_bench("v4_model", replace(TINY, skip_peers=False))
    assert not result["failures"] and [row["op"] for row in result["rows"]] == ["hybridkv f32", "transformers"]
    assert any("against transformers, relative" in note for note in result["notes"])


def test_weights_as_they_are_released_are_timed_beside_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench("v4_model", replace(TINY, weight_dtype="released"))
    assert not result["failures"]
    assert [row["op"] for row in result["rows"]] == ["hybridkv f32", "hybridkv f32, released"]
    assert any("products of codes agree" in note for note in result["notes"])
    result = run_bench("v4_model", replace(TINY, weight_dtype="released", ranks=(2,)))
    assert not result["failures"]
    assert [row["op"] for row in result["rows"]][2:] == ["hybridkv f32, released, a rank of 2"]
    assert any("a rank of 2 has 0.00 GiB of weights" in note for note in result["notes"])
    with pytest.raises(HybridKVError, match="3 ranks do not divide its 4 attention heads; use 2 or 1"):
        run_bench("v4_model", replace(TINY, ranks=(3,)))
    with pytest.raises(HybridKVError, match="is not released in codes"):
        run_bench("decode", replace(TINY, weight_dtype="released"))
    with pytest.raises(HybridKVError, match="auto or released, not fp8"):
        run_bench("v4_model", replace(TINY, weight_dtype="fp8"))


def test_tuning_is_as_it_was_after_a_peer() -> None:
    tuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    before = tuner.prune_configs, vars(tuner)["do_bench"]
    with peers.tuned_together():
        assert tuner.prune_configs is not before[0] and vars(tuner)["do_bench"] is not before[1]
    assert (tuner.prune_configs, vars(tuner)["do_bench"]) == before


def test_a_peer_that_takes_too_long_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "eager_ms", lambda *_: time.sleep(60))
    monkeypatch.setitem(peers.SECONDS, "transformers", 0.05)
    result = run_bench("decode", replace(TINY, skip_peers=False, peer_layers=4, only="peers"))
    assert [row["op"] for row in result["rows"]] == ["decode beside peers"] and not result["failures"]
    assert any("skipped: TimeoutError: not ready" in note for note in result["notes"])


def test_only_takes_the_parts_of_decode_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    for only, op in (
        ("budget", "decode with budget"), ("weights", "decode fp8 weights"), ("state", "decode bf16 state")
    ):  # fmt: skip
        result = run_bench("decode", replace(TINY, only=only))
        assert {row["op"] for row in result["rows"]} == {op} and not result["failures"]


def test_a_prompt_with_a_budget_says_what_the_cut_took(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_bench("prefill", TINY)["rows"]
    assert [row["op"] for row in rows] == [
        "prefill", "prefill", "eviction in prefill", "prefill", "prefill", "prefill", *["prefill", "decode step"] * 2
    ]  # fmt: skip
    assert [row["exact"] for row in rows[6:]] == [False, False, True, True]
    assert 0 < rows[2]["part"] < 1 and rows[3]["chunk"] == 128, "the first length is read in other chunks too"


def test_kernels_are_compiled_by_processes_first(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_bench("kernels", replace(TINY, only="silu", warm=1))
    assert result["rows"] and any("compiled by 1 processes" in note for note in result["notes"])
    assert not any("failed" in note or "did not end" in note for note in result["notes"])


NO_TYPER = """import sys
sys.modules["typer"] = sys.modules["rich"] = None
from hybridkv.bench.__main__ import main
main(sys.argv[1:])"""


def test_the_module_needs_no_typer(tmp_path: Path) -> None:
    given = "kernels --model-shape tiny --device cpu --only silu --kv-dtype f32,fp8 --chunk 64,128 --skip-peers"
    command = [sys.executable, "-c", NO_TYPER, *given.split(), "--json", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, check=True)
    line = done.stdout.splitlines()[-1]
    assert json.loads(line)["rows"] and (tmp_path / "x").read_text() == line + "\n"


def test_both_command_lines_take_the_same_options(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _, by_typer, _ = run("--help")
    with pytest.raises(SystemExit):
        bench_main(["--help"])
    by_argparse = capsys.readouterr().out
    flags = {flag_of(f) for f in OPTIONS.values()} | {"--base", "--json"}
    assert len(flags) == 35
    for said in (by_argparse, "\n".join(by_typer)):
        assert flags | {"--help"} == set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", said)) - {"--model-shape tiny"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("kernels --model-shape 28b", "there is no model shape"),
        ("kernels --model-shape DeepSeek-V4-Flash", "benches of its own: v4_kernels"),
        ("v4_model --model-shape 27b", "benches of its own: kernels"),
        ("decode --contexts 2k --model-shape tiny", "--contexts takes whole numbers"),
    ],
)
def test_a_mistake_ends_the_module_in_one_line(arguments: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        bench_main(arguments.split())


def test_nothing_begins_after_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*BENCHES, "v4_kernels"):
        result = run_bench(name, replace(TINY, limit=0.0))
        assert not result["rows"] and not result["failures"] and result["left_out"] > 0


def test_check() -> None:
    x = torch.randn(100)
    assert check("x", x, x, 0) == 0
    assert check("x", x * 1.001, x, 1e-2) == pytest.approx(1e-3, rel=0.01)
    for got, bound in ((x * 1.1, 1e-2), (x * float("nan"), 1e-2), (x + 1e-6, 0)):
        with pytest.raises(WrongResult):
            check("x", got, x, bound)


def test_floors_are_bytes_or_operations_whichever_takes_longer() -> None:
    ceilings = Ceilings(tb_s=4.0, tflop_s=800.0)
    assert ceilings.floor_us(4e6, 0) == pytest.approx(1.0)
    assert ceilings.floor_us(4e6, 8e9) == pytest.approx(10.0)


def test_numbers_of_a_json_line_are_short_and_finite() -> None:
    assert rounded({"a": [1.23456789, float("nan"), float("inf")], "b": 3}) == {"a": [1.2346, None, None], "b": 3}


def session() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_session", BENCH / "gpu_session.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_bench_that_is_stopped_gives_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases_dense, "silu_case", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        bench_main(["kernels", "--model-shape", "tiny", "--device", "cpu", "--only", "add_rms|silu", "--skip-peers"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["op"] for row in result["rows"]] == ["add_rms_norm"]
    assert result["notes"] == ["stopped before the end"]


def test_a_session_asks_a_step_to_stop_and_takes_its_last_json_line(tmp_path: Path) -> None:
    s, log = session(), tmp_path / "x.log"
    code = """import time
try:
    print('{"rows": []}', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print('{"rows": [1]}')"""
    ended, seconds = s.run_step(s.Step("x", 60, [sys.executable, "-c", code]), 2, log)
    assert ended == 124 and seconds < 20 and s.json_line(log) in ({"rows": [1]}, None)  # None: not yet begun
    assert s.run_step(s.Step("x", 60, [sys.executable, "-c", "raise SystemExit(3)"]), 60, log)[0] == 3


def test_a_session_runs_what_is_there() -> None:
    steps = session().steps()
    assert [s.name for s in steps][:1] == ["tests"] and len({s.name for s in steps}) == len(steps)
    files = [BENCH.parent / part for step in steps for part in step.command if part.endswith(".py")]
    assert len(files) > 15 and all(path.is_file() for path in files)
    benches = [step.command[3:] for step in steps if "hybridkv.bench" in step.command]
    assert {name for name, *_ in benches} == {*BENCHES, *V4_BENCHES}
    for arguments in benches:
        assert parser().parse_args(arguments).limit > 0


# ---- stand-in caches


@pytest.mark.parametrize("kind", ["f32", "fp8"])
@pytest.mark.parametrize("budget", [None, 96])
def test_a_stand_in_is_what_a_prompt_would_have_left(kind: str, budget: int | None) -> None:
    shape = find_shape("tiny", device="cpu")
    model = random_decoder(shape.config, "cpu", torch.float32)
    cache = CacheConfig(kv_dtype=kind, budget=budget)
    engine = make_engine(model, cache, "cpu", torch.float32, slots=2, context=256, spare=256)
    fill_pages(engine.manager)
    requests = [resident(engine, n, 3) for n in (200, 130)]
    fill_state(engine.manager)
    engine.manager.check_integrity()
    for request, n in zip(requests, (200, 130), strict=True):
        assert engine.manager.position(request.key) == n and len(request.tokens) == n + 1
        cut = budget is not None and n > budget + cache.window
        lengths = np.ravel(engine.manager.lengths(request.key)["attention"])
        assert lengths.mean() == (budget if cut else n) and (cut or (lengths == n).all())
        assert bool(request.evictions) == cut
    while not engine.idle:
        engine.step()
    assert [len(r.generated) for r in requests] == [4, 4] and not any(r.error for r in requests)
    engine.manager.check_integrity()


# ---- comparing trees


def test_rows_are_compared_by_op_and_case() -> None:
    ours = {"measure": "us", "rows": [{"op": "a", "case": "x", "us": 2.0}, {"op": "a", "case": "y", "us": 1.0}]}
    base = {"measure": "us", "rows": [{"op": "a", "case": "x", "us": 5.0}, {"op": "b", "case": "y", "us": 1.0}]}
    assert compare.side_by_side(ours, base) == [{"op": "a", "case": "x", "ours": 2.0, "base": 5.0, "ratio": 2.5}]
    more = {"measure": "requests", "rows": [{"op": "a", "case": "x", "requests": 6}]}
    less = {"measure": "requests", "rows": [{"op": "a", "case": "x", "requests": 3}]}
    assert compare.side_by_side(more, less)[0]["ratio"] == 2.0


def test_a_base_needs_a_git_checkout_and_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "PACKAGE", tmp_path / "site-packages" / "hybridkv")
    code, _, err = run("kernels", "--model-shape", "tiny", "--device", "cpu", "--base", "HEAD")
    assert code == 2 and "needs a git checkout" in err and len(err.splitlines()) == 1
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(HybridKVError, match="no commit 'nowhere'"), compare.worktree(tmp_path, "nowhere"):
        pass


def test_a_base_is_measured_in_its_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository whose package has no benchmarks: ours are put over it, and its own code runs under them."""
    package = tmp_path / "hybridkv"
    for folder in ("models", "cache"):
        (package / folder).mkdir(parents=True)
    for name in ("__init__.py", "cache/query_buffers.py"):
        (package / name).write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a tree"]):
        subprocess.run([*git, *arguments], check=True)
    (package / "bench").mkdir()
    (package / "bench" / "__init__.py").write_text("")
    (package / "bench" / "suite.py").write_text(
        "import hybridkv, json\n"
        "def run_json(name, options):\n"
        "    print('a table')\n"
        "    print(json.dumps({'bench': name, 'from': hybridkv.__file__, 'options': json.loads(options)}))\n"
    )
    (package / "models" / "random_weights.py").write_text("")
    monkeypatch.setattr(compare, "PACKAGE", package)
    found = compare.run_base("decode", TINY, "HEAD")
    assert found["bench"] == "decode" and found["options"]["skip_peers"] and "hybridkv-base-" in found["from"]
    assert from_json(json.dumps(found["options"]))
    left = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(left.splitlines()) == 1, "the worktree is gone"
    (package / "bench" / "suite.py").write_text("raise SystemExit(3)")
    with pytest.raises(HybridKVError, match="does not run on that commit"):
        compare.run_base("decode", TINY, "HEAD")
    (package / "cache" / "query_buffers.py").unlink()
    subprocess.run([*git, "commit", "-q", "-a", "-m", "without query_buffers"], check=True)
    with pytest.raises(
        HybridKVError, match=r"has no hybridkv/cache/query_buffers.py.*measure it with its own benchmark"
    ):
        compare.run_base("decode", TINY, "HEAD")
    left = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(left.splitlines()) == 1, "the worktree is gone"


@pytest.mark.parametrize("form", ["q8_0", "q6_k", "q5_k", "q4_k", "q4_k_m"])
def test_random_weights_in_a_format(form: str) -> None:
    """Projections are packed where their rows are whole blocks, and as large as plain ones."""
    shape = find_shape("tiny")
    config = replace(shape.config, hidden=256, intermediate=512)
    model = cast(Any, random_decoder(config, "cpu", torch.float32, form=form))
    layers = [(i, layer.feed) for i, layer in enumerate(model.layers)]
    for i, mlp in layers:
        down = 6 if form == "q4_k_m" and i % 2 else BITS.get(form.upper(), 4)
        for part, bits in ((mlp.gate_up, BITS.get(form.upper(), 4)), (mlp.down, down)):
            assert isinstance(part, PackedLinear) and [p.bits for p in part.parts] == [bits], part
            size = float(dequantise_ref(part.parts[0]).square().mean().sqrt()) * part.shape[1] ** 0.5
            assert 0.5 < size < 2
    assert model.head.parts[0].bits == (6 if form == "q4_k_m" else BITS.get(form.upper(), 4))
    with pytest.raises(KeyError):
        random_decoder(config, "cpu", torch.float32, form="q3_k")


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no benchmark 'nothing'"),
        (["kernels", "--device", "cpu"], "needs a CUDA device"),
        (["kernels", "--device", "tpu", "--model-shape", "tiny"], "device must be auto, cpu or cuda"),
        (["kernels", "--model-shape", "28b"], "there is no model shape '28b'"),
        (["kernels", "--model-shape", "DeepSeek-V4-Flash"], "benches of its own"),
        (["decode", "--model-shape", "tiny", "--kv-dtype", "bf16,fp7"], "fp7"),
        (["decode", "--model-shape", "tiny", "--contexts", "2k"], "--contexts takes whole numbers"),
        (["decode", "--model-shape", "tiny", "--layers", "0"], "layers must be a positive number"),
        (["decode", "--model-shape", "tiny", "--weight-dtype", "int4"], "must be one of auto, fp8, q8_0"),
        (["capacity", "--model-shape", "tiny", "--device", "cpu", "--weight-dtype", "q4_k"], "`hybridkv plan` counts"),
        (["prefill", "--model-shape", "tiny", "--chunk", "100"], "multiple of 64"),
        (["load", "--model-shape", "tiny", "--prompt-tokens", "10:5"], "--prompt-tokens 10:5: the lower end"),
        (["load", "--model-shape", "tiny", "--prompt-tokens", "0:5"], "must be at least 1"),
        (["load", "--model-shape", "tiny", "--answer-tokens", "ten"], "--answer-tokens takes LOW:HIGH"),
        (["load", "--model-shape", "tiny", "--answer-tokens", "1:2:3"], "--answer-tokens takes LOW:HIGH"),
        (
            ["load", "--model-shape", "tiny", "--device", "cpu", "--prompt-tokens", "4000:5000"],
            "do not fit the context",
        ),
        (["load", "--model-shape", "tiny", "--device", "cpu", "--budget", "48"], "smaller than the 64 recent tokens"),
        (["load", "--model-shape", "tiny", "--requests", "0"], "--requests must be a positive number"),
        (["load", "--model-shape", "tiny", "--rate", "0"], "--rate takes requests a second above 0"),
        (["load", "--model-shape", "tiny", "--load", "0.5,6"], "at most 5, not 6"),
        (["load", "--model-shape", "tiny", "--load", "most"], "--load takes numbers"),
        (["load", "--model-shape", "tiny", "--load", "0.5", "--rate", "1"], "give one of them"),
        (["load", "--model-shape", "tiny", "--tbt-limit", "0"], "--tbt-limit must be a positive number"),
        (["load", "--model-shape", "tiny", "--seconds", "nan"], "--seconds must be a positive number"),
        (["load", "--model-shape", "tiny", "--spread", "even"], "--spread must be uniform or log"),
        (["load", "--model-shape", "DeepSeek-V4-Flash"], "benches of its own"),
        (["decode", "--model-shape", "tiny", "--json", "/no/such/folder/x"], "--json: there is no folder"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, run: Run) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and said in err and len(err.splitlines()) == 1


def test_a_cuda_device_that_is_not_there_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("kernels", "--device", "cuda")
    assert code == 2 and "there is no CUDA device here" in err


def test_the_json_line_is_added_to_a_file_and_a_trace_is_written(tmp_path: Path, run: Run) -> None:
    where = ["--json", str(tmp_path / "out.jsonl"), "--trace", str(tmp_path / "trace")]
    (tmp_path / "out.jsonl").write_text("{}\n")
    more = ["--device", "cpu", "--skip-peers", "--contexts", "70"]
    code, lines, _ = run("prefill", "--model-shape", "tiny", *more, *where)
    assert code == 0 and any("the largest costs" in line for line in lines)
    written = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(written) == 2 and json.loads(written[1]) == json.loads(lines[-1])
    assert (tmp_path / "trace" / "prefill_chunk.json.gz").stat().st_size > 0


def test_kernel_names_become_short() -> None:
    assert (
        short("void at::native::vectorized_elementwise_kernel<4, at::X>(int, float)") == "vectorized_elementwise_kernel"
    )
    assert short("nvjet_tst_128x8_64x12_2x1_v_bz_TNT") == "matrix products (cuBLAS)"
    assert short("attention_decode_kernel") == "attention_decode_kernel"


def test_options_survive_a_trip_through_json() -> None:
    options = replace(TINY, contexts=(64,), kv_dtypes=("fp8",))
    assert from_json(json.dumps(asdict(options))) == options


def test_quantised_values_become_the_weights_that_they_stand_for() -> None:
    weight, x = torch.randn(48, 64), torch.randn(5, 64)
    layer = Linear(*encode_weight(weight)[:1], scale=encode_weight(weight)[1])
    want = layer(x)
    decode.dequantise_weights((GatedMlp(layer, Linear(weight)),))
    assert layer.scale is None and layer.weight.dtype == torch.bfloat16
    assert_close_rms("product", want, F.linear(x, layer.weight.float()), 2e-3)  # a weight has four bits; a scale more
    assert not torch.equal(F.linear(x, weight), want)


@pytest.mark.parametrize("policy", eviction_bench.POLICIES)
def test_both_ways_of_an_eviction_are_timed_and_leave_the_same(policy: str) -> None:
    """Left to the device, and carried out by the host; on a CPU the first is timed in this test alone."""
    shape = find_shape("tiny", device="cpu")
    cache = CacheConfig(kv_dtype="f32", budget=96, policy=policy)
    model = eviction_bench.Configured(shape.config)
    engine = make_engine(model, cache, "cpu", torch.float32, slots=1, context=264)
    fill_pages(engine.manager)
    give_weights(engine)
    kept = []
    for form in (eviction_bench.alone, eviction_bench.waited, eviction_bench.by_host):
        request = eviction_bench.prepared(engine, 256, first=not kept)
        found = form(engine, request)
        assert all(value > 0 for value in found.values())
        kept.append(np.ravel(engine.manager.lengths(request.key)["attention"]))
        assert request.evictions and kept[-1].mean() == 96
        engine.abort(request)
        engine.manager.check_integrity()
    assert found["pages"] == 256 // 64 * len(kept[0]) - sum(-(-kept[-1] // 64))
