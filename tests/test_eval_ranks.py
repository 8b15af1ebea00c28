"""`hybridkv eval --tp`: the records of one rank, and what is said where a run ends early or cannot begin."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny_ranks import saved_model

from cli.commands import SECONDS, process
from hybridkv.cli import main
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.results import read_results
from hybridkv.evaluation.run import Record, Run
from hybridkv.evaluation.settings import EvalSettings

pytestmark = pytest.mark.usefixtures("ready_ranks")
ASKED: dict[str, Any] = dict(
    tasks=("niah_single_1",), policies=("auto", "replay", "auto:bounded=yes"), ratios=(4,), lengths=(320,), samples=1,
    divergence=1, all_tasks=True, device="cpu", dtype="float32", max_requests=2,
)  # fmt: skip
WORDS = ("--device", "cpu", "--dtype", "float32", "--tasks", "niah_single_1", "--policies", "auto", "--ratios", "4")
WORDS += ("--lengths", "512", "--samples", "3", "--max-requests", "1", "--divergence", "1", "--all-tasks")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    kind, heads = getattr(request, "param", ("qwen3_5", 2))
    return saved_model(tmp_path / "model", kind, num_key_value_heads=heads)


def records(folder: Path, tp: int, **more: Any) -> list[Record]:
    found: list[Record] = []
    assert Run(EvalSettings(model=str(folder), tp=tp, **ASKED | more)).go(found.extend, lambda *_: None)
    assert not dist.is_initialized()
    return found[1:]


@pytest.mark.slow
@pytest.mark.parametrize("folder", [("llama", 1), ("qwen3_5", 2), ("llama", 4)], indirect=True)
def test_answers_scores_and_bytes_are_those_of_one_rank(folder: Path) -> None:
    """KV heads on one rank each, one on both, and two a rank. In exact mode the distributions have the same bits."""
    want, found = (records(folder, tp, exact=True) for tp in (1, 2))
    assert found == want and {r["kind"] for r in want} == {"answer", "divergence"}
    cut = [r for r in want if r["policy"] != "full"]
    assert any(r["answer"] for r in want if r["kind"] == "answer") and len(cut) == 3 * len(want) / 4
    assert any(r.get("kl", 0) > 0 for r in cut) and all(r["kept"] < r["tokens"] / 3 for r in cut)


@pytest.mark.slow
def test_two_dtypes_open_the_ranks_twice_and_differ_by_rounding_alone(folder: Path) -> None:
    more = dict(policies=("snapkv",), kv_dtypes=("f32", "bf16"), modes=("unseen",))
    want, found = (records(folder, tp, **more) for tp in (1, 2))
    assert {r["kv_dtype"] for r in want} == {"f32", "bf16"} and len(want) == len(found)
    for one, two in zip(want, found, strict=True):
        for name in ("kl", "kl_999"):
            assert two.pop(name, 0) == pytest.approx(one.pop(name, 0), abs=1e-4)
        assert one == two


def test_the_command_passes_it_on_and_the_number_of_ranks_is_a_setting(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["eval", "-m", str(folder), *WORDS, "--modes", "seen", "-o", str(tmp_path / "out"), *more])
        return leaving.value.code or 0, capsys.readouterr().err  # type: ignore[return-value]

    assert run("--tp", "2") == (0, "")
    found = read_results(tmp_path / "out")
    assert found.complete and found.settings.tp == 2
    code, err = run()
    assert code == 2 and "other settings: tp 2, now 1" in err
    code, err = run("--tp", "3", "--restart")
    assert code == 2 and "3 ranks do not divide its 8 attention heads; use 2, 4 or 1" in err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        code, err = run("--tp", "2")
    assert code == 2 and "starts the other ranks by itself" in err


def test_results_of_before_there_were_ranks_go_on(folder: Path, tmp_path: Path) -> None:
    """They do not name the number."""
    from hybridkv.evaluation.results import Results

    asked = EvalSettings(model=str(folder), **ASKED)
    with Results(tmp_path / "out", asked) as results:
        results.write([{"kind": "run", "units": 4}])
    path = tmp_path / "out" / "results.jsonl"
    line = json.loads(path.read_text())
    del line["settings"]["tp"]
    path.write_text(json.dumps(line) + "\n")
    with Results(tmp_path / "out", asked) as results:
        assert results.saved.run
    with pytest.raises(HybridKVError, match="other settings: tp 1, now 2"):
        Results(tmp_path / "out", EvalSettings(model=str(folder), tp=2, **ASKED))


@pytest.mark.slow
def test_a_run_over_ranks_that_is_interrupted_says_so_and_goes_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("eval", "-m", folder, *WORDS, "--tp", "2", "-o", out)
    with process(*command) as child:
        until = time.monotonic() + SECONDS
        while not (out / "results.jsonl").exists() or b'"whole"' not in (out / "results.jsonl").read_bytes():
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=SECONDS)
    done = len(read_results(out).done)
    assert child.returncode == 130 and 1 <= done < 8, err
    assert f"stopped: {done} of 8 units are kept in {out}" in err and err.count("\n") == 1
    before = (out / "results.jsonl").read_bytes()
    with pytest.raises(SystemExit) as leaving:
        main([str(word) for word in command])
    assert not leaving.value.code and (out / "results.jsonl").read_bytes().startswith(before)
    assert read_results(out).complete
