"""How tests run `hybridkv bench` in their own process, on a tiny model."""

from collections.abc import Callable

import pytest

from hybridkv.bench import decode
from hybridkv.bench.options import BenchOptions
from hybridkv.cli import main

TINY = BenchOptions(model_shape="tiny", device="cpu", skip_peers=True)
Run = Callable[..., tuple[int, list[str], str]]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("decode", "--quick")` -> exit code, lines of standard output, standard error."""
    monkeypatch.setattr(decode, "STEPS", 2)

    def run(*arguments: str) -> tuple[int, list[str], str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out.splitlines(), err

    return run
