"""The file of results: what was written is there after any end, and what does not belong together is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from eval_records import FACTS, SETTINGS, units, write

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.results import NAME, Results, commit, read_results

FEW = replace(SETTINGS, samples=1, divergence=1, lengths=(2048,), kv_dtypes=("bf16",))  # 10 units


def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", FEW)
    write(tmp_path / "parts", FEW, most=3)
    with Results(tmp_path / "parts", FEW) as results:
        every = list(units(FEW))
        assert results.saved.done == {records[0]["unit"] for records in every[:3]} and not results.saved.complete
        for records in every[3:]:
            results.write(records)
        assert results.saved.complete
    assert (tmp_path / "parts" / NAME).read_bytes() == (whole / NAME).read_bytes()
    found = read_results(whole)
    assert found.settings == FEW and len(found.done) == len(every) and found.complete
    assert found.records == [record for records in every for record in records]


def test_whatever_a_crash_tore_off_is_dropped(tmp_path: Path) -> None:
    """Cut after every byte of the last unit: the units before it are there, it is not, and the run goes on."""
    path = write(tmp_path / "torn", FEW, most=2) / NAME
    short = path.read_bytes()
    every = list(units(FEW))
    with Results(tmp_path / "torn", FEW) as results:
        results.write(every[2])
    full = path.read_bytes()
    assert full.startswith(short)
    for end in [*range(len(short), len(full), 37), len(full) - 1]:
        path.write_bytes(full[:end])
        assert len(read_results(path.parent).done) == 2, end
        with Results(path.parent, FEW) as results:
            assert path.read_bytes() == short
            results.write(every[2])
        assert path.read_bytes() == full, end


@pytest.mark.parametrize("junk", [b"\0\0\0", b'{"kind": "answer"', b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"kind": 3}\n'])
def test_a_last_line_that_is_no_record_is_dropped_and_one_in_the_middle_is_told(tmp_path: Path, junk: bytes) -> None:
    path = write(tmp_path, FEW, most=2) / NAME
    good = path.read_bytes()
    path.write_bytes(good + junk)
    assert len(read_results(tmp_path).done) == 2
    path.write_bytes(good + junk.rstrip(b"\n") + b"\n" + good)
    with pytest.raises(HybridKVError, match="line 18: not a result"):
        read_results(tmp_path)


def test_a_run_that_was_stopped_before_its_first_line_begins_anew(tmp_path: Path) -> None:
    for number, begun in enumerate((b"", b'{"kind":"run","sett')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / NAME).write_bytes(begun)
        with pytest.raises(HybridKVError, match="is empty"):
            read_results(folder)
        with Results(folder, FEW) as results:
            assert results.saved.run == {} and not results.saved.complete
            results.write(next(units(FEW)))
        assert len(read_results(folder).done) == 1


def test_other_settings_weights_or_versions_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FEW, most=2)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(HybridKVError, match=r"other settings: ratios 2,4,8, now 2,4; name another folder with -o, or"):
        Results(tmp_path, replace(FEW, ratios=(2, 4)))
    with pytest.raises(HybridKVError, match="seed 0, now 7"):
        Results(tmp_path, replace(FEW, seed=7))
    with (
        Results(tmp_path, FEW) as results,
        pytest.raises(HybridKVError, match="other weights .abababababab, now 111"),
    ):
        results.write([{"kind": "run", **FACTS, "model_hash": "1" * 64}])
    assert (tmp_path / NAME).read_bytes() == before
    first, *rest = before.splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(
        json.dumps(json.loads(first) | {"version": "0.0.1"}).encode() + b"\n" + b"".join(rest)
    )
    with pytest.raises(HybridKVError, match=r"results of hybridkv 0\.0\.1, this is"):
        Results(tmp_path, FEW)
    old = (tmp_path / NAME).read_bytes()
    with Results(tmp_path, replace(FEW, seed=7), restart=True) as results:
        assert results.saved.records == []
    assert (tmp_path / NAME).read_bytes() == old, "what is there stays until the new run has begun"
    with Results(tmp_path, replace(FEW, seed=7), restart=True) as results:
        results.write(next(units(FEW)))
    assert read_results(tmp_path).settings.seed == 7 and len(read_results(tmp_path).done) == 1


@pytest.mark.parametrize("name", ("device", "dtype", "units"))
def test_a_run_goes_on_only_where_it_began(name: str, tmp_path: Path) -> None:
    write(tmp_path, FEW, most=2)
    facts = read_results(tmp_path).run
    with Results(tmp_path, FEW) as results, pytest.raises(HybridKVError, match=f"another {name} "):
        results.begin({**facts, name: "other"})


def test_more_memory_is_not_another_evaluation(tmp_path: Path) -> None:
    write(tmp_path, FEW, most=2)
    with Results(tmp_path, replace(FEW, memory="8GiB")) as results:
        assert len(results.saved.done) == 2


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    Results(tmp_path / "new", FEW).close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    Results(tmp_path, FEW).close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with Results(tmp_path, FEW), pytest.raises(HybridKVError, match="another process is writing"):
        Results(tmp_path, FEW, restart=True)
    Results(tmp_path, FEW).close()  # the first has ended


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("my homepage")
    with pytest.raises(HybridKVError, match="index.html of something else"):
        Results(tmp_path, FEW, restart=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(HybridKVError, match="is a file; name a folder"):
        Results(tmp_path / "file", FEW)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / NAME).write_text('{"kind": "answer"}\n{"kind": "whole"}\n')
    with pytest.raises(HybridKVError, match="does not begin as"):
        Results(tmp_path / "own", FEW)
    with pytest.raises(HybridKVError, match="holds no results.jsonl"):
        read_results(tmp_path / "nowhere")


def test_the_commit_is_that_of_the_checkout() -> None:
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 12
