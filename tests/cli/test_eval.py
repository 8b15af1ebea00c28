"""`hybridkv eval`: runs that are stopped go on, mistakes are one line, and what there is can be shown again."""

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from eval_records import SETTINGS, write

from cli.commands import SECONDS, Run, process
from hybridkv.commands import completion
from hybridkv.commands.evaluate import short_name
from hybridkv.evaluation.results import read_results
from hybridkv.evaluation.settings import EvalSettings

FEW = replace(SETTINGS, samples=4, divergence=1)
# random weights answer nothing, so the cache is cut only with --all-tasks
ASKED = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--tasks",
    "niah_multikey_2",
    "--policies",
    "snapkv,keydiff:pooling=3",
)
ASKED += ("--ratios", "4,2.5", "--lengths", "512", "--samples", "2", "--divergence", "1", "--max-requests", "1")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a run leaves it."""
    return write(tmp_path_factory.mktemp("eval") / "results", FEW)


def test_a_run_writes_everything_and_twice_the_same(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    command = ("eval", "-m", folder, *ASKED, "--modes", "seen", "--all-tasks", "-o", out)
    code, said, err = run(*command)
    assert code == 0 and err == ""
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(files) == {"results.jsonl", "summary.csv", "index.html", "plot.svg"}
    found = read_results(out)
    assert found.complete and len(found.done) == 3  # two texts, each a unit, and one of divergence
    assert found.run["model_name"] == "tiny-llama" and len(found.run["model_hash"]) == 64
    cuts = [("full", 1), *((p, r) for p in ("snapkv", "keydiff:pooling=3") for r in (4, 2.5))]
    asked = {("answer", n, *cut) for n in range(2) for cut in cuts} | {("divergence", 0, *cut) for cut in cuts}
    assert {(r["kind"], r["number"], r["policy"], r["ratio"]) for r in found.records} == asked
    for r in found.records:
        assert r["kept"] <= r["tokens"] / r["ratio"] + 1 and r["kv_bytes"] <= r["peak_bytes"]
    # the same command has nothing to do, and prints the same; so does a fresh run of it
    assert run(*command) == (0, said, "")
    code, again, _ = run(*command[:-1], tmp_path / "again")
    assert again.replace(str(tmp_path / "again"), str(out)) == said
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files
    # and what is there can be shown without the model
    (out / "summary.csv").unlink()
    assert run("eval", "--show", out) == (0, said, "")
    assert (out / "summary.csv").read_bytes() == files["summary.csv"]


@pytest.mark.slow
def test_a_run_that_is_interrupted_goes_on_where_it_was(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    command = ("eval", "-m", folder, *ASKED, "--all-tasks", "-o", out)
    with process(*command) as child:
        deadline = time.monotonic() + SECONDS
        while not (out / "results.jsonl").exists() or b'"whole"' not in (out / "results.jsonl").read_bytes():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        said, err = child.communicate(timeout=SECONDS)
    done = len(read_results(out).done)
    assert child.returncode == 130 and 1 <= done < 6, err
    assert f"stopped: {done} of 6 units are kept in {out}; the same command goes on from there" in err
    assert err.count("\n") == 1 and "tiny-llama, question seen" in said
    before = (out / "results.jsonl").read_bytes()
    code, _, err = run(*command)
    assert (code, err) == (0, "") and (out / "results.jsonl").read_bytes().startswith(before)
    assert read_results(out).complete
    run(*command[:-1], tmp_path / "at-once")
    assert (tmp_path / "at-once" / "results.jsonl").read_bytes() == (out / "results.jsonl").read_bytes()


def test_a_limit_ends_the_run_and_says_how_to_go_on(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    command = ("eval", "-m", folder, *ASKED, "-o", out)
    code, said, err = run(*command, "--limit", "0.000001")
    assert (code, said, err) == (0, "", "the limit was reached: nothing was measured yet\n")
    # what is there is of other settings
    code, _, err = run(*command, "--seed", 5)
    assert code == 2 and "other settings: seed 0, now 5" in err and "--restart" in err and err.count("\n") == 1


def test_a_model_that_knows_nothing_is_told_in_one_line(folder: Path, tmp_path: Path, run: Run) -> None:
    code, out, err = run("eval", "-m", folder, *ASKED, "--modes", "seen", "-o", tmp_path / "out")
    assert code == 2 and err.count("\n") == 1
    assert "tiny-llama answers no task well enough with the full cache: the best is niah_multikey_2 with 0.0" in err
    assert "Not averaged" in out and len(read_results(tmp_path / "out").records) == 2 + 5  # answers are kept


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "nia_single_1"], "no task 'nia_single_1' (is niah_single_1 meant?); choose from niah_single_1, "),
        (["--tasks", "ruler,vt"], "task vt is named twice"),
        (["--policies", "snap"], "no policy 'snap' (is snapkv meant?)"),
        (["--policies", "peak:poling=3"], "there is no setting 'poling'"),
        (["--ratios", "4,0.5"], "not 0.5; 4 keeps a quarter"),
        (["--ratios", "four"], "it takes a number, not 'four'"),
        (["--lengths", "12"], "a length, in tokens, must be a whole number from 128 to 1048576, not 12"),
        (["--lengths", "1k,1024"], "length 1024 is named twice"),
        (["--modes", "blind"], "no mode 'blind'"),
        (["--samples", "0"], "samples must be a whole number from 1"),
        (["--kv-dtypes", "bf16,int4"], "int4"),
        (["--limit", "0"], "--limit takes a number of seconds above 0"),
        (["--show", "nowhere"], "holds no results.jsonl"),
        (["--show", ".", "--tasks", "vt"], "leave out --tasks"),
        (["--show", ".", "-o", "x"], "leave out --output"),
        (["-m", "no/such/model"], "no/such/model"),
        (["-o", "/dev/null"], "is a file; name a folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    arguments: list[str], said: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("eval", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == []


def test_results_are_shown_again(results: Path, run: Run) -> None:
    code, out, err = run("eval", "--show", results)
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert (
        lines[0] == "some-model, question seen, 2048 and 4096 tokens, 4 texts a task"
        and lines[-3] == f"Plots: {results}/index.html"
    )
    assert "cwe" in out and run("eval", "--show", results) == (code, out, err)


def test_half_a_run_is_shown_as_far_as_it_is(tmp_path: Path, run: Run) -> None:
    """The second mode has not been asked yet, nor the second dtype."""
    write(tmp_path / "half", FEW, most=17)
    code, out, err = run("eval", "--show", tmp_path / "half")
    assert (code, err) == (0, "") and "not seen" not in out
    assert "question seen, 2048 tokens, 4 texts a task (unfinished: 17 of 136 units)" in out
    write(tmp_path / "none", FEW, most=0)
    code, out, err = run("eval", "--show", tmp_path / "none")
    assert code == 2 and "has no answer yet" in err and out == ""


def test_tab_completes_tasks_and_policies_behind_commas() -> None:
    assert completion.tasks("niah_single") == ["niah_single_1", "niah_single_2", "niah_single_3"]
    assert completion.tasks("vt,al") == ["vt,all"] and completion.policies("peak,key") == ["peak,keydiff"]


def test_a_folder_is_named_after_the_model() -> None:
    names = {None: "SmolLM2-135M-Instruct", "Qwen/Qwen3.5-4B": "Qwen3.5-4B", "a b/x.gguf": "x", "/": "model"}
    assert {model: short_name(model) for model in names} == names


def test_help_says_what_is_asked_by_default(run: Run) -> None:
    code, out, _ = run("eval", "--help")
    said = " ".join(out.replace("│", " ").split())
    assert code == 0 and "1024 on a CPU, 2048,4096 on a GPU" in said and ",".join(EvalSettings.policies) in said


def test_records_are_plain_json(results: Path) -> None:
    lines = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["run", "answer"] and lines[-1]["kind"] == "whole"
    assert lines[0]["settings"] == FEW.as_json() and lines[0]["version"]
