"""Results: the file that an evaluation writes as it goes, so that one that was stopped goes on where it was.

`results.jsonl` in a folder holds one JSON object a line:

    {"kind": "run", "settings": {...}, "version": ..., "model_hash": ..., ...}    what is asked of what
    {"kind": "answer", "unit": ..., "task": ..., "score": ..., ...}
    {"kind": "divergence", "unit": ..., "kl": ..., ...}
    {"kind": "whole", "records": 14}                                              all units above are whole

What stands after the last line `whole` was torn by a crash and is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hybridkv import __version__
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.settings import EvalSettings

NAME = "results.jsonl"
OTHERS = ("summary.csv", "index.html", "plot.svg")  # what is made from the results
_WAYS = "name another folder with -o, or drop what is there with --restart"

Record = dict[str, Any]


@dataclass
class Saved:
    """What a file of results holds: the line of the run, and whole units."""

    run: Record = field(default_factory=dict)  # {}: nothing was written yet
    records: list[Record] = field(default_factory=list)
    end: int = 0  # bytes of the file up to the last whole unit

    @property
    def settings(self) -> EvalSettings:
        """What was asked."""
        return EvalSettings.from_json(self.run.get("settings", {}))

    @property
    def done(self) -> set[str]:
        """Names of the units that need not be computed again."""
        return {record["unit"] for record in self.records}

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute."""
        return bool(self.run) and len(self.done) == self.run.get("units")


def read_results(folder: Path) -> Saved:
    """The results in a folder, or HybridKVError."""
    path = folder / NAME
    if not path.is_file():
        raise HybridKVError(f"{str(folder)!r} holds no {NAME}: it is not a folder that hybridkv eval wrote")
    found = _read(path)
    if not found.run:
        raise HybridKVError(f"{str(path)!r} is empty: the run was stopped before its first answer")
    return found


def read_back(folder: Path) -> Saved:
    """The results in a folder, if any."""
    path = folder / NAME
    return _read(path) if path.is_file() else Saved()


def _read(path: Path) -> Saved:
    found, waiting, end = Saved(), [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            record = _record(line)
            if record is None:
                if line.endswith(b"\n") and file.read(1):
                    raise HybridKVError(f"{str(path)!r}, line {number}: not a result of hybridkv eval")
                break  # the last line, torn
            if record["kind"] == "run" and number == 1:
                found.run, found.end = record, end
            elif record["kind"] == "whole" and number > 1:
                found.records += waiting
                found.end, waiting = end, []
            elif number > 1:
                waiting.append(record)
            else:
                raise HybridKVError(f"{str(path)!r} does not begin as a file of hybridkv eval does")
    return found


def _record(line: bytes) -> Record | None:
    """One line, or None where it is torn or no record."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if line.endswith(b"\n") and isinstance(found, dict) and isinstance(found.get("kind"), str) else None


class Results:
    """The results of one evaluation, open for more. Only one process writes to a folder at a time.

        with Results(folder, settings) as results:
            results.write(records_of_whole_units)

    Args:
        folder: is made if it is not there. What it holds must be of the same settings.
        settings: what is asked.
        restart: drop what is there.
    """

    def __init__(self, folder: Path, settings: EvalSettings, restart: bool = False) -> None:
        self.folder, self.settings = folder, settings
        self.path = folder / NAME
        self._refuse_strangers()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file: IO[bytes] = open(self.path, "ab")  # noqa: SIM115  open until close()
        except OSError as error:
            raise HybridKVError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self.saved = Saved() if restart else self._same(_read(self.path))
            self._old = restart and self.path.stat().st_size > 0  # stays until the new run begins
            if not self._old:
                self.file.truncate(self.saved.end)
        except BaseException:
            self.file.close()
            raise

    def _refuse_strangers(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise HybridKVError(f"{str(self.folder)!r} is a file; name a folder for the results")
        mine = [name for name in OTHERS if (self.folder / name).exists()]
        if mine and not self.path.exists():
            raise HybridKVError(
                f"{str(self.folder)!r} has a {mine[0]} of something else, which would be overwritten; name another "
                "folder with -o"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HybridKVError(f"another process is writing to {str(self.folder)!r}; name another folder") from None

    def _same(self, saved: Saved) -> Saved:
        """What is there, if it was asked for with the same settings."""
        if not saved.run:
            return saved
        version = saved.run.get("version")
        if version != __version__:
            raise HybridKVError(
                f"{str(self.folder)!r} holds results of hybridkv {version}, this is {__version__}; {_WAYS}"
            )
        there, asked = saved.settings.as_json(), self.settings.deciding()
        for name, value in asked.items():
            if there.get(name) != value:
                raise HybridKVError(
                    f"{str(self.folder)!r} holds results of other settings: {name} {_words(there.get(name))}, now "
                    f"{_words(value)}; {_WAYS}"
                )
        return saved

    def begin(self, facts: Record) -> None:
        """Say what runs: model_name, model_hash, device, dtype, units.

        A run that goes on must find the same weights.
        """
        if self._old:
            self.file.truncate(0)
            self._old = False
        if not self.saved.run:
            about = {"version": __version__, "commit": commit(), "digest": self.settings.digest()}
            self.saved.run = {"kind": "run", **about, "settings": self.settings.as_json(), **facts}
            self._append([self.saved.run])
        there, now = self.saved.run.get("model_hash"), facts.get("model_hash")
        if there != now:
            raise HybridKVError(
                f"{str(self.folder)!r} holds results of other weights ({str(there)[:12]}, now {str(now)[:12]}); {_WAYS}"
            )
        for name in ("device", "dtype", "units"):
            there, now = self.saved.run.get(name), facts.get(name)
            if there != now:
                raise HybridKVError(
                    f"{str(self.folder)!r} holds results of another {name} ({there}, now {now}); {_WAYS}"
                )

    def write(self, records: Sequence[Record]) -> None:
        """Add the records of one or several whole units. A first record of kind `run` is taken by `begin`."""
        records = list(records)
        if records and records[0]["kind"] == "run":
            self.begin({name: value for name, value in records.pop(0).items() if name != "kind"})
        elif not self.saved.run:
            self.begin({})
        if records:
            self._append([*records, {"kind": "whole", "records": len(records)}])
            self.saved.records += records

    def _append(self, records: Sequence[Record]) -> None:
        lines = [json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n" for record in records]
        self.file.write("".join(lines).encode())
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """What was written stays; where nothing was, nothing is left."""
        self.file.close()
        if not self.saved.run and not self._old:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds something else
                self.folder.rmdir()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _words(value: object) -> str:
    """A setting as a command line has it."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def commit() -> str | None:
    """The commit of the checkout that this runs from; None where it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None
