"""`hybridkv cache`: what is saved in a folder, listed, shown, verified and removed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cache.test_store import Store, ask, opened, save
from hybridkv.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, output and errors of `hybridkv cache ...`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["cache", *map(str, arguments)])
        return (int(end.value.code or 0), *capsys.readouterr())

    return call


def test_saved_caches_are_listed_shown_verified_and_removed(run: Run, tmp_path: Path) -> None:
    assert run("list", tmp_path) == (0, "0 saved\n", "")
    owner, store = opened(), Store(tmp_path)
    save(owner, store, ask(owner, 21), "first"), save(owner, store, ask(owner, 30), "second")
    owner.close()
    code, out, _ = run("list", tmp_path)
    assert code == 0 and "first" in out and "30 tokens, 29 cached" in out and "2 saved" in out
    code, out, _ = run("show", tmp_path, "first")
    assert code == 0 and "architecture" in out and "part columns" in out and "part state" in out
    assert run("verify", tmp_path) == (0, "first: good\nsecond: good\n", "")
    code, out, _ = run("rm", tmp_path, "second")
    assert code == 0 and out.startswith("removed second, ") and [each.name for each in store.saved()] == ["first"]
    part = next((tmp_path / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    code, out, _ = run("verify", tmp_path, "first")
    assert code == 1 and "checksum does not agree" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list",), "DIR"),
        (("eat", "."), "ACTION must be one of list, show, rm, verify"),
        (("show", "/nowhere", "x"), "there is no folder '/nowhere'"),
        (("list", "/nowhere"), "there is no folder '/nowhere'"),
        (("list", __file__), f"there is no folder {__file__!r}"),  # a file
        (("rm", "."), "rm needs the NAME"),
        (("show", ".", "../x"), "cannot be called"),
        (("show", ".", "x"), "no store of saved caches"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments: tuple, said: str, run: Run) -> None:
    code, out, errors = run(*arguments)
    assert code == 2 and not out and said in errors and errors.count("\n") == 1
